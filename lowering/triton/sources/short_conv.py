"""The short convolution, and standing after some of a row's tokens."""

import triton
import triton.language as tl


@triton.jit
def short_conv(
    x,
    taps,
    window,
    query_start,
    out,
    after,
    rows,
    channels,
    slot,
    spans,
    x_stride,
    WIDTH: tl.constexpr,
    DILATION: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
):
    """`short_conv` token by token, TILE channels at a time; taps [WIDTH channels], so that each is read as it lies.

    A row's tokens are `spans` jobs of SPAN each, of which the first makes the row's window too.
    x [tokens channels] with a stride of its own, out likewise without, window [slots past channels], past = (WIDTH - 1)
    * DILATION. `after` [slots slot channels] gets the window after each row's last token, or with STEPS the old one
    followed by the row's new tokens (a trail). What lies past a row's tokens there, padding tokens and the scratch slot
    are not written.
    """
    past: tl.constexpr = (WIDTH - 1) * DILATION
    stride, new_stride = channels.to(tl.int64), x_stride.to(tl.int64)
    tiles = tl.cdiv(channels, TILE)
    for job in range(tl.program_id(0), rows * spans * tiles, tl.num_programs(0)):
        row = (job // (spans * tiles)).to(tl.int64)
        begin = job // tiles % spans * SPAN
        channel = job % tiles * TILE + tl.arange(0, TILE)
        live = channel < channels
        before = window + row * past * stride + channel
        made = after + row * slot * stride + channel
        first = tl.load(query_start + row)
        last = tl.load(query_start + row + 1)
        new = x + first * new_stride + channel
        for token in range(begin, tl.minimum(begin + SPAN, last - first)):
            total = tl.zeros((TILE,), tl.float32)
            for tap in tl.static_range(WIDTH):
                seen = seen_at(new, before, token + (tap + 1 - WIDTH) * DILATION, past, new_stride, stride, live)
                total += seen.to(tl.float32) * tl.load(taps + tap * stride + channel, mask=live, other=0.0).to(
                    tl.float32
                )
            total = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
            tl.store(out + (first + token) * stride + channel, total, mask=live)
            if STEPS:
                read = tl.load(new + token * new_stride, mask=live, other=0.0)
                tl.store(made + (past + token) * stride, read.to(after.dtype.element_ty), mask=live)
        if begin == 0:
            keep_window(new, before, made, last - first, past, new_stride, stride, live, STEPS)


@triton.jit
def keep_window(new, before, made, count, past: tl.constexpr, new_stride, stride, live, STEPS: tl.constexpr):
    """The window after a row's `count` tokens, or with STEPS the one before them."""
    for place in tl.static_range(past):
        if STEPS:
            kept = tl.load(before + place * stride, mask=live, other=0.0).to(new.dtype.element_ty)
        else:
            kept = seen_at(new, before, count + (place - past), past, new_stride, stride, live)
        tl.store(made + place * stride, kept.to(made.dtype.element_ty), mask=live)


@triton.jit
def seen_at(new, before, place, past, new_stride, stride, live):
    """What a row reads at a place counted from its first new token, in x's dtype: the window where it is negative."""
    if place >= 0:
        seen = tl.load(new + place * new_stride, mask=live, other=0.0)
    else:
        seen = tl.load(before + (past + place) * stride, mask=live, other=0.0).to(new.dtype.element_ty)
    return seen


@triton.jit
def commit(inputs, accepted, out, rows, past, slot, channels, TILE: tl.constexpr):
    """`WindowTrail.at`: out [slots past channels] is what inputs [slots slot channels] held after those accepted."""
    tiles = tl.cdiv(past * channels, TILE)
    for job in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (job // tiles).to(tl.int64)
        cell = job % tiles * TILE + tl.arange(0, TILE)
        taken = tl.load(accepted + row)
        found = tl.load(inputs + (row * slot + taken) * channels + cell, mask=cell < past * channels)
        tl.store(out + row * past * channels + cell, found, mask=cell < past * channels)
