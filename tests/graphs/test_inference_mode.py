"""What is made inside of `torch.inference_mode()` is good outside of it: parameters, states, captures, drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params as trees
from lowering.npu.attention import shared_mask
from tests.sharding.kinds import whole

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")]
LISTS = [[3, 5, 7], [4, 8]]


def moves(model: fm.Model, params: Any, step: Any, run: Any) -> Iterator[tuple[Any, ...]]:
    """What a serving loop would make of two rows, one call after the other."""
    draft = fm.draft(model, "mtp")
    state = model.init_state(2, 32, page_size=4, checked=step is None)
    forward = model.forward if step is None else step
    batch, drafted = fm.Batch.from_lists(LISTS, state), draft.init_state(state)
    yield batch, state, drafted
    out, state = forward(params, state, batch)
    yield (state,)
    drafted, carry = draft.extend(params, drafted, out, batch, fm.next_tokens(batch, torch.tensor([6, 2])))
    yield drafted, carry
    _, pending = forward(params, state, fm.Batch.from_lists([[1, 2], [3, 4]], state), keep_steps=True)
    yield (pending,)
    state = fm.fork(fm.commit(pending, [0, 0]))
    yield (state,)
    state, drafted = (fm.fork(fm.select(one, [1, 0]), [1, 0]) for one in (state, drafted))
    yield state, drafted
    greedy, most = fm.RowSampling.of([fm.Sampling()] * 2), torch.tensor([3, 3])
    for _ in range(3):
        verdict, state, drafted, carry = run(params, state, drafted, carry, greedy, torch.arange(2), most, steps=2)
        yield verdict.tokens.clone(), state, drafted, carry
    out, state = forward(params, fm.release(state, [1]), fm.Batch.from_lists([[1], [9, 8, 7]], state))
    yield out.logits.clone(), state


def driven(inside: list[bool], captured: bool) -> list[list[Tensor]]:
    """The tensors of each move, which are those of no mode; move i is made in inference mode where `inside[i]` says."""
    model, params = whole("qwen_dense")
    plainly: Any = fm.Round(model, fm.draft(model, "mtp")).run
    step = lowering.jit(model.forward, donate=("state",), backend="fx") if captured else None
    made = moves(
        model, params, step, lowering.jit(plainly, ("state", "drafted"), backend="fx") if captured else plainly
    )
    found = []
    for mode in inside:
        with torch.inference_mode(mode), torch.no_grad():
            value = next(made)
        leaves = [leaf for leaf in trees.leaves(value) if isinstance(leaf, Tensor)]
        assert all(
            not leaf.is_inference() for one in value if not isinstance(one, Tensor) for leaf in trees.leaves(one)
        )
        found.append([leaf.clone() for leaf in leaves])
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_calls_inside_and_outside_are_the_same_calls(captured: bool) -> None:
    count = 10
    expected = driven([False] * count, captured)
    for first in (True, False):
        for mine, right in zip(driven([first, not first] * (count // 2), captured), expected, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True))


@pytest.mark.parametrize("backend", [None, "fx"])
def test_generation_inside_and_outside(backend: str | None) -> None:
    model, params = whole("qwen_dense")
    options: dict[str, Any] = {"eos": (), "draft": "mtp", "backend": backend, "page_size": 4}
    right = [result.tokens for result in fm.generate(fm.build(model.config_json), params, LISTS, 5, **options)]
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert [result.tokens for result in fm.generate(model, params, LISTS, 5, **options)] == right
    with torch.inference_mode():
        events = fm.serve(
            model, params, [fm.Request(tuple(prompt), 5) for prompt in LISTS], rows=1, **{name: value for name, value in options.items() if name != "eos"}
        )
    assert sum(len(event.tokens) for event in events) == 10


def test_parameters_that_were_made_inside_train_outside() -> None:
    model, plain = whole("qwen_dense")
    with torch.inference_mode():
        made = [
            model.init_params(),
            fm.load("bundled")[1],
            trees.quantize(plain, "W8A8_DYNAMIC"),
            lowering.prepare(plain),
        ]
        batch, mask = fm.Batch.from_lists(LISTS), shared_mask(torch.device("cpu"))
        trees.dequantize(made[2], torch.float32)
    leaves = [leaf for tree in (*made, batch, mask) for leaf in trees.leaves(tree) if isinstance(leaf, Tensor)]
    assert not any(leaf.is_inference() for leaf in leaves)
    params = trees.map(lambda leaf: leaf.requires_grad_(), made[0])
    model.forward(params, None, batch)[0].logits.sum().backward()
    assert params.embed.weight.grad is not None


def test_a_capture_of_tensors_of_the_mode() -> None:
    """Results are tensors of their own, good everywhere, from arguments made on either side."""
    step = lowering.jit(lambda x, y: (x * y, x), backend="fx")
    with torch.inference_mode():
        inner = torch.arange(3.0)
        results = [step(inner, inner)]
    results += [step(torch.arange(3.0), inner), step(torch.arange(3.0), torch.arange(3.0))]
    for product, same in results:
        product += 1
        assert product.tolist() == [1, 2, 5] and same.tolist() == [0, 1, 2]
    assert step.captures == 1
