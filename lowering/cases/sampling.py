"""Cases of filters and draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .case import Arguments, Case, Draw


def cases() -> list[Case]:
    """Every case of this file."""

    # Spread enough that no cut lies within rounding of a token's edge.
    def filters(vocab: int, k: Sequence[int] | None, p: Sequence[float] | None) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            rows = len(k or p or ())
            both = zip(k or [0] * rows, p or [1.0] * rows, strict=True)
            hints = {"largest_k": max(k or [0]), "p_alone": any(top == 0 and share < 1 for top, share in both)}
            ks, ps = None if k is None else torch.tensor(k), None if p is None else torch.tensor(p)
            return (6 * draw.normal(rows, vocab), ks, ps), hints

        return make

    def draws(make: Callable[[Draw], Arguments], *, min_p: bool) -> Callable[[Draw], Arguments]:
        def extended(draw: Draw) -> Arguments:
            (logits, k, p), hints = make(draw)
            rows = logits.shape[0]
            least = draw.uniform(0.0, 0.1, rows) if min_p else None
            return (logits, draw.ids(2**40, rows), draw.uniform(0.5, 2.0, rows), k, p, least), hints

        return extended

    settings: dict[str, Any] = {
        "k": ((1, 5, 0, 97), None),
        "p": (None, (0.9, 1.0, 0.01)),
        "k_and_p": ((9, 40, 3), (0.8, 0.99, 1.0)),
        "mixed": ((0, 7, 0, 30), (0.7, 0.5, 1.0, 1.0)),
        "mixed_p_after_k": ((0, 12), (1.0, 0.6)),
    }
    small = {name: filters(97, *given) for name, given in settings.items()} | {"one": filters(1, (1, 3), (0.5, 1.0))}
    wide = {"k_and_p": ((20,) * 8, (0.95,) * 8), "p": (None, (0.95,) * 8)}
    large = {f"vocab_248320_{name}": filters(248_320, *given) for name, given in wide.items()}
    return [
        Case(op, name, make if op == "keep_top" else draws(make, min_p=len(name) % 2 == 0), 97, bench=name in large)
        for op in ("keep_top", "draw")
        for name, make in (small | large).items()
    ]
