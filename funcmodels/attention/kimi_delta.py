"""Kimi delta attention: short convolution, delta rule with a decay a key channel, gated norm (Kimi Linear, Kimi-K3)."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.sharding import Inputs, Outputs
from params.spec import leaf
from params.tree import exactly, tree

from ..blocks.linear import Linear, Norm, project
from ..state.step import Step
from .gated_delta import DeltaNetState, DeltaTrails


@tree
class KimiDelta:
    """`in_proj` rows: queries, keys and values (these pass the convolution), write strengths b, latents of two gates.

    `forget` and `gate` make of them a log decay a channel of keys, before its activation, and a gate a channel of
    values. Both have one width. Without `gate` the last rows are not a latent, but that gate itself. Gate parameters
    stay float32 whatever the model runs in.
    """

    in_proj: Linear
    conv: Float[Tensor, "channels width"]
    forget: Linear
    a_log: Float[Tensor, " v_heads"]
    dt_bias: Float[Tensor, " outputs"]
    gate: Linear | None
    norm: Norm
    out: Linear

    @staticmethod
    def spec(
        hidden: int,
        heads: int,
        head_dim: int,
        width: int,
        *,
        full_rank_gate: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KimiDelta:
        """Spec of the parameters. `dtype` is that of convolution and norm where it is not the model's."""
        inner = heads * head_dim
        each, latent = (inner, heads), (head_dim, None)
        rows = (*(each,) * 3, (heads, heads), latent, each if full_rank_gate else latent)
        of_heads = Outputs((each,))
        return KimiDelta(
            in_proj=Linear.spec(hidden, *(count for count, _ in rows), shard=Outputs(rows)),
            conv=leaf((3 * inner, width), "conv", dtype, parts=(inner,) * 3, shard=Outputs((each,) * 3)),
            forget=Linear.spec(head_dim, inner, shard=of_heads),
            a_log=leaf((heads,), "log_uniform", torch.float32, shard=Outputs(((heads, heads),))),
            dt_bias=leaf((inner,), "inverse_softplus", torch.float32, shard=of_heads),
            gate=None if full_rank_gate else Linear.spec(head_dim, inner, shard=of_heads),
            norm=Norm.spec(head_dim, dtype),
            out=Linear.spec(inner, hidden, shard=Inputs(heads)),
        )


def kimi_delta(
    params: KimiDelta,
    x: Float[Tensor, "tokens hidden"],
    past: DeltaNetState | None,
    step: Step,
    *,
    eps: float,
    lower_bound: float | None = None,
) -> tuple[Float[Tensor, "tokens hidden"], DeltaNetState | None]:
    """The output, and the state after each row's last token (or before them, with trails).

    `lower_bound` is that of the log decay, if it has one (see `ops.channel_gates`).
    """
    heads, dim = params.a_log.shape[0], params.norm.weight.shape[0]

    def of_heads(channels: Tensor) -> Tensor:
        return channels.unflatten(-1, (heads, dim))

    # What follows reads the projection through these views.
    parts = 3 * heads * dim, heads, dim, heads * dim if params.gate is None else dim
    qkv, b, f, z = project(params.in_proj, x).split(parts, -1)
    window = None if past is None else past.window
    qkv, window, window_trail = ops.short_conv(qkv, params.conv, window, step.rows, keep_steps=step.keep_steps)
    q, k, v = map(of_heads, qkv.chunk(3, -1))
    q, k = ops.l2_norm(q, scale=dim**-0.5), ops.l2_norm(k)
    f, z = project(params.forget, f), z if params.gate is None else project(params.gate, z)
    decay, beta = ops.channel_gates(of_heads(f), b, params.a_log, of_heads(params.dt_bias), lower_bound=lower_bound)
    delta = None if past is None else past.delta
    y, delta, delta_trail = ops.gated_delta_rule(q, k, v, decay, beta, delta, step.rows, keep_steps=step.keep_steps)
    y = ops.gated_rms_norm_fp32(y, of_heads(z), exactly(params.norm, Norm).weight, eps=eps, activation="sigmoid")
    y = project(params.out, y.flatten(-2))
    if past is None:
        return y, None
    trail = DeltaTrails(window_trail, delta_trail) if step.keep_steps else None
    return y, replace(past, window=window, delta=delta, trail=trail)
