"""Routing, experts, and the small activations, in float64."""

from __future__ import annotations

import pytest
import torch

import lowering
from lowering import ops
from tests.cases import Draw
from tests.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_route_softmax(dtype: torch.dtype) -> None:
    """The largest logits win; weights are softmax over all, renormalised over those chosen, in the logits' dtype."""
    logits = (Draw(dtype).distinct(16, 5, 16) / 8).to(dtype)
    weights, ids = ops.route_softmax(logits, top_k=3)
    assert weights.dtype == dtype
    wide = logits.double().softmax(-1)
    for token in range(5):
        best = sorted(range(16), key=lambda e: -float(logits[token, e]))[:3]
        assert ids[token].tolist() == best
        assert_close(weights[token], (wide[token, best] / wide[token, best].sum()).to(dtype), length=16)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 3), (6, 1)])
def test_route_grouped(groups: int, kept: int) -> None:
    """The groups with the largest probabilities stay; weights are those of the softmax over all, scaled alone."""
    logits = (Draw(torch.float32).distinct(12, 7, 12) / 4).float()
    weights, ids = ops.route_grouped(logits, top_k=2, groups=groups, kept_groups=kept, scale=1.5)
    wide, each = logits.double().softmax(-1), 12 // groups
    for token in range(7):
        best = sorted(range(groups), key=lambda g: -float(logits[token, g * each : (g + 1) * each].max()))[:kept]
        allowed = [e for e in range(12) if e // each in best]
        chosen = sorted(allowed, key=lambda e: -float(logits[token, e]))[:2]
        assert ids[token].tolist() == chosen
        assert_close(weights[token], (1.5 * wide[token, chosen]).float(), length=12)


def test_route_softmax_of_distant_logits() -> None:
    """Logits far apart stay finite and sum to one."""
    logits = torch.tensor([[-18.0, 3000, -4000, 2999.5], [-1e4, -1e4 - 1, -3e4, -2e4]])
    weights, ids = ops.route_softmax(logits, top_k=2)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert_close(weights.sum(-1), torch.ones(2))


@pytest.mark.parametrize("kernel", [kernel.name for kernel in ops.experts.serving("cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_experts(kernel: str, dtype: torch.dtype) -> None:
    """Each token visits its own experts; an expert that nobody chose may hold NaN, one that overflows stays apart."""
    draw = Draw(dtype)
    tokens, hidden, inner, count = 7, 10, 6, 15
    x, weights, ids = (
        draw.normal(tokens, hidden),
        draw.uniform(0.1, 1, tokens, 2).to(dtype),
        draw.distinct(14, tokens, 2),
    )
    gate_up, down = draw.normal(count, 2 * inner, hidden) / 3, draw.normal(count, hidden, inner) / 3
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for choice in range(2):
            e = int(ids[token, choice])
            both = gate_up[e].double() @ x[token].double()
            gate, up = both[:inner], both[inner:]
            expected[token] += weights[token, choice].double() * (down[e].double() @ (gate / (1 + (-gate).exp()) * up))
    with lowering.use(experts=kernel):
        assert_close(ops.experts(x, weights, ids, gate_up, down), expected, length=hidden, dtype=dtype)
        gate_up[14] = torch.inf
        assert_close(ops.experts(x, weights, ids, gate_up, down), expected, length=hidden, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_swiglu(dtype: torch.dtype) -> None:
    """Gate is the first half."""
    x = Draw(dtype).normal(3, 2, 14) * 4
    gate, up = x.double()[..., :7], x.double()[..., 7:]
    assert_close(ops.swiglu(x), gate / (1 + (-gate).exp()) * up, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_linear_and_embedding(dtype: torch.dtype) -> None:
    """y = x W^T over any leading axes; rows of a table."""
    draw = Draw(dtype)
    x, weight = draw.normal(2, 3, 20), draw.normal(5, 20)
    assert_close(ops.linear(x, weight), x.double() @ weight.double().T, length=20, dtype=dtype)
    assert torch.equal(ops.embedding(torch.tensor([4, 0, 4]), weight), weight[[4, 0, 4]])
