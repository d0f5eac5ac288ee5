"""Cases of routed experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .case import Arguments, Case, Draw
from .weights import QUANTIZED


def mixture(
    tokens: int, hidden: int, experts: int, inner: int, choices: int, scheme: str | None = None, **caps: Any
) -> Callable[[Draw], Arguments]:
    """Arguments of `experts`; `scheme` is that of its weights."""

    def make(draw: Draw) -> Arguments:
        weights = draw.uniform(0.1, 1.0, tokens, choices).to(draw.dtype)
        both: list[Any] = [
            draw.normal(experts, 2 * inner, hidden) / hidden**0.5,
            draw.normal(experts, hidden, inner) / inner**0.5,
        ]
        if scheme is not None:
            both = [QUANTIZED[scheme](weight.float()) for weight in both]
        return (draw.normal(tokens, hidden), weights, draw.distinct(experts, tokens, choices), *both), caps

    return make


def cases() -> list[Case]:
    """Every case of this file."""

    def route(tokens: int, experts: int, top_k: int, **groups: Any) -> Callable[[Draw], Arguments]:
        # Distinct logits, so that a choice has one right answer in any dtype.
        def make(draw: Draw) -> Arguments:
            return ((draw.distinct(experts, tokens, experts) / 16).to(draw.dtype),), {"top_k": top_k, **groups}

        return make

    def grouped(*sizes: int, groups: int = 1, kept: int = 1, scale: float = 1.0) -> Callable[[Draw], Arguments]:
        return route(*sizes, groups=groups, kept_groups=kept, scale=scale)

    def sigmoid(
        tokens: int,
        experts: int,
        top_k: int,
        *,
        groups: int = 1,
        kept: int = 1,
        scale: float = 1.0,
        renorm: bool = True,
    ) -> Callable[[Draw], Arguments]:
        # Sums of score and bias are steps apart: the bias orders blocks of experts, or groups, the scores those inside.
        # The first expert of a group is lifted, so that the group with the best one is not that with the two best.
        def make(draw: Draw) -> Arguments:
            block = experts // groups if groups > 1 else 4
            step, blocks = 0.4 / (block - 1), experts // block
            order = draw.distinct(blocks, 1, blocks).T
            places, *inside = (1 + draw.distinct(block - 1, blocks, block - 1) for _ in range(1 + tokens))
            bias = block * order + torch.nn.functional.pad(places, (1, 0)).float()
            bias[:, :1] += 1.37 * block * (blocks - order) * (groups > 1)
            scores = 0.5 + step * torch.nn.functional.pad(torch.stack(inside) - places, (1, 0)).flatten(1)
            sizes = {"top_k": top_k, "groups": groups, "kept_groups": kept, "scale": scale, "renormalise": renorm}
            return (scores.logit().to(draw.dtype), (step * bias).flatten().to(draw.dtype)), sizes

        return make

    return [
        Case("route_softmax", "tiny", route(6, 8, 2), 8),
        Case("route_softmax", "wide", route(5, 128, 8), 128),
        Case("route_softmax", "all", route(3, 4, 4), 4),
        Case("route_grouped", "lite", grouped(5, 64, 6), 64),
        Case("route_grouped", "v2", grouped(7, 160, 6, groups=8, kept=3, scale=16.0), 160),
        Case("route_grouped", "narrow", grouped(3, 6, 2, groups=3, kept=1, scale=0.5), 6),
        Case("route_sigmoid", "no_groups", sigmoid(5, 64, 8, scale=2.446), 64),
        Case("route_sigmoid", "groups", sigmoid(7, 40, 6, groups=8, kept=3, scale=2.5), 40),
        Case("route_sigmoid", "narrow", sigmoid(3, 6, 2, groups=3, kept=2), 6),
        Case("route_sigmoid", "as_they_are", sigmoid(4, 9, 3, groups=3, kept=1, renorm=False), 9),
        Case("experts", "tiny", mixture(6, 32, 8, 16, 2), 32),
        Case("experts", "one_token", mixture(1, 24, 5, 7, 1), 24),
        Case("experts", "caps", mixture(6, 32, 8, 16, 2, caps=(0.5, 0.25)), 32),
        Case("experts", "gate_cap", mixture(2, 24, 7, 9, 3, caps=(0.5, None)), 24),
        Case("experts", "empty", mixture(0, 24, 5, 7, 2), 24),
        Case("experts", "many_choices", mixture(512, 512, 12, 8, 4), 512),
        Case("experts", "prompt_512", mixture(512, 256, 16, 64, 2), 256, bench=True),
    ]
