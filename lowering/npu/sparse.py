"""Sparse attention on Ascend: blocks by the lightning indexer, attention over gathered keys by fused attention.

The indexer's own causal order moves by one key a query, and ours by one block every `ratio` tokens. So each token is a
request of its own here, of one query, over the blocks it sees: `actual_seq_lengths_key` counts them, and no order is
asked for. Weights of one leave the sum over heads as it is; a positive scale would not change which blocks are best.
Ascend 950 takes some numbers of heads only: heads of zeros, with weights of zero, fill up to the next.

Fused attention takes lengths as host lists, which a captured program would have to be given anew, and which are not
known while accepted counts stay on the device. So the gathered keys of a token come with a mask, made on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.sparse import (
    expand_blocks,
    index_keys,
    index_scores_topk,
    pool_keys,
    selected_slots,
    sparse_attention,
    visible_tokens,
)
from ..target import ASCEND
from .attention import wrong_heads
from .features import npu
from .host_checks.check import ASCEND_950
from .host_checks.sparse import HEADS_950
from .kernel import HALVES, above, empty, fused, machine, wrong_dtype

INDEXER = "npu_lightning_indexer"
ATTENTION = "npu_fused_infer_attention_score_v2"
INDEX_DIM = 128
"""The one head size of the indexer."""
COUNTS = (*range(1, 2049), *range(3072, 8193, 1024))
"""How many blocks the indexer is documented to be asked for; its host code takes more than 2048 from CANN 9.0.0."""
GATHERED = 64
"""Tokens whose selected keys and values are gathered at a time: with 2051 keys of 2 x 256 channels 270 MB each time."""


def _refuse_index(q, index_pages, rows, *, ratio, top_k) -> str | None:
    heads, index_dim, page_blocks = q.shape[1], q.shape[2], index_pages.shape[1]
    if index_dim != INDEX_DIM:
        return f"takes an index_dim of {INDEX_DIM}; this call has {index_dim}"
    if page_blocks % 16 or page_blocks > 1024:
        return (
            f"takes pages of block keys in multiples of 16, up to 1024; this call has {page_blocks} a page: make "
            f"page_size a multiple of {16 * ratio}"
        )
    if top_k > 2048 and not machine(q).has_cann("9.0.0"):
        return f"takes a top_k of 1 to 2048 before CANN 9.0.0; this call has {top_k}"
    if top_k not in COUNTS:
        return f"takes a top_k of 1 to 2048, or up to 8192 in steps of 1024; this call has {top_k}"
    return wrong_dtype(HALVES, q=q, index_pages=index_pages) or above(64, index_heads=heads) or empty(q=q)


@fused(index_scores_topk, INDEXER, INDEXER, refuse=_refuse_index)
def _indexed(q, index_pages, rows, *, ratio, top_k):
    row, visible = visible_tokens(rows, q.shape[0])
    blocks = (visible // ratio).int()
    weights, more = q.new_ones(q.shape[0], 1, q.shape[1]), _idle_heads(q)
    if more:
        q, weights = torch.nn.functional.pad(q, (0, 0, 0, more)), torch.nn.functional.pad(weights, (0, more))
    found, _ = npu.npu_lightning_indexer(
        q[:, None].contiguous(),
        index_pages[:, :, None].contiguous(),
        weights,
        # No length of zero is documented: a token without blocks looks at one slot, and what it finds is dropped.
        actual_seq_lengths_key=blocks.clamp(min=1),
        block_table=rows.page_table[row].int().contiguous(),
        layout_query="BSND",
        layout_key="PA_BSND",
        sparse_count=top_k,
        sparse_mode=0,
    )
    return torch.where(torch.arange(top_k, device=q.device) < blocks[:, None], found[:, 0, 0], -1)


def _idle_heads(q: Tensor) -> int:
    """How many heads without weight fill a call up to a number that the target takes."""
    heads = q.shape[1]
    return next(count for count in HEADS_950 if count >= heads) - heads if machine(q).name in ASCEND_950 else 0


def _refuse_gathered(q, k_pages, v_pages, selected, rows, *, scale) -> str | None:
    wrong = wrong_dtype(HALVES, q=q, k_pages=k_pages, v_pages=v_pages)
    return wrong or wrong_heads(q, k_pages, v_pages) or empty(q=q, selected=selected)


@fused(sparse_attention, "npu_gather_fia", ATTENTION, refuse=_refuse_gathered)
def _gathered(q, k_pages, v_pages, selected, rows, *, scale):
    row, visible = visible_tokens(rows, q.shape[0])
    chosen = torch.where(visible[:, None] > 0, selected, -1)
    parts = zip(q.split(GATHERED), chosen.split(GATHERED), rows.page_table[row].split(GATHERED), strict=True)
    return torch.cat([_over_gathered(some, k_pages, v_pages, places, pages, scale) for some, places, pages in parts])


def _over_gathered(q: Tensor, k_pages: Tensor, v_pages: Tensor, places: Tensor, pages: Tensor, scale: float) -> Tensor:
    """Attention of tokens, each a request of one query, over copies of the keys and values at its `places`."""
    valid, slots = selected_slots(places, pages, k_pages.shape[1])
    # A mask hides the scores of what is not selected; its values must be numbers, for a weight of zero keeps NaN.
    k, v = (torch.where(valid[..., None, None], pool.flatten(0, 1)[slots], 0) for pool in (k_pages, v_pages))
    y, _ = npu.npu_fused_infer_attention_score_v2(
        q[:, None].contiguous(),
        k,
        v,
        atten_mask=~valid[:, None, None],
        num_query_heads=q.shape[1],
        num_key_value_heads=k.shape[2],
        softmax_scale=scale,
        input_layout="BSND",
        sparse_mode=0,
    )
    # The operator leaves open what a query gets that sees nothing.
    return torch.where(valid[:, :1, None], y[:, 0], 0)


sparse_attention.without(
    ASCEND,
    "npu_sparse_flash_attention reads one latent of 512 channels and 64 rotary ones as key and value at once, and here "
    "keys and values are apart",
)
pool_keys.without(ASCEND, "no operator takes the mean of a block's keys")
index_keys.without(ASCEND, "no operator takes the mean of a block's keys")
expand_blocks.without(ASCEND, "no operator makes token places of block numbers")
