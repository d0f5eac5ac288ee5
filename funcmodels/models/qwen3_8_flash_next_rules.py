"""Reading the config of Qwen3.8-Flash-Next: other spellings of its fields, and what they must be.

Source: `Qwen4ExpTextConfig` of transformers 5.24, as for the fields themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .. import config as configs
from .qwen3_5_config import default_layer_types
from .qwen3_8_flash_next_config import INDEXED, LINEAR, FlashNextConfig

MOST_HASHES, MOST_SHARDS = 512, 2**14
"""The most hash heads, each of which a prime is looked for, and shards of tables; published are 16 and 512 a layer."""


def read_config(given: Mapping[str, Any]) -> FlashNextConfig:
    """The text model's config, from a text or a vision-language `config.json`. Raises `ConfigError`."""
    text = configs.text_fields(given)
    rope: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    rope |= {name: text[name] for name in rope if text.get(name) is not None}
    rope |= next(iter(configs.rope_sections(text).values()), {})
    fields = {"layer_types": default_layer_types(text), "ple_embed_dim": text.get("hidden_size")}
    fields |= {name: value for name, value in text.items() if value is not None} | rope
    fields |= _renamed(fields)
    config = configs.read(FlashNextConfig, fields)
    _check(config, fields)
    return config


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a config may write in several ways, in one. Wrong types are left to the config's own check."""
    found: dict[str, Any] = {"output_gate_type": fields.get("output_gate_type") or fields.get("hidden_act") or "silu"}
    kinds, layers, end = (fields.get(name) for name in ("layer_types", "ple_layer_ids", "eos_token_id"))
    if isinstance(kinds, (list, tuple)):
        found["layer_types"] = [INDEXED if kind == "full_attention" else kind for kind in kinds]
    if isinstance(layers, (list, tuple)) and all(isinstance(layer, int) for layer in layers):
        found["ple_layer_ids"] = sorted(set(layers))
    if isinstance(end, (list, tuple)):
        found["eos_token_id"] = end[0] if end else -1
    return found


def _check(config: FlashNextConfig, given: Mapping[str, Any]) -> None:
    configs.require(
        *configs.sizes(config, (*_NGRAMS, "seed")),
        *_layer_rules(config),
        *_block_rules(config, given),
        *_index_rules(config),
        *(_ngram_rules(config) if config.ple_layer_ids else ()),
        *_rotary_rules(config, given),
    )


def indexed_by(
    config: FlashNextConfig, trained: FlashNextConfig, *, budget: int | None, ratio: int | None
) -> FlashNextConfig:
    """The config with another budget or ratio of the index; warns of another ratio than the one `trained` with.

    Raises `ConfigError` for sizes that do not fit each other.
    """
    changed = {"indexer_budget": budget, "indexer_compress_ratio": ratio}
    config = replace(config, **{name: value for name, value in changed.items() if value is not None})
    configs.require(*configs.positive(config, changed), *_index_rules(config))
    asked, seen = config.indexer_compress_ratio, trained.indexer_compress_ratio
    if asked != seen:
        warnings.warn(
            f"indexer_compress_ratio {asked}: these weights were trained with blocks of {seen} tokens and never "
            "ranked others",
            stacklevel=3,
        )
    return config


def _layer_rules(config: FlashNextConfig) -> Iterator[tuple[bool, str]]:
    kinds, layers, drafts = config.layer_types, config.num_hidden_layers, config.mtp_num_hidden_layers
    yield drafts in (0, 1), f"mtp_num_hidden_layers must be 0 or 1, found {drafts}"
    yield len(kinds) == layers, f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
    yield (
        set(kinds) <= {INDEXED, LINEAR},
        f"layer_types may hold {LINEAR} and {INDEXED} (or full_attention), found {sorted(set(kinds))}",
    )
    yield configs.multiple(config, "num_attention_heads", "num_key_value_heads")
    yield configs.multiple(config, "linear_num_value_heads", "linear_num_key_heads")


