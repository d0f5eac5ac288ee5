"""What tests of all families share: nearness to transformers, losses and gradients, transforms, schedules of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.states import ROUNDING, Ids, per_row
from tests.tolerances import assert_close


def close(actual: Any, expected: Any) -> None:
    """The results of two forwards agree."""
    assert_close(actual, expected, looser=5, reason=ROUNDING)


def together(one: Any, state: fm.State | None, ids: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A forward of all rows in one batch, whose ids are checked; without a state too."""
    batch = fm.Batch.from_lists(ids, state, vocab=one.config.vocab_size)
    return one.model.forward(one.params, state, batch, **kwargs)


# Beside transformers


def distance(value: Tensor, truth: Tensor) -> float:
    """Root mean square distance, relative."""
    assert value.shape == truth.shape
    return float((value.float() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def assert_as_near(ours: Mapping[str, Tensor], theirs: Any, truth: Any) -> None:
    """Each of our values is at most twice as far from the truth as transformers', plus 0.5%."""
    for name, value in ours.items():
        if value.is_floating_point():
            mine, other = (distance(x, _remembered(truth, name)) for x in (value, _remembered(theirs, name)))
            assert mine <= 2 * other + 5e-3, f"{name}: {mine:.2g} from the truth, transformers {other:.2g}"


def _remembered(run: Any, name: str) -> Tensor:
    """What a run of transformers remembers under our name: an entry of the state, a layer, logits, or hidden."""
    if name in run.entries:
        return run.entries[name]
    return run.layers[int(name.partition(".")[2])] if name.startswith("layers.") else getattr(run, name)


def total_loss(logits: Sequence[Tensor], ids: Ids) -> Tensor:
    """Cross entropy of every row's next tokens, summed."""
    each = (
        torch.nn.functional.cross_entropy(part[:-1], torch.tensor(row[1:]), reduction="sum")
        for part, row in zip(logits, ids, strict=True)
    )
    return torch.stack(list(each)).sum()


def loss_of(one: Any, tree: Any, ids: Any) -> Tensor:
    """`total_loss` of our model without a state."""
    out, _ = one.model.forward(tree, None, fm.Batch.from_lists(ids))
    return total_loss(per_row(out.logits, ids), ids)


def their_gradients(one: Any, ids: Ids) -> tuple[Tensor, dict[str, Any]]:
    """`total_loss` of transformers, and its gradients by the parameters' names there."""
    one.theirs.requires_grad_(True)
    try:
        loss = total_loss([one.theirs(input_ids=torch.tensor([row])).logits[0] for row in ids], ids)
        loss.backward()
        return loss.detach(), {name: leaf.grad for name, leaf in one.theirs.named_parameters()}
    finally:
        one.theirs.zero_grad()
        one.theirs.requires_grad_(False)


def assert_same_gradients(found: Any, expected: Any, silent: Callable[[str], bool] = lambda path: False) -> None:
    """Of every leaf, none of which is zero but those that are `silent`."""
    for (path, grad), (_, right) in zip(params.items(found), params.items(expected), strict=True):
        assert silent(path) or right.abs().max() > 0, path
        assert_close(grad, right, looser=20, reason="a backward in another order")


# Transforms


def check_stacked(one: Any, ids: Any) -> None:
    """Mapped over stacked parameters: the logits of each."""
    batch = fm.Batch.from_lists(ids)
    scaled = [params.map(lambda leaf, s=s: leaf * s, one.params) for s in (1.0, 1.1, 0.9)]
    stacked = params.map(lambda *leaves: torch.stack(leaves), *scaled)
    logits = torch.func.vmap(lambda tree: one.model.forward(tree, None, batch)[0].logits)(stacked)
    close(logits, torch.stack([one.model.forward(tree, None, batch)[0].logits for tree in scaled]))


def check_per_example(one: Any, examples: Tensor, silent: Callable[[str], bool] = lambda path: False) -> None:
    """Gradients example by example, `examples` [examples tokens], mapped and one at a time."""
    length = examples.shape[1]
    start = torch.tensor([0, length], dtype=torch.int32)

    def loss(tree: Any, example: Tensor) -> Tensor:
        batch = fm.Batch(example, start, max_query=length, uniform=True, counts=(length,))
        out, _ = one.model.forward(tree, None, batch)
        return torch.nn.functional.cross_entropy(out.logits[:-1], example[1:])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(one.params, examples)
    alone = [torch.func.grad(loss)(one.params, example) for example in examples]
    assert_same_gradients(each, params.map(lambda *leaves: torch.stack(leaves), *alone), silent)


def check_one_leaf(one: Any, leaf: str, ids: list[int]) -> None:
    """The gradient of one leaf through a state: pages that a backward needs, or that an older state has, stay."""
    tree = params.put(one.params, leaf, params.at(one.params, leaf).clone().requires_grad_())
    empty = state = one.model.init_state(1, 16, page_size=4)
    logits = []
    for part in (ids[:4], ids[4:5], ids[5:]):
        out, state = one.model.forward(tree, state, fm.Batch.from_lists([part], state))
        logits.append(out.logits)
    total_loss([torch.cat(logits)], [ids]).backward()
    assert not any(pool.requires_grad for pool in empty.pools())
    expected = torch.func.grad(lambda weights: loss_of(one, weights, [ids]))(one.params)
    found = params.at(tree, leaf).grad
    assert_close(found, params.at(expected, leaf), looser=20, reason="a backward sums over tokens and layers")


# Calls


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths of up to four rows, and what each gets in each call: prompts, chunks, single tokens, nothing."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    left, schedule = list(lengths), []
    while any(left):
        counts = [draw(st.integers(0, most)) for most in left]
        if any(counts):
            schedule.append(counts)
            left = [most - count for most, count in zip(left, counts, strict=True)]
        else:
            row = next(row for row, most in enumerate(left) if most)
            schedule.append([int(index == row) for index in range(len(left))])
            left[row] -= 1
    return lengths, schedule
