"""The config of Gemma3: the fields that shape the text model, read from `config.json` and checked.

Source: `Gemma3TextConfig` of transformers 5.24, whose defaults a published config.json leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import config as configs

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers: one that attends to its whole past, and one that attends to a window of it."""


@dataclass(frozen=True)
class Gemma3Config:
    """Fields of the checkpoint's config.json under their own names, but for the factors of linear rope scaling.

    `final_logit_softcapping` 0 is none.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    rope_theta: float
    rope_factor: float
    rope_local_base_freq: float
    rope_local_factor: float
    vocab_size: int = 262_208
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: float = 256.0
    sliding_window: int = 4096
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131_072
    attention_bias: bool = False
    final_logit_softcapping: float = 0.0
    tie_word_embeddings: bool = True

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself included; None for all."""
        return self.sliding_window if self.layer_types[layer] == LOCAL else None


def read_config(given: Mapping[str, Any]) -> Gemma3Config:
    """The text model's config, from a text or a vision-language `config.json`. Raises `ConfigError`."""
    text = configs.text_fields(given, tied=True)
    fields = {"layer_types": _layer_types(text), **{name: value for name, value in text.items() if value is not None}}
    rope = _rope_sections(text)
    fields |= {
        "rope_theta": rope[GLOBAL].get("rope_theta", fields.get("rope_theta", 1e6)),
        "rope_factor": rope[GLOBAL].get("factor", 1.0),
        "rope_local_base_freq": rope[LOCAL].get("rope_theta", fields.get("rope_local_base_freq", 1e4)),
        "rope_local_factor": rope[LOCAL].get("factor", 1.0),
    }
    config = configs.read(Gemma3Config, fields)
    configs.require(*_size_rules(config), *_layer_rules(config, text), *_rope_rules(text), *_unsupported(text))
    return config


def _layer_types(given: Mapping[str, Any]) -> list[str]:
    """Every n-th layer is global, by default every sixth. Wrong types are left to the config's own check."""
    layers, every = configs.layer_count(given), _pattern(given)
    if layers is None or not isinstance(every, int) or every < 1:
        return []
    return [LOCAL if (index + 1) % every else GLOBAL for index in range(layers)]


def _pattern(given: Mapping[str, Any]) -> Any:
    found = given.get("sliding_window_pattern")
    return 6 if found is None else found


def _rope_sections(given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rotary fields by kind of layer: the present spelling, and `rope_scaling`, which was of global layers alone."""
    present = configs.section(given, "rope_parameters")
    found = {kind: configs.section(present, kind) for kind in (GLOBAL, LOCAL)}
    return {**found, GLOBAL: {**found[GLOBAL], **configs.section(given, "rope_scaling")}}


def _size_rules(config: Gemma3Config) -> Iterator[tuple[bool, str]]:
    yield from configs.sizes(config)
    yield configs.multiple(config, "num_attention_heads", "num_key_value_heads")
    yield config.head_dim % 2 == 0, f"head_dim must be even for its channels to turn in pairs, found {config.head_dim}"


def _layer_rules(config: Gemma3Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    kinds, layers, every = config.layer_types, config.num_hidden_layers, _pattern(given)
    patterned = given.get("layer_types") is not None or (isinstance(every, int) and every > 0)
    yield patterned, f"sliding_window_pattern must be a positive integer, found {every!r}"
    yield not patterned or len(kinds) == layers, f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
    known = set(kinds) <= {GLOBAL, LOCAL}
    yield known, f"layer_types may hold {GLOBAL} and {LOCAL}, found {sorted(set(kinds))}"
    unset = "sliding_window" in given and given["sliding_window"] is None and LOCAL in kinds
    yield not unset, f"sliding_window is null and layer_types has {LOCAL} layers; give the number of tokens they see"


def _rope_rules(given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    present, scaling = configs.section(given, "rope_parameters"), configs.section(given, "rope_scaling")
    unknown = sorted(present.keys() - {GLOBAL, LOCAL})
    yield not unknown, f"rope_parameters holds sections {GLOBAL} and {LOCAL}, found {unknown}"
    stated = configs.section(present, GLOBAL)
    # transformers lets rope_scaling replace what rope_parameters says; which of two holds is not guessed
    differing = [name for name in scaling if name in stated and stated[name] != scaling[name]]
    yield not differing, f"rope_scaling and rope_parameters[{GLOBAL!r}] differ in {differing}; remove the one not meant"
    named = "type" not in scaling or "rope_type" in scaling
    yield named, "rope_scaling has a type and no rope_type, which transformers passes over; name it rope_type"
    for kind, section in _rope_sections(given).items():
        yield from _section_rules(kind, section)


def _section_rules(kind: str, section: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    rope = section.get("rope_type", section.get("type", "default"))
    yield section.get("type", rope) == rope, f"rope_type {rope!r} and type {section.get('type')!r} of {kind} differ"
    yield rope in ("default", "linear"), f"rope_type {rope!r} of {kind} is not supported; default and linear are"
    scaled = "factor" in section
    yield scaled == (rope == "linear"), f"rope_type {rope!r} of {kind} {'takes no' if scaled else 'needs a'} factor"
    part = section.get("partial_rotary_factor", 1.0)
    yield part == 1.0, f"partial_rotary_factor {part} of {kind} is not supported; Gemma3 turns every channel"


def _unsupported(given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    activation = given.get("hidden_activation", "gelu_pytorch_tanh")
    known = activation in ("gelu_pytorch_tanh", None)
    yield known, f"hidden_activation {activation!r} is not supported; only gelu_pytorch_tanh is"
    both_ways = given.get("use_bidirectional_attention")
    yield not both_ways, f"use_bidirectional_attention {both_ways!r} is not supported; attention here is causal"
    cap = given.get("attn_logit_softcapping")
    yield (
        cap is None,
        f"attn_logit_softcapping {cap!r} is not supported: transformers ignores it for Gemma3, other engines apply it; "
        "set it to null for what transformers computes",
    )
    last = given.get("final_logit_softcapping")
    capped = last is None or (isinstance(last, (int, float)) and last > 0)
    yield capped, f"final_logit_softcapping must be positive or null, found {last!r}"
