"""Causal convolution over the tokens of each request, three taps wide, with a cache of the two tokens before them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import ASCEND_950, need, need_default, need_dtype, need_one_dtype, need_rank, need_shape, need_values, soc
from .registration import operator

TAPS = 3
"""The one width of kernel that the operator takes."""


def _conv_like(
    x: Tensor, weight: Tensor, conv_states: Tensor, query_start_loc: Any, cache_indices: Any,
    residual_connection: int, activation: str = "None", activation_mode: str = "None", pad_slot_id: int = -1,
    block_size: int = 128, max_query_len: int = -1, conv_mode: str = "default", run_mode: int = 0, **rest: Any,
) -> Tensor:  # fmt: skip
    need(soc() == ASCEND_950, f"documented for {ASCEND_950}; the call is lowered to {soc()}")
    need_default(**rest)
    for name, value in (("activation", activation), ("activation_mode", activation_mode)):
        need(value == "None", f"{name} is {value!r}, which the operator takes and ignores; apply it afterwards")
    modes = (pad_slot_id, conv_mode, run_mode)
    need(modes == (-1, "default", 0), "the reference covers the default of pad_slot_id and modes")
    # Its documentation wants windows with room for the new tokens where this template takes more than one.
    room = TAPS - 1 + (max_query_len - 1 if 1 <= max_query_len <= 8 else 0)
    need(residual_connection in (0, 1), f"residual_connection is {residual_connection}; expected 0 or 1")
    need_dtype((torch.float16, torch.bfloat16), x=x)
    need_one_dtype(x=x, weight=weight, conv_states=conv_states)
    need_rank(2, 2, x=x)
    channels = x.shape[1]
    need_shape((TAPS, channels), "taps, channels", weight=weight)
    need_shape((conv_states.shape[0], room, channels), "slots, past tokens, channels", conv_states=conv_states)
    for name, given in (("query_start_loc", query_start_loc), ("cache_indices", cache_indices)):
        need(given is not None, f"{name} is missing; the reference covers tokens of all requests in one axis")
    need_dtype((torch.int32,), query_start_loc=query_start_loc, cache_indices=cache_indices)
    need_rank(1, 1, query_start_loc=query_start_loc)
    need_shape((query_start_loc.shape[0] - 1,), "one slot a request", cache_indices=cache_indices)
    return torch.empty_like(x)


@operator("npu_fused_causal_conv1d", shapes=_conv_like)
def npu_fused_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    residual_connection: int,
    max_query_len: int = -1,
    **rest: Any,
) -> Tensor:
    """Each token's weighted sum of itself and the two before it, tap 0 on the oldest. Writes `conv_states` in place."""
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    need_values(0, len(conv_states) - 1, "slots", cache_indices=cache_indices)
    need(len(set(slots)) == len(slots), f"cache_indices {slots} gives one slot to two requests")
    need(
        starts[0] == 0 and starts[-1] == len(x) and sorted(starts) == starts,
        f"query_start_loc is {starts}; expected running sums from 0 to the {len(x)} tokens",
    )
    out = []
    longest = max(end - start for start, end in pairwise(starts))
    need(not 1 <= max_query_len <= 8 or longest <= max_query_len, f"{longest} tokens a row; {max_query_len} were said")
    for slot, start, end in zip(slots, starts, starts[1:], strict=False):
        seen = torch.cat((conv_states[slot], x[start:end]))
        taps = [seen[tap : tap + end - start].float() * weight[tap].float() for tap in range(TAPS)]
        y = sum(taps, torch.zeros(end - start, x.shape[1]))
        out.append(y + x[start:end].float() if residual_connection else y)
        conv_states[slot] = seen[-(TAPS - 1) :]
    return torch.cat(out).to(x.dtype)
