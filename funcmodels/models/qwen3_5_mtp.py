"""The draft head of Qwen3.5 and Qwen3.6: one more decoder layer that predicts the token after the next.

Its parameters are `Qwen35Params.mtp`; embedding and output projection are the model's. `MtpDraft` drafts with it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.gqa import KeyValuePages, key_value_layers
from ..blocks.linear import head_weight, look_up, normalised, project
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish
from .qwen3_5_config import Qwen35Config
from .qwen3_5_layers import Qwen35Params, decoder_layers


def mtp_entries(config: Qwen35Config, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer of the draft head, all of them attention."""
    return key_value_layers(space, config, config.mtp_num_hidden_layers)


def mtp_forward(
    config: Qwen35Config,
    params: Qwen35Params,
    state: State | None,
    batch: Batch,
    hidden: Float[Tensor, "tokens hidden"],
    *,
    logits: LogitsOf = "all",
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """The multi-token prediction head: from `hidden` after a token and the next token, the one after that.

    `batch` holds the next tokens; `hidden` is the model's after its final norm, or the head's own at the place before.
    `state` has the head's keys and values. Source: `Qwen3_5MultiTokenPredictor` as serving engines run it; the head
    shares embedding and output projection with the model.
    """
    mtp = params.mtp
    if mtp is None:
        raise ValueError("mtp_forward: these parameters have no mtp head; load a checkpoint whose config has one")
    kinds = (KeyValuePages,) * config.mtp_num_hidden_layers
    step = begin(state, batch, keep_steps, axes=(1, 3), kinds=kinds)
    eps = config.rms_norm_eps
    embedded = normalised(mtp.embed_norm, look_up(params.embed, batch.tokens), eps=eps)
    normed = normalised(mtp.hidden_norm, hidden, eps=eps)
    x = project(mtp.fc, torch.cat((embedded, normed), -1))
    hidden, entries = decoder_layers(config, mtp.layers, mtp.norm, x, batch, step, Taps((), ()))
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, {}), finish(step, entries)


def mtp_read(
    config: Qwen35Config, params: Qwen35Params, hidden: Float[Tensor, "rows hidden"]
) -> tuple[Float[Tensor, "rows hidden"], Any]:
    """What the output projection reads of hidden states that `mtp_forward` returned, and its weight."""
    return hidden, head_weight(params.embed, params.head)
