"""Grouped-query attention over normalised, rotated queries and keys: plain (Gemma3), or with a gate (Qwen3.5)."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.sharding import Inputs, Outputs
from params.tree import tree, unchecked

from ..blocks.linear import Linear, Norm, linear_spec, norm_spec, normalised, project
from ..errors import StateError
from ..state.state import Appended
from ..state.step import Step, writable


@tree
class Attention:
    """`qkv` rows: queries, then keys, then values, head by head."""

    qkv: Linear
    out: Linear
    q_norm: Norm
    k_norm: Norm


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


def attention_spec(hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> Attention:
    """Spec of the parameters; `bias` is that of both projections."""
    return unchecked(Attention, **_specs(hidden, heads, heads, kv_heads, head_dim, bias))


def gated_attention_spec(hidden: int, heads: int, kv_heads: int, head_dim: int) -> GatedAttention:
    """Spec of the parameters."""
    return unchecked(GatedAttention, **_specs(hidden, heads, 2 * heads, kv_heads, head_dim, False))


def _specs(hidden: int, heads: int, query_parts: int, kv_heads: int, head_dim: int, bias: bool) -> dict[str, Any]:
    parts = [count * head_dim for count in (query_parts, kv_heads, kv_heads)]
    shared = Outputs(tuple(zip(parts, (heads, kv_heads, kv_heads), strict=True)))
    return {
        "qkv": linear_spec(hidden, *parts, bias=bias, shard=shared),
        "out": linear_spec(heads * head_dim, hidden, bias=bias, shard=Inputs(heads)),
        "q_norm": norm_spec(head_dim, "zeros"),
        "k_norm": norm_spec(head_dim, "zeros"),
    }


def key_value_pages(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KeyValuePages:
    """Empty pages 0..`pages`, page 0 being scratch."""
    shape = (pages + 1, page_size, kv_heads, head_dim)
    return KeyValuePages(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


def attention(
    params: Attention,
    x: Float[Tensor, "tokens hidden"],
    past: KeyValuePages | None,
    step: Step,
    rotary: tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    scale: float,
    window: int | None,
) -> tuple[Float[Tensor, "tokens hidden"], KeyValuePages | None]:
    """out(attention(q, k, v)) over the last `window` tokens or all, and the pages with the new keys and values."""
    q, k, v = _projected(params, x, heads, kv_heads)
    q, k = _turned(params, q, k, rotary, eps)
    y, past = attend(q, k, v, past, step, scale=scale, window=window)
    return project(params.out, rearrange(y, "tokens heads dim -> tokens (heads dim)")), past


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
    query_gate, k, v = _projected(params, x, 2 * heads, kv_heads)
    q, gate = rearrange(query_gate, "tokens (heads two) dim -> two tokens heads dim", two=2)
    q, k = _turned(params, q, k, rotary, eps)
    y, past = attend(q, k, v, past, step, scale=q.shape[2] ** -0.5)
    y = rearrange(y * torch.sigmoid(gate), "tokens heads dim -> tokens (heads dim)")
    return project(params.out, y), past


def _projected(
    params: Attention | GatedAttention, x: Tensor, query_parts: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (a gate beside each counts as one more), keys and values, [tokens heads head_dim]."""
    head_dim = params.q_norm.weight.shape[0]
    found, expected = params.qkv.weight.shape[0], (query_parts + 2 * kv_heads) * head_dim
    if found != expected:
        raise ValueError(
            f"attention: qkv.weight has {found} rows, expected {expected} ({query_parts} heads of queries and gates "
            f"and {kv_heads} heads of keys and of values, {head_dim} wide)"
        )
    mixed = rearrange(project(params.qkv, x), "tokens (heads dim) -> tokens heads dim", dim=head_dim)
    q, k, v = mixed.split((query_parts, kv_heads, kv_heads), -2)
    return q, k, v


def _turned(
    params: Attention | GatedAttention, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised head by head and turned to their places."""
    q = normalised(params.q_norm, q, eps=eps)
    k = normalised(params.k_norm, k, eps=eps)
    return ops.rotary(q, k, *rotary)


def attend(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    past: KeyValuePages | None,
    step: Step,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Tensor, "tokens heads head_dim"], KeyValuePages | None]:
    """Causal attention over each row's past and new tokens, of which a query sees the last `window` up to its own.

    The pages keep all of them, since a rollback may bring back those before a window. `ValueError` unless heads are a
    multiple of kv_heads.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} query heads over {k.shape[1]} key/value heads; heads must be a multiple of "
            "kv_heads (are queries and keys swapped?)"
        )
    hints: dict[str, Any] = {"max_query": step.max_query, "uniform": step.uniform, "scale": scale, "window": window}
    if past is None:
        return ops.attention(q, k, v, step.query_start, **hints), None
    check_heads(past.k, k)
    past = writable(past, q, k, v)
    pages = KeyValuePages(*ops.write_pages(past.k, past.v, k, v, step.slots))
    y = ops.paged_attention(q, pages.k, pages.v, step.page_table, step.lengths, step.query_start, step.host, **hints)
    return y, pages


def check_heads(
    pages: Float[Tensor, "pages page_size kv_heads head_dim"], k: Float[Tensor, "tokens heads dim"]
) -> None:
    """`StateError` for pages of keys of other heads than a layer's."""
    if pages.shape[2:] != k.shape[1:]:
        raise StateError(
            f"the state has {pages.shape[2]} key/value heads of {pages.shape[3]}, the layer {k.shape[1]} of "
            f"{k.shape[2]}; make the state with the init_state of a model whose config is that of the parameters"
        )
