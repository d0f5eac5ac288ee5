"""The config of a block draft, DFlash or DSpark: the fields that shape it, read from its `config.json` and checked.

A field stands at the top, in the section `dflash_config` or `dspark_config`, or under a name that begins with
`dspark_`. Source: the configs of published drafts, and SGLang 0.5.23, which runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import config as configs

FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH = ("DFlashDraftModel",)
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
SECTIONS = ("dflash_config", "dspark_config")
MARKOV = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockConfig:
    """Fields of the checkpoint's config.json under their own names. `markov_rank` 0 is a draft without Markov head.

    `target_layer_ids` count layers from 0: the draft reads the residual stream after each. `sliding_window` is that of
    layers of type `sliding_attention`, which are causal unless `is_causal` says otherwise; the others are not, unless
    it does. `draft_vocab_size` 0 says that the draft proposes all of the model's tokens.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    sliding_window: int = 0
    is_causal: bool | None = None
    use_gemma_norm: bool = False
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    draft_vocab_size: int = 0

    @property
    def from_anchor(self) -> bool:
        """Whether the first draft comes from the row of the newest token itself, and each row predicts the next."""
        return self.architecture in DSPARK and self.sample_from_anchor

    @property
    def block(self) -> int:
        """Rows of a block: the newest token, and masks behind it."""
        return self.block_size + (self.architecture in DSPARK and not self.sample_from_anchor)

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block if self.from_anchor else self.block - 1

    def causal(self, layer: int) -> bool:
        """Whether tokens of a block see only those before them in this layer."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer on a side, itself included; None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def read_config(given: Mapping[str, Any], target_layers: int) -> BlockConfig:
    """The config of a draft for a model of `target_layers` layers. Raises `ConfigError`."""
    fields = _fields(given)
    rope = next(iter(configs.rope_sections(fields).values()), {})
    fields |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    fields |= {"architecture": _architecture(given), "block_size": fields.get("block_size", _default_block(given))}
    layers = configs.layer_count(fields)
    if layers is not None:
        fields.setdefault("layer_types", [FULL] * layers)
        fields.setdefault("target_layer_ids", default_layers(target_layers, layers))
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        fields.setdefault("head_dim", hidden // heads)
    config = configs.read(BlockConfig, fields, required=())
    configs.require(*_size_rules(config), *_layer_rules(config, fields, target_layers), *_option_rules(fields))
    return config


def default_layers(target_layers: int, draft_layers: int) -> list[int]:
    """The layers read where a config names none: the middle one, or as many as the draft has, evenly apart."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields that are not null; those of a section before those at the top."""
    prefixed = {name.removeprefix("dspark_"): value for name, value in given.items() if name.startswith("dspark_")}
    found: dict[str, Any] = {}
    for section in (prefixed, given, *(configs.section(given, name) for name in SECTIONS)):
        found |= {name: value for name, value in section.items() if value is not None and name not in SECTIONS}
    if "noise_token_id" in found:
        found.setdefault("mask_token_id", found["noise_token_id"])
    return found


def _architecture(given: Mapping[str, Any]) -> str:
    named = given.get("architectures")
    known = [name for name in named if name in (*DFLASH, *DSPARK)] if isinstance(named, (list, tuple)) else []
    configs.require(
        (len(known) == 1, f"architectures {named!r} names no block draft; known: {', '.join((*DFLASH, *DSPARK))}")
    )
    return known[0]


def _default_block(given: Mapping[str, Any]) -> int:
    return 16 if _architecture(given) in DFLASH else 7


def _size_rules(config: BlockConfig) -> Iterator[tuple[bool, str]]:
    yield from configs.sizes(config, ("mask_token_id",))
    yield configs.multiple(config, "num_attention_heads", "num_key_value_heads")
    yield config.head_dim % 2 == 0, f"head_dim must be even, since channels turn in pairs, found {config.head_dim}"
    yield config.drafts > 0, f"block_size {config.block_size} leaves no draft: the first row of a block is the root"
    yield (
        0 <= config.mask_token_id < config.vocab_size,
        f"mask_token_id must be in 0..{config.vocab_size - 1}, found {config.mask_token_id}",
    )
    yield config.markov_rank >= 0, f"markov_rank must not be negative, found {config.markov_rank}"
    yield (
        config.markov_head_type in MARKOV,
        f"markov_head_type {config.markov_head_type!r} is not known; known: {', '.join(MARKOV)}",
    )
    yield (
        config.architecture in DSPARK or config.markov_rank == 0,
        f"markov_rank {config.markov_rank} of a DFlash draft is not supported: its rows are independent",
    )
    yield (
        0 <= config.draft_vocab_size <= config.vocab_size,
        f"draft_vocab_size must be in 0..{config.vocab_size}, found {config.draft_vocab_size}",
    )


def _layer_rules(config: BlockConfig, fields: Mapping[str, Any], target_layers: int) -> Iterator[tuple[bool, str]]:
    kinds, layers, ids = config.layer_types, config.num_hidden_layers, config.target_layer_ids
    yield len(kinds) == layers, f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
    yield set(kinds) <= {FULL, SLIDING}, f"layer_types may hold {FULL} and {SLIDING}, found {sorted(set(kinds))}"
    yield (
        SLIDING not in kinds or config.sliding_window > 0,
        f"layer_types has {SLIDING}, which needs a positive sliding_window, found {config.sliding_window}",
    )
    wrong = [layer for layer in ids if not 0 <= layer < target_layers]
    yield bool(ids), "target_layer_ids is empty; the draft reads at least one layer of the model"
    yield not wrong, f"target_layer_ids {wrong} are not in 0..{target_layers - 1}, the layers of this model"
    made_for = fields.get("num_target_layers", target_layers)
    yield made_for == target_layers, f"the draft is for a model of {made_for} layers, this one has {target_layers}"


def _option_rules(fields: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    for name in _UNSUPPORTED:
        value = fields.get(name)
        yield not value, f"{name} {value!r} is not supported; only drafts without it are"
    yield fields.get("output_multiplier", 1) == 1, f"output_multiplier {fields.get('output_multiplier')} is not 1"
    yield fields.get("hidden_act", "silu") == "silu", f"hidden_act {fields.get('hidden_act')!r} is not supported"
    yield from configs.rope_section_rules(configs.rope_sections(fields))


_UNSUPPORTED = (
    "attention_bias",
    "attention_sink",
    "attention_value_scale",
    "block_conv",
    "domino_head",
    "draft_adapter_rank",
    "final_logit_softcapping",
    "selector_rank",
    "selector_top_k",
    "transformer_layer_config",
)
"""Fields that some drafts have and whose computation is not here."""
