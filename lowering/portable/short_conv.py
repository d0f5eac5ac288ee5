"""The short convolution in blocks of tokens that stay in cache through all its taps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..host import symbolic
from ..ops.short_conv import short_conv, window_after, with_scratch
from ..ops.widen import wide_dtype
from ..target import EVERY

BLOCK = 2**18
"""Elements that are worked on at a time."""


def _refuse(x, weight, window, rows, *, keep_steps, dilation=1) -> str | None:
    if symbolic((rows.max_query,)):
        return "goes over tokens block by block, and their number is a symbol here"
    return "keeps no steps" if keep_steps else None


@short_conv.kernel("torch_blocked", targets=EVERY, refuse=_refuse, batches=False)
def _blocked(x, weight, window, rows, *, keep_steps, dilation=1):
    new = rows.rectangle(x)
    count, _, channels = new.shape
    past = (weight.shape[1] - 1) * dilation
    before = new.new_zeros(count, past, channels) if window is None else window[:count].to(x.dtype)
    step = max(past, BLOCK // max(count * channels, 1))
    taps = weight.to(wide_dtype(x, weight)).T.contiguous().unbind()
    first = torch.cat((before, new[:, :step]), 1)
    blocks = [_convolved(first, taps, dilation)]
    blocks += [_convolved(new[:, at - past : at + step], taps, dilation) for at in range(step, rows.max_query, step)]
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    y = rows.flat(y, x.shape[0])
    if window is None:
        return y, None, None
    if rows.uniform:
        last = first if rows.max_query <= step else new
        last = last[:, last.shape[1] - past :]
        return y, torch.cat((last.to(window.dtype), window[count:])), None
    after = window_after(with_scratch(torch.cat((before, new), 1)), rows.new, past)
    return y, after.to(window.dtype), None


def _convolved(inputs: Tensor, taps: tuple[Tensor, ...], dilation: int) -> Tensor:
    """inputs [rows past+tokens channels], taps [width] of [channels]."""
    wide = inputs.to(taps[0].dtype)
    tokens = wide.shape[1] - (len(taps) - 1) * dilation
    y = wide[:, :tokens] * taps[0]
    for at, tap in enumerate(taps[1:], 1):
        y.addcmul_(wide[:, at * dilation : at * dilation + tokens], tap)
    return F.silu(y).to(inputs.dtype)
