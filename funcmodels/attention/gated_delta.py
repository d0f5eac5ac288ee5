"""Gated delta net: short convolution, gated delta rule, gated norm (the linear attention of Qwen3.5 and Flash-Next)."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops import DeltaStates, DeltaTrail, WindowTrail
from lowering.ops.norm import Activation
from params.sharding import Inputs, Outputs
from params.spec import leaf
from params.tree import exactly, tree

from ..blocks.linear import Linear, Norm, project
from ..state.space import Space
from ..state.state import Recurrent
from ..state.step import Step


@tree
class DeltaNet:
    """`in_proj` rows: queries, keys and values (these pass the convolution), output gate z, write b, decay a.

    Gate parameters stay float32 whatever the model runs in.
    """

    in_proj: Linear
    conv: Float[Tensor, "channels width"]
    a_log: Float[Tensor, " v_heads"]
    dt_bias: Float[Tensor, " v_heads"]
    norm: Norm
    out: Linear

    @staticmethod
    def spec(hidden: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, width: int) -> DeltaNet:
        """Spec of the parameters."""
        keys, values = k_heads * k_dim, v_heads * v_dim
        qkv = ((keys, k_heads), (keys, k_heads), (values, v_heads))
        each = (v_heads, v_heads)
        shard = Outputs((*qkv, (values, v_heads), each, each))
        return DeltaNet(
            in_proj=Linear.spec(hidden, 2 * keys + values, values, v_heads, v_heads, shard=shard),
            conv=leaf((2 * keys + values, width), "conv", shard=Outputs(qkv)),
            a_log=leaf((v_heads,), "log_uniform", torch.float32, shard=Outputs((each,))),
            dt_bias=leaf((v_heads,), "inverse_softplus", torch.float32, shard=Outputs((each,))),
            norm=Norm.spec(v_dim),
            out=Linear.spec(values, hidden, shard=Inputs(v_heads)),
        )


@tree
class DeltaTrails:
    """The trails of window and delta state while pending."""

    window: WindowTrail
    delta: DeltaTrail | DeltaStates


@tree
class DeltaNetState(Recurrent):
    """The last width - 1 inputs of the convolution (time-major), and the delta-rule matrices (value-major)."""

    window: Float[Tensor, "slots past channels"]
    delta: Float[Tensor, "slots v_heads v_dim k_dim"]
    trail: DeltaTrails | None = None

    def after(self, accepted: Int[Tensor, " rows"]) -> DeltaNetState:
        """The state after the first `accepted` pending tokens of each row."""
        assert self.trail is not None
        window = self.trail.window.at(accepted, self.window.shape[1]).to(self.window.dtype)
        return DeltaNetState(window, self.trail.delta.at(accepted))


def delta_net_state(space: Space, k_heads: int, v_heads: int, k_dim: int, v_dim: int, width: int) -> DeltaNetState:
    """Zeros for every row and the scratch slot."""
    slots, device, channels = space.rows + 1, space.device, 2 * k_heads * k_dim + v_heads * v_dim
    window = torch.zeros(slots, width - 1, channels, dtype=space.dtype, device=device)
    state = torch.zeros(slots, v_heads, v_dim, k_dim, dtype=space.recurrent_dtype, device=device)
    return DeltaNetState(window, state)


def delta_net(
    params: DeltaNet,
    x: Float[Tensor, "tokens hidden"],
    past: DeltaNetState | None,
    step: Step,
    *,
    k_heads: int,
    k_dim: int,
    eps: float,
    gate: Activation = "silu",
) -> tuple[Float[Tensor, "tokens hidden"], DeltaNetState | None]:
    """The output, gated by `gate` of z, and the state after each row's last token (or before them, with trails)."""
    v_heads, v_dim = params.a_log.shape[0], params.norm.weight.shape[0]
    keys, values = k_heads * k_dim, v_heads * v_dim

    qkv, z, b, a = project(params.in_proj, x).split_with_sizes((2 * keys + values, values, v_heads, v_heads), -1)
    window = None if past is None else past.window
    qkv, window, window_trail = ops.short_conv(qkv, params.conv, window, step.rows, keep_steps=step.keep_steps)
    q, k, v = qkv.split_with_sizes((keys, keys, values), -1)
    q = ops.l2_norm(q.unflatten(-1, (k_heads, k_dim)), scale=k_dim**-0.5)
    k = ops.l2_norm(k.unflatten(-1, (k_heads, k_dim)))
    v, z = (x.unflatten(-1, (v_heads, v_dim)) for x in (v, z))
    decay, beta = ops.delta_gates(a, b, params.a_log, params.dt_bias)
    delta = None if past is None else past.delta
    y, delta, delta_trail = ops.gated_delta_rule(q, k, v, decay, beta, delta, step.rows, keep_steps=step.keep_steps)
    y = ops.gated_rms_norm(y, z, exactly(params.norm, Norm).weight, eps=eps, activation=gate)
    y = project(params.out, y.flatten(-2))
    if past is None:
        return y, None
    trail = DeltaTrails(window_trail, delta_trail) if step.keep_steps else None
    return y, replace(past, window=window, delta=delta, trail=trail)
