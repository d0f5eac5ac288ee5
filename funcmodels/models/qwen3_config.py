"""The config of Qwen3, read from `config.json` and checked. Source: `Qwen3Config` of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import config as configs

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers: one that attends to its whole past, and one that attends to a window of it."""


@dataclass(frozen=True)
class Qwen3Config:
    """Fields of the checkpoint's config.json under their own names. `sliding_window` 0 is none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    layer_types: tuple[str, ...]
    rope_theta: float
    head_dim: int = 128
    sliding_window: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def read_config(given: Mapping[str, Any]) -> Qwen3Config:
    """The config of a `config.json`. Raises `ConfigError`."""
    sections = configs.rope_sections(given)
    rope = {"rope_theta": given.get("rope_theta", 1e4), **next(iter(sections.values()), {})}
    sliding = given.get("sliding_window", 4096) if given.get("use_sliding_window") else None
    fields = {"layer_types": _layer_types(given, sliding), **{k: v for k, v in given.items() if v is not None}}
    fields |= {"rope_theta": rope.get("rope_theta"), "sliding_window": sliding}
    config = configs.read(Qwen3Config, fields)
    act, part = given.get("hidden_act", "silu"), rope.get("partial_rotary_factor", 1.0)
    configs.require(
        *configs.sizes(config),
        *configs.positive(config, ("sliding_window",) if SLIDING in config.layer_types else ()),
        *configs.layer_types(config, (FULL, SLIDING)),
        *configs.rope_section_rules(sections),
        configs.multiple(config, "num_attention_heads", "num_key_value_heads"),
        (config.head_dim % 2 == 0, f"head_dim must be even for its channels to turn in pairs, found {config.head_dim}"),
        (act == "silu", f"hidden_act {act!r} is not supported; only silu is"),
        (part == 1.0, f"partial_rotary_factor {part!r} is not supported; Qwen3 turns every channel"),
    )
    return config


def _layer_types(given: Mapping[str, Any], sliding: Any) -> list[str]:
    """The first layers attend to all, those from `max_window_layers` on to a window, where there is one."""
    full = given.get("max_window_layers", 28) if sliding is not None else configs.MOST["num_hidden_layers"]
    return [SLIDING if configs.is_count(full) and at >= full else FULL for at in range(configs.layer_count(given) or 0)]
