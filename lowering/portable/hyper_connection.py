"""Hyper-connections some tokens at a time: of all streams only what is returned is held for all tokens."""

from __future__ import annotations

from torch import Tensor

from ..ops.hyper_connection import hyper_inject, hyper_mix
from ..target import EVERY

BLOCK = 2**22
"""Elements of streams that are worked on at a time: 16 MiB in float32, of which there are at most five."""


def _parts(x: Tensor) -> list[slice]:
    """The tokens in pieces of at most `BLOCK` elements."""
    step = max(1, BLOCK // max(x.shape[1] * x.shape[2], 1))
    return [slice(at, at + step) for at in range(0, x.shape[0], step)]


@hyper_mix.kernel("torch_blocked", targets=EVERY, eager=True)
def _mix(x, norm, down, up, *, eps):
    parts = _parts(x)
    if len(parts) < 2:
        return hyper_mix.body(x, norm, down, up, eps=eps)
    mixed, weights = x.new_empty(x.shape[0], x.shape[2]), None
    for part in parts:
        mixed[part], found = hyper_mix.body(x[part], norm, down, up, eps=eps)
        if found is not None:
            weights = found.new_empty(x.shape[:2]) if weights is None else weights
            weights[part] = found
    return mixed, weights


@hyper_inject.kernel("torch_blocked", targets=EVERY, eager=True)
def _inject(x, y, weights):
    parts = _parts(x)
    if len(parts) < 2:
        return hyper_inject.body(x, y, weights)
    out = x.new_empty(x.shape)
    for part in parts:
        out[part] = hyper_inject.body(x[part], y[part], weights[part])
    return out
