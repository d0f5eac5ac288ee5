"""Tiny random Qwen3.8-Flash-Next models of transformers (`qwen4_exp`), ours with the same values, and what each keeps.

Sizes are drawn so that no two can be mixed up unseen; what transformers starts at zero is random too.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.qwen3_5 import Pair, Remembered

SEEDS = range(9)
"""Between them: n-grams of 2 to 4 tokens, one to three layers with embeddings, blocks of 2 to 4 tokens, both gates."""


def sizes(seed: int) -> dict[str, Any]:
    """Random config fields; odd seeds tie the embedding."""
    draw = random.Random(f"flash {seed}")
    head_dim, index_dim = draw.choice((12, 16, 20)), draw.choice((10, 14, 24))
    rotary = draw.choice((4, 6, 8))
    kv_heads, k_heads = draw.randint(1, 3), draw.randint(1, 3)
    k_dim, v_dim = draw.sample((3, 4, 6, 7, 10), 2)
    layers = [
        "linear_attention",
        "indexed_attention",
        "linear_attention",
        draw.choice(("full_attention", "linear_attention")),
    ]
    draw.shuffle(layers)
    linear = [layer for layer, kind in enumerate(layers, 1) if kind == "linear_attention"]
    experts = draw.randint(3, 7)
    return {
        "vocab_size": draw.randint(50, 99), "hidden_size": draw.choice((11, 18, 22, 30)), "num_hidden_layers": 4,
        "num_attention_heads": kv_heads * draw.randint(1, 3), "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "linear_num_key_heads": k_heads, "linear_num_value_heads": k_heads * (1 + seed % 3),
        "linear_key_head_dim": k_dim, "linear_value_head_dim": v_dim, "linear_conv_kernel_dim": draw.randint(2, 5),
        "layer_types": layers, "tie_word_embeddings": bool(seed % 2), "max_position_embeddings": 512,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)), "pad_token_id": None, "bos_token_id": None,
        "num_experts": experts, "num_experts_per_tok": draw.randint(2, experts),
        "moe_intermediate_size": draw.choice((5, 9, 16)), "shared_expert_intermediate_size": draw.choice((6, 13)),
        "hc_count": draw.choice((2, 3, 4)), "hc_lowrank": draw.choice((5, 7, 8)),
        "output_gate_type": ("sigmoid", "silu", None)[seed % 3],
        **_ngrams(draw, seed, linear), **_index(draw, index_dim),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": draw.choice((1e2, 1e4, 1e7)),
            "partial_rotary_factor": rotary / head_dim, "mrope_interleaved": True,
            "mrope_section": [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6],
        },
    }  # fmt: skip


def _ngrams(draw: random.Random, seed: int, linear: Sequence[int]) -> dict[str, Any]:
    order, heads = 2 + seed % 3, draw.randint(1, 3)
    divisor = draw.choice((4, 9))
    return {
        "ple_layer_ids": sorted(draw.sample(linear, 1 + seed % len(linear))), "ngram_size": order,
        "heads_per_ngram": heads, "ple_embed_dim": heads * (order - 1) * draw.choice((3, 5)),
        "ple_conv_kernel_size": draw.randint(2, 4), "ngram_vocab_size_base": draw.randint(17, 120),
        "make_ngram_vocab_size_divisible_by": divisor, "split_ngram_parts": draw.choice((1, 3, 4)),
        "seed": draw.randint(0, 9999), "eos_token_id": draw.choice((3, [5, 2])),
    }  # fmt: skip


def _index(draw: random.Random, dim: int) -> dict[str, int]:
    ratio = draw.randint(2, 4)
    return {
        "indexer_n_heads": draw.randint(1, 3), "indexer_kv_heads": 1, "indexer_head_dim": dim,
        "indexer_budget": ratio * draw.randint(1, 3), "indexer_compress_ratio": ratio,
    }  # fmt: skip


@functools.cache
def pair(seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A random model, the same for the same seed."""
    return build(sizes(seed), seed, dtype)


@functools.cache
def small(seed: int = 0) -> Pair:
    """As `pair`, with two layers: a delta net with n-gram embeddings, and attention."""
    kinds = ["linear_attention", "indexed_attention"]
    return build(sizes(seed) | {"num_hidden_layers": 2, "layer_types": kinds, "ple_layer_ids": [1]}, seed)


