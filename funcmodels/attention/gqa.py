"""Grouped-query attention over normalised, rotated queries and keys: plain (Gemma3, Qwen3), or gated (Qwen3.5)."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.sharding import Inputs, Outputs
from params.tree import tree

from ..blocks.linear import BiasedLinear, Linear, Norm, normalised, project
from ..errors import StateError
from ..state.space import Space
from ..state.state import Appended
from ..state.step import Step, writable

A = TypeVar("A", bound="Attention")


@tree
class Attention:
    """`qkv` rows: queries, then keys, then values, head by head."""

    gated: ClassVar[bool] = False

    qkv: Linear
    out: Linear
    q_norm: Norm
    k_norm: Norm

    @classmethod
    def spec(
        cls: type[A],
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        norm: type[Norm] = Norm,
        bias: bool = False,
    ) -> A:
        """Spec of the parameters; `norm` is the kind of both norms, `bias` that of both projections."""
        parts = [count * head_dim for count in (heads * (2 if cls.gated else 1), kv_heads, kv_heads)]
        shard = Outputs(tuple(zip(parts, (heads, kv_heads, kv_heads), strict=True)))
        kind, of_heads = BiasedLinear if bias else Linear, norm.spec(head_dim)
        out = kind.spec(heads * head_dim, hidden, shard=Inputs(heads))
        return cls(kind.spec(hidden, *parts, shard=shard), out, of_heads, of_heads)


@tree
class GatedAttention(Attention):
    """`qkv` rows: per query head query then gate, then keys, then values."""

    gated: ClassVar[bool] = True


@tree
class KeyValuePages(Appended):
    """Keys after norm and rotary, and values, of every token."""

    k: Float[Tensor, "pages page_size kv_heads head_dim"]
    v: Float[Tensor, "pages page_size kv_heads head_dim"]


@runtime_checkable
class HasHeads(Protocol):
    """What a config says of its attention."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        ...


def key_value_pages(space: Space, config: HasHeads) -> KeyValuePages:
    """Empty pages of a layer, page 0 being scratch."""
    shape = (space.pages + 1, space.page_size, config.num_key_value_heads, config.head_dim)
    return KeyValuePages(*(torch.zeros(shape, dtype=space.dtype, device=space.device) for _ in range(2)))


def key_value_layers(space: Space, config: HasHeads, layers: int) -> tuple[KeyValuePages, ...]:
    """Empty pages of so many layers."""
    return tuple(key_value_pages(space, config) for _ in range(layers))


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
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Float[Tensor, "tokens hidden"], KeyValuePages | None]:
    """The output over the last `window` tokens or all, and the pages with the new keys and values.

    That is out(attention(q, k, v)), times sigmoid(gate) within where the node is a `GatedAttention`. `scale` is by
    default head_dim ** -0.5.
    """
    q, k, v = _projected(params, x, heads * (2 if params.gated else 1), kv_heads)
    gate = None
    if params.gated:
        q, gate = rearrange(q, "tokens (heads two) dim -> two tokens heads dim", two=2)
    q = normalised(params.q_norm, q, eps=eps)
    k = normalised(params.k_norm, k, eps=eps)
    q, k = ops.rotary(q, k, *rotary)
    y, past = attend(q, k, v, past, step, scale=scale or q.shape[2] ** -0.5, window=window)
    y = y if gate is None else y * torch.sigmoid(gate)
    return project(params.out, rearrange(y, "tokens heads dim -> tokens (heads dim)")), past


def _projected(params: Attention, x: Tensor, query_parts: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (a gate beside each counts as one more), keys and values, [tokens heads head_dim]."""
    head_dim = params.q_norm.weight.shape[0]
    found, expected = params.qkv.weight.shape[0], (query_parts + 2 * kv_heads) * head_dim
    if found != expected:
        raise ValueError(
            f"attention: qkv.weight has {found} rows, expected {expected} ({query_parts} heads of queries and gates "
            f"and {kv_heads} heads of keys and of values, {head_dim} wide)"
        )
    mixed = rearrange(project(params.qkv, x), "tokens (heads dim) -> tokens heads dim", dim=head_dim)
    q, k, v = mixed.split_with_sizes((query_parts, kv_heads, kv_heads), -2)
    return q, k, v


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
    if past is None:
        return ops.attention(q, k, v, step.rows, scale=scale, window=window), None
    check_heads(past.k, k)
    past = writable(past, q, k, v)
    pages = KeyValuePages(*ops.write_pages(past.k, past.v, k, v, step.slots))
    return ops.paged_attention(q, pages.k, pages.v, step.rows, scale=scale, window=window), pages


def check_heads(
    pages: Float[Tensor, "pages page_size kv_heads head_dim"], k: Float[Tensor, "tokens heads dim"]
) -> None:
    """`StateError` for pages of keys of other heads than a layer's."""
    if pages.shape[2:] != k.shape[1:]:
        raise StateError(
            f"the state has {pages.shape[2]} key/value heads of {pages.shape[3]}, the layer {k.shape[1]} of "
            f"{k.shape[2]}; make the state with the init_state of a model whose config is that of the parameters"
        )
