"""Mixture of experts: routing, and the routed experts' feed-forward."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from params.shards import AddendWeight, SomeExperts
from params.weights import WeightValue

from ..op import op
from ..weights import PreparedWeight
from .collective import all_reduce
from .linear import linear
from .mlp import Caps, swiglu
from .quant import of_expert
from .widen import wide


@op
def route_softmax(
    logits: Float[Tensor, "tokens experts"], *, top_k: int
) -> tuple[Float[Tensor, "tokens choices"], Int[Tensor, "tokens choices"]]:
    """The `top_k` experts of each token and their weights (Qwen3.5-MoE).

    Weights are a softmax over all experts, in float32 or wider, renormalised over those chosen, rounded to the logits'
    dtype.
    """
    weights, ids = wide(logits).softmax(-1).topk(top_k, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


@op
def route_grouped(
    logits: Float[Tensor, "tokens experts"], *, top_k: int, groups: int, kept_groups: int, scale: float
) -> tuple[Float[Tensor, "tokens choices"], Int[Tensor, "tokens choices"]]:
    """The `top_k` experts of each token among those of its best groups, and their weights (DeepSeek-V2).

    Probabilities are a softmax over all experts, in float32 or wider. A group is as good as its most probable expert,
    and `kept_groups` of them stay. Weights are `scale` times the probabilities, not renormalised over those chosen.
    """
    weights = wide(logits).softmax(-1)
    if kept_groups < groups:
        weights = _in_best(weights, weights.unflatten(-1, (groups, -1)).amax(-1), kept_groups, 0.0)
    weights, ids = weights.topk(top_k, -1)
    return (weights * scale).to(logits.dtype), ids


@op
def route_sigmoid(
    logits: Float[Tensor, "tokens experts"],
    bias: Float[Tensor, " experts"],
    *,
    top_k: int,
    groups: int,
    kept_groups: int,
    scale: float,
    renormalise: bool,
) -> tuple[Float[Tensor, "tokens choices"], Int[Tensor, "tokens choices"]]:
    """The `top_k` experts of each token among those of its best groups, and their weights (Kimi, DeepSeek-V3).

    An expert's score is the sigmoid of its logit, in float32 or wider. Experts are chosen by score plus `bias`, a group
    being as good as its two best experts together; `kept_groups` stay. Weights are the scores of those chosen, without
    the bias, divided by their sum (plus 1e-20) where they are to be renormalised, times `scale`.
    """
    scores = wide(logits).sigmoid()
    choice = scores + wide(bias)
    if kept_groups < groups:
        best_two = choice.unflatten(-1, (groups, -1)).topk(2, -1).values.sum(-1)
        choice = _in_best(choice, best_two, kept_groups, -torch.inf)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return (weights * scale).to(logits.dtype), ids


def _in_best(values: Tensor, of_groups: Tensor, kept_groups: int, otherwise: float) -> Tensor:
    """`values` [tokens experts], and `otherwise` for experts outside the groups with the largest `of_groups`."""
    groups = of_groups.shape[1]
    best = of_groups.topk(kept_groups, -1).indices
    kept = (best[..., None] == torch.arange(groups, device=best.device)).any(-2)
    return torch.where(kept.repeat_interleave(values.shape[1] // groups, -1), values, otherwise)


@op
def experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens choices"],
    ids: Int[Tensor, "tokens choices"],
    gate_up: Float[Tensor, "experts twice_inner hidden"] | WeightValue | PreparedWeight,
    down: Float[Tensor, "experts hidden inner"] | WeightValue | PreparedWeight,
    *,
    caps: Caps | None = None,
) -> Float[Tensor, "tokens hidden"]:
    """Sum over each token's experts of weight * down(swiglu(gate_up x, caps)), in the order of expert ids.

    The reference sends every token through every expert, with weight zero where it was not chosen. Products with
    quantised weights are those of `linear`; what lies between the two has the dtype of x. Of experts that several ranks
    share (`params.shards`) the result is that of all, on every rank.
    """
    if isinstance(gate_up, AddendWeight) and isinstance(down, AddendWeight):
        return all_reduce.body(experts.body(x, weights, ids, gate_up.weight, down.weight, caps=caps), group=down.group)
    if isinstance(gate_up, SomeExperts) and isinstance(down, SomeExperts):
        own, at = own_choices(ids, down)
        y = experts.body(x, torch.where(own, weights, 0), at, gate_up.weight, down.weight, caps=caps)
        return all_reduce.body(y, group=down.group)
    gate_up, down = (w.plain() if isinstance(w, PreparedWeight) else w for w in (gate_up, down))
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        y = swiglu.body(linear.body(x, of_expert(gate_up, expert)), caps=caps)
        y = linear.body(y, of_expert(down, expert))
        # A token that did not choose the expert must not meet its value: an overflow there would be 0 * inf.
        out = out + torch.where(weight != 0, y * weight, 0)
    return out


def own_choices(
    ids: Int[Tensor, "tokens choices"], weight: SomeExperts
) -> tuple[Bool[Tensor, "tokens choices"], Int[Tensor, "tokens choices"]]:
    """Which choices fall on this rank's experts, and their places among these (0 for the others)."""
    at = ids - weight.first
    own = (at >= 0) & (at < weight.weight.shape[0])
    return own, torch.where(own, at, 0)
