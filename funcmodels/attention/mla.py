"""Multi-head latent attention: one latent and one rope key a token in the state, keys and values of all heads from it.

DeepSeek-V2, and without a rotation Kimi Linear and, with a gate at its output, Kimi-K3. See `lowering.ops.mla` for the
arithmetic.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from lowering.layouts import NdPages, NzPages, layout_for
from lowering.ops import LatentPools, LatentQueries
from lowering.weights import PreparedWeight, plain
from params.quant.values import QuantizedWeight
from params.sharding import Inputs, Outputs
from params.spec import leaf
from params.tree import exactly, leaves, put, tree

from ..blocks.linear import BiasedLinear, Linear, Norm, PrepareWeight, normalised, project
from ..errors import StateError
from ..state.space import Space
from ..state.state import Appended
from ..state.step import Step, writable


@tree
class UpProjection:
    """What makes keys and values of latents: per head the rows of its key without rope, then those of its value."""

    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Float[Tensor, "up_rows latent_dim"] | QuantizedWeight | PreparedWeight

    def lower_weights(self, prepare: PrepareWeight) -> UpProjection:
        """With the weight in the layout of the kernel that will read it."""
        return put(self, "weight", prepare("mla_prefix_attention", self.weight))


@tree
class LatentAttention:
    """`down` rows: queries (or their latent, where `q_norm` and `q_up` make queries of it), then latent and rope key.

    Where the output has gates their rows come last, as many as `out` has inputs. A query is a part without rope, then
    one with it. Biases are those of the queries' latent, and of latent and rope.
    """

    down: Linear
    q_bias: Float[Tensor, " q_rank"] | None
    kv_bias: Float[Tensor, " latent_and_rope"] | None
    q_norm: Norm | None
    q_up: Linear | None
    latent_norm: Norm
    up: UpProjection
    out: Linear

    @staticmethod
    def spec(
        hidden: int,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        q_rank: int,
        latent_dim: int,
        bias: bool,
        *,
        gated: bool = False,
    ) -> LatentAttention:
        """Spec of the parameters. With `q_rank` 0 queries have no latent, never a bias; `gated` adds output gates."""
        queries, ups = heads * (nope_dim + rope_dim), heads * (nope_dim + v_dim)
        gates = ((heads * v_dim, heads),) if gated else ()
        rows = ((q_rank, None) if q_rank else (queries, heads), (latent_dim + rope_dim, None), *gates)
        whole = all(units is None for _, units in rows)
        return LatentAttention(
            down=Linear.spec(hidden, *(count for count, _ in rows), shard=None if whole else Outputs(rows)),
            q_bias=leaf((q_rank,), "zeros") if bias and q_rank else None,
            kv_bias=leaf((latent_dim + rope_dim,), "zeros") if bias else None,
            q_norm=Norm.spec(q_rank) if q_rank else None,
            q_up=Linear.spec(q_rank, queries, shard=Outputs(((queries, heads),))) if q_rank else None,
            latent_norm=Norm.spec(latent_dim),
            up=UpProjection(leaf((ups, latent_dim), shard=Outputs(((ups, heads),)))),
            out=(BiasedLinear if bias else Linear).spec(heads * v_dim, hidden, shard=Inputs(heads)),
        )


@tree
class LatentPages(Appended):
    """Latents after their norm, and rope keys after rotation, of every token."""

    latent: NdPages | NzPages
    rope: NdPages | NzPages


def latent_pages(space: Space, latent_dim: int, rope_dim: int) -> LatentPages:
    """Empty pages of a layer, page 0 being scratch, in the space's layout or the one that suits the target."""
    size, where, widths = space.page_size, (space.dtype, space.device), (latent_dim, rope_dim)
    kind = layout_for(space.layout, space.device, space.dtype, size, widths)
    return LatentPages(*(kind.empty(space.pages + 1, size, width, *where) for width in widths))


