"""Cases of quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from params.quant.values import (
    SplitWeight,
)

from .case import Arguments, Case, Draw
from .moe import mixture
from .weights import QUANTIZED

_REQUANTIZED = 64
"""What lies between two quantised products is rounded to steps far above those of its dtype, so a last bit may come to
such a step: the bound is that of sums so many times longer."""


def cases() -> list[Case]:
    """Every case of this file."""

    def linear(scheme: str, lead: tuple[int, ...], inputs: int, outputs: int) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            x, weight = draw.normal(*lead, inputs), draw.normal(outputs, inputs).float()
            made = QUANTIZED[scheme](weight)
            if isinstance(made, SplitWeight):
                made = SplitWeight((made.parts[0], made.parts[1].to(draw.dtype)))
            return (x, made), {}

        return make

    made = []
    shapes = {
        "decode": ((3,), 1024, 640),
        "lead": ((7, 2), 96, 20),
        "narrow": ((5,), 160, 8),
        "empty": ((0,), 64, 32),
        "decode_8": ((8,), 1024, 7168),
        "prompt_512": ((512,), 1024, 7168),
    }
    for scheme in ("w8a8", "w8a8_dynamic", "w4a8_dynamic", "w8a8_mxfp8", "w4a16_mxfp4"):
        for name, shape in shapes.items():
            bench = name in ("decode_8", "prompt_512")
            if bench and scheme != "w8a8_dynamic":
                continue
            made.append(Case("linear", f"{scheme}_{name}", linear(scheme, *shape), shape[1], bench=bench))
        if scheme != "w8a8":
            for name, sizes in {
                "tiny": (6, 64, 8, 32, 2),
                "wide": (5, 128, 4, 64, 2),
                "awkward": (5, 48, 3, 24, 1),
                "empty": (0, 64, 5, 32, 2),
            }.items():
                made.append(Case("experts", f"{scheme}_{name}", mixture(*sizes, scheme), _REQUANTIZED * sizes[1]))
            capped = mixture(3, 64, 8, 64, 2, scheme, caps=(0.5, 0.25))
            made.append(Case("experts", f"{scheme}_caps", capped, _REQUANTIZED * 64))
    wide = mixture(512, 256, 16, 64, 2, "w8a8_dynamic")
    made.append(Case("experts", "w8a8_dynamic_prompt_512", wide, _REQUANTIZED * 256, bench=True))
    for scheme in ("w8a8_by_bits", "w8a8_dynamic_groups", "w4a8_dynamic_groups", "split"):
        made.append(Case("linear", scheme, linear(scheme, (4,), 128, 22), 128))
    for scheme in ("w8a8_mxfp8_slice", "w4a16_mxfp4_slice"):
        made.append(Case("linear", scheme, linear(scheme, (4,), 100, 22), 100))
    return [replace(case, quantized=True) for case in made]
