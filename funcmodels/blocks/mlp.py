"""Feed-forward blocks: SwiGLU, and the mixture of experts with a gated shared expert."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from params.spec import TensorSpec
from params.tree import tree, unchecked

from .linear import Linear, PrepareWeight, linear_spec


@tree
class Mlp:
    """SwiGLU: gate and up in one projection."""

    gate_up: Linear
    down: Linear


@tree
class Experts:
    """All routed experts, stacked."""

    gate_up: Float[Tensor, "experts twice_inner hidden"]
    down: Float[Tensor, "experts hidden inner"]

    def lower_weights(self, prepare: PrepareWeight) -> Experts:
        """With the weights in the layout of the kernel that will read them."""
        return unchecked(Experts, gate_up=prepare("experts", self.gate_up), down=prepare("experts", self.down))


@tree
class SharedExpertMoe:
    """Routed experts plus one expert for every token, scaled by a sigmoid gate."""

    router: Linear
    experts: Experts
    shared: Mlp
    shared_gate: Linear


@tree
class Routing:
    """What a router chose: expert ids and their weights."""

    ids: Int[Tensor, "*layers tokens choices"]
    weights: Float[Tensor, "*layers tokens choices"]


def mlp_spec(hidden: int, inner: int) -> Mlp:
    """Spec of a SwiGLU block."""
    return unchecked(Mlp, gate_up=linear_spec(hidden, inner, inner), down=linear_spec(inner, hidden))


def moe_spec(hidden: int, experts: int, inner: int, shared_inner: int) -> SharedExpertMoe:
    """Spec of a mixture of experts with a shared expert."""
    routed = unchecked(
        Experts, gate_up=TensorSpec((experts, 2 * inner, hidden)), down=TensorSpec((experts, hidden, inner))
    )
    return unchecked(
        SharedExpertMoe, router=linear_spec(hidden, experts), experts=routed, shared=mlp_spec(hidden, shared_inner),
        shared_gate=linear_spec(hidden, 1),
    )  # fmt: skip


def mlp(params: Mlp, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
    """down(silu(gate x) * up x)."""
    return ops.linear(ops.swiglu(ops.linear(x, params.gate_up.weight)), params.down.weight)


def moe(
    params: SharedExpertMoe, x: Float[Tensor, "tokens hidden"], *, top_k: int
) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
    """Weighted sum of the chosen experts, plus sigmoid(shared_gate x) times the shared expert; and the choice."""
    weights, ids = ops.route_softmax(ops.linear(x, params.router.weight), top_k=top_k)
    routed = ops.experts(x, weights, ids, params.experts.gate_up, params.experts.down)
    shared = torch.sigmoid(ops.linear(x, params.shared_gate.weight)) * mlp(params.shared, x)
    return routed + shared, Routing(ids, weights)
