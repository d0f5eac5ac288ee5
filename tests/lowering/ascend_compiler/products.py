"""Kernels with products of matrices, for the emulator: what runs on cube cores, alone or together with vector cores."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, row, column, rows, columns, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        inner = start + tl.arange(0, K)
        live_a = (row < rows)[:, None] & (inner < depth)[None, :]
        live_b = (inner < depth)[:, None] & (column < columns)[None, :]
        x = tl.load(a + row[:, None] * depth + inner[None, :], mask=live_a, other=0.0)
        y = tl.load(b + inner[:, None] * columns + column[None, :], mask=live_b, other=0.0)
        total = tl.dot(x, y, total)
    return total


@triton.jit
def plain(a, b, out, rows, columns, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out = a @ b: a program of cube cores alone."""
    across = tl.cdiv(columns, N)
    for job in range(tl.program_id(0), tl.cdiv(rows, M) * across, tl.num_programs(0)):
        row, column = (job // across) * M + tl.arange(0, M), (job % across) * N + tl.arange(0, N)
        total = product(a, b, row, column, rows, columns, depth, M, N, K)
        live = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + row[:, None] * columns + column[None, :], total, mask=live)


@triton.jit
def gated(a, b, gate, out, rows, columns, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out = (a @ b) silu(gate): results go to the vector cores through the workspace."""
    across = tl.cdiv(columns, N)
    for job in range(tl.program_id(0), tl.cdiv(rows, M) * across, tl.num_programs(0)):
        row, column = (job // across) * M + tl.arange(0, M), (job % across) * N + tl.arange(0, N)
        total = product(a, b, row, column, rows, columns, depth, M, N, K)
        live = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        by = tl.load(gate + place, mask=live, other=0.0).to(tl.float32)
        tl.store(out + place, (total * by / (1.0 + tl.exp(-by))).to(out.dtype.element_ty), mask=live)


@triton.jit
def attended(q, k, v, out, heads, rows, length, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Plain attention: what the vector cores make of one product is an operand of the next."""
    tiles = tl.cdiv(rows, M)
    for job in range(tl.program_id(0), heads * tiles, tl.num_programs(0)):
        row, d = (job % tiles) * M + tl.arange(0, M), tl.arange(0, D)
        place = (job // tiles * rows + row[:, None]) * D + d[None, :]
        queries = tl.load(q + place, mask=(row < rows)[:, None], other=0.0)
        top = tl.full([M], -1e30, tl.float32)
        mass = tl.zeros([M], tl.float32)
        total = tl.zeros([M, D], tl.float32)
        for start in range(0, length, N):
            at = start + tl.arange(0, N)
            there = (job // tiles * length + at[:, None]) * D + d[None, :]
            keys = tl.load(k + there, mask=(at < length)[:, None], other=0.0)
            values = tl.load(v + there, mask=(at < length)[:, None], other=0.0)
            scores = tl.where((at < length)[None, :], tl.dot(queries, tl.trans(keys)) * scale, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            shrink, weights = tl.exp(top - higher), tl.exp(scores - higher[:, None])
            mass = mass * shrink + tl.sum(weights, 1)
            total = total * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
            top = higher
        tl.store(out + place, (total / mass[:, None]).to(out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def batched(a, b, out, batch, steps, M: tl.constexpr):
    """out[i] = the sum of a[i, step] @ b[i, step] over steps: small products into one accumulator."""
    place = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    for job in range(tl.program_id(0), batch, tl.num_programs(0)):
        total = tl.zeros([M, M], tl.float32)
        for step in range(0, steps):
            first = (job * steps + step) * M * M
            total += tl.dot(tl.load(a + first + place), tl.load(b + first + place))
        tl.store(out + job * M * M + place, total)


@triton.jit
def summed(a, b, out, lengths, batch, M: tl.constexpr, D: tl.constexpr, SELECT: tl.constexpr):
    """out[i] = column sums of a[i] @ b[i] ^ T over its first lengths[i] rows and columns, [batch M].

    The other rows and columns of the product are nobody's. Multiplied by 0 they are 0 by luck alone.
    """
    row, d = tl.arange(0, M), tl.arange(0, D)
    for job in range(tl.program_id(0), batch, tl.num_programs(0)):
        length = tl.load(lengths + job)
        place = (job * M + row[:, None]) * D + d[None, :]
        x = tl.load(a + place, mask=(row < length)[:, None], other=0.0)
        y = tl.load(b + place, mask=(row < length)[:, None], other=0.0)
        scores = tl.dot(x, tl.trans(y))
        live = (row < length).to(tl.float32)
        if SELECT:
            scores = tl.where((live[:, None] > 0) & (live[None, :] > 0), scores, 0.0)
        else:
            scores = scores * live[:, None] * live[None, :]
        tl.store(out + job * M + row, tl.sum(scores, 0))
