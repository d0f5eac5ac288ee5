"""Qwen3.5 and Qwen3.6, dense and mixture of experts: three gated delta net layers, then one of gated attention.

Text models. Source: `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` and their models in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from params.names.qwen3_5 import NAMES

from ..attention.gated_delta import DeltaNetState, delta_net_state
from ..attention.gqa import KeyValuePages, key_value_pages
from ..blocks.linear import head_weight, look_up
from ..family import Family, MtpHead
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish
from .qwen3_5_config import Qwen35Config, read_config
from .qwen3_5_layers import Qwen35Params, decoder_layers
from .qwen3_5_mtp import mtp_entries, mtp_forward, mtp_read


def init_entries(config: Qwen35Config, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer."""
    return tuple(
        key_value_pages(space, config) if kind == "full_attention" else delta_net_state(space, **config.delta_sizes)
        for kind in config.layer_types
    )


def forward(
    config: Qwen35Config,
    params: Qwen35Params,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`."""
    taps = Taps(outputs, _tap_names(config))
    kinds = [KeyValuePages if kind == "full_attention" else DeltaNetState for kind in config.layer_types]
    step = begin(state, batch, keep_steps, axes=(1, 3), kinds=kinds)
    x = look_up(params.embed, batch.tokens)
    hidden, entries = decoder_layers(config, params.layers, params.norm, x, batch, step, taps)
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, taps.taken()), finish(step, entries)


def _tap_names(config: Qwen35Config) -> list[str]:
    layers = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    return layers + [f"{layer}.router" for layer in layers if config.num_experts]


FAMILY = Family(
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    read_config=read_config,
    params=Qwen35Params,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    mtp=MtpHead(mtp_entries, mtp_forward, mtp_read),
    heads=("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
)
