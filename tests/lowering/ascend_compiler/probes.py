"""Kernels for the compiler alone: one that is as it should be, and one for every way to be otherwise."""

import triton
import triton.language as tl


@triton.jit
def good(x, y, n, TILE: tl.constexpr):
    for start in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) + 1.0, mask=i < n)


@triton.jit
def bound_on_the_left(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    read = tl.load(x + i, mask=n > i)  # a whole tile
    tl.store(y + i, read, mask=i < n)


@triton.jit
def shifted_after(x, y, n, TILE: tl.constexpr):
    i = (tl.program_id(0) * TILE + tl.arange(0, TILE)) - 3
    read = tl.load(x + i, mask=i >= 0, other=0.0)  # a whole tile
    tl.store(y + i + 3, read)


@triton.jit
def shifted_before(x, y, n, TILE: tl.constexpr):
    i = (tl.program_id(0) * TILE - 3) + tl.arange(0, TILE)
    read = tl.load(x + i, mask=i >= 0, other=0.0)
    tl.store(y + i + 3, read)


@triton.jit
def all_but_one(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    read = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, read, mask=(i < n) & (i != 5))  # written back


@triton.jit
def chosen(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    read = tl.load(x + i)
    tl.store(y + i, tl.where(i < n, read, 0.0))


@triton.jit
def halves_and_adds(a, b):
    return a * 0.5 + b


@triton.jit
def scanned(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, tl.associative_scan(tl.load(x + i), 0, halves_and_adds))


@triton.jit
def divided(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, tl.load(x + i // 3))


@triton.jit
def narrow(x, slots, y, width, TILE: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0))
    i = tl.arange(0, TILE)
    read = tl.load(x + (slot * width).to(tl.int64) + i)  # 32 bits
    tl.store(y + tl.program_id(0) * TILE + i, read)


@triton.jit
def wide(x, slots, y, width, TILE: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    i = tl.arange(0, TILE)
    tl.store(y + tl.program_id(0) * TILE + i, tl.load(x + slot * width + i))


@triton.jit
def halved(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    read = tl.load(x + i, mask=i < n).to(tl.float32)  # the front end
    tl.store(y + i, read)


@triton.jit
def doubled(x, y, n, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + i, tl.load(x + i, mask=i < n).to(tl.float64))
