"""What latent attention calls beside fused attention: the merge of partial results, ATB's ring, products by head."""

from __future__ import annotations

from typing import Any

import torch

from .check import ASCEND_910, ONN, OP, OT, HostCheck, enter

UPDATE = "attention/attention_update/op_host/attention_update_tiling.cpp CheckInputParams"
RING = f"{OP} ops/atb/RingMlaAtb.cpp; ascend-transformer-boost 0377f405 ring_mla_operation.cpp ParamCheck"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

enter(
    "npu_attention_update",
    HostCheck(
        "1 to 16 parts, as many lse as outputs",
        lambda c: 1 <= len(c.lse) <= 16 and len(c.lse) == len(c.local_out),
        f"{OT} v8.5.0 {UPDATE}",
    ),
    HostCheck(
        "float32 lse of one axis",
        lambda c: all(lse.dtype == torch.float32 and lse.ndim == 1 for lse in c.lse),
        f"{OT} v8.5.0 {UPDATE}",
    ),
    HostCheck(
        "outputs of two axes, 8 to 512 channels in multiples of 8",
        lambda c: all(out.ndim == 2 and out.shape[1] % 8 == 0 and 8 <= out.shape[1] <= 512 for out in c.local_out),
        f"{OT} v8.5.0 {UPDATE}",
    ),
    HostCheck(
        "outputs of one dtype, float32, float16 or bfloat16",
        lambda c: len({out.dtype for out in c.local_out}) == 1 and c.local_out[0].dtype in FLOATS,
        f"{OT} v8.5.0 {UPDATE}",
    ),
    HostCheck(
        "an update_type of 0 or 1",
        lambda c: c.update_type in (0, 1),
        f"{OT} v8.5.0 {UPDATE}",
    ),
)

enter(
    "atb.npu_ring_mla",
    HostCheck(
        "query heads in multiples of key heads",
        lambda c: c.head_num % c.kv_head_num == 0,
        RING,
    ),
    HostCheck(
        "128 plain channels and 64 rope channels",
        lambda c: (c.q_nope.shape[-1], c.q_rope.shape[-1]) == (128, 64),
        RING,
    ),
    HostCheck(
        "a mask of two axes, or of three with the batch",
        lambda c: c.mask is None or c.mask.ndim in (2, 3),
        RING,
    ),
    HostCheck(
        "lengths on the host, [batch] or [2, batch]",
        lambda c: (
            c.seqlen.device.type in ("cpu", "meta")
            and (c.seqlen.ndim == 1 or (c.seqlen.ndim == 2 and c.seqlen.shape[0] == 2))
        ),
        RING,
    ),
    HostCheck(
        "an earlier output of [tokens, heads, channels] with its lse of [heads, tokens]",
        lambda c: (
            c.pre_out is None
            or (c.pre_out.shape == c.q_nope.shape and c.prev_lse.shape == (c.head_num, c.q_nope.shape[0]))
        ),
        RING,
    ),
)

IN_ORDER, TURNED, ACROSS = (0, 1, 2), (1, 0, 2), (0, 2, 1)
PRODUCT = f"{ONN} 25eefad6 matmul/transpose_batch_mat_mul/op_api/aclnn_transpose_batch_mat_mul.cpp"


def turned(c: Any) -> bool:
    """Whether the first two axes of x are in each other's place."""
    return tuple(c.perm_x1 or IN_ORDER) == TURNED


def counted(c: Any) -> tuple[int, int, int]:
    """Matrices, inner channels and outputs."""
    matrices, inner, outputs = (c.weight.shape[axis] for axis in c.perm_x2 or IN_ORDER)
    return matrices, inner, outputs


enter(
    "npu_transpose_batchmatmul",
    HostCheck(
        "factors of three axes",
        lambda c: c.input.ndim == c.weight.ndim == 3,
        f"{PRODUCT} CheckParams",
    ),
    HostCheck(
        "one dtype, float32, float16 or bfloat16",
        lambda c: c.weight.dtype == c.input.dtype and c.input.dtype in FLOATS,
        f"{PRODUCT} CheckDtypeValid",
    ),
    HostCheck(
        "perm_x1 of (0, 1, 2) or (1, 0, 2)",
        lambda c: tuple(c.perm_x1 or IN_ORDER) in (IN_ORDER, TURNED),
        f"{PRODUCT} CheckPermLimit",
    ),
    HostCheck(
        "perm_x2 of (0, 1, 2) or (0, 2, 1)",
        lambda c: tuple(c.perm_x2 or IN_ORDER) in (IN_ORDER, ACROSS),
        f"{PRODUCT} CheckPermLimit",
    ),
    HostCheck(
        "perm_y of (1, 0, 2)",
        lambda c: tuple(c.perm_y or TURNED) == TURNED,
        f"{PRODUCT} CheckPermLimit",
    ),
    HostCheck(
        "as many inner channels in both factors",
        lambda c: c.input.shape[-1] == counted(c)[1],
        f"{PRODUCT} CheckShapeValid",
    ),
    HostCheck(
        "fewer than 65536 matrices and outputs, and inner channels of an x that is not turned",
        lambda c: max(counted(c)[0], counted(c)[2], 0 if turned(c) else counted(c)[1]) < 65536,
        f"{PRODUCT} CheckShapeValid",
        targets=ASCEND_910,
    ),
    HostCheck(
        "a weight that is turned beside an x that is turned alone",
        lambda c: tuple(c.perm_x2 or IN_ORDER) != ACROSS or turned(c),
        f"{PRODUCT} CheckShapeValid",
        targets=ASCEND_910,
    ),
)