def latent_attention(
    params: LatentAttention,
    x: Float[Tensor, "tokens hidden"],
    past: LatentPages | None,
    step: Step,
    rotary: tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]] | None,
    *,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    scale: float,
    eps: float,
    gated: bool = False,
) -> tuple[Float[Tensor, "tokens hidden"], LatentPages | None]:
    """out(attention over the row's latents), and the pages with the new latents and rope keys written.

    Without `rotary` rope keys, and the queries that meet them, stay as they are. `eps` is that of the norms of latents.
    `gated` says that the last rows of `down` are gates of what `out` takes.
    """
    norm, up = exactly(params.latent_norm, Norm).weight, exactly(params.up, UpProjection).weight
    latent_dim = norm.shape[0]
    projected = project(params.down, x)
    latents, gates = latent_dim + rope_dim, heads * v_dim if gated else 0
    q, kv, gate = projected.split_with_sizes((projected.shape[1] - latents - gates, latents, gates), -1)
    q, kv = (x if bias is None else x + bias for x, bias in ((q, params.q_bias), (kv, params.kv_bias)))
    queries = _queries(params, q, heads, nope_dim, rope_dim, rotary, eps)
    if up.shape[0] != heads * (nope_dim + v_dim):
        raise ValueError(
            f"latent_attention: up.weight has {up.shape[0]} rows, expected {heads * (nope_dim + v_dim)} "
            f"({heads} heads with keys of {nope_dim} and values of {v_dim})"
        )
    if past is None:
        y = _among_themselves(params, queries, kv, step, rotary, scale, v_dim, eps)
        return _out(params, y, gate), None
    if (past.latent.width, past.rope.width) != (latent_dim, rope_dim):
        raise StateError(
            f"the state's latents have {past.latent.width} channels and rope keys {past.rope.width}, the layer's "
            f"{latent_dim} and {rope_dim}; make the state with the init_state of a model whose config is that of the "
            "parameters"
        )
    past = writable(past, *leaves(queries), kv, norm, *leaves(params.up))
    pools, cos_sin = LatentPools(past.latent, past.rope), rotary or (None, None)
    pools, new = ops.latent_norm_rope_write(pools, kv, norm, *cos_sin, step.slots, eps=eps)
    y = ops.mla_prefix_attention(queries, new, pools, up, step.rows, scale=scale, v_dim=v_dim)
    return _out(params, y, gate), LatentPages(pools.latent, pools.rope)


def _queries(
    params: LatentAttention,
    q: Float[Tensor, "tokens channels"],
    heads: int,
    nope_dim: int,
    rope_dim: int,
    rotary: tuple[Tensor, Tensor] | None,
    eps: float,
) -> LatentQueries:
    """The two parts of every head's query, of their latent where they have one, the latter turned."""
    if params.q_norm is not None and params.q_up is not None:
        q = project(params.q_up, normalised(params.q_norm, q, eps=eps))
    if q.shape[1] != heads * (nope_dim + rope_dim):
        raise ValueError(
            f"latent_attention: queries have {q.shape[1]} channels, expected {heads * (nope_dim + rope_dim)} "
            f"({heads} heads of {nope_dim} without rope and {rope_dim} with it)"
        )
    q = rearrange(q, "tokens (heads dim) -> tokens heads dim", heads=heads)
    q_nope, q_rope = q.split_with_sizes((nope_dim, rope_dim), -1)
    return LatentQueries(q_nope, _turned(q_rope, rotary))


def _out(
    params: LatentAttention, y: Float[Tensor, "tokens heads v_dim"], gate: Tensor
) -> Float[Tensor, "tokens hidden"]:
    """The projection of all heads' outputs, each channel times the sigmoid of its gate; `gate` may have no channels."""
    y = y.flatten(1)
    return project(params.out, y * gate.sigmoid() if gate.shape[1] else y)


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if rotary is None else ops.rotary_interleaved(x, *rotary)


def _among_themselves(
    params: LatentAttention,
    queries: LatentQueries,
    kv: Tensor,
    step: Step,
    rotary: tuple[Tensor, Tensor] | None,
    scale: float,
    v_dim: int,
    eps: float,
) -> Float[Tensor, "tokens heads v_dim"]:
    """Without a state: keys and values of all heads are made, and each token sees its row's earlier ones."""
    latent_dim = params.latent_norm.weight.shape[0]
    latent, rope = kv.split_with_sizes((latent_dim, kv.shape[1] - latent_dim), -1)
    latent = normalised(params.latent_norm, latent, eps=eps)
    rope = _turned(rope[:, None], rotary)
    up = plain(exactly(params.up, UpProjection).weight).to(latent.dtype)
    heads, nope_dim = queries.nope.shape[1:]
    k_nope, v = ops.linear(latent, up).unflatten(1, (heads, -1)).split_with_sizes((nope_dim, v_dim), -1)
    q, k = torch.cat(leaves(queries), -1), torch.cat((k_nope, rope.expand(-1, heads, -1)), -1)
    return ops.attention(q, k, v, step.rows, scale=scale)
