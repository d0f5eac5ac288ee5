"""The config of Qwen3.5 and Qwen3.6: the fields that shape the text model, read from `config.json` and checked.

Source: `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import config as configs

MROPE_SECTION = (11, 11, 10)
"""What transformers takes where a config has none: for 64 rotary channels, cut where there are fewer."""


@dataclass(frozen=True)
class Qwen35Config:
    """Fields of the checkpoint's config.json under their own names. `num_experts` 0 is the dense model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[str, ...]
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False

    @property
    def delta_sizes(self) -> dict[str, int]:
        """Sizes of a delta net."""
        return {
            "k_heads": self.linear_num_key_heads,
            "v_heads": self.linear_num_value_heads,
            "k_dim": self.linear_key_head_dim,
            "v_dim": self.linear_value_head_dim,
            "width": self.linear_conv_kernel_dim,
        }

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)


def read_config(given: Mapping[str, Any]) -> Qwen35Config:
    """The text model's config, from a text or a vision-language `config.json`. Raises `ConfigError`."""
    text = configs.text_fields(given)
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": list(MROPE_SECTION)}
    rope |= {name: text[name] for name in rope if text.get(name) is not None}
    rope |= next(iter(configs.rope_sections(text).values()), {})
    fields = {"layer_types": default_layer_types(text), **{k: v for k, v in text.items() if v is not None}, **rope}
    sizes = _MOE_SIZES if "moe" in str(text.get("model_type")) else ("intermediate_size",)
    config = configs.read(Qwen35Config, fields, required=sizes)
    _check(config, fields, sizes)
    return config


def default_layer_types(given: Mapping[str, Any]) -> list[str]:
    """Every n-th layer attends fully, by default every fourth. Wrong types are left to the config's own check."""
    layers, every = configs.layer_count(given), given.get("full_attention_interval")
    every = 4 if every is None else every
    if layers is None or given.get("layer_types") is not None:
        return []
    whole = configs.is_count(every) and every > 0
    configs.require((whole, f"full_attention_interval must be a positive integer, found {every!r}"))
    return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]


def _check(config: Qwen35Config, given: Mapping[str, Any], sizes: Sequence[str]) -> None:
    configs.require(
        *configs.sizes(config, ("partial_rotary_factor",)),
        *configs.positive(config, sizes),
        *_layer_rules(config),
        *_feed_forward_rules(config, given, sizes),
        *_rotary_rules(config, given),
        (
            given.get("hidden_act", "silu") == "silu",
            f"hidden_act {given.get('hidden_act')!r} is not supported; only silu is",
        ),
        (not given.get("attention_bias", False), "attention_bias true is not supported"),
        (given.get("attn_output_gate", True), "attn_output_gate false is not supported: Qwen3.5 gates its attention"),
    )


def _layer_rules(config: Qwen35Config) -> Iterator[tuple[bool, str]]:
    drafts = config.mtp_num_hidden_layers
    yield drafts >= 0, f"mtp_num_hidden_layers must not be negative, found {drafts}"
    yield from configs.layer_types(config, ("full_attention", "linear_attention"))
    yield configs.multiple(config, "num_attention_heads", "num_key_value_heads")
    yield configs.multiple(config, "linear_num_value_heads", "linear_num_key_heads")


def _feed_forward_rules(
    config: Qwen35Config, given: Mapping[str, Any], sizes: Sequence[str]
) -> Iterator[tuple[bool, str]]:
    experts, chosen, kind = config.num_experts, config.num_experts_per_tok, given.get("model_type")
    yield (experts > 0) == (sizes is _MOE_SIZES), f"model_type {kind!r} and num_experts {experts} contradict each other"
    yield experts >= 0, f"num_experts must not be negative, found {experts}"
    yield experts <= 0 or chosen <= experts, f"num_experts_per_tok {chosen} is more than num_experts {experts}"


def _rotary_rules(config: Qwen35Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    dim, sections = config.rotary_dim, config.mrope_section
    yield (
        0 < dim <= config.head_dim and dim % 2 == 0,
        f"partial_rotary_factor {config.partial_rotary_factor} gives {dim} rotary channels of {config.head_dim}; "
        "an even number in 2..head_dim is needed",
    )
    yield len(sections) == 3, f"mrope_section must have three parts, found {list(sections)}"
    yield min(sections, default=0) >= 0, f"mrope_section must not have negative parts, found {list(sections)}"
    yield (
        sections == MROPE_SECTION or sum(sections) <= dim // 2,
        f"mrope_section {list(sections)} adds up to {sum(sections)}, more than half of the {dim} rotary channels",
    )
    yield from configs.rope_section_rules(configs.rope_sections(given))


_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
