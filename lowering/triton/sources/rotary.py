"""Rotary embedding of heads, halves against halves or neighbours against each other, and its angles."""

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
            pass_on(x + token * x_stride, out + token * heads * DIM, head, heads, 2 * HALF, DIM, REST)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """As a tensor of this dtype holds it, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def pass_on(x, out, head, heads, FIRST: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr):
    """Channels from FIRST on of heads [heads DIM], bit for bit. REST >= DIM - FIRST."""
    past = tl.arange(0, REST)
    kept = (head < heads)[:, None] & (past < DIM - FIRST)[None, :]
    cells = head[:, None] * DIM + past[None, :] + FIRST
    tl.store(out + cells, tl.load(x + cells, mask=kept, other=0.0), mask=kept)


@triton.jit
def rotary_interleaved(
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
    """`rotary_interleaved`, in the sizes of `rotary`: pairs of neighbours, in float32, rounded once and sorted."""
    tiles = tl.cdiv(heads, TILE)
    channel, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    for job in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = (job // tiles).to(tl.int64)
        head = job % tiles * TILE + tl.arange(0, TILE)
        turn = tl.load(cos + token * HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        slant = tl.load(sin + token * HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        start = (token * heads + head[:, None]) * DIM
        pairs = (head < heads)[:, None] & (both < 2 * HALF)[None, :]
        given = tl.load(x + token * x_stride + head[:, None] * DIM + both[None, :], mask=pairs, other=0.0)
        # Taken apart in their own dtype: what is taken apart in float32 ends the compiler for 950.
        even, odd = tl.split(tl.reshape(given, (TILE, BLOCK, 2)))
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        live = (head < heads)[:, None] & (channel < HALF)[None, :]
        tl.store(out + start + channel[None, :], (even * turn - odd * slant).to(out.dtype.element_ty), mask=live)
        high = start + channel[None, :] + HALF
        tl.store(out + high, (odd * turn + even * slant).to(out.dtype.element_ty), mask=live)
        if DIM > 2 * HALF:
            pass_on(x + token * x_stride, out + token * heads * DIM, head, heads, 2 * HALF, DIM, REST)


@triton.jit
def angles(
    positions,
    rates,
    cos,
    sin,
    tokens,
    multiplier,
    AXES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cosines and sines [tokens HALF], times the multiplier, of the sum over AXES of a place times its rate.

    positions [AXES tokens] of integers, rates [AXES HALF] in float32: a frequency that turns with one axis is 0 in the
    others.
    """
    channel = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * TILE, tokens, tl.num_programs(0) * TILE):
        token = start + tl.arange(0, TILE)
        angle = tl.zeros((TILE, BLOCK), tl.float32)
        for axis in tl.static_range(AXES):
            place = tl.load(positions + axis * tokens + token, mask=token < tokens, other=0).to(tl.float32)
            rate = tl.load(rates + axis * HALF + channel, mask=channel < HALF, other=0.0)
            angle += place[:, None] * rate[None, :]
        live = (token < tokens)[:, None] & (channel < HALF)[None, :]
        cells = token.to(tl.int64)[:, None] * HALF + channel[None, :]
        tl.store(cos + cells, tl.cos(angle) * multiplier, mask=live)
        tl.store(sin + cells, tl.sin(angle) * multiplier, mask=live)
