"""Attention over the tokens of a row that an index has selected, read where they lie in pages."""

import triton
import triton.language as tl


@triton.jit
def sparse_attention(
    q,
    k_pages,
    v_pages,
    selected,
    query_start,
    lengths,
    page_table,
    out,
    rows,
    steps,
    kv_heads,
    max_pages,
    scale,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    TABLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """`sparse_attention`: a token and a key/value head a job, TILE keys a turn, the softmax going along.

    q [tokens kv_heads SHARED HEAD_DIM], out [tokens kv_heads SHARED V_DIM], pages [pages PAGE_SIZE kv_heads dim],
    selected [tokens SELECTED], in a tile of HEADS >= SHARED. What is not selected reads the first key that is, with a
    weight of zero. Padding tokens, and those that select nothing, are not written.
    """
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, HEAD_DIM)
    value = tl.arange(0, V_DIM)
    for job in range(tl.program_id(0), rows * steps * kv_heads, tl.num_programs(0)):
        group = job % kv_heads
        row = job // (steps * kv_heads)
        first = tl.load(query_start + row)
        last = tl.load(query_start + row + 1)
        token = first + job // kv_heads % steps
        if token < last:
            place = tl.full((), 0, tl.int64) + token
            listed = selected + place * SELECTED
            start = tl.load(listed)
            if start >= 0:
                seen = tl.minimum(tl.load(lengths + row) - last + token + 1, SELECTED)
                entry = tl.arange(0, TABLE)
                pages = tl.load(page_table + row.to(tl.int64) * max_pages + entry, mask=entry < max_pages, other=0)
                pages = pages.to(tl.float32, bitcast=True)
                own = (place * kv_heads + group) * SHARED
                asked = own * HEAD_DIM + head[:, None] * HEAD_DIM + channel[None, :]
                query = tl.load(q + asked, mask=head[:, None] < SHARED, other=0.0)
                most = tl.full((HEADS,), -1.0e30, tl.float32)
                weight = tl.zeros((HEADS,), tl.float32)
                total = tl.zeros((HEADS, V_DIM), tl.float32)
                for at in range(0, seen, TILE):
                    key = at + tl.arange(0, TILE)
                    found = tl.load(listed + key, mask=key < SELECTED, other=-1)
                    live = found >= 0
                    found = tl.where(live, found, start)
                    page = tl.gather(pages, found // PAGE_SIZE, 0).to(tl.int32, bitcast=True)
                    slot = page.to(tl.int64) * PAGE_SIZE + found % PAGE_SIZE
                    line = slot * kv_heads + group
                    keys = tl.load(k_pages + line[:, None] * HEAD_DIM + channel[None, :])
                    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
                    new = tl.maximum(most, tl.max(scores, 1))
                    weights = tl.where(live[None, :], tl.exp(scores - new[:, None]), 0.0)
                    old = tl.exp(most - new)
                    weight = weight * old + tl.sum(weights, 1)
                    values = tl.load(v_pages + line[:, None] * V_DIM + value[None, :])
                    values = values.to(query.dtype)
                    total = total * old[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="ieee")
                    most = new
                answer = (total / weight[:, None]).to(out.dtype.element_ty)
                filled = own * V_DIM + head[:, None] * V_DIM + value[None, :]
                tl.store(out + filled, answer, mask=head[:, None] < SHARED)


@triton.jit
def expand_blocks(
    blocks,
    query_start,
    lengths,
    out,
    rows,
    steps,
    TOP_K: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
):
    """`expand_blocks`, a token a job: blocks [tokens TOP_K], in a tile >= TOP_K, out [tokens (TOP_K + 1) * RATIO - 1].

    The unfinished block takes the place of the first -1, or stands behind all. Padding tokens are not written.
    """
    number = tl.arange(0, TILE)
    each = tl.arange(0, RATIO)
    for job in range(tl.program_id(0), rows * steps, tl.num_programs(0)):
        row = job // steps
        first = tl.load(query_start + row)
        last = tl.load(query_start + row + 1)
        token = first + job % steps
        if token < last:
            place = tl.full((), 0, tl.int64) + token
            visible = tl.load(lengths + row) - last + token + 1
            unfinished = visible // RATIO
            block = tl.load(blocks + place * TOP_K + number, mask=number < TOP_K, other=-1)
            count = tl.sum(tl.where(block >= 0, 1, 0), 0)
            block = tl.where(number == count, unfinished, block)
            member = block[:, None] * RATIO + each[None, :]
            member = tl.where((member >= 0) & (member < visible), member, -1)
            line = out + place * (TOP_K * RATIO + RATIO - 1)
            tl.store(line + number[:, None] * RATIO + each[None, :], member, mask=number[:, None] < TOP_K)
            behind = unfinished * RATIO + each
            behind = tl.where((behind < visible) & (count == TOP_K), behind, -1)
            tl.store(line + TOP_K * RATIO + each, behind, mask=each < RATIO - 1)
