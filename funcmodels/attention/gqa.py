"""Grouped-query attention with an output gate, normalised queries and keys, and partial rotary (Qwen3.5)."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import map, tree, unchecked

from ..blocks.linear import Linear, Norm, linear_spec, norm_spec
from ..state import Appended
from ..step import Step


@tree
class GatedAttention:
    """`qkv` rows: per query head query then gate, then keys, then values."""

    qkv: Linear
    out: Linear
    q_norm: Norm
    k_norm: Norm


@tree
class KeyValuePages(Appended):
    """Keys after norm and rotary, and values, of every token."""

    k: Float[Tensor, "pages page_size kv_heads head_dim"]
    v: Float[Tensor, "pages page_size kv_heads head_dim"]


def gated_attention_spec(hidden: int, heads: int, kv_heads: int, head_dim: int) -> GatedAttention:
    """Spec of the parameters."""
    return unchecked(
        GatedAttention,
        qkv=linear_spec(hidden, 2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim),
        out=linear_spec(heads * head_dim, hidden),
        q_norm=norm_spec(head_dim, "zeros"),
        k_norm=norm_spec(head_dim, "zeros"),
    )


def key_value_pages(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KeyValuePages:
    """Empty pages 0..`pages`, page 0 being scratch."""
    shape = (pages + 1, page_size, kv_heads, head_dim)
    return KeyValuePages(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def gated_attention(
    params: GatedAttention,
    x: Float[Tensor, "tokens hidden"],
    past: KeyValuePages | None,
    step: Step,
    rotary: tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Float[Tensor, "tokens hidden"], KeyValuePages | None]:
    """out(attention(q, k, v) * sigmoid(gate)), and the pages with the new keys and values written."""
    head_dim = params.q_norm.weight.shape[0]
    expected = (2 * heads + 2 * kv_heads) * head_dim
    if params.qkv.weight.shape[0] != expected:
        raise ValueError(
            f"gated_attention: qkv.weight has {params.qkv.weight.shape[0]} rows, expected {expected} "
            f"({heads} query heads with gates and {kv_heads} key and value heads of {head_dim})"
        )
    mixed = rearrange(ops.linear(x, params.qkv.weight), "tokens (heads dim) -> tokens heads dim", dim=head_dim)
    query_gate, k, v = mixed.split((2 * heads, kv_heads, kv_heads), -2)
    q, gate = rearrange(query_gate, "tokens (heads two) dim -> two tokens heads dim", two=2)
    q = ops.gemma_rms_norm(q, params.q_norm.weight, eps=eps)
    k = ops.gemma_rms_norm(k, params.k_norm.weight, eps=eps)
    q, k = ops.rotary(q, k, *rotary)
    y, past = attend(q, k, v, past, step, scale=head_dim**-0.5)
    y = rearrange(y * torch.sigmoid(gate), "tokens heads dim -> tokens (heads dim)")
    return ops.linear(y, params.out.weight), past


def attend(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    past: KeyValuePages | None,
    step: Step,
    *,
    scale: float,
) -> tuple[Float[Tensor, "tokens heads head_dim"], KeyValuePages | None]:
    """Causal attention over each row's past and new tokens. `ValueError` unless heads are a multiple of kv_heads."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} query heads over {k.shape[1]} key/value heads; heads must be a multiple of "
            "kv_heads (are queries and keys swapped?)"
        )
    rows = {"max_query": step.max_query, "uniform": step.uniform}
    if past is None:
        return ops.attention(q, k, v, step.query_start, scale=scale, **rows), None
    if k.requires_grad:
        # Under autograd nothing is written in place: a backward reads the pages as they were.
        past = map(torch.clone, past)
    pages = KeyValuePages(*ops.write_pages(past.k, past.v, k, v, step.slots))
    y = ops.paged_attention(
        q, pages.k, pages.v, step.page_table, step.lengths, step.query_start, step.host, scale=scale, **rows
    )
    return y, pages
