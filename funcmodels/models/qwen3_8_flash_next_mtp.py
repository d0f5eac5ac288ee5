"""The draft head of Qwen3.8-Flash-Next: one more layer over the streams, with the next token added to each of them.

Its parameters are `FlashNextParams.mtp`; embedding and output projection are the model's. What it takes and what it
hands on from step to step are streams laid end to end, as in `Output.hidden`. `MtpDraft` drafts with it.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..attention.qsa import IndexedPages
from ..blocks.hyper_connection import read_streams
from ..blocks.linear import head_weight, look_up, normalised, project
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish
from .qwen3_8_flash_next_config import FlashNextConfig
from .qwen3_8_flash_next_layers import FlashNextParams, Mtp, decoder_layer, index_entry, place_angles


def mtp_entries(config: FlashNextConfig, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer of the draft head, all of them attention."""
    return tuple(index_entry(config, space) for _ in range(config.mtp_num_hidden_layers))


def mtp_forward(
    config: FlashNextConfig,
    params: FlashNextParams,
    state: State | None,
    batch: Batch,
    hidden: Float[Tensor, "tokens joined"],
    *,
    logits: LogitsOf = "all",
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """The multi-token prediction head: from the streams after a token and the next token, the one after that.

    `batch` holds the next tokens; `hidden` are the model's streams before its last connection, or the head's own at the
    place before. `state` has the head's pages. Source: the head as serving engines run it; transformers has none.
    """
    mtp, eps = _head(params), config.rms_norm_eps
    step = begin(state, batch, keep_steps, kinds=(IndexedPages,) * config.mtp_num_hidden_layers)
    rotary = place_angles(config, step)
    embedded = normalised(mtp.embed_norm, look_up(params.embed, batch.tokens), eps=eps)
    # One mean of squares over all streams, unlike the norms of the connections.
    normed = normalised(mtp.hidden_norm, hidden, eps=eps).unflatten(-1, (config.hc_count, -1))
    x = project(mtp.embed_proj, embedded)[:, None] + project(mtp.hidden_proj, normed)
    entries: list[Entry | None] = []
    for index, layer in enumerate(mtp.layers):
        x, entry = decoder_layer(config, layer, x, batch, index, step, rotary, Taps((), ()))
        entries.append(entry)
    mixed, _ = read_streams(mtp.mixer, x, eps=eps)
    found = head_logits(mixed, head_weight(params.embed, params.head), step, logits)
    return Output(found, x.flatten(1), {}), finish(step, entries)


def mtp_read(
    config: FlashNextConfig, params: FlashNextParams, hidden: Float[Tensor, "rows joined"]
) -> tuple[Float[Tensor, "rows hidden"], Any]:
    """What the output projection reads of streams that `mtp_forward` returned, and its weight."""
    streams = hidden.unflatten(-1, (config.hc_count, -1))
    mixed, _ = read_streams(_head(params).mixer, streams, eps=config.rms_norm_eps)
    return mixed, head_weight(params.embed, params.head)


def _head(params: FlashNextParams) -> Mtp:
    if params.mtp is None:
        raise ValueError("mtp_forward: these parameters have no mtp head; load a checkpoint whose config has one")
    return params.mtp
