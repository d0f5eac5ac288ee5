"""Cases of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import Arguments, Case, Draw


def _norm(*shape: int, **kwargs: Any) -> Callable[[Draw], Arguments]:
    return lambda draw: ((draw.normal(*shape), draw.normal(shape[-1])), {"eps": 1e-6, **kwargs})


def _add_norm(*shape: int) -> Callable[[Draw], Arguments]:
    return lambda draw: ((draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1])), {"eps": 1e-6})


def _gated_norm(activation: str, *shape: int) -> Callable[[Draw], Arguments]:
    kwargs = {"eps": 1e-6, "activation": activation}
    return lambda draw: ((draw.normal(*shape), draw.normal(*shape), draw.normal(shape[-1])), kwargs)


def cases() -> list[Case]:
    """Every case of this file."""
    shapes = {"hidden": (5, 1024), "heads": (3, 2, 256), "awkward": (7, 1, 129), "empty": (0, 64)}
    bench = {"prompt_512": (512, 1024), "decode_8": (8, 1024)}
    made = []
    for name, shape in (shapes | bench).items():
        marks: dict[str, Any] = {"length": shape[-1], "bench": name in bench}
        for op in ("rms_norm", "rms_norm_rstd", "gemma_rms_norm", "gemma_rms_norm_rstd"):
            made.append(Case(op, name, _norm(*shape), **marks))
        for op in ("add_rms_norm", "add_gemma_rms_norm"):
            made.append(Case(op, name, _add_norm(*shape), **marks))
    for name, shape in {"heads": (5, 16, 128), "awkward": (3, 6, 12), "prompt_512": (512, 16, 128)}.items():
        marks = {"length": shape[-1], "bench": name == "prompt_512"}
        for op in ("gated_rms_norm", "gated_rms_norm_fp32"):
            for activation in ("silu", "sigmoid"):
                made.append(Case(op, f"{name}_{activation}", _gated_norm(activation, *shape), **marks))

    def wide_weight(draw: Draw) -> Arguments:
        args = draw.normal(5, 6, 32), draw.normal(5, 6, 32), draw.normal(32, dtype=torch.float32)
        return args, {"eps": 1e-5, "activation": "sigmoid"}

    made.append(Case("gated_rms_norm_fp32", "wide_weight", wide_weight, 32))
    for op in ("rms_norm", "gemma_rms_norm"):
        made.append(Case(op, "large_eps", _norm(5, 12, eps=0.5), 12))
    made.append(Case("add_rms_norm", "large_eps", lambda draw: (_add_norm(5, 12)(draw)[0], {"eps": 0.5}), 12))
    made.append(Case("grouped_gemma_rms_norm", "streams", _norm(5, 4 * 256, groups=4), 256))
    made.append(Case("grouped_gemma_rms_norm", "awkward", _norm(3, 3 * 7, groups=3), 7))
    return made
