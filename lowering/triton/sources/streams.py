"""Several residual streams, or sums of sublayers' outputs, mixed into what a sublayer reads."""

import triton
import triton.language as tl


@triton.jit
def attention_residual(
    bank, prefix, norm, proj, out, tokens, eps, SNAPSHOTS: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr
):
    """`attention_residual`: bank [tokens SNAPSHOTS HIDDEN], prefix and out [tokens HIDDEN], in a tile >= HIDDEN.

    The softmax goes along: each row is read once, and what was summed is rescaled where a larger score comes.
    """
    channel = tl.arange(0, TILE)
    live = channel < HIDDEN
    query = tl.load(norm + channel, mask=live, other=0.0).to(tl.float32)
    query *= tl.load(proj + channel, mask=live, other=0.0).to(tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        place = tl.full((), 0, tl.int64) + token  # in 64 bits
        total = tl.load(prefix + place * HIDDEN + channel, mask=live, other=0.0).to(tl.float32)
        most = score(total, query, eps, HIDDEN)
        weight = 1.0
        for snapshot in range(SNAPSHOTS):
            cells = (place * SNAPSHOTS + snapshot) * HIDDEN + channel
            row = tl.load(bank + cells, mask=live, other=0.0).to(tl.float32)
            found = score(row, query, eps, HIDDEN)
            new = tl.maximum(most, found)
            old, more = tl.exp(most - new), tl.exp(found - new)
            total = total * old + row * more
            weight = weight * old + more
            most = new
        tl.store(out + place * HIDDEN + channel, (total / weight).to(out.dtype.element_ty), mask=live)


@triton.jit
def score(row, query, eps, HIDDEN: tl.constexpr):
    """The query times the root-mean-square norm of a row."""
    return tl.sum(row * query, 0) * tl.rsqrt(tl.sum(row * row, 0) / HIDDEN + eps)


@triton.jit
def narrowed(
    low, gates, weights, tokens, STREAMS: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr
):
    """What `hyper_mix` makes of its first product low [tokens OUTPUTS], OUTPUTS = RANK or RANK + STREAMS.

    The gates' own rank [tokens RANK] through silu, and the weights [tokens STREAMS] of the streams, if there are any.
    """
    channel = tl.arange(0, TILE)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        place = tl.full((), 0, tl.int64) + token  # in 64 bits
        first = place * OUTPUTS
        mean = tl.load(low + first + channel, mask=channel < RANK, other=0.0).to(tl.float32) / STREAMS
        opened = (mean * tl.sigmoid(mean)).to(gates.dtype.element_ty)
        tl.store(gates + place * RANK + channel, opened, mask=channel < RANK)
        if OUTPUTS > RANK:
            for stream in tl.static_range(STREAMS):
                back = tl.load(low + first + RANK + stream).to(tl.float32) / STREAMS
                tl.store(weights + place * STREAMS + stream, 2.0 * tl.sigmoid(back))


@triton.jit
def mixed(x, norm, rstd, gates, out, tokens, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """The mean over streams that `hyper_mix` gives: x and gates [tokens STREAMS HIDDEN], out [tokens HIDDEN].

    Gates come without their sigmoid. Streams are normed without a rounding, by rstd [tokens STREAMS] and norm [STREAMS
    HIDDEN].
    """
    tiles = tl.cdiv(HIDDEN, TILE)
    for job in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = (job // tiles).to(tl.int64)
        channel = job % tiles * TILE + tl.arange(0, TILE)
        live = channel < HIDDEN
        total = tl.zeros((TILE,), tl.float32)
        for stream in tl.static_range(STREAMS):
            cells = (token * STREAMS + stream) * HIDDEN + channel
            unit = tl.load(x + cells, mask=live, other=0.0).to(tl.float32) * tl.load(rstd + token * STREAMS + stream)
            unit *= 1.0 + tl.load(norm + stream * HIDDEN + channel, mask=live, other=0.0).to(tl.float32)
            total += unit * tl.sigmoid(tl.load(gates + cells, mask=live, other=0.0).to(tl.float32))
        tl.store(out + token * HIDDEN + channel, (total / STREAMS).to(out.dtype.element_ty), mask=live)


@triton.jit
def injected(x, y, weights, out, tokens, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr):
    """`hyper_inject`: x and out [tokens STREAMS HIDDEN], y [tokens HIDDEN], weights [tokens STREAMS]."""
    tiles = tl.cdiv(HIDDEN, TILE)
    for job in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = (job // tiles).to(tl.int64)
        channel = job % tiles * TILE + tl.arange(0, TILE)
        live = channel < HIDDEN
        made = tl.load(y + token * HIDDEN + channel, mask=live, other=0.0).to(tl.float32)
        for stream in tl.static_range(STREAMS):
            cells = (token * STREAMS + stream) * HIDDEN + channel
            old = tl.load(x + cells, mask=live, other=0.0).to(tl.float32)
            weight = tl.load(weights + token * STREAMS + stream).to(tl.float32)
            tl.store(out + cells, (old + weight * made).to(out.dtype.element_ty), mask=live)
