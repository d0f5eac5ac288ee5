"""Launches of the short convolution, and of standing after some of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.short_conv import WindowTrail
from ..rows import Rows
from ..target import Target
from .delta import COPY
from .launch import Launch
from .tiles import Footprint, planned

TOKEN = Footprint(copies=5.0, copies_950=5.0, streams=3)
SPAN = 64
"""Tokens of a row that a program goes over: rows of prompts are shared among cores."""


def short_conv(
    x: Tensor, weight: Tensor, window: Tensor, rows: Rows, *, keep_steps: bool, dilation: int = 1, target: Target
) -> tuple[Launch, tuple[Tensor, Tensor, WindowTrail | None]]:
    """The op of this name, for rows that continue a window, and the result that the launch fills."""
    channels, width = weight.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    past = (width - 1) * dilation
    out, slot = filled_by(x, rows), past + rows.max_query if keep_steps else past
    after = (x if keep_steps else window).new_zeros(rows.count + 1, slot, channels)
    tile = planned(target, TOKEN, size=x.element_size(), most=channels)
    arguments = {
        "x": x,
        "taps": weight.T.contiguous(),
        "window": window,
        "query_start": rows.query_start,
        "out": out,
        "after": after,
        "rows": rows.count,
        "channels": channels,
        "slot": slot,
        "spans": -(-rows.max_query // SPAN),
        "x_stride": x.stride(0),
    }
    constants = {"WIDTH": width, "DILATION": dilation, "TILE": tile, "SPAN": SPAN, "STEPS": keep_steps}
    jobs = rows.count * arguments["spans"] * -(-channels // tile)
    pools, fills = ("x", "window", "out", "after"), ("out", "after")
    launch = Launch("short_conv", "short_conv", arguments, constants, jobs, pools, fills)
    return launch, (out, window, WindowTrail(after)) if keep_steps else (out, after, None)


def filled_by(x: Tensor, rows: Rows) -> Tensor:
    """A tensor like x for a launch to fill; it fills the tokens of rows alone, and padding shall hold zeros."""
    make = torch.empty_like if rows.uniform else torch.zeros_like
    return make(x, memory_format=torch.contiguous_format)


def commit(trail: WindowTrail, accepted: Tensor, past: int, *, target: Target) -> tuple[Launch, Tensor]:
    """`WindowTrail.at`, and the windows that the launch fills."""
    (slots, slot, channels), rows = trail.inputs.shape, accepted.shape[0]
    out = trail.inputs.new_zeros(slots, past, channels)
    tile = planned(target, COPY, size=out.element_size(), most=past * channels)
    arguments = {"inputs": trail.inputs, "accepted": accepted, "out": out}
    sizes = {"rows": rows, "past": past, "slot": slot, "channels": channels}
    jobs = rows * -(-past * channels // tile)
    return Launch("short_conv", "commit", arguments | sizes, {"TILE": tile}, jobs, ("inputs", "out"), ("out",)), out
