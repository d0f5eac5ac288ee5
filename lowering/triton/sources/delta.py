"""The gated delta rule for few tokens a row, its gates, and standing after some of the tokens.

Programs take jobs in turn, so that a grid of as many programs as there are cores serves any number of rows.
"""

import triton
import triton.language as tl


@triton.jit
def recurrent(
    q,
    k,
    v,
    decay,
    beta,
    state,
    query_start,
    out,
    after,
    rows,
    k_heads,
    v_heads,
    steps,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """`gated_delta_rule` token by token, TILE rows of a head's state in registers; TILE divides V_DIM.

    q, k [tokens k_heads K_DIM]; v, out [tokens v_heads V_DIM]; beta [tokens v_heads], and decay likewise or, with
    CHANNELS, [tokens v_heads K_DIM]; state [slots v_heads V_DIM K_DIM]. `after` gets the state after the last token, or
    with STEPS [rows steps v_heads V_DIM K_DIM] the one after each. Padding tokens and the scratch slot are not written.
    """
    tl.static_assert(V_DIM % TILE == 0)
    tiles: tl.constexpr = V_DIM // TILE
    keys = tl.arange(0, K_DIM)
    for job in range(tl.program_id(0), rows * v_heads * tiles, tl.num_programs(0)):
        row = job // (v_heads * tiles)
        head = job // tiles % v_heads
        key_head = head // (v_heads // k_heads)
        values = job % tiles * TILE + tl.arange(0, TILE)
        cells = values[:, None] * K_DIM + keys[None, :]
        place = (row.to(tl.int64) * v_heads + head) * V_DIM * K_DIM
        first = tl.load(query_start + row)
        last = tl.load(query_start + row + 1)
        now = tl.load(state + place + cells).to(tl.float32)
        for step in range(0, last - first):
            token = first.to(tl.int64) + step
            shared = (token * k_heads + key_head) * K_DIM
            own = token * v_heads + head
            query = tl.load(q + shared + keys).to(tl.float32)
            key = tl.load(k + shared + keys).to(tl.float32)
            value = tl.load(v + own * V_DIM + values).to(tl.float32)
            strength = tl.load(beta + own).to(tl.float32)
            if CHANNELS:
                now = now * tl.exp(tl.load(decay + own * K_DIM + keys).to(tl.float32))[None, :]
            else:
                now = now * tl.exp(tl.load(decay + own).to(tl.float32))
            update = strength * (value - tl.sum(now * key[None, :], 1))
            now = now + update[:, None] * key[None, :]
            tl.store(out + own * V_DIM + values, tl.sum(now * query[None, :], 1).to(out.dtype.element_ty))
            if STEPS:
                kept = (row.to(tl.int64) * steps + step) * v_heads + head
                tl.store(after + kept * V_DIM * K_DIM + cells, now.to(after.dtype.element_ty))
                # Ascend's compiler lets the next step write the tile while it is stored: its flags alternate between
                # two buffers, and the state has one. The emulator found it.
                tl.debug_barrier()
        if not STEPS:
            tl.store(after + place + cells, now.to(after.dtype.element_ty))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def delta_gates(a, b, a_log, dt_bias, decay, beta, tokens, heads, TILE: tl.constexpr, HEADS: tl.constexpr):
    """`delta_gates`: a, b, decay and beta [tokens heads], TILE tokens at a time, all heads in a tile of HEADS."""
    head = tl.arange(0, HEADS)
    rate = tl.exp(tl.load(a_log + head, mask=head < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * TILE, tokens, tl.num_programs(0) * TILE):
        token = start + tl.arange(0, TILE)
        live = (token < tokens)[:, None] & (head < heads)[None, :]
        cells = token.to(tl.int64)[:, None] * heads + head[None, :]
        x = tl.load(a + cells, mask=live, other=0.0).to(tl.float32) + bias[None, :]
        tl.store(decay + cells, -rate[None, :] * softplus(x), mask=live)
        # The op rounds the strength to the dtype of b.
        strength = tl.sigmoid(tl.load(b + cells, mask=live, other=0.0).to(tl.float32))
        tl.store(beta + cells, strength.to(b.dtype.element_ty).to(tl.float32), mask=live)


@triton.jit
def channel_gates(
    f,
    b,
    a_log,
    dt_bias,
    decay,
    beta,
    tokens,
    heads,
    lower_bound,
    K_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """`channel_gates`: f and decay [tokens heads K_DIM], b and beta [tokens heads]; TILE heads of a token at a time."""
    key = tl.arange(0, K_DIM)
    tiles = tl.cdiv(heads, TILE)
    for job in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = (job // tiles).to(tl.int64) * heads
        head = job % tiles * TILE + tl.arange(0, TILE)
        live = (head < heads)[:, None] & (key < K_DIM)[None, :]
        cells = head[:, None] * K_DIM + key[None, :]
        rate = tl.exp(tl.load(a_log + head, mask=head < heads, other=0.0).to(tl.float32))[:, None]
        x = tl.load(f + token * K_DIM + cells, mask=live, other=0.0).to(tl.float32)
        x = x + tl.load(dt_bias + cells, mask=live, other=0.0).to(tl.float32)
        if BOUNDED:
            left = lower_bound * tl.sigmoid(rate * x)
        else:
            left = -rate * softplus(x)
        tl.store(decay + token * K_DIM + cells, left, mask=live)
        strength = tl.sigmoid(tl.load(b + token + head, mask=head < heads, other=0.0).to(tl.float32))
        tl.store(beta + token + head, strength, mask=head < heads)


@triton.jit
def commit(before, after, accepted, out, rows, steps, width, TILE: tl.constexpr):
    """`DeltaStates.at`: before and out [slots width], after [rows steps width]; of each row the state it stands at."""
    tiles = tl.cdiv(width, TILE)
    for job in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (job // tiles).to(tl.int64)
        cell = job % tiles * TILE + tl.arange(0, TILE)
        taken = tl.load(accepted + row)
        if taken > 0:
            found = tl.load(after + (row * steps + taken - 1) * width + cell, mask=cell < width)
            tl.store(out + row * width + cell, found, mask=cell < width)
        else:
            kept = tl.load(before + row * width + cell, mask=cell < width)
            tl.store(out + row * width + cell, kept, mask=cell < width)


@triton.jit
def scatter(source, slots, out, rows, width, TILE: tl.constexpr):
    """Rows of source [rows width] into the slots of out [slots width] that are named; -1 names none."""
    tiles = tl.cdiv(width, TILE)
    for job in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = (job // tiles).to(tl.int64)
        cell = job % tiles * TILE + tl.arange(0, TILE)
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            found = tl.load(source + row * width + cell, mask=cell < width)
            tl.store(out + slot * width + cell, found, mask=cell < width)
