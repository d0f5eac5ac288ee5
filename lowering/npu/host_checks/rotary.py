"""Rotary embeddings."""

from __future__ import annotations

from .check import ASCEND_910, ASCEND_950, OP, OT, HostCheck, enter

ROPE = "posembedding/rotary_position_embedding/op_host"
APPLY = "posembedding/apply_rotary_pos_emb/op_host"

enter(
    "npu_rotary_mul",
    HostCheck(
        "cosines and sines of one shape, as wide as x",
        lambda c: c.r1.shape == c.r2.shape and c.r1.shape[-1] == c.input.shape[-1],
        f"{OT} v8.5.0 {ROPE}/rope_rotate_half_tiling.cpp CheckShapeSupport",
    ),
    HostCheck(
        "an even width of up to 896",
        lambda c: c.input.shape[-1] % 2 == 0 and c.input.shape[-1] <= 896,
        f"{OT} v8.5.0 {ROPE}/rope_rotate_half_tiling.cpp CheckShapeSupport",
        targets=ASCEND_910,
    ),
    HostCheck(
        "x of 3 or 4 axes",
        lambda c: c.input.ndim in (3, 4),
        f"{OT} v8.5.0 {ROPE}/rope_rotate_half_tiling.cpp CheckShapeSupport",
        targets=ASCEND_910,
    ),
    HostCheck(
        "an even width of up to 1024",
        lambda c: c.input.shape[-1] % 2 == 0 and c.input.shape[-1] <= 1024,
        f"{OT} v9.0.0 {ROPE}/rope_regbase_tiling_base.cpp CheckRotaryModeShapeRelation",
        targets=ASCEND_950,
    ),
    HostCheck(
        "no matrix to rotate by",
        lambda c: c.rotate is None,
        f"{OP} RotaryMulKernelNpuOpApi.cpp",
        targets=ASCEND_950,
    ),
)

enter(
    "npu_interleave_rope",
    HostCheck(
        "x of [batch, heads, steps, 64]",
        lambda c: c.x.ndim == 4 and c.x.shape[-1] == 64,
        f"{OT} v8.5.0 posembedding/interleave_rope/op_host/interleave_rope_tiling.cpp",
    ),
    HostCheck(
        "cosines and sines of [batch, 1, steps or 1, 64]",
        lambda c: (
            c.cos.shape == c.sin.shape
            and tuple(c.cos.shape) in ((c.x.shape[0], 1, steps, 64) for steps in (c.x.shape[2], 1))
        ),
        f"{OT} v8.5.0 posembedding/interleave_rope/op_host/interleave_rope_tiling.cpp",
    ),
)

enter(
    "npu_apply_rotary_pos_emb",
    HostCheck(
        "layout BSND or TND, heads and cosines of 64 or 128, the heads not the narrower ones",
        lambda c: (
            c.layout in ("BSND", "TND")
            and {c.query.shape[-1], c.cos.shape[-1]} <= {64, 128}
            and c.query.shape[-1] >= c.cos.shape[-1]
        ),
        f"{OT} v8.5.0 {APPLY}/apply_rotary_pos_emb_tiling.cpp CheckParams",
        targets=ASCEND_910,
    ),
    HostCheck(
        "one dtype, cosines of one head, no empty tensor",
        lambda c: (
            len({c.query.dtype, c.key.dtype, c.cos.dtype, c.sin.dtype}) == 1
            and c.cos.shape[c.layout.find("N")] == 1
            and min(c.query.numel(), c.key.numel()) > 0
        ),
        f"{OT} v8.5.0 {APPLY}/apply_rotary_pos_emb_tiling.cpp CheckParams",
        targets=ASCEND_910,
    ),
    HostCheck(
        "heads of up to 1024 channels, of which the first are turned",
        lambda c: c.cos.shape[-1] <= c.query.shape[-1] <= 1024,
        f"{OT} v8.5.0 {APPLY}/apply_rotary_pos_emb_tiling_base_arch35.cpp CheckShapeRelation",
        targets=ASCEND_950,
    ),
)
