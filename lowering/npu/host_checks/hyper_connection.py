"""Hyper-connections: streams that take an output back."""

from __future__ import annotations

import torch

from .check import ASCEND_910, OT, HostCheck, enter

ACLNN = "mhc/mhc_post/op_host/op_api/aclnn_mhc_post.cpp"
TILING = "mhc/mhc_post/op_host arch22 tiling, CheckSpecConstraints"

enter(
    "npu_mhc_post",
    HostCheck("h_res", lambda c: c.h_res is not None, f"{OT} v9.1.0-beta.1 to v9.1.0.pre {ACLNN}", until="master"),
    HostCheck(
        "h_res, which it needs here",
        lambda c: c.h_res is not None,
        f"{OT} 3a280bcc {ACLNN}",
        targets=ASCEND_910,
        since="master",
    ),
    HostCheck(
        "float16 or bfloat16 streams of three or four axes, and an output of their dtype",
        lambda c: c.x.dtype in (torch.float16, torch.bfloat16) and c.h_out.dtype == c.x.dtype and c.x.ndim in (3, 4),
        f"{OT} v9.1.0.pre {ACLNN}",
    ),
    HostCheck(
        "float32 weights and matrices, these of [streams, streams]",
        lambda c: (
            c.h_post.dtype == torch.float32
            and (
                c.h_res is None
                or (c.h_res.dtype == torch.float32 and c.h_res.shape == (*c.x.shape[:-1], c.x.shape[-2]))
            )
        ),
        f"{OT} v9.1.0.pre {ACLNN}",
    ),
    HostCheck(
        "4 streams, of widths in multiples of 128 below 100000",
        lambda c: c.x.shape[-2] == 4 and c.x.shape[-1] % 128 == 0 and 0 < c.x.shape[-1] < 100_000,
        f"{OT} v9.1.0.pre {TILING}",
        targets=ASCEND_910,
    ),
)
