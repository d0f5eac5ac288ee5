"""Cases of hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .case import Arguments, Case, Draw


def _mix(tokens: int, streams: int, hidden: int, rank: int, *, writes: bool) -> Callable[[Draw], Arguments]:
    def make(draw: Draw) -> Arguments:
        joined = streams * hidden
        down = draw.normal(rank + streams * writes, joined) / joined**0.5
        up = draw.normal(joined, rank) / rank**0.5
        return (draw.normal(tokens, streams, hidden), draw.normal(joined), down, up), {"eps": 1e-6}

    return make


def _inject(tokens: int, streams: int, hidden: int) -> Callable[[Draw], Arguments]:
    return lambda draw: (
        (draw.normal(tokens, streams, hidden), draw.normal(tokens, hidden), draw.uniform(0.0, 2.0, tokens, streams)),
        {},
    )


def cases() -> list[Case]:
    """Every case of this file."""
    made = []
    sizes = (
        ("tiny", (5, 3, 8), 6),
        ("awkward", (1, 2, 33), 1),
        ("four", (7, 4, 24), 5),
        ("four_wide", (3, 4, 128), 5),
        ("decode_8", (8, 4, 2560), 320),
    )
    for name, shape, rank in sizes:
        marks: dict[str, Any] = {"length": shape[1] * shape[2], "bench": name == "decode_8"}
        made.append(Case("hyper_mix", name, _mix(*shape, rank, writes=True), **marks))
        made.append(Case("hyper_mix", f"{name}_reads", _mix(*shape, rank, writes=False), **marks))
        made.append(Case("hyper_inject", name, _inject(*shape), bench=marks["bench"]))
    return made
