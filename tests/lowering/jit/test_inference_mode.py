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
from tests.oracle.states import ROUNDING
from tests.sharding.kinds import KINDS, whole
from tests.tolerances import assert_close

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")]
LISTS = [[3, 5, 7], [4, 8]]
MOVES = 10


def moves(model: fm.Model, params: Any, step: Any, run: Any) -> Iterator[tuple[Any, ...]]:
    """What a serving loop would make of two rows, one call after the other."""
    draft = fm.draft(model, "mtp")
    state = model.init_state(2, 32, page_size=4)
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


def small() -> tuple[fm.Model, Any]:
    """A recurrent layer and a draft head."""
    model = fm.build(KINDS["qwen_dense"] | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]})
    return model, model.init_params()


def driven(inside: list[bool], captured: bool) -> list[list[Tensor]]:
    """The tensors of each move, those with `inside` made in the mode. No tree holds one of the mode."""
    model, params = small()
    step, run = None, fm.Round(model, fm.draft(model, "mtp")).run
    if captured:
        step = lowering.jit(model.forward, donate=("state",), backend="fx")
        run = lowering.jit(run, donate=("state", "drafted"), backend="fx")
    made, found = moves(model, params, step, run), []
    for mode in inside:
        with torch.inference_mode(mode), torch.no_grad():
            values = next(made)
        kept = [leaf for one in values if not isinstance(one, Tensor) for leaf in trees.leaves(one)]
        assert not any(leaf.is_inference() for leaf in kept)
        found.append([leaf.clone() for leaf in trees.leaves(values) if isinstance(leaf, Tensor)])
    return found


@pytest.mark.parametrize(("captured", "first"), [(False, True), (False, False), (True, True)])
def test_calls_inside_and_outside_are_the_same_calls(captured: bool, first: bool) -> None:
    expected = driven([False] * MOVES, False)
    for mine, right in zip(driven([first, not first] * (MOVES // 2), captured), expected, strict=True):
        for one, other in zip(mine, right, strict=True):
            assert_close(one, other, looser=5, reason=ROUNDING)


@pytest.mark.parametrize(("backend", "draft"), [(None, "mtp"), ("fx", None)])
def test_generation_inside_and_outside(backend: str | None, draft: str | None) -> None:
    model, params = small()
    options: dict[str, Any] = {"draft": draft, "backend": backend, "page_size": 4}
    right = [result.tokens for result in fm.generate(model, params, LISTS, 5, eos=())]
    engine = fm.Engine(model, params, **options)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert [result.tokens for result in engine.generate(LISTS, 5, eos=())] == right
    with torch.inference_mode():
        events = fm.serve(model, params, [fm.Request(tuple(prompt), 5) for prompt in LISTS], rows=1, **options)
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
    params = trees.tree_map(lambda leaf: leaf.requires_grad_(), made[0])
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
