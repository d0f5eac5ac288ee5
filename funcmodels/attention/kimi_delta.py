"""Kimi delta attention: short convolution, delta rule with a decay a key channel, gated norm (Kimi Linear)."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.sharding import Inputs, Outputs
from params.spec import TensorSpec
from params.tree import tree, unchecked

from ..blocks.linear import Linear, Norm, linear_spec, norm_spec
from ..step import Step
from .gated_delta import DeltaNetState, DeltaTrails


@tree
class KimiDelta:
    """`in_proj` rows: queries, keys and values (these pass the convolution), write b, then the latents of two gates.

    `forget` and `gate` make of them a log decay a channel of keys, before its activation, and a gate a channel of
    values. Both have one width.
    """

    in_proj: Linear
    conv: Float[Tensor, "channels width"]
    forget: Linear
    a_log: Float[Tensor, " v_heads"]
    dt_bias: Float[Tensor, " outputs"]
    gate: Linear
    norm: Norm
    out: Linear


def kimi_delta_spec(hidden: int, heads: int, head_dim: int, width: int) -> KimiDelta:
    """Spec of the parameters. Gate parameters stay float32 whatever the model runs in."""
    inner = heads * head_dim
    qkv, each = ((inner, heads),) * 3, Outputs(((inner, heads),))
    low_rank = ((head_dim, None),) * 2
    return unchecked(
        KimiDelta,
        in_proj=linear_spec(
            hidden, inner, inner, inner, heads, head_dim, head_dim, shard=Outputs((*qkv, (heads, heads), *low_rank))
        ),
        conv=TensorSpec((3 * inner, width), "conv", parts=(inner,) * 3, shard=Outputs(qkv)),
        forget=linear_spec(head_dim, inner, shard=each),
        a_log=TensorSpec((heads,), "log_uniform", torch.float32, shard=Outputs(((heads, heads),))),
        dt_bias=TensorSpec((inner,), "inverse_softplus", torch.float32, shard=each),
        gate=linear_spec(head_dim, inner, shard=each),
        norm=norm_spec(head_dim, "ones"),
        out=linear_spec(inner, hidden, shard=Inputs(heads)),
    )


def kimi_delta(
    params: KimiDelta, x: Float[Tensor, "tokens hidden"], past: DeltaNetState | None, step: Step, *, eps: float
) -> tuple[Float[Tensor, "tokens hidden"], DeltaNetState | None]:
    """The output, and the state after each row's last token (or before them, with trails)."""
    heads, dim = params.a_log.shape[0], params.norm.weight.shape[0]
    rows = {"max_query": step.max_query, "uniform": step.uniform, "keep_steps": step.keep_steps}

    def of_heads(channels: Tensor) -> Tensor:
        return channels.unflatten(-1, (heads, dim))

    # What follows reads the projection through these views.
    qkv, b, f, z = ops.linear(x, params.in_proj.weight).split((3 * heads * dim, heads, dim, dim), -1)
    window = None if past is None else past.window
    qkv, window, window_trail = ops.short_conv(qkv, params.conv, window, step.query_start, **rows)
    q, k, v = map(of_heads, qkv.chunk(3, -1))
    q, k = ops.l2_norm(q, scale=dim**-0.5), ops.l2_norm(k)
    f, z = (of_heads(ops.linear(latent, made.weight)) for latent, made in ((f, params.forget), (z, params.gate)))
    decay, beta = ops.channel_gates(f, b, params.a_log, params.dt_bias.unflatten(0, (heads, dim)))
    delta = None if past is None else past.delta
    y, delta, delta_trail = ops.gated_delta_rule(q, k, v, decay, beta, delta, step.query_start, **rows)
    y = ops.gated_rms_norm_fp32(y, z, params.norm.weight, eps=eps, activation="sigmoid")
    y = ops.linear(y.flatten(-2), params.out.weight)
    if past is None:
        return y, None
    trail = DeltaTrails(window_trail, delta_trail) if step.keep_steps else None
    return y, replace(past, window=window, delta=delta, trail=trail)
