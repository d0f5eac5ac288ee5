"""Tiny random Gemma3 models of transformers, our parameters with the same values, and what transformers remembers."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.qwen3_5 import Pair, Remembered, tokens

__all__ = ["Pair", "build", "pair", "run", "sizes", "tokens"]

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def sizes(seed: int) -> dict[str, Any]:
    """Random config fields: odd seeds tie the embedding, every third has biases, windows are shorter than prompts."""
    draw = random.Random(f"gemma3 {seed}")
    kv_heads, head_dim = draw.randint(1, 3), draw.choice((8, 16, 20))
    heads = kv_heads * draw.randint(1, 3)
    layers = [LOCAL, GLOBAL, *draw.choices((LOCAL, LOCAL, GLOBAL), k=2)]
    draw.shuffle(layers)
    return {
        "vocab_size": draw.randint(50, 99), "hidden_size": heads * draw.choice((5, 6, 10)),
        "intermediate_size": draw.choice((14, 25, 40)), "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "query_pre_attn_scalar": draw.choice((7, 24, 40)),
        "sliding_window": draw.randint(2, 9), "layer_types": layers, "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "tie_word_embeddings": bool(seed % 2), "attention_bias": seed % 3 == 2, "max_position_embeddings": 512,
        "final_logit_softcapping": draw.choice((None, 4.0)), "pad_token_id": None, "eos_token_id": None,
        "bos_token_id": None, "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": draw.choice((1e2, 1e4))},
            GLOBAL: {"rope_type": "linear", "rope_theta": draw.choice((1e4, 1e6)), "factor": draw.choice((3.0, 8.0))}
            if seed % 4 else {"rope_type": "default", "rope_theta": 1e6},
        },
    }  # fmt: skip


@functools.cache
def pair(seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A random model, the same for the same seed."""
    return build(sizes(seed), seed, dtype)


def build(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of these config fields with every parameter random (transformers starts norms at zero)."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**fields)
    config._attn_implementation = "eager"
    theirs = Gemma3ForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for leaf, parameter in theirs.named_parameters():
        parameter.data = _value(leaf, torch.randn(parameter.shape, generator=generator)).to(dtype)
    model = fm.build(config.to_dict())
    ours = params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names)
    return Pair(theirs, model, ours)


def _value(leaf: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1:
        return 0.3 * noise
    return noise * (0.3 if "embed" in leaf else 0.7 / noise.shape[-1] ** 0.5)


@torch.no_grad()
def run(pair: Pair, ids: Sequence[int], cache: Any = None) -> Remembered:
    """One row through transformers, on top of `cache`; by default of an empty one that keeps every key."""
    from transformers import DynamicCache

    cache = DynamicCache() if cache is None else cache
    found: dict[str, Tensor] = {}
    named = {f"layers.{index}": layer for index, layer in enumerate(pair.theirs.model.layers)}
    modules = {**named, "hidden": pair.theirs.model.norm}
    hooks = [module.register_forward_hook(functools.partial(_keep, found, name)) for name, module in modules.items()]
    try:
        out = pair.theirs(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Remembered(out.logits[0], found["hidden"], [found[name] for name in named], [], entries(cache), cache)


def _keep(found: dict[str, Tensor], name: str, module: Any, inputs: Any, output: Any) -> None:
    found[name] = (output[0] if isinstance(output, tuple) else output)[0]


def entries(cache: Any) -> dict[str, Tensor]:
    """The first row of a cache of transformers as `fm.logical` gives it: keys and values become time-major."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        found[f"layers.{index}.k"] = layer.keys[0].transpose(0, 1)
        found[f"layers.{index}.v"] = layer.values[0].transpose(0, 1)
    return found
