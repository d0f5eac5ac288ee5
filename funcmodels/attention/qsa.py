"""Gated attention over the blocks of tokens that an index selects for each query (Qwen3.8-Flash-Next).

Every query head attends to the same tokens: those of the best blocks within a budget, and the unfinished block. While a
row holds no more than that, attention is dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lowering import Rows, ops
from lowering.ops.sparse import as_pages, selects_all
from params.sharding import Inputs, Outputs
from params.tree import exactly, tree

from ..blocks.linear import GemmaNorm, Linear, Norm, normalised, project
from ..errors import StateError
from ..state.space import Space
from ..state.state import Appended
from ..state.step import Step, writable
from .gqa import KeyValuePages, attend, check_heads


@dataclass(frozen=True)
class IndexSizes:
    """Sizes of the index: `budget` tokens of selected blocks a query, `ratio` tokens a block."""

    heads: int
    dim: int
    budget: int
    ratio: int

    @property
    def top_k(self) -> int:
        """Blocks a query selects."""
        return self.budget // self.ratio


@tree
class IndexedAttention:
    """`qkv` rows: per query head query then gate, then keys, values, index queries, and the index key."""

    qkv: Linear
    out: Linear
    q_norm: Norm
    k_norm: Norm
    index_q_norm: Norm
    index_k_norm: Norm

    @staticmethod
    def spec(hidden: int, heads: int, kv_heads: int, head_dim: int, index: IndexSizes) -> IndexedAttention:
        """Spec of the parameters. Every rank selects for itself, from the one index that all heads share."""
        keys = kv_heads * head_dim
        parts = (2 * heads * head_dim, keys, keys, (index.heads + 1) * index.dim)
        shard = Outputs(tuple(zip(parts, (heads, kv_heads, kv_heads, None), strict=True)))
        norm, index_norm = GemmaNorm.spec(head_dim), GemmaNorm.spec(index.dim)
        return IndexedAttention(
            qkv=Linear.spec(hidden, *parts, shard=shard),
            out=Linear.spec(heads * head_dim, hidden, shard=Inputs(heads)),
            q_norm=norm,
            k_norm=norm,
            index_q_norm=index_norm,
            index_k_norm=index_norm,
        )


@tree
class IndexedPages(Appended):
    """Keys and values of every token, its raw index key, and one pooled key for every block of tokens.

    A block lies in the page of its tokens. Its key is pooled from the raw ones by whichever forward completes it, so
    that dropping tokens needs no more than a shorter length.
    """

    k: Float[Tensor, "pages page_size kv_heads head_dim"]
    v: Float[Tensor, "pages page_size kv_heads head_dim"]
    raw: Float[Tensor, "pages page_size index_dim"]
    index: Float[Tensor, "pages page_blocks index_dim"]


@tree
class Selection:
    """What a layer chose: blocks of each token (-1 for none; None unless asked for) and the output gate."""

    blocks: Int[Tensor, "tokens top_k"] | None
    gate: Float[Tensor, "tokens heads head_dim"]


def indexed_pages(space: Space, kv_heads: int, head_dim: int, index: IndexSizes) -> IndexedPages:
    """Empty pages of a layer, page 0 being scratch. `ValueError` unless a page holds whole blocks."""
    page_size = space.page_size
    if page_size % index.ratio:
        raise ValueError(
            f"init_state: page_size {page_size} is not a multiple of {index.ratio}, the tokens of an index block; "
            f"give a page_size of whole blocks, as {-(-page_size // index.ratio) * index.ratio}"
        )
    kv, raw = (page_size, kv_heads, head_dim), (page_size, index.dim)
    shapes = (kv, kv, raw, (page_size // index.ratio, index.dim))
    pages, dtype, device = space.pages + 1, space.dtype, space.device
    return IndexedPages(*(torch.zeros(pages, *shape, dtype=dtype, device=device) for shape in shapes))


def indexed_attention(
    params: IndexedAttention,
    x: Float[Tensor, "tokens hidden"],
    past: IndexedPages | None,
    step: Step,
    rotary: tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]],
    *,
    heads: int,
    kv_heads: int,
    index: IndexSizes,
    theta: float,
    eps: float,
    show_blocks: bool = False,
) -> tuple[Float[Tensor, "tokens hidden"], IndexedPages | None, Selection]:
    """out(attention over the selected tokens * sigmoid(gate)), the pages with the new tokens, and what was chosen.

    `rotary` are the angles of the places, whose base is `theta`; index heads turn by the same ones. With `show_blocks`
    the selection says which blocks, also where attention is dense.
    """
    head_dim = params.q_norm.weight.shape[0]
    parts = (2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, index.heads * index.dim, index.dim)
    qkv = project(params.qkv, x).split(parts, -1)
    query_gate, k, v = (rearrange(part, "tokens (heads dim) -> tokens heads dim", dim=head_dim) for part in qkv[:3])
    q, gate = rearrange(query_gate, "tokens (heads two) dim -> two tokens heads dim", two=2)
    q = normalised(params.q_norm, q, eps=eps)
    k = normalised(params.k_norm, k, eps=eps)
    q, k = ops.rotary(q, k, *rotary)
    index_q = normalised(params.index_q_norm, qkv[3].unflatten(-1, (index.heads, index.dim)), eps=eps)
    index_q, _ = ops.rotary(index_q, index_q[:, :1], *rotary)
    pooling = {"eps": eps, "rotary_dim": 2 * rotary[0].shape[1], "theta": theta}
    new = _NewTokens(q, k, v, index_q, qkv[4], exactly(params.index_k_norm, GemmaNorm).weight, pooling)
    if past is None:
        y, blocks = _alone(new, step, index, show_blocks)
    else:
        y, past, blocks = _paged(new, past, step, index, show_blocks)
    gate = torch.sigmoid(gate)
    y = project(params.out, (y * gate).flatten(1))
    return y, past, Selection(blocks, gate)


@dataclass(frozen=True)
class _NewTokens:
    """What the new tokens bring: heads after norm and rotary, raw index keys, and how those are pooled."""

    q: Float[Tensor, "tokens heads head_dim"]
    k: Float[Tensor, "tokens kv_heads head_dim"]
    v: Float[Tensor, "tokens kv_heads head_dim"]
    index_q: Float[Tensor, "tokens index_heads index_dim"]
    raw: Float[Tensor, "tokens index_dim"]
    pool_norm: Any
    pooling: dict[str, Any]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5


def _paged(
    new: _NewTokens, past: IndexedPages, step: Step, index: IndexSizes, show_blocks: bool
) -> tuple[Tensor, IndexedPages, Tensor | None]:
    """Over the pages of past and new tokens."""
    page_size = past.k.shape[1]
    if past.index.shape[1] * index.ratio != page_size:
        raise StateError(
            f"the state's index has a key for every {page_size // past.index.shape[1]} tokens, the config says "
            f"{index.ratio}; make the state with the init_state of a model with this indexer_compress_ratio"
        )
    check_heads(past.k, new.k)
    past = writable(past, new.q, new.k, new.v, new.raw, new.pool_norm)
    rows = step.rows
    raw, keys = ops.index_keys(past.raw, past.index, new.raw, new.pool_norm, step.slots, rows, **new.pooling)
    dense = selects_all(rows, page_size, index.budget + index.ratio - 1)
    blocks = _best(new, keys, rows, index) if show_blocks or not dense else None
    if dense:
        y, kv = attend(new.q, new.k, new.v, KeyValuePages(past.k, past.v), step, scale=new.scale)
        assert kv is not None
        return y, IndexedPages(kv.k, kv.v, raw, keys), blocks
    k, v = ops.write_pages(past.k, past.v, new.k, new.v, step.slots)
    return _sparse(new, k, v, blocks, rows, index), IndexedPages(k, v, raw, keys), blocks


def _alone(new: _NewTokens, step: Step, index: IndexSizes, show_blocks: bool) -> tuple[Tensor, Tensor | None]:
    """Over the new tokens alone: each row is one page."""
    dense = step.rows.max_query <= index.budget + index.ratio - 1
    y, blocks = None, None
    if dense:
        y, _ = attend(new.q, new.k, new.v, None, step, scale=new.scale)
    if show_blocks or not dense:
        rows = step.rows.alone()
        k, v, raw = (as_pages(x, rows, index.ratio) for x in (new.k, new.v, new.raw))
        each = raw.shape[1] // index.ratio
        first = (torch.arange(each, device=raw.device) * index.ratio).expand(rows.count, -1)
        keys = ops.pool_keys(raw.unflatten(1, (each, index.ratio)), first, new.pool_norm, **new.pooling)
        blocks = _best(new, keys, rows, index)
        y = _sparse(new, k, v, blocks, rows, index) if y is None else y
    assert y is not None
    return y, blocks


def _best(new: _NewTokens, keys: Tensor, rows: Rows, index: IndexSizes) -> Tensor:
    """The blocks that each token selects. Nothing learns through a choice."""
    return ops.index_scores_topk(new.index_q.detach(), keys.detach(), rows, ratio=index.ratio, top_k=index.top_k)


def _sparse(new: _NewTokens, k: Tensor, v: Tensor, blocks: Tensor | None, rows: Rows, index: IndexSizes) -> Tensor:
    """Attention over pages of keys and values to the tokens of `blocks`."""
    assert blocks is not None
    selected = ops.expand_blocks(blocks, rows, ratio=index.ratio)
    return ops.sparse_attention(new.q, k, v, selected, rows, scale=new.scale)
