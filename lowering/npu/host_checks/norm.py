"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from .check import ONN, HostCheck, enter

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
RMS = f"{ONN} v8.5.0 norm/rms_norm/op_host"
GEMMA = f"{ONN} v8.5.0 norm/gemma_rms_norm/op_host"
ADD = f"{ONN} v8.5.0 norm/add_rms_norm/op_host"


def _covers(gamma: Tensor, x: Tensor) -> bool:
    """Whether gamma has the trailing axes of x."""
    return 0 < gamma.ndim <= x.ndim and x.shape[x.ndim - gamma.ndim :] == gamma.shape


enter(
    "npu_rms_norm",
    HostCheck(
        "x of 1 to 8 axes, of which gamma has the last ones, neither empty",
        lambda c: 1 <= c.input.ndim <= 8 and _covers(c.gamma, c.input) and c.input.numel() > 0,
        f"{RMS}/rms_norm_tiling.cpp CheckInputShape4RmsNorm",
    ),
    HostCheck(
        "float16, bfloat16 or float32 and a gamma of the same, or a float32 one",
        lambda c: c.input.dtype in FLOATS and c.gamma.dtype in (c.input.dtype, torch.float32),
        f"{RMS}/rms_norm_def.cpp",
    ),
)

enter(
    "npu_gemma_rms_norm",
    HostCheck(
        "one dtype, float16, bfloat16 or float32",
        lambda c: c.input.dtype in FLOATS and c.gamma.dtype == c.input.dtype,
        f"{GEMMA}/gemma_rms_norm_def.cpp",
    ),
    HostCheck(
        "a gamma of x's last axes, neither empty",
        lambda c: _covers(c.gamma, c.input) and c.input.numel() > 0,
        f"{ONN} e5c3fa93 norm/gemma_rms_norm/op_host",
    ),
)

enter(
    "npu_add_rms_norm",
    HostCheck(
        "one dtype, float16, bfloat16 or float32",
        lambda c: c.x1.dtype in FLOATS and {c.x2.dtype, c.gamma.dtype} == {c.x1.dtype},
        f"{ADD}/add_rms_norm_def.cpp",
    ),
    HostCheck(
        "x1 and x2 of one shape of 1 to 8 axes, of which gamma has the last ones",
        lambda c: c.x1.shape == c.x2.shape and 1 <= c.x1.ndim <= 8 and _covers(c.gamma, c.x1),
        f"{ADD}/add_rms_norm_tiling.cpp CheckInputOutputShape",
    ),
)
