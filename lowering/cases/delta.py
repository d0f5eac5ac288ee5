"""Cases of short convolutions and the delta rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .case import DECODE_1, DECODE_8, PROMPT, ROWS, VERIFY, VERIFY_8, Arguments, Case, Draw, RowCounts


def _short_conv(
    rows: RowCounts, channels: int, width: int, *, window: bool, keep_steps: bool, **dilation: int
) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        reach = (width - 1) * dilation.get("dilation", 1)
        past = draw.normal(len(rows.counts) + 1, reach, channels) if window else None
        kwargs = {"keep_steps": keep_steps, **dilation}
        return (draw.normal(rows.tokens, channels), draw.normal(channels, width), past, rows.made()), kwargs

    return make


def delta(
    rows: RowCounts, k_heads: int, v_heads: int, k_dim: int, v_dim: int, *,
    state: bool, keep_steps: bool, recurrent: torch.dtype = torch.float32, channels: bool = False,
) -> Callable[[Draw], Arguments]:  # fmt: skip
    """Arguments of `gated_delta_rule`: unit keys and queries, nonzero gates, a random state.

    With `channels` every channel of the keys has its own gate.
    """

    def unit(draw: Draw) -> Tensor:
        return torch.nn.functional.normalize(draw.normal(rows.tokens, k_heads, k_dim), dim=-1)

    def make(draw: Draw) -> Arguments:
        q, k, v = unit(draw) * k_dim**-0.5, unit(draw), draw.normal(rows.tokens, v_heads, v_dim)
        gates = (rows.tokens, v_heads, *([k_dim] if channels else []))
        decay, beta = draw.uniform(-2.0, 0.0, *gates), draw.uniform(0.0, 1.0, rows.tokens, v_heads)
        before = draw.normal(len(rows.counts) + 1, v_heads, v_dim, k_dim, dtype=recurrent) if state else None
        return (q, k, v, decay, beta, before, rows.made()), {"keep_steps": keep_steps}

    return make


def faded(rows: RowCounts, heads: int, dim: int) -> Callable[[Draw], Arguments]:
    """Arguments of `gated_delta_rule` with a state of denormal numbers and nothing written: slow on some machines."""

    def make(draw: Draw) -> Arguments:
        (q, k, v, decay, beta, state, made), kwargs = delta(rows, heads, heads, dim, dim, state=True, keep_steps=False)(
            draw
        )
        return (q, k, v, decay * 1e-3, beta * 0, state * 1e-40, made), kwargs

    return make


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    for rows in (*ROWS, VERIFY):
        for window, keep in ((False, False), (True, False), (True, rows is VERIFY)):
            tail = ("_window" if window else "") + ("_keep" if keep else "")
            made.append(
                Case(
                    "short_conv", f"{rows.name}_10x4{tail}", _short_conv(rows, 10, 4, window=window, keep_steps=keep), 4
                )
            )
            name = f"{rows.name}_2_6_8_12{tail}"
            made.append(Case("gated_delta_rule", name, delta(rows, 2, 6, 8, 12, state=window, keep_steps=keep), 130))
            wide = delta(rows, 2, 4, 128, 128, state=window, keep_steps=keep, recurrent=torch.bfloat16)
            made.append(Case("gated_delta_rule", f"{rows.name}_2_4_128_bf16{tail}", wide, 260))
            by_channel = delta(rows, 3, 3, 8, 12, state=window, keep_steps=keep, channels=True)
            made.append(Case("gated_delta_rule", f"{rows.name}_3_8_12_channels{tail}", by_channel, 130))
            by_channel = delta(
                rows, 2, 4, 16, 12, state=window, keep_steps=keep, recurrent=torch.bfloat16, channels=True
            )
            made.append(Case("gated_delta_rule", f"{rows.name}_2_4_16_bf16_channels{tail}", by_channel, 130))
            apart = _short_conv(rows, 6, 3, window=window, keep_steps=keep, dilation=2)
            made.append(Case("short_conv", f"{rows.name}_6x3_apart{tail}", apart, 3))
        for channels, width in ((16, 2), (128, 3)):
            conv = _short_conv(rows, channels, width, window=True, keep_steps=rows is VERIFY)
            made.append(Case("short_conv", f"{rows.name}_{channels}x{width}", conv, width))
    for rows in (PROMPT, DECODE_1, DECODE_8):
        made.append(
            Case("short_conv", rows.name, _short_conv(rows, 6144, 4, window=True, keep_steps=False), 4, bench=True)
        )
        wide = delta(rows, 16, 16, 128, 128, state=True, keep_steps=False)
        made.append(Case("gated_delta_rule", rows.name, wide, 512, bench=True))
        by_channel = delta(rows, 16, 16, 128, 128, state=True, keep_steps=False, channels=True)
        made.append(Case("gated_delta_rule", f"{rows.name}_channels", by_channel, 512, bench=True))
    for channels in (False, True):
        window = delta(VERIFY_8, 16, 16, 128, 128, state=True, keep_steps=True, channels=channels)
        name = f"{VERIFY_8.name}_keep" + ("_channels" if channels else "")
        made.append(Case("gated_delta_rule", name, window, 512, bench=True))
    made.append(Case("gated_delta_rule", "decode_8_faded", faded(DECODE_8, 16, 128), 512, bench=True))
    made.append(Case("l2_norm", "heads", lambda draw: ((draw.normal(5, 16, 128),), {"scale": 128**-0.5}), 128))
    made.append(Case("l2_norm", "awkward", lambda draw: ((draw.normal(3, 7),), {}), 7))
    made.append(Case("l2_norm", "large_eps", lambda draw: ((draw.normal(5, 12),), {"eps": 3.0}), 12))
    made.append(Case("l2_norm", "prompt_512", lambda draw: ((draw.normal(512, 16, 128),), {}), 128, bench=True))

    def gates(draw: Draw) -> Arguments:
        return (draw.normal(5, 6), draw.normal(5, 6), draw.uniform(-1.0, 3.0, 6), draw.uniform(-5.0, 1.0, 6)), {}

    def channel_gates(draw: Draw, **bound: float) -> Arguments:
        args = draw.normal(5, 6, 8), draw.normal(5, 6), draw.uniform(-1.0, 3.0, 6), draw.uniform(-5.0, 1.0, 6, 8)
        return args, bound

    def replay(draw: Draw, *channels: int) -> Arguments:
        keys, updates = draw.normal(3, 4, 6, 8, dtype=torch.float32), draw.normal(3, 4, 6, 12, dtype=torch.float32)
        before, decay = draw.normal(4, 6, 12, 8, dtype=torch.float32), draw.uniform(-2.0, 0.0, 3, 4, 6, *channels)
        return (before, keys, updates, decay, torch.tensor([0, 4, 2], dtype=torch.int32)), {}

    return [
        *made,
        Case("delta_gates", "heads", gates),
        Case("channel_gates", "channels", channel_gates),
        Case("channel_gates", "channels_from_-5_on", lambda draw: channel_gates(draw, lower_bound=-5.0)),
        Case("replay_delta", "accepted_0_4_2", replay, 4),
        Case("replay_delta", "accepted_0_4_2_channels", lambda draw: replay(draw, 8), 4),
    ]
