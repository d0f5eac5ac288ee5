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
    groups,
    x_stride,
    gate_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SILU: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """`gated_rms_norm` with ROUNDED, which rounds before the gate, else `gated_rms_norm_fp32`; gate by SILU or sigmoid.

    x, gate and out [rows groups DIM], the first two with strides of their own from row to row. TILE rows of one group
    at a time in a tile of BLOCK >= DIM channels.
    """
    channel = tl.arange(0, BLOCK)
    scale = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    tiles = tl.cdiv(rows, TILE)
    for job in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group, start = (job // tiles).to(tl.int64), job % tiles * TILE
        row = start + tl.arange(0, TILE)
        live = (row < rows)[:, None] & (channel < DIM)[None, :]
        wide_row, inside = row.to(tl.int64)[:, None], group * DIM + channel[None, :]
        wide = tl.load(x + wide_row * x_stride + inside, mask=live, other=0.0).to(tl.float32)
        unit = wide * tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        if ROUNDED:
            scaled = scale[None, :] * unit.to(x.dtype.element_ty).to(tl.float32)
            scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
        else:
            scaled = scale[None, :] * unit
        opened = tl.load(gate + wide_row * gate_stride + inside, mask=live, other=0.0).to(tl.float32)
        if SILU:
            scaled = scaled * (opened * tl.sigmoid(opened))
        else:
            scaled = scaled * tl.sigmoid(opened)
        tl.store(out + wide_row * groups * DIM + inside, scaled.to(out.dtype.element_ty), mask=live)


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    rstd,
    rows,
    groups,
    x_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GEMMA: tl.constexpr,
    APART: tl.constexpr,
    KEPT: tl.constexpr,
):
    """`rms_norm`, with GEMMA `gemma_rms_norm`; with KEPT also the reciprocal deviations, rstd [rows groups].

    x [rows groups DIM] has a stride of its own from row to row, out none. The weight is [DIM], with APART [groups DIM].
    A mean of squares a group, TILE rows of one group at a time.
    """
    channel = tl.arange(0, BLOCK)
    tiles = tl.cdiv(rows, TILE)
    for job in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group, start = (job // tiles).to(tl.int64), job % tiles * TILE
        row = start + tl.arange(0, TILE)
        live = (row < rows)[:, None] & (channel < DIM)[None, :]
        wide_row, inside = row.to(tl.int64)[:, None], group * DIM + channel[None, :]
        if APART:
            scale = tl.load(weight + group * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        else:
            scale = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        wide = tl.load(x + wide_row * x_stride + inside, mask=live, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
        scaled = weighed(wide * root[:, None], scale, x.dtype.element_ty, GEMMA)
        tl.store(out + wide_row * groups * DIM + inside, scaled.to(out.dtype.element_ty), mask=live)
        if KEPT:
            tl.store(rstd + row.to(tl.int64) * groups + group, root, mask=row < rows)


@triton.jit
def add_rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """`add_rms_norm`, with GEMMA `add_gemma_rms_norm`: of the rounded sum x + residual, all [rows DIM]."""
    channel = tl.arange(0, BLOCK)
    scale = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE)
        live = (row < rows)[:, None] & (channel < DIM)[None, :]
        cells = row.to(tl.int64)[:, None] * DIM + channel[None, :]
        wide = tl.load(x + cells, mask=live, other=0.0).to(tl.float32)
        wide += tl.load(residual + cells, mask=live, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + cells, rounded, mask=live)
        wide = rounded.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
        scaled = weighed(wide * root[:, None], scale, total.dtype.element_ty, GEMMA)
        tl.store(out + cells, scaled.to(out.dtype.element_ty), mask=live)


@triton.jit
def weighed(unit, scale, rounded: tl.constexpr, GEMMA: tl.constexpr):
    """Rows of unit root mean square times their weight, rounded before it; with GEMMA times one plus it, unrounded."""
    if GEMMA:
        scaled = unit * (1.0 + scale)[None, :]
    else:
        scaled = unit.to(rounded).to(tl.float32) * scale[None, :]
    return scaled


@triton.jit
def l2_norm(x, out, rows, groups, x_stride, scale, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`l2_norm`: x [rows groups DIM] with a stride of its own from row to row, out without; tiles as in `rms_norm`."""
    channel = tl.arange(0, BLOCK)
    tiles = tl.cdiv(rows, TILE)
    for job in range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
        group, start = (job // tiles).to(tl.int64), job % tiles * TILE
        row = start + tl.arange(0, TILE)
        live = (row < rows)[:, None] & (channel < DIM)[None, :]
        wide_row, inside = row.to(tl.int64)[:, None], group * DIM + channel[None, :]
        wide = tl.load(x + wide_row * x_stride + inside, mask=live, other=0.0).to(tl.float32)
        scaled = wide * (scale * tl.rsqrt(tl.sum(wide * wide, 1) + eps))[:, None]
        tl.store(out + wide_row * groups * DIM + inside, scaled.to(out.dtype.element_ty), mask=live)
