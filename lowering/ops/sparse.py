"""Attention over blocks that an index selects: block keys, their scores, the tokens selected, attention over those.

The index holds one key for every complete block of `ratio` tokens. A query scores the blocks that end at or before it,
keeps the `top_k` best, and adds the tokens of the unfinished block, itself the last (Qwen3.8-Flash-Next).

All four ops work over pages. Block n of a row lies in the page of its tokens: `index_pages` has page_size / ratio keys
a page. Without a state each row is a page of its own: `as_pages` and `pool_keys` make them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..host import tracing
from ..op import op
from ..rows import Rows
from ..weights import PreparedWeight
from .norm import gemma_rms_norm
from .rotary import rotary, rotary_angles
from .widen import wide


@op
def pool_keys(
    raw: Float[Tensor, "*lead ratio index_dim"],
    positions: Int[Tensor, "*lead"],
    weight: Float[Tensor, " index_dim"] | PreparedWeight,
    *,
    eps: float,
    rotary_dim: int,
    theta: float,
) -> Float[Tensor, "*lead index_dim"]:
    """One key a block: the float32 mean of its raw keys, rounded, `gemma_rms_norm`, rotary at `positions`.

    A block's position is that of its first token.
    """
    mean = wide(raw).mean(-2).to(raw.dtype)
    keys = gemma_rms_norm.body(mean, weight, eps=eps).flatten(0, -2)[:, None]
    angles = rotary_angles.body(positions.flatten(), rotary_dim=rotary_dim, theta=theta)
    return rotary.body(keys, keys, *angles)[1].reshape(mean.shape)


@op
def index_keys(
    raw_pages: Float[Tensor, "pages page_size index_dim"],
    index_pages: Float[Tensor, "pages page_blocks index_dim"],
    raw: Float[Tensor, "tokens index_dim"],
    weight: Float[Tensor, " index_dim"] | PreparedWeight,
    slots: Int[Tensor, " tokens"],
    rows: Rows,
    *,
    eps: float,
    rotary_dim: int,
    theta: float,
) -> tuple[Float[Tensor, "pages page_size index_dim"], Float[Tensor, "pages page_blocks index_dim"]]:
    """Store the new tokens' raw keys at their slots, then `pool_keys` of every block they complete, both in place.

    A block is pooled from the raw keys in its page, whichever forward wrote them, so
    dropping tokens and going on from any length needs no other state. Its position is its place in the row.
    """
    ratio = block_tokens(raw_pages, index_pages)
    # A view or an error: on a copy the write would be lost.
    raw_pages.view(-1, raw_pages.shape[2]).index_copy_(0, slots, raw.to(raw_pages.dtype))
    block_slots, blocks = completed_blocks(rows, raw.shape[0], index_pages.shape[1], ratio)
    members = raw_pages.view(-1, ratio, raw_pages.shape[2])[block_slots]
    keys = pool_keys.body(members, blocks * ratio, weight, eps=eps, rotary_dim=rotary_dim, theta=theta)
    index_pages.view(-1, index_pages.shape[2]).index_copy_(0, block_slots, keys.to(index_pages.dtype))
    return raw_pages, index_pages


def block_tokens(raw_pages: Tensor, index_pages: Tensor) -> int:
    """Tokens a block: page_size / page_blocks. `ValueError` unless that is a whole number."""
    ratio, rest = divmod(raw_pages.shape[1], index_pages.shape[1])
    if rest or not ratio:
        raise ValueError(
            f"index_keys: pages of {raw_pages.shape[1]} raw keys and {index_pages.shape[1]} block keys; a page must "
            "hold whole blocks: make page_size a multiple of the ratio"
        )
    return ratio


def completed_blocks(rows: Rows, tokens: int, page_blocks: int, ratio: int) -> tuple[Tensor, Tensor]:
    """The blocks that the new tokens complete, as slots in the index pages and as numbers within their rows.

    There are tokens // ratio + rows entries, as many as can ever be needed; those left over lie in the scratch page.
    """
    lengths, table = rows.paged
    ends = (lengths // ratio - rows.past // ratio).cumsum(0)
    entry = torch.arange(tokens // ratio + rows.count, device=lengths.device)
    row = torch.searchsorted(ends, entry, right=True)
    live = row < rows.count
    row = row.clamp(max=rows.count - 1)
    block = torch.where(live, lengths[row] // ratio - ends[row] + entry, 0)
    page = table[row, block // page_blocks].long()
    return torch.where(live, page * page_blocks + block % page_blocks, entry % page_blocks), block


@op
def index_scores_topk(
    q: Float[Tensor, "tokens index_heads index_dim"],
    index_pages: Float[Tensor, "pages page_blocks index_dim"],
    rows: Rows,
    *,
    ratio: int,
    top_k: int,
) -> Int[Tensor, "tokens top_k"]:
    """The `top_k` best blocks of each token, int32: valid ones first, in any order, then -1.

    The score of a block is the float32 sum over index heads of relu(q . key), over sqrt(index_dim); of equal ones the
    lower block wins. A token at place t of its row sees the blocks below (t + 1) // ratio: none that is unfinished, and
    its own only if it ends it. Keys of other slots may hold anything. Padding tokens see nothing.
    """
    q3 = wide(rows.rectangle(q))
    keys = wide(index_pages[rows.paged[1]].flatten(1, 2))
    scores = torch.einsum("rqhd,rbd->rqhb", q3, keys).relu().sum(2) / q.shape[2] ** 0.5
    scores = rows.flat(scores, q.shape[0])
    _, visible = visible_tokens(rows, q.shape[0])
    blocks = torch.arange(keys.shape[1], device=q.device)
    seen = blocks < visible[:, None] // ratio
    # A stable sort keeps the lower of equal blocks first.
    order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    found = torch.where(seen.gather(1, order), order, -1)
    return F.pad(found, (0, top_k - found.shape[1]), value=-1).int()


@op
def expand_blocks(blocks: Int[Tensor, "tokens top_k"], rows: Rows, *, ratio: int) -> Int[Tensor, "tokens selected"]:
    """Places in the row of the tokens selected, int32 [tokens, top_k * ratio + ratio - 1]: valid ones first, then -1.

    Of each block all `ratio` tokens, and the tokens of the unfinished block, itself the last. Padding gets -1.
    """
    _, visible = visible_tokens(rows, blocks.shape[0])
    return members(blocks, visible, ratio)


def members(blocks: Tensor, visible: Tensor, ratio: int) -> Tensor:
    """`expand_blocks` of queries that see `visible` tokens of their rows."""
    visible = visible[:, None].to(blocks.dtype)
    # The unfinished block is one more behind the valid ones; where there is none, its tokens are all yet to come.
    count = (blocks >= 0).sum(-1, keepdim=True)
    blocks = F.pad(blocks, (0, 1), value=-1).scatter(1, count, visible // ratio)
    each = torch.arange(ratio, device=blocks.device, dtype=blocks.dtype)
    tokens = (blocks[:, :, None] * ratio + each).flatten(1)[:, :-1]
    return torch.where(tokens < visible, tokens, -1).clamp(min=-1).int()


@op
def sparse_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_pages: Float[Tensor, "pages page_size kv_heads head_dim"],
    v_pages: Float[Tensor, "pages page_size kv_heads v_dim"],
    selected: Int[Tensor, "tokens selected"],
    rows: Rows,
    *,
    scale: float,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Attention of each token over the tokens of its row that `selected` names, in pages; all heads over the same.

    `selected` holds distinct places in the row that the token may see, valid ones first, then -1. Any other slot may
    hold anything, NaN included. A token with nothing selected, as padding has, gets zeros.
    """
    row, visible = visible_tokens(rows, q.shape[0])
    chosen = torch.where(visible[:, None] > 0, selected, -1)
    valid, slots = selected_slots(chosen, rows.paged[1][row], k_pages.shape[1])
    k, v = (
        torch.where(valid[..., None, None], pages.flatten(0, 1)[slots], 0).to(q.dtype) for pages in (k_pages, v_pages)
    )
    grouped = rearrange(q, "tokens (kv_heads shared) dim -> tokens kv_heads shared dim", kv_heads=k.shape[2])
    scores = torch.einsum("tgsd,tkgd->tgsk", wide(grouped), wide(k)) * scale
    scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
    # A token with nothing selected has zeros for weights, not NaN.
    weights = torch.where(valid[:, None, None], scores.softmax(-1), 0)
    return torch.einsum("tgsk,tkgd->tgsd", weights, wide(v)).to(q.dtype).flatten(1, 2)


