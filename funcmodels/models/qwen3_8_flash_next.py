"""Qwen3.8-Flash-Next: delta nets and sparse attention between hyper-connections, n-gram embeddings, experts everywhere.

Text model. Several residual streams take the place of a residual and its norms: nothing else normalises what a layer
reads, and the mean of the streams that the last connection reads goes to the head as it is. Source:
`Qwen4ExpTextConfig` and `Qwen4ExpForCausalLM` in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from params.names.qwen3_8_flash_next import NAMES

from ..attention.gated_delta import DeltaNetState, delta_net_state
from ..attention.qsa import IndexedPages
from ..blocks.hyper_connection import read_streams
from ..blocks.linear import head_weight, look_up
from ..blocks.ngram_embedding import ngram_state
from ..family import Family, MtpHead
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish
from .qwen3_8_flash_next_config import INDEXED, FlashNextConfig
from .qwen3_8_flash_next_layers import FlashNextParams, NgramLayerState, decoder_layer, index_entry, place_angles
from .qwen3_8_flash_next_mtp import mtp_entries, mtp_forward, mtp_read
from .qwen3_8_flash_next_rules import read_config


def init_entries(config: FlashNextConfig, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer."""
    sizes = {"width": config.ple_conv_kernel_size, "order": config.ngram_size}

    def entry(layer: int, kind: str) -> Entry:
        if kind == INDEXED:
            return index_entry(config, space)
        delta = delta_net_state(space, **config.delta_sizes)
        if config.ple_index(layer) is None:
            return delta
        return NgramLayerState(delta, ngram_state(space, config.hidden_size, config.hc_count, **sizes))

    return tuple(entry(layer, kind) for layer, kind in enumerate(config.layer_types))


def forward(
    config: FlashNextConfig,
    params: FlashNextParams,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits of the batch's tokens, and the state that holds them too. See `Model.forward`.

    `Output.hidden` are the streams that the last connection reads, laid end to end: what the draft head takes.
    `outputs` offers `layers.3` (the streams after a layer) and, of each layer that has them, `layers.3.router`,
    `.blocks` (those selected, -1 for none), `.output_gate` (of attention), `.ngram_gate`, `.attn_inject` and
    `.mlp_inject` (the weights of the streams); and `mixed`, what goes to the head.
    """
    taps = Taps(outputs, _tap_names(config))
    step = begin(state, batch, keep_steps, kinds=_entry_kinds(config))
    rotary = place_angles(config, step)
    embedded = look_up(params.embed, batch.tokens)
    x = embedded[:, None].expand(-1, config.hc_count, -1)
    entries: list[Entry | None] = []
    for index, layer in enumerate(params.layers):
        x, entry = decoder_layer(config, layer, x, batch, index, step, rotary, taps)
        entries.append(entry)
    mixed, _ = read_streams(params.mixer, x, eps=config.rms_norm_eps)
    taps.offer("mixed", mixed)
    found = head_logits(mixed, head_weight(params.embed, params.head), step, logits)
    return Output(found, x.flatten(1), taps.taken()), finish(step, entries)


def _entry_kinds(config: FlashNextConfig) -> list[type[Entry]]:
    def kind(layer: int, name: str) -> type[Entry]:
        if name == INDEXED:
            return IndexedPages
        return DeltaNetState if config.ple_index(layer) is None else NgramLayerState

    return [kind(layer, name) for layer, name in enumerate(config.layer_types)]


def _tap_names(config: FlashNextConfig) -> list[str]:
    names = ["mixed"]
    for index, kind in enumerate(config.layer_types):
        kinds = ["router", "attn_inject", "mlp_inject"]
        kinds += ["blocks", "output_gate"] if kind == INDEXED else []
        kinds += ["ngram_gate"] if config.ple_index(index) is not None else []
        names += [f"layers.{index}", *(f"layers.{index}.{name}" for name in kinds)]
    return names


FAMILY = Family(
    model_types=("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"),
    read_config=read_config,
    params=FlashNextParams,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    mtp=MtpHead(mtp_entries, mtp_forward, mtp_read),
    heads=("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
)
