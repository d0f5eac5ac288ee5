"""Cases of projections, lookups, greedy heads and gated activations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .case import Arguments, Case, Draw


def cases() -> list[Case]:
    """Every case of this file."""

    def linear(lead: tuple[int, ...], inputs: int, outputs: int) -> Callable[[Draw], Arguments]:
        return lambda draw: ((draw.normal(*lead, inputs), draw.normal(outputs, inputs)), {})

    def corrected(rows: int, vocab: int, rank: int, outputs: int) -> Callable[[Draw], Arguments]:
        shapes = (rows, vocab), (rows, rank), (outputs, rank), (vocab, 24)
        return lambda draw: (tuple(draw.normal(*shape) for shape in shapes), {})

    def among(make: Callable[[Draw], Arguments], *only: int) -> Callable[[Draw], Arguments]:
        return lambda draw: ((*make(draw)[0], torch.tensor(only)), {})

    shapes = {
        "decode": ((3,), 1024, 640),
        "one": ((1,), 256, 32),
        "narrow": ((5,), 96, 1),
        "awkward": ((7, 2), 33, 19),
        "empty": ((0,), 64, 32),
        "prompt_512": ((512,), 1024, 7168),
        "decode_8": ((8,), 1024, 7168),
        "decode_1": ((1,), 1024, 7168),
    }
    made = [
        Case("linear", name, linear(*shape), length=shape[1], bench=name.startswith(("prompt", "decode_")))
        for name, shape in shapes.items()
    ]
    made.append(Case("embedding", "ids", lambda draw: ((draw.ids(97, 5), draw.normal(97, 24)), {})))
    made += [
        Case("greedy_token", "decode", linear((3,), 1024, 640), 1024),
        Case("greedy_token", "of_a_draft", among(linear((7, 2), 33, 19), 18, 2, 7, 5), 33),
        Case("greedy_markov_token", "block", corrected(5, 97, 14, 103), 14),
        Case("greedy_markov_token", "of_a_draft", among(corrected(2, 19, 6, 4), 18, 2, 7, 5), 6),
    ]
    for name, shape, bench in (
        ("mlp", (5, 512), False),
        ("lead", (2, 3, 14), False),
        ("prompt_512", (512, 7168), True),
    ):
        for op in ("swiglu", "geglu"):
            made.append(Case(op, name, lambda draw, shape=shape: ((draw.normal(*shape),), {}), bench=bench))
    for name, shape, caps in (("caps", (5, 512), (4.0, 25.0)), ("gate_cap", (2, 3, 14), (0.5, None))):
        kwargs = {"caps": caps}
        made.append(Case("swiglu", name, lambda draw, shape=shape, kw=kwargs: ((8 * draw.normal(*shape),), kw)))
    return made
