"""Rotary embedding of heads, halves against halves."""

import triton
import triton.language as tl


@triton.jit
def rotary(
    x,
    cos,
    sin,
    out,
    tokens,
    heads,
    x_stride,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
):
    """`rotary` of one tensor: x [tokens heads DIM] with a stride of its own, out without, cos and sin [tokens HALF].

    TILE heads of a token at a time. Products and sums are rounded to x's dtype one by one, as the op's are. BLOCK >=
    HALF; REST >= DIM - 2 HALF.
    """
    tiles = tl.cdiv(heads, TILE)
    channel = tl.arange(0, BLOCK)
    for job in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = (job // tiles).to(tl.int64)
        head = job % tiles * TILE + tl.arange(0, TILE)
        live = (head < heads)[:, None] & (channel < HALF)[None, :]
        low_cells = token * x_stride + head[:, None] * DIM + channel[None, :]
        turn = tl.load(cos + token * HALF + channel, mask=channel < HALF, other=0.0)
        turn = turn.to(x.dtype.element_ty).to(tl.float32)[None, :]
        slant = tl.load(sin + token * HALF + channel, mask=channel < HALF, other=0.0)
        slant = slant.to(x.dtype.element_ty).to(tl.float32)[None, :]
        low = tl.load(x + low_cells, mask=live, other=0.0).to(tl.float32)
        high = tl.load(x + low_cells + HALF, mask=live, other=0.0).to(tl.float32)
        made = (token * heads + head[:, None]) * DIM + channel[None, :]
        less = rounded(low * turn, x.dtype.element_ty) - rounded(high * slant, x.dtype.element_ty)
        more = rounded(high * turn, x.dtype.element_ty) + rounded(low * slant, x.dtype.element_ty)
        tl.store(out + made, less.to(out.dtype.element_ty), mask=live)
        tl.store(out + made + HALF, more.to(out.dtype.element_ty), mask=live)
        if DIM > 2 * HALF:
            past = tl.arange(0, REST)
            kept = (head < heads)[:, None] & (past < DIM - 2 * HALF)[None, :]
            from_cells = token * x_stride + head[:, None] * DIM + past[None, :] + 2 * HALF
            passed = tl.load(x + from_cells, mask=kept, other=0.0)
            tl.store(out + (token * heads + head[:, None]) * DIM + past[None, :] + 2 * HALF, passed, mask=kept)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """As a tensor of this dtype holds it, in float32."""
    return x.to(dtype).to(tl.float32)
