"""The short convolution: an operator for three taps on Ascend 950, and none elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.short_conv import short_conv
from .features import npu
from .kernel import HALVES, fused, wrong_dtype

TAPS = 3

short_conv.without(("ascend910b", "ascend910_93"), "torch_npu has no short convolution for Ascend 910")


def _refuse(x, weight, window, rows, *, keep_steps, dilation=1) -> str | None:
    if weight.shape[1] != TAPS:
        return f"takes {TAPS} taps; this weight has {weight.shape[1]}"
    if dilation != 1:
        return f"reads tokens next to each other; this call has dilation {dilation}"
    if window is None:
        return "continues a window; this call has none"
    if keep_steps:
        return "keeps no steps"
    if not rows.uniform:
        return "takes rows of one length without padding; this batch is ragged or padded"
    if x.shape[1] % 128:
        return f"takes channels in multiples of 128; this call has {x.shape[1]}"
    return wrong_dtype(HALVES, x=x, weight=weight, window=window)


@fused(short_conv, "npu_fused_causal_conv1d", "npu_fused_causal_conv1d", refuse=_refuse)
def _three_taps(x, weight, window, rows, *, keep_steps, dilation=1):
    # The operator writes the windows it is given, and has no activation of its own.
    after = window.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(rows.count, dtype=torch.int32, device=x.device)
    starts = {"query_start_loc": rows.query_start.int(), "cache_indices": slots}
    y = npu.npu_fused_causal_conv1d(x.contiguous(), weight.T.contiguous(), after, **starts)
    return F.silu(y), after, None
