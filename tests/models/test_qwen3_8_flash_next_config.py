"""Configs of Qwen3.8-Flash-Next: what is refused, the published one and its hash, and lowering it without weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from funcmodels.blocks.ngram_embedding import hash_multipliers, hash_sizes, shard_rows
from tests.oracle.qwen3_8_flash_next import sizes

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen4_exp", "text_config": {
        "model_type": "qwen4_exp_text", "vocab_size": 248_320, "hidden_size": 2560, "num_hidden_layers": 48,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "max_position_embeddings": 262_144, "output_gate_type": "sigmoid",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
        "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "seed": 1234,
        "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128, "eos_token_id": 248_044,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "mtp_num_hidden_layers": 1, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}  # fmt: skip
"""The published sizes."""


def config(**changes: Any) -> dict[str, Any]:
    """Layers 1 to 4: a delta net, attention, a delta net, attention; n-grams of 3 tokens in the first."""
    kinds = ["linear_attention", "full_attention"] * 2
    fixed = {"layer_types": kinds, "ple_layer_ids": [1], "ngram_size": 3, "heads_per_ngram": 2, "ple_embed_dim": 12}
    changed = {**sizes(0), "model_type": "qwen4_exp_text", **fixed, **changes}
    return {name: value for name, value in changed.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be an integer, found '32'"),
        ({"indexer_budget": ...}, "indexer_budget is missing"),
        ({"indexer_compress_ratio": None}, "indexer_compress_ratio is missing"),
        ({"indexer_compress_ratio": 0}, "indexer_compress_ratio must be positive, found 0"),
        ({"indexer_budget": 9, "indexer_compress_ratio": 4}, "multiple of indexer_compress_ratio, found 9 and 4"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1, found 2"),
        ({"indexer_head_dim": 2}, "channels rotate, more than the indexer_head_dim 2"),
        ({"ngram_size": 1}, "ngram_size must be at least 2, found 1"),
        ({"heads_per_ngram": 0}, "heads_per_ngram must be positive, found 0"),
        ({"heads_per_ngram": 5}, "ple_embed_dim 12 is not a multiple of the 10 hash heads"),
        ({"ngram_vocab_size_base": -5}, "ngram_vocab_size_base must be positive, found -5"),
        ({"make_ngram_vocab_size_divisible_by": 0}, "make_ngram_vocab_size_divisible_by must be positive, found 0"),
        ({"split_ngram_parts": 0}, "split_ngram_parts must be positive, found 0"),
        ({"ple_conv_kernel_size": 1}, "ple_conv_kernel_size must be at least 2"),
        ({"ple_layer_ids": [99]}, "ple_layer_ids count layers from 1 to 4, found [99]"),
        ({"ple_layer_ids": [0, 1]}, "ple_layer_ids count layers from 1 to 4, found [0]"),
        ({"ple_layer_ids": [1, 2]}, "ple_layer_ids [2] are not linear_attention layers"),
        ({"ple_layer_ids": ["1"]}, "ple_layer_ids must be a list of int, found ['1']"),
        ({"eos_token_id": None}, "eos_token_id must be a token of the"),
        ({"eos_token_id": []}, "found -1: n-grams stop at it"),
        ({"eos_token_id": 1000}, "found 1000: n-grams stop at it"),
        ({"hc_count": 1}, "hc_count must be at least 2, found 1"),
        ({"hc_lowrank": 0}, "hc_lowrank must be positive, found 0"),
        ({"output_gate_type": "relu"}, "output_gate_type 'relu' is not supported; silu and sigmoid are"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types may hold linear_attention and indexed_attention"),
        ({"num_hidden_layers": 10**30, "layer_types": None}, "num_hidden_layers must be at most 1000,"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is more than num_experts 2"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 0 or 1, found 2"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type 'yarn' is not supported"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_a_wrong_field_is_named_before_anything_is_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(fm.ConfigError, match=re.escape(message)):
        fm.build(config(**changes))


def test_fields_that_may_be_left_out_or_written_otherwise() -> None:
    """No layers with embeddings, several, in any order; the embedding as wide as the model; gates by the activation."""
    none = fm.build(config(ple_layer_ids=[], eos_token_id=None, ngram_size=1, hidden_act="silu", output_gate_type=None))
    assert none.config.ple_layer_ids == () and none.config.gate == "silu"
    assert all(layer.ngrams is None for layer in none.param_spec().layers)
    several = fm.build(config(ple_layer_ids=[3, 1, 3], eos_token_id=[7, 8]))
    assert several.config.ple_layer_ids == (1, 3) and several.config.eos_token_id == 7
    first, _, second, _ = (layer.ngrams for layer in several.param_spec().layers)
    assert first.end == 7 and first.multipliers != second.multipliers and not set(first.sizes) & set(second.sizes)
    wide = fm.build(config(hidden_size=24, ple_embed_dim=None))
    assert wide.config.ple_embed_dim == 24
    default = fm.build(config(layer_types=None, num_hidden_layers=8, ple_layer_ids=[2]))
    assert [kind == "indexed_attention" for kind in default.config.layer_types] == ([False] * 3 + [True]) * 2
    assert default.config.partial_rotary_factor == sizes(0)["rope_parameters"]["partial_rotary_factor"]
    whole = fm.build(config(rope_parameters=None, indexer_head_dim=sizes(0)["head_dim"]))
    assert (whole.config.partial_rotary_factor, whole.config.rope_theta) == (1.0, 10000.0)


@pytest.mark.parametrize("kind", ["qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"])
def test_older_names_and_nested_configs_are_the_same_model(kind: str) -> None:
    flat = fm.build(config())
    given = config(model_type=kind)
    assert fm.build(given).param_spec() == flat.param_spec()
    assert fm.build({"model_type": kind, "text_config": given, "vision_config": {"depth": 1}}).config == flat.config


def test_the_published_hash() -> None:
    """Numbers that the published checkpoint holds."""
    ngrams = fm.build(PUBLISHED).param_spec().layers[1].ngrams
    assert ngrams.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert ngrams.sizes[:4] == (20000003, 20000023, 20000033, 20000047) and ngrams.sizes[-1] == 20000171
    assert len(ngrams.sizes) == 16 and ngrams.end == 248_044
    assert ngrams.table.shape == (320_001_536, 160) and ngrams.table.parts == (2_500_012,) * 128
    assert ngrams.offsets == tuple(sum(ngrams.sizes[:head]) for head in range(16))
    assert sum(ngrams.sizes) <= 320_001_536 < sum(ngrams.sizes) + 128


@pytest.mark.parametrize(("vocab", "order", "index", "seed"), [(7, 2, 0, 0), (248_320, 4, 3, 1234), (2**62, 3, 1, 99)])
def test_multipliers_and_sizes_are_those_of_transformers(vocab: int, order: int, index: int, seed: int) -> None:
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

    assert hash_multipliers(vocab, order, index, seed) == tuple(
        theirs._build_layer_multipliers(vocab, order, index, seed).tolist()
    )
    for base in (1, 2, 89, 500):
        nth = [theirs._find_nth_prime_after(base - 1, index * order + head + 1) for head in range(order)]
        assert hash_sizes(base, order, index) == tuple(nth)


@pytest.mark.parametrize(("rows", "shards"), [(320, 128), (100, 7), (9, 4), (5, 9), (12, 1)])
def test_shards_are_those_that_transformers_cuts(rows: int, shards: int) -> None:
    assert shard_rows(rows, shards) == tuple(len(part) for part in torch.arange(rows).chunk(shards))


def test_the_published_model_is_as_large_as_they_say() -> None:
    spec = fm.build(PUBLISHED).param_spec()
    count = sum(leaf.numel for leaf in params.leaves(spec))
    assert spec.layers[1].ngrams.table.numel == 51_200_245_760
    assert 170e9 < count < 190e9, count
    attention = [layer.attn for layer in spec.layers if hasattr(layer.attn, "qkv")]
    assert len(attention) == 12
    assert attention[0].qkv.weight.parts == (2 * 24 * 256, 512, 512, 5 * 128)


def test_the_published_widths_lower_without_weights() -> None:
    """Eight layers from shapes alone, a window to verify: nothing is allocated, the table of 51 billion included."""
    text = PUBLISHED["text_config"]
    layers = {"num_hidden_layers": 8, "layer_types": text["layer_types"][:8]}
    model = fm.build({"model_type": "qwen4_exp", "text_config": {**text, **layers}})
    spec = model.param_spec(torch.bfloat16)
    state = model.init_state(2, 4096, dtype=torch.bfloat16, device="meta")
    batch = fm.Batch.from_lists([[0] * 4] * 2)
    low = lowering.lower(model.forward, spec, state, batch, target="cpu", keep_steps=True)
    calls = {row.op: row.count for row in low.explain().rows}
    assert calls["hyper_mix"] == 17 and calls["hyper_inject"] == 16 and calls["table_rows"] == 1
    assert calls["index_scores_topk"] == calls["sparse_attention"] == 2
    assert low.cost_analysis().argument_bytes["params"] > 100e9
