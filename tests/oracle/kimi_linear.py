"""Tiny random Kimi Linear models of transformers, our parameters with the same values, and what transformers remembers.

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

KINDS = ("published", "grouped", "dense")
"""Queries without a latent, as in the published model; one, with biases, and experts in groups; no experts at all."""
DELTA, LATENT = "linear_attention", "full_attention"


def sizes(kind: str, seed: int, tiled: bool = False) -> dict[str, Any]:
    """Random config fields, in the published spelling for even seeds. `tiled` sizes fill the tiles of NZ pages."""
    draw = random.Random(f"{kind} {seed}")
    layers = [DELTA, LATENT, *draw.choices((DELTA, LATENT), k=2)]
    draw.shuffle(layers)
    groups, each = draw.choice((2, 3)), draw.choice((2, 3))
    kept = groups - 1 if kind == "grouped" else groups
    shared, latent = draw.choice((3, 4, 10)), draw.choice((14, 22))
    if tiled:
        shared, latent = 16, 32
    return {
        "vocab_size": draw.randint(50, 99), "hidden_size": draw.choice((18, 24, 30)), "num_hidden_layers": 4,
        "num_attention_heads": draw.choice((2, 3, 5)), "num_key_value_heads": None, "kv_lora_rank": latent,
        "qk_nope_head_dim": draw.choice((9, 12)), "qk_rope_head_dim": shared, "v_head_dim": draw.choice((5, 8)),
        "q_lora_rank": draw.choice((13, 20)) if kind == "grouped" else None,
        "attention_bias": kind == "grouped" and seed % 2 == 0, "intermediate_size": draw.choice((17, 26)),
        "num_local_experts": groups * each, "num_experts_per_tok": draw.randint(1, kept * each),
        "n_shared_experts": draw.choice((1, 2)), "moe_intermediate_size": draw.choice((6, 15)),
        "n_group": groups if kind == "grouped" else 1, "topk_group": kept if kind == "grouped" else 1,
        "norm_topk_prob": kind != "grouped" or seed % 2 == 0, "routed_scaling_factor": 2.446,
        "rms_norm_eps": draw.choice((1e-5, 1e-3)), "max_position_embeddings": 512, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
        **_kinds(layers, draw, seed), **_dense(kind, seed),
    }  # fmt: skip


def _kinds(layers: list[str], draw: random.Random, seed: int) -> dict[str, Any]:
    """What the delta attention has: in a section that counts layers from 1, or in fields of transformers."""
    heads, dim, width = draw.choice((2, 4)), draw.choice((5, 7, 8)), draw.randint(2, 5)
    if seed % 2:
        own = {"linear_num_heads": heads, "linear_head_dim": dim, "linear_conv_kernel_dim": width}
        return {"layer_types": layers, **own}
    numbers = {kind: [index + 1 for index, given in enumerate(layers) if given == kind] for kind in (DELTA, LATENT)}
    section = {"kda_layers": numbers[DELTA], "full_attn_layers": numbers[LATENT]}
    return {"linear_attn_config": section | {"num_heads": heads, "head_dim": dim, "short_conv_kernel_size": width}}


def _dense(kind: str, seed: int) -> dict[str, Any]:
    if seed % 2:
        sparse = "dense" if kind == "dense" else "sparse"
        return {"mlp_layer_types": [sparse, "dense", sparse, sparse]}
    return {"first_k_dense_replace": 4 if kind == "dense" else 1}


@functools.cache
def pair(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, tiled: bool = False) -> Pair:
    """A random model of a kind, the same for the same seed."""
    return build(sizes(kind, seed, tiled), seed, dtype)


def build(fields: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of these config fields with every parameter random; float32 stays where transformers keeps it."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    theirs = KimiLinearForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for leaf, value in (*theirs.named_parameters(), *theirs.named_buffers()):
        kept = any(name in leaf for name in theirs._keep_in_fp32_modules_strict or ())
        value.data = _value(leaf, torch.randn(value.shape, generator=generator)).to(torch.float32 if kept else dtype)
    model = fm.build(config.to_dict())
    return Pair(theirs, model, params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names))


def _value(leaf: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1 or "A_log" in leaf:
        return 0.3 * noise + float("norm" in leaf)
    if "mlp.gate." in leaf:
        return noise
    return noise * (1.0 if "embed" in leaf else 0.7 / noise.shape[-1] ** 0.5)


@torch.no_grad()
def run(pair: Pair, ids: Sequence[int], cache: Any = None) -> Remembered:
    """One row through transformers, on top of `cache`."""
    from transformers import DynamicCache

    config = pair.theirs.config
    cache = DynamicCache(config=config) if cache is None else cache
    with watched(pair.theirs) as (layers, routers):
        out = pair.theirs.model(input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=True)
    hidden = out.last_hidden_state[0]
    found = [layers[index][0] for index in sorted(layers)]
    chosen = [routers[index] for index in sorted(routers)]
    logits = pair.theirs.lm_head(hidden)
    return Remembered(logits, hidden, found, chosen, entries(cache, config.layer_types), cache)


def entries(cache: Any, layer_types: Sequence[str], row: int = 0) -> dict[str, Tensor]:
    """Row `row` of a cache of transformers as `fm.logical` gives it.

    Latents stand as keys of one head, the shared key as its values. The window [channels, width] becomes time-major
    without its oldest entry, which no later token reads; delta matrices [heads, k_dim, v_dim] become value-major.
    """
    found: dict[str, Tensor] = {}
    for index, (kind, layer) in enumerate(zip(layer_types, cache.layers, strict=True)):
        if kind == LATENT:
            found[f"layers.{index}.latent"] = layer.keys[row, 0]
            found[f"layers.{index}.rope"] = layer.values[row, 0]
        else:
            found[f"layers.{index}.window"] = layer.conv_states[0][row].mT[1:]
            found[f"layers.{index}.delta"] = layer.recurrent_states[0][row].mT
    return found
