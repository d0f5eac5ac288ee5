"""Root-mean-square norms with a gate."""

import triton
import triton.language as tl


@triton.jit
def gated_rms_norm(
    x,
    gate,
    weight,
    out,
    rows,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SILU: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """`gated_rms_norm` with ROUNDED, which rounds before the gate, else `gated_rms_norm_fp32`; gate by SILU or sigmoid.

    x, gate and out [rows DIM], TILE rows at a time in a tile of BLOCK >= DIM channels.
    """
    channel = tl.arange(0, BLOCK)
    scale = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE)
        live = (row < rows)[:, None] & (channel < DIM)[None, :]
        cells = row.to(tl.int64)[:, None] * DIM + channel[None, :]
        wide = tl.load(x + cells, mask=live, other=0.0).to(tl.float32)
        unit = wide * tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        if ROUNDED:
            scaled = scale[None, :] * unit.to(x.dtype.element_ty).to(tl.float32)
            scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
        else:
            scaled = scale[None, :] * unit
        opened = tl.load(gate + cells, mask=live, other=0.0).to(tl.float32)
        if SILU:
            scaled = scaled * (opened * tl.sigmoid(opened))
        else:
            scaled = scaled * tl.sigmoid(opened)
        tl.store(out + cells, scaled.to(out.dtype.element_ty), mask=live)
