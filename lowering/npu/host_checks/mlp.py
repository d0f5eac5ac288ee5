"""Gated activations."""

from __future__ import annotations

from .check import ONN, HostCheck, enter
from .norm import FLOATS

GEGLU = f"{ONN} v8.5.0 activation/ge_glu_v2/op_host/op_api/aclnn_geglu.cpp"

enter(
    "npu_swiglu",
    HostCheck(
        "float16, bfloat16 or float32 of an even size along the axis",
        lambda c: c.input.dtype in FLOATS and c.input.shape[c.dim] % 2 == 0,
        f"{ONN} v8.5.0 activation/swi_glu/op_host/swi_glu_tiling.cpp",
    ),
)

enter(
    "npu_geglu",
    HostCheck(
        "an even size along the axis, and no empty tensor",
        lambda c: c.input.dtype in FLOATS and c.input.shape[c.dim] % 2 == 0 and c.input.numel() > 0,
        f"{GEGLU} CheckShape",
    ),
    HostCheck("approximate 0 or 1", lambda c: c.approximate in (0, 1), f"{GEGLU} CheckParams"),
)