def _block_rules(config: FlashNextConfig, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    experts, chosen, gate = config.num_experts, config.num_experts_per_tok, config.output_gate_type
    yield config.hc_count > 1, f"hc_count must be at least 2, found {config.hc_count}"
    yield config.linear_conv_kernel_dim > 1, "linear_conv_kernel_dim 1 is not supported: there is no window to carry"
    yield chosen <= experts, f"num_experts_per_tok {chosen} is more than num_experts {experts}"
    yield given.get("norm_topk_prob", True) is True, "norm_topk_prob false is not supported: weights are renormalised"
    yield gate in ("silu", "sigmoid"), f"output_gate_type {gate!r} is not supported; silu and sigmoid are"
    act = given.get("hidden_act", "silu")
    yield act == "silu", f"hidden_act {act!r} is not supported; only silu is"
    yield not given.get("attention_bias", False), "attention_bias true is not supported"


def _index_rules(config: FlashNextConfig) -> Iterator[tuple[bool, str]]:
    budget, ratio, heads = config.indexer_budget, config.indexer_compress_ratio, config.indexer_kv_heads
    yield heads == 1, f"indexer_kv_heads must be 1, found {heads}"
    yield (
        ratio < 1 or budget % ratio == 0,
        f"indexer_budget must be a multiple of indexer_compress_ratio, found {budget} and {ratio}",
    )
    yield (
        config.rotary_dim <= config.indexer_head_dim,
        f"{config.rotary_dim} channels rotate, more than the indexer_head_dim {config.indexer_head_dim}",
    )


def _ngram_rules(config: FlashNextConfig) -> Iterator[tuple[bool, str]]:
    layers, ids, end = config.num_hidden_layers, config.ple_layer_ids, config.eos_token_id
    yield config.ngram_size > 1, f"ngram_size must be at least 2, found {config.ngram_size}"
    yield from configs.positive(config, _NGRAMS)
    yield config.ple_conv_kernel_size > 1, "ple_conv_kernel_size must be at least 2: else there is no window to carry"
    heads = max((config.ngram_size - 1) * config.heads_per_ngram, 1)
    tables = len(ids)
    yield (
        heads * tables <= MOST_HASHES,
        f"{tables} layers of {heads} hash heads are {heads * tables}, more than {MOST_HASHES} in all; check "
        "ple_layer_ids, ngram_size and heads_per_ngram",
    )
    yield (
        config.split_ngram_parts * tables <= MOST_SHARDS,
        f"split_ngram_parts {config.split_ngram_parts} of {tables} layers are more than {MOST_SHARDS} in all",
    )
    yield (
        config.ple_embed_dim % heads == 0,
        f"ple_embed_dim {config.ple_embed_dim} is not a multiple of the {heads} hash heads "
        f"(heads_per_ngram {config.heads_per_ngram} for each n-gram order from 2 to ngram_size {config.ngram_size})",
    )
    kinds = dict(enumerate(config.layer_types, 1))
    outside = [layer for layer in ids if not 1 <= layer <= layers]
    yield not outside, f"ple_layer_ids count layers from 1 to {layers}, found {outside}"
    other = [layer for layer in ids if kinds.get(layer, LINEAR) != LINEAR]
    yield not other, f"ple_layer_ids {other} are not {LINEAR} layers, which alone may have an n-gram embedding"
    yield (
        0 <= end < config.vocab_size,
        f"eos_token_id must be a token of the {config.vocab_size}, found {end}: n-grams stop at it",
    )


def _rotary_rules(config: FlashNextConfig, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    dim = config.rotary_dim
    yield (
        0 < dim <= config.head_dim and dim % 2 == 0,
        f"partial_rotary_factor {config.partial_rotary_factor} gives {dim} rotary channels of {config.head_dim}; "
        "an even number in 2..head_dim is needed",
    )
    yield from configs.rope_section_rules(configs.rope_sections(given))


_NGRAMS = (
    "ngram_size",
    "ple_conv_kernel_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "split_ngram_parts",
    "ple_embed_dim",
)
