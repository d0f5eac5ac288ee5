"""Routing, experts, and the small activations, in float64."""

from __future__ import annotations

import pytest
import torch

import lowering
from lowering import ops
from lowering.portable import moe
from tests.cases import Draw, cases_of
from tests.lowering.ops.largest import largest
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


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 3), (6, 1)])
def test_route_sigmoid(groups: int, kept: int, renormalise: bool) -> None:
    """Chosen by score plus bias from the groups whose two best add up to most; weighed by the score alone."""
    draw = Draw(torch.float32)
    logits, bias = (draw.distinct(12, 7, 12) / 4 - 1.5).float(), draw.uniform(-1.0, 1.0, 12)
    sizes = {"top_k": 2, "groups": groups, "kept_groups": kept, "scale": 2.5}
    weights, ids = ops.route_sigmoid(logits, bias, **sizes, renormalise=renormalise)
    scores, each = 1 / (1 + (-logits.double()).exp()), 12 // groups
    for token in range(7):
        choice = (scores[token] + bias.double()).tolist()
        sums = [sum(sorted(choice[g * each : (g + 1) * each])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g, sums=sums: -sums[g])[:kept]
        allowed = [e for e in range(12) if e // each in best]
        chosen = sorted(allowed, key=lambda e, choice=choice: -choice[e])[:2]
        assert ids[token].tolist() == chosen
        wanted = scores[token, chosen] / (scores[token, chosen].sum() if renormalise else 1)
        assert_close(weights[token], (2.5 * wanted).float(), length=12)


def test_route_sigmoid_keeps_a_fine_bias_and_weighs_by_faint_scores() -> None:
    """Steps of 0.004 at 7 are below bfloat16; scores of 1e-8 under a bias of 12 still tell the chosen apart."""
    sizes = {"top_k": 2, "groups": 1, "kept_groups": 1, "scale": 2.0, "renormalise": True}
    bias = 7 + 0.004 * torch.arange(8)
    _, ids = ops.route_sigmoid(torch.full((1, 8), -18.0), bias, **sizes)
    assert ids.tolist() == [[7, 6]]
    logits = -18 + torch.arange(8)[None] / 4
    weights, ids = ops.route_sigmoid(logits, torch.full((8,), 12.0) + 0.1 * torch.arange(8), **sizes)
    expected = logits.double()[0, ids[0]].exp()
    assert ids.tolist() == [[7, 6]]
    assert_close(weights[0], (2 * expected / expected.sum()).float(), length=64)


def test_route_sigmoid_is_the_router_of_transformers() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

    for groups, kept, renormalise in ((1, 1, True), (4, 2, True), (4, 3, False)):
        theirs = KimiLinearTopkRouter(
            KimiLinearConfig(
                hidden_size=9, num_local_experts=16, num_experts_per_tok=5, n_group=groups, topk_group=kept,
                norm_topk_prob=renormalise,
            )
        ).requires_grad_(False)  # fmt: skip
        draw = Draw(torch.float32, groups)
        theirs.weight.copy_(draw.normal(16, 9))
        theirs.e_score_correction_bias.copy_(draw.normal(16))
        logits, weights, ids = theirs(draw.normal(30, 9))
        sizes = {"top_k": 5, "groups": groups, "kept_groups": kept, "scale": 2.446, "renormalise": renormalise}
        ours, chosen = ops.route_sigmoid(logits, theirs.e_score_correction_bias, **sizes)
        order, other = ids.sort(-1), chosen.sort(-1)
        assert torch.equal(order.values, other.values)
        assert_close(ours.gather(-1, other.indices), weights.gather(-1, order.indices), length=16)


def test_route_softmax_of_distant_logits() -> None:
    """Logits far apart stay finite and sum to one."""
    logits = torch.tensor([[-18.0, 3000, -4000, 2999.5], [-1e4, -1e4 - 1, -3e4, -2e4]])
    weights, ids = ops.route_softmax(logits, top_k=2)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert_close(weights.sum(-1), torch.ones(2))


KERNELS = [kernel.name for kernel in ops.experts.serving("cpu") if kernel.reads(torch.empty(0))]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_experts(kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token visits its own experts; an expert that nobody chose may hold NaN, one that overflows stays apart."""
    monkeypatch.setattr(moe, "LARGE", 0)
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


def test_results_of_all_choices_never_lie_side_by_side() -> None:
    """For a prompt: what grows with it is what is returned, however many experts a token has."""
    (case,) = [case for case in cases_of("experts") if case.name == "many_choices"]
    args, kwargs = case.arguments()
    choice = ops.experts.explain(*args)
    kernels, prompt = ops.experts.kernels, args[0].numel()
    assert choice.kernel.name == "torch_added"
    assert largest(choice.kernel.run, *args, **kwargs) <= prompt
    assert largest(kernels["torch_grouped"].run, *args, **kwargs) == 4 * prompt
    assert torch.equal(choice.kernel.run(*args, **kwargs), kernels["torch_grouped"].run(*args, **kwargs))


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