def selected_slots(selected: Tensor, pages: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Which places [tokens selected] are valid, and the slot (page * page_size + offset) of each, 0 for the others.

    `pages` [tokens max_pages] are the page tables of each token's row.
    """
    valid = selected >= 0
    place = torch.where(valid, selected, 0)
    page = pages.gather(1, (place // page_size).long()).long()
    return valid, torch.where(valid, page * page_size + place % page_size, 0)


def visible_tokens(rows: Rows, tokens: int) -> tuple[Tensor, Tensor]:
    """Each token's row (padding: the last), and how many tokens of it that token sees, itself included (padding: 0)."""
    row, (lengths, _) = rows.of_tokens(tokens), rows.paged
    live = row < rows.count
    row = row.clamp(max=rows.count - 1)
    later = rows.query_start[1:][row] - 1 - torch.arange(tokens, device=lengths.device)
    return row, torch.where(live, lengths[row] - later, 0)


def selects_all(rows: Rows, page_size: int, selected: int) -> bool:
    """Whether no row can be longer than `selected` = budget + ratio - 1 tokens: every query selects all it sees.

    Dense attention is then the same and faster. While tracing only what the shapes say counts.
    """
    if rows.paged[1].shape[1] * page_size <= selected:
        return True
    return rows.host is not None and not tracing() and max(rows.host.length, default=0) <= selected


def as_pages(x: Tensor, rows: Rows, ratio: int) -> Tensor:
    """Each row of a batch without a state as one page, [tokens ...] as [rows page_size ...].

    Pages are filled up with zeros to whole blocks of `ratio` tokens. The rows to read them by are `rows.alone()`.
    """
    return F.pad(rows.rectangle(x), (*(0, 0) * (x.ndim - 1), 0, -rows.max_query % ratio))
