"""Tiny random Qwen3.5 models of transformers, our parameters with the same values, and what transformers remembers.

Sizes are drawn so that no two can be mixed up unseen: key and value dims differ, head_dim is not tied to hidden.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import funcmodels as fm
import params

KINDS = ("dense", "moe")


@dataclass(frozen=True)
class Pair:
    """A model of transformers and ours, with the same values."""

    theirs: Any
    model: Any
    params: Any

    @property
    def config(self) -> Any:
        return self.model.config


@dataclass(frozen=True)
class Remembered:
    """What transformers computes for one row: per token, per layer, and its cache as our logical entries."""

    logits: Tensor
    hidden: Tensor
    layers: list[Tensor]
    chosen: list[Tensor]
    entries: dict[str, Tensor]
    cache: Any


def sizes(kind: str, seed: int) -> dict[str, Any]:
    """Random config fields; odd seeds tie the embedding."""
    draw = random.Random(f"{kind} {seed}")
    head_dim = draw.choice((8, 16, 20))
    rotary = draw.choice([n for n in range(2, head_dim + 1, 2) if int(head_dim * (n / head_dim)) == n])
    kv_heads, k_heads = draw.randint(1, 3), draw.randint(1, 3)
    k_dim, v_dim = draw.sample((3, 4, 6, 7, 10), 2)
    layers = ["linear_attention", "full_attention", *draw.choices(("linear_attention", "full_attention"), k=2)]
    draw.shuffle(layers)
    return {
        "vocab_size": draw.randint(50, 99), "hidden_size": draw.choice((12, 18, 22, 30)), "num_hidden_layers": 4,
        "num_attention_heads": kv_heads * draw.randint(1, 3), "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "linear_num_key_heads": k_heads, "linear_num_value_heads": k_heads * (1 + seed % 3),
        "linear_key_head_dim": k_dim, "linear_value_head_dim": v_dim, "linear_conv_kernel_dim": draw.randint(2, 5),
        "layer_types": layers, "tie_word_embeddings": bool(seed % 2), "max_position_embeddings": 512,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)), "pad_token_id": None, **_feed_forward(kind, draw),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": draw.choice((1e2, 1e4, 1e7)),
            "partial_rotary_factor": rotary / head_dim,
            "mrope_section": [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6], "mrope_interleaved": True,
        },
    }  # fmt: skip


def _feed_forward(kind: str, draw: random.Random) -> dict[str, int]:
    if kind == "dense":
        return {"intermediate_size": draw.choice((14, 25, 40))}
    experts = draw.randint(3, 7)
    return {
        "num_experts": experts, "num_experts_per_tok": draw.randint(1, experts),
        "moe_intermediate_size": draw.choice((5, 9, 16)), "shared_expert_intermediate_size": draw.choice((6, 11)),
    }  # fmt: skip


@functools.cache
def pair(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A random model of either kind, the same for the same seed."""
    return build(kind, sizes(kind, seed), seed, dtype)


def build(kind: str, fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of these config fields with every parameter random (transformers starts norms at zero)."""
    import transformers

    name = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe"}[kind]
    config = getattr(transformers, f"{name}TextConfig")(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for leaf, parameter in theirs.named_parameters():
        parameter.data = _value(leaf, torch.randn(parameter.shape, generator=generator)).to(dtype)
    model = fm.build(config.to_dict())
    ours = params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names)
    return Pair(theirs, model, ours)


def _value(leaf: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1:
        return 0.3 * noise + float("linear_attn.norm" in leaf)
    return noise * (1.0 if "embed" in leaf else 0.7 / noise.shape[-1] ** 0.5)


def tokens(pair: Pair, *counts: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, one list a count."""
    draw = random.Random(seed)
    return [[draw.randrange(pair.config.vocab_size) for _ in range(count)] for count in counts]


@torch.no_grad()
def run(pair: Pair, ids: Sequence[int], positions: Tensor | None = None, cache: Any = None) -> Remembered:
    """One row through transformers, on top of `cache`. `positions` [3, tokens] are rotary positions."""
    from transformers import DynamicCache

    config = pair.theirs.config
    cache = DynamicCache(config=config) if cache is None else cache
    extra = {} if positions is None else {"position_ids": positions[:, None]}
    with watched(pair.theirs) as (layers, routers):
        out = pair.theirs.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True, **extra)
    hidden = out.last_hidden_state[0]
    found = [layers[index][0] for index in sorted(layers)]
    chosen = [routers[index] for index in sorted(routers)]
    logits = pair.theirs.lm_head(hidden)
    return Remembered(logits, hidden, found, chosen, entries(cache, config.layer_types), cache)


@contextmanager
def watched(theirs: Any) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """The output of every decoder layer, and the expert ids its router chose."""
    layers: dict[int, Tensor] = {}
    routers: dict[int, Tensor] = {}
    hooks = []
    for index, layer in enumerate(theirs.model.layers):
        hooks.append(layer.register_forward_hook(functools.partial(_keep, layers, index)))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(functools.partial(_keep_choice, routers, index)))
    try:
        yield layers, routers
    finally:
        for hook in hooks:
            hook.remove()


def _keep(found: dict[int, Tensor], index: int, module: Any, inputs: Any, output: Any) -> None:
    found[index] = output[0] if isinstance(output, tuple) else output


def _keep_choice(found: dict[int, Tensor], index: int, module: Any, inputs: Any, output: Any) -> None:
    found[index] = output[-1]


def entries(cache: Any, layer_types: Sequence[str], row: int = 0) -> dict[str, Tensor]:
    """Row `row` of a cache of transformers as `fm.logical` gives it.

    Keys and values [heads, tokens, dim] become time-major; the window [channels, width] becomes time-major without its
    oldest entry, which no later token reads; delta matrices [heads, k_dim, v_dim] become value-major.
    """
    found: dict[str, Tensor] = {}
    for index, (kind, layer) in enumerate(zip(layer_types, cache.layers, strict=True)):
        if kind == "full_attention":
            found[f"layers.{index}.k"] = layer.keys[row].transpose(0, 1)
            found[f"layers.{index}.v"] = layer.values[row].transpose(0, 1)
        else:
            found[f"layers.{index}.window"] = layer.conv_states[0][row].mT[1:]
            found[f"layers.{index}.delta"] = layer.recurrent_states[0][row].mT
    return found