def build(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of these config fields with every parameter random."""
    theirs = oracle(fields, seed, dtype)
    model = fm.build(theirs.config.to_dict())
    ours = params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names)
    return Pair(theirs, model, ours)


def oracle(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers alone."""
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = Qwen4ExpForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for leaf, parameter in theirs.named_parameters():
        parameter.data = value(leaf, torch.randn(parameter.shape, generator=generator)).to(dtype)
    return theirs


def value(leaf: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1:
        return 0.3 * noise + float("linear_attn.norm" in leaf)
    return noise * (1.0 if "embed" in leaf else 0.7 / noise[0].numel() ** 0.5)


def tokens(pair: Pair, *counts: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, one list a count. About every sixth is the token that n-grams end at, some of them in a row."""
    draw = random.Random(seed)
    end, vocab = pair.config.eos_token_id, pair.config.vocab_size
    return [[end if draw.random() < 1 / 6 else draw.randrange(vocab) for _ in range(count)] for count in counts]


@torch.no_grad()
def run(pair: Pair, ids: Sequence[int], cache: Any = None) -> Remembered:
    """One row through transformers, on top of `cache`. Layers and hidden are streams laid end to end."""
    from transformers import DynamicCache

    cache = DynamicCache(config=pair.theirs.config) if cache is None else cache
    layers: dict[int, Tensor] = {}
    routers: dict[int, Tensor] = {}
    hooks = []
    for index, layer in enumerate(pair.theirs.model.layers):
        hooks.append(layer.register_forward_hook(functools.partial(_keep, layers, index)))
        hooks.append(layer.mlp.gate.register_forward_hook(functools.partial(_keep_choice, routers, index)))
    try:
        with first_of_equals():
            out = pair.theirs.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    found = [layers[index][0] for index in sorted(layers)]
    logits = pair.theirs.lm_head(out.last_hidden_state[0])
    chosen = [routers[index] for index in sorted(routers)]
    return Remembered(logits, found[-1], found, chosen, entries(pair, cache), cache)


def _keep(found: dict[int, Tensor], index: int, module: Any, inputs: Any, output: Any) -> None:
    found[index] = output


def _keep_choice(found: dict[int, Tensor], index: int, module: Any, inputs: Any, output: Any) -> None:
    found[index] = output[-1]


@contextmanager
def first_of_equals() -> Iterator[None]:
    """Blocks of one score, as all that no index head likes have, are taken in their order; topk promises none."""
    plain = torch.Tensor.topk

    def topk(self: Tensor, k: int, dim: int = -1, *rest: Any) -> Any:
        if self.ndim != 1:
            return plain(self, k, dim, *rest)
        values, indices = self.sort(descending=True, stable=True)
        return SimpleNamespace(values=values[:k], indices=indices[:k])

    with mock.patch.object(torch.Tensor, "topk", topk):
        yield


def entries(pair: Pair, cache: Any) -> dict[str, Tensor]:
    """A cache of transformers as `fm.logical` gives it.

    Transformers pools no index keys ahead: they are made here with its modules. Of the tokens before a row's first it
    keeps the end token, we zeros.
    """
    found: dict[str, Tensor] = {}
    kinds = pair.theirs.config.layer_types
    length = cache.layers[kinds.index("indexed_attention")].keys.shape[2]
    for index, (kind, layer) in enumerate(zip(kinds, cache.layers, strict=True)):
        if kind == "indexed_attention":
            part = {"k": layer.keys[0].transpose(0, 1), "v": layer.values[0].transpose(0, 1)}
            part |= {"raw": layer.indexer_keys[0], "index": _pooled(pair, index, layer.indexer_keys[0])}
        else:
            part = {"window": layer.conv_states[0][0].mT[1:], "delta": layer.recurrent_states[0][0].mT}
            if pair.config.ple_index(index) is not None:
                before = layer.conv_states[2][0].clone()
                before[: max(before.shape[0] - length, 0)] = 0
                part = {f"attn.{name}": value for name, value in part.items()}
                part |= {"ngrams.window": layer.conv_states[1][0].mT, "ngrams.context": before}
        found |= {f"layers.{index}.{name}": value for name, value in part.items()}
    return found


def _pooled(pair: Pair, index: int, raw: Tensor) -> Tensor:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    ratio = pair.theirs.config.indexer_compress_ratio
    blocks = raw[: raw.shape[0] // ratio * ratio].unflatten(0, (-1, ratio)).float().mean(1).to(raw.dtype)
    if not len(blocks):
        return blocks
    normed = pair.theirs.model.layers[index].self_attn.indexer.k_layernorm(blocks)
    places = (torch.arange(len(blocks)) * ratio).expand(3, 1, -1)
    cos, sin = pair.theirs.model.rotary_emb(normed, places)
    turned: Any = apply_rotary_pos_emb(normed[None, None], cos=cos, sin=sin)
    return turned[0, 0]
