"""The short convolution: an operator for three taps on Ascend 950, and none elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.short_conv import WindowTrail, short_conv, with_scratch
from .features import npu
from .kernel import HALVES, above, fused, wrong_dtype

TAPS = 3

short_conv.without(("ascend910b", "ascend910_93"), "torch_npu has no short convolution for Ascend 910")


def _refuse(x, weight, window, rows, *, keep_steps, dilation=1) -> str | None:
    if weight.shape[1] != TAPS:
        return f"takes {TAPS} taps; this weight has {weight.shape[1]}"
    if dilation != 1:
        return f"reads tokens next to each other; this call has dilation {dilation}"
    if window is None:
        return "continues a window; this call has none"
    if not rows.uniform:
        return "takes rows of one length without padding; this batch is ragged or padded"
    if x.shape[1] % 16 or not 64 <= x.shape[1] <= 16384:
        return f"takes 64 to 16384 channels in multiples of 16; this call has {x.shape[1]}"
    return above(256, rows=rows.count) or wrong_dtype(HALVES, x=x, weight=weight, window=window)


@fused(short_conv, "npu_fused_causal_conv1d", "npu_fused_causal_conv1d", refuse=_refuse)
def _three_taps(x, weight, window, rows, *, keep_steps, dilation=1):
    # The operator writes the windows it is given; older ones ignore its argument for the activation.
    after = window.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(rows.count, dtype=torch.int32, device=x.device)
    starts = {"query_start_loc": rows.query_start.int(), "cache_indices": slots}
    y = npu.npu_fused_causal_conv1d(
        x.contiguous(), weight.T.contiguous(), after, max_query_len=_longest(rows.max_query), **starts
    )
    if keep_steps:
        before = torch.cat((window[: rows.count].to(x.dtype), rows.rectangle(x)), 1)
        return F.silu(y), window, WindowTrail(with_scratch(before))
    return F.silu(y), after, None


def _longest(tokens: int) -> int:
    """What is given as the longest row: it chooses the operator's template.

    That of 1 to 8 is documented for windows with room for the new tokens, but for one, which ours do not have; that of
    more takes windows of `TAPS - 1` entries at any length.
    """
    return tokens if tokens == 1 or tokens > 8 else 9
