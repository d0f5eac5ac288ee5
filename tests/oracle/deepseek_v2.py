"""Tiny random DeepSeek-V2 models of transformers, our parameters with the same values, and what transformers remembers.

Sizes are drawn so that no two can be mixed up unseen. `KINDS` name what a config has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.qwen3_5 import Pair, Remembered, watched

KINDS = ("lite", "full", "plain", "dense")
"""YaRN without a query latent; YaRN with one, groups of experts and scaled weights; plain rope with one; no experts."""


def sizes(kind: str, seed: int, tiled: bool = False) -> dict[str, Any]:
    """Random config fields; odd seeds tie the embedding. `tiled` sizes fill the tiles of NZ pages."""
    draw = random.Random(f"{kind} {seed}")
    heads, layers = draw.choice((2, 3, 5)), draw.choice((2, 3))
    # transformers turns pairs in place of complex numbers, so what stands before them must be even.
    nope, rope, v, latent = 12, draw.choice((4, 6, 10)), draw.choice((5, 9)), draw.choice((14, 22))
    if tiled:
        rope, latent = 16, 32
    groups, each = draw.choice((2, 3)), draw.choice((2, 3))
    return {
        "vocab_size": draw.randint(50, 99), "hidden_size": heads * draw.choice((8, 12)), "num_hidden_layers": layers,
        "num_attention_heads": heads, "kv_lora_rank": latent, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
        "v_head_dim": v, "q_lora_rank": draw.choice((13, 20)) if kind in ("full", "plain") else None,
        "intermediate_size": draw.choice((17, 26)), "first_k_dense_replace": layers if kind == "dense" else seed % 2,
        "n_routed_experts": groups * each, "n_shared_experts": draw.choice((1, 3)),
        "num_experts_per_tok": draw.randint(1, each), "moe_intermediate_size": draw.choice((6, 15)),
        "topk_method": "group_limited_greedy" if kind == "full" else "greedy", "n_group": groups,
        "topk_group": groups - 1, "routed_scaling_factor": 2.5 if kind == "full" else 1.0,
        "rms_norm_eps": draw.choice((1e-6, 1e-3)), "max_position_embeddings": 512,
        "tie_word_embeddings": bool(seed % 2), "attention_bias": kind == "full" and seed % 2 == 0,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": _rope(kind, draw),
    }  # fmt: skip


def _rope(kind: str, draw: random.Random) -> dict[str, Any]:
    theta = {"rope_theta": draw.choice((1e2, 1e4))}
    if kind in ("plain", "dense"):
        return {"rope_type": "default", **theta}
    # The two factors are told apart: angles are multiplied by their quotient, the softmax scale by one's square.
    scales = draw.choice(({"mscale": 0.7, "mscale_all_dim": 1.1}, {"mscale_all_dim": 0.7}, {"mscale": 1.0}))
    # The length is the config's own, of which transformers says nothing: it compares the quotient of both with factor.
    stretch = {"factor": draw.choice((4.0, 40.0)), "original_max_position_embeddings": 512}
    return {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, **theta, **stretch, **scales}


@functools.cache
def pair(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, tiled: bool = False) -> Pair:
    """A random model of a kind, the same for the same seed."""
    return build(sizes(kind, seed, tiled), seed, dtype)


def build(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of these config fields with every parameter random, the router in float32 as transformers keeps it."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    theirs = DeepseekV2ForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for leaf, parameter in theirs.named_parameters():
        value = _value(leaf, torch.randn(parameter.shape, generator=generator))
        parameter.data = value if "mlp.gate." in leaf else value.to(dtype)
    model = fm.build(config.to_dict())
    return Pair(theirs, model, params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names))


def _value(leaf: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1:
        return 0.3 * noise + float("norm" in leaf)
    if "mlp.gate." in leaf:
        return noise
    return noise * (1.0 if "embed" in leaf else 0.7 / noise.shape[-1] ** 0.5)


@torch.no_grad()
def run(pair: Pair, ids: Sequence[int], cache: Any = None) -> Remembered:
    """One row through transformers, on top of `cache`."""
    from transformers import DynamicCache

    cache = DynamicCache(config=pair.theirs.config) if cache is None else cache
    with watched(pair.theirs) as (layers, routers):
        out = pair.theirs.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True)
    hidden = out.last_hidden_state[0]
    found = [layers[index][0] for index in sorted(layers)]
    chosen = [routers[index] for index in sorted(routers)]
    return Remembered(pair.theirs.lm_head(hidden), hidden, found, chosen, entries(cache), cache)


def entries(cache: Any, row: int = 0) -> dict[str, Tensor]:
    """Row `row` of a cache of transformers as `fm.logical` gives it: its channels in pairs are sorted in ours."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        found[f"layers.{index}.latent"] = layer.keys[row, 0]
        rope = layer.values[row, 0]
        found[f"layers.{index}.rope"] = torch.cat((rope[:, 0::2], rope[:, 1::2]), -1)
    return found
