"""Feed-forward blocks: SwiGLU, and mixtures of experts whose shared expert has a gate (Qwen3.5) or none (DeepSeek)."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops.mlp import Caps
from lowering.weights import PreparedWeight
from params.quant.values import QuantizedWeight
from params.sharding import Inputs, OfExperts, Outputs
from params.spec import leaf
from params.tree import exactly, put, tree

from .linear import Linear, PrepareWeight, project


@tree
class Mlp:
    """SwiGLU: gate and up in one projection."""

    gate_up: Linear
    down: Linear

    @staticmethod
    def spec(hidden: int, inner: int) -> Mlp:
        """Spec of a SwiGLU block."""
        gate_up = Linear.spec(hidden, inner, inner, shard=Outputs(((inner, inner),) * 2))
        return Mlp(gate_up, Linear.spec(inner, hidden, shard=Inputs(inner)))


@tree
class Experts:
    """All routed experts, stacked."""

    projections: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    gate_up: Float[Tensor, "experts twice_inner hidden"] | QuantizedWeight | PreparedWeight
    down: Float[Tensor, "experts hidden inner"] | QuantizedWeight | PreparedWeight

    @staticmethod
    def spec(hidden: int, experts: int, inner: int) -> Experts:
        """Spec of routed experts, stacked."""
        gate_up = leaf((experts, 2 * inner, hidden), shard=OfExperts(Outputs(((inner, inner),) * 2)))
        return Experts(gate_up, leaf((experts, hidden, inner), shard=OfExperts(Inputs(inner))))

    def lower_weights(self, prepare: PrepareWeight) -> Experts:
        """With the weights in the layout of the kernel that will read them."""
        prepared = put(self, "gate_up", prepare("experts", self.gate_up))
        return put(prepared, "down", prepare("experts", self.down))


@tree
class SharedExpertMoe:
    """Routed experts plus one expert for every token, scaled by a sigmoid gate."""

    router: Linear
    experts: Experts
    shared: Mlp
    shared_gate: Linear

    @staticmethod
    def spec(hidden: int, experts: int, inner: int, shared_inner: int) -> SharedExpertMoe:
        """Spec of `experts` routed experts and the shared one, of these widths."""
        return SharedExpertMoe(
            router=Linear.spec(hidden, experts),
            experts=Experts.spec(hidden, experts, inner),
            shared=Mlp.spec(hidden, shared_inner),
            shared_gate=Linear.spec(hidden, 1),
        )


@tree
class GroupedMoe:
    """Routed experts, plus one for every token. The router is float32 whatever the model runs in, or quantised."""

    router: Linear
    experts: Experts
    shared: Mlp

    @staticmethod
    def spec(hidden: int, experts: int, inner: int, shared_inner: int) -> GroupedMoe:
        """Spec of `experts` routed experts and the shared one, of these widths."""
        router = Linear(leaf((experts, hidden), dtype=torch.float32))
        return GroupedMoe(router, Experts.spec(hidden, experts, inner), Mlp.spec(hidden, shared_inner))


@tree
class BiasedRouter:
    """What scores experts, and what is added to the scores when they choose. Float32, or the weight quantised."""

    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Float[Tensor, "experts hidden"] | QuantizedWeight | PreparedWeight
    bias: Float[Tensor, " experts"]

    @staticmethod
    def spec(hidden: int, experts: int) -> BiasedRouter:
        """Spec of a router among `experts`."""
        weight = leaf((experts, hidden), dtype=torch.float32)
        return BiasedRouter(weight, leaf((experts,), "zeros", torch.float32))


@tree
class Routing:
    """What a router chose: expert ids and their weights."""

    ids: Int[Tensor, "*layers tokens choices"]
    weights: Float[Tensor, "*layers tokens choices"]


def mlp(params: Mlp, x: Float[Tensor, "tokens hidden"], *, caps: Caps | None = None) -> Float[Tensor, "tokens hidden"]:
    """down(silu(gate x) * up x), or with `caps` of `ops.swiglu` down(SiTU)."""
    return project(params.down, ops.swiglu(project(params.gate_up, x), caps=caps))


def moe(
    params: SharedExpertMoe, x: Float[Tensor, "tokens hidden"], *, top_k: int
) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
    """Weighted sum of the chosen experts, plus sigmoid(shared_gate x) times the shared expert; and the choice."""
    weights, ids = ops.route_softmax(project(params.router, x), top_k=top_k)
    routed = ops.experts(x, weights, ids, params.experts.gate_up, params.experts.down)
    shared = torch.sigmoid(project(params.shared_gate, x)) * mlp(params.shared, x)
    return routed + shared, Routing(ids, weights)


def grouped_moe(
    params: GroupedMoe, x: Float[Tensor, "tokens hidden"], *, top_k: int, groups: int, kept_groups: int, scale: float
) -> tuple[Float[Tensor, "tokens hidden"], Routing]:
    """Weighted sum of the experts chosen by `route_grouped`, plus the shared expert; and the choice."""
    logits = router_logits(x, exactly(params.router, Linear).weight)
    weights, ids = ops.route_grouped(logits, top_k=top_k, groups=groups, kept_groups=kept_groups, scale=scale)
    routed = ops.experts(x, weights.to(x.dtype), ids, params.experts.gate_up, params.experts.down)
    return routed + mlp(params.shared, x), Routing(ids, weights)


def router_logits(
    x: Float[Tensor, "tokens hidden"], weight: Float[Tensor, "experts hidden"] | QuantizedWeight | PreparedWeight
) -> Float[Tensor, "tokens experts"]:
    """Scores of experts in the router's own dtype; a quantised router takes `x` as it is."""
    return ops.linear(x.to(weight.dtype) if isinstance(weight, Tensor) else x, weight)
