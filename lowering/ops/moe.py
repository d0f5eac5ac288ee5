"""Mixture of experts: routing, and the routed experts' feed-forward."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..op import op
from ..weights import PreparedWeight, plain
from .mlp import swiglu
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
        best = weights.unflatten(-1, (groups, -1)).amax(-1).topk(kept_groups, -1).indices
        kept = (best[..., None] == torch.arange(groups, device=best.device)).any(-2)
        weights = torch.where(kept.repeat_interleave(weights.shape[1] // groups, -1), weights, 0)
    weights, ids = weights.topk(top_k, -1)
    return (weights * scale).to(logits.dtype), ids


@op
def experts(
    x: Float[Tensor, "tokens hidden"],
    weights: Float[Tensor, "tokens choices"],
    ids: Int[Tensor, "tokens choices"],
    gate_up: Float[Tensor, "experts twice_inner hidden"] | PreparedWeight,
    down: Float[Tensor, "experts hidden inner"] | PreparedWeight,
) -> Float[Tensor, "tokens hidden"]:
    """Sum over each token's experts of weight * down(swiglu(gate_up x)), in the order of expert ids.

    The reference sends every token through every expert, with weight zero where it was not chosen.
    """
    out, gate_up, down = torch.zeros_like(x), plain(gate_up), plain(down)
    for expert in range(gate_up.shape[0]):
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        y = swiglu.body(x @ gate_up[expert].mT) @ down[expert].mT
        # A token that did not choose the expert must not meet its value: an overflow there would be 0 * inf.
        out = out + torch.where(weight != 0, y * weight, 0)
    return out
