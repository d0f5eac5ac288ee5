"""Cases of rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .attention import without_keys
from .case import Arguments, Case, Draw


def cases() -> list[Case]:
    """Every case of this file."""

    def turn(tokens: int, heads: int, kv_heads: int, head_dim: int, half: int) -> Callable[[Draw], Arguments]:
        def make(draw: Draw) -> Arguments:
            angles = draw.uniform(-3.0, 3.0, tokens, half)
            return (
                draw.normal(tokens, heads, head_dim),
                draw.normal(tokens, kv_heads, head_dim),
                angles.cos(),
                angles.sin(),
            ), {}

        return make

    text: dict[str, Any] = {"rotary_dim": 64, "theta": 1e7}
    shapes = {"partial": (5, 8, 2, 256, 32), "full": (3, 4, 4, 16, 8), "awkward": (7, 3, 1, 13, 3)}
    made = [Case("rotary", name, turn(*shape)) for name, shape in shapes.items()]
    for name, shape in (shapes | {"latent": (5, 16, 1, 64, 32), "awkward_whole": (5, 3, 1, 6, 3)}).items():
        made.append(Case("rotary_interleaved", name, without_keys(turn(*shape))))
    made.append(Case("rotary", "prompt_512", turn(512, 8, 2, 256, 32), bench=True))
    made.append(Case("rotary_angles", "text", lambda draw: ((draw.ids(3000, 9).int(),), text)))
    made.append(Case("rotary_angles", "scaled", lambda draw: ((draw.ids(3000, 9).int(),), text | {"factor": 8.0})))
    stretch: dict[str, Any] = {"theta": 1e4, "factor": 40.0, "ramp": (10.0, 23.0), "multiplier": 1.26}
    made.append(Case("yarn_angles", "lite", lambda draw: ((draw.ids(3000, 9).int(),), stretch | {"rotary_dim": 64})))
    narrow = stretch | {"rotary_dim": 6, "ramp": (0.5, 0.501), "multiplier": 1.0}
    made.append(Case("yarn_angles", "narrow", lambda draw: ((draw.ids(300, 5).int(),), narrow)))
    sections = {"sections": (11, 11, 10)}
    made.append(Case("mrope_angles", "image", lambda draw: ((draw.ids(3000, 3, 9).int(),), text | sections)))
    return made
