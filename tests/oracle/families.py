"""What tests of all families share: nearness to transformers, losses and gradients, transforms, schedules of calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params
from lowering import ops
from tests.oracle.qwen3_5 import Pair, tokens
from tests.oracle.states import ROUNDING, Ids, advance, assert_rows_close, per_row, poison
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


def paired(theirs: Any, seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """A model of transformers with every parameter random, the same for the same seed, and ours with its values."""
    generator = torch.Generator().manual_seed(seed)
    for leaf in theirs.eval().requires_grad_(False).parameters():
        noise = torch.randn(leaf.shape, generator=generator)
        # Vectors stay about what they begin as (norms at zero or one), so that no sum grows from layer to layer.
        leaf.data = (leaf + 0.3 * noise if leaf.ndim == 1 else noise * 0.7 / leaf.shape[-1] ** 0.5).to(dtype)
    model = fm.build(theirs.config.to_dict())
    return Pair(theirs, model, params.from_checkpoint(theirs.state_dict(), model.param_spec(), model.family.names))


# Transforms


def check_stacked(one: Any, ids: Any) -> None:
    """Mapped over stacked parameters: the logits of each."""
    batch = fm.Batch.from_lists(ids)
    scaled = [params.tree_map(lambda leaf, s=s: leaf * s, one.params) for s in (1.0, 1.1, 0.9)]
    stacked = params.tree_map(lambda *leaves: torch.stack(leaves), *scaled)
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
    assert_same_gradients(each, params.tree_map(lambda *leaves: torch.stack(leaves), *alone), silent)


def check_one_leaf(one: Any, leaf: str, ids: list[int], empty: fm.State) -> None:
    """The gradient of one leaf through a state: pages that a backward needs, or that an older state has, stay."""
    tree = params.put(one.params, leaf, params.at(one.params, leaf).clone().requires_grad_())
    state, logits = empty, []
    for part in (ids[:4], ids[4:5], ids[5:]):
        out, state = one.model.forward(tree, state, fm.Batch.from_lists([part], state))
        logits.append(out.logits)
    total_loss([torch.cat(logits)], [ids]).backward()
    assert not any(pool.requires_grad for pool in empty.pools())
    expected = torch.func.grad(lambda weights: loss_of(one, weights, [ids]))(one.params)
    found = params.at(tree, leaf).grad
    assert_close(found, params.at(expected, leaf), looser=20, reason="a backward sums over tokens and layers")


# Calls


def watch_ops(monkeypatch: Any, **places: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """What the named ops read at a place of their arguments from now on, and what they give."""
    seen: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in places}

    def watched(name: str, place: int, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            for found, value in zip(seen[name], (args[place], result), strict=True):
                found.append(value)
            return result

        return call

    for name, place in places.items():
        monkeypatch.setattr(ops, name, watched(name, place, getattr(ops, name)))
    return seen


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


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Two trees have the same bits."""
    assert all(torch.equal(x, y) for x, y in zip(params.leaves(actual), params.leaves(expected), strict=True))


def check_drawn_drafts(one: Any, seed: int, page_size: int) -> None:
    """Rounds of random drafts, verified greedily: the tokens are those of one token at a time."""
    prompts, draw = tokens(one, 5, 8, seed=seed), random.Random(seed)
    results = fm.generate(one.model, one.params, prompts, 12, eos=(), page_size=page_size)
    expected = [result.tokens for result in results]
    _, state = advance(one, one.model.init_state(2, 40, page_size=page_size), [row[:-1] for row in prompts])
    emitted: list[list[int]] = [[], []]
    roots = [row[-1] for row in prompts]
    while min(len(row) for row in emitted) < 12:
        drafts = [
            [right if draw.random() < 0.6 else draw.randrange(one.config.vocab_size) for right in row[len(done) :][:3]]
            for row, done in zip(expected, emitted, strict=True)
        ]
        window = [[root, *draft] for root, draft in zip(roots, drafts, strict=True)]
        out, pending = advance(one, state, window, keep_steps=True)
        best = [rows.argmax(-1).tolist() for rows in per_row(out.logits, window)]
        counts = []
        for row, (draft, choice) in enumerate(zip(drafts, best, strict=True)):
            right = [x == y for x, y in zip(draft, choice, strict=False)]
            accepted = right.index(False) if False in right else len(right)
            emitted[row] += choice[: accepted + 1]
            roots[row] = choice[accepted]
            counts.append(accepted + 1)
        state = fm.commit(pending, counts)
    assert [row[:12] for row in emitted] == expected


def check_shared_prefix(one: Any, run: Callable[[list[int]], Any], empty: fm.State) -> None:
    """Rows forked in one pool hold the full pages of the prefix together, and go on apart. `run` is the oracle's.

    `empty` has one row, and pages of eight to ten tokens.
    """
    prefix, *tails = tokens(one, 21, 6, 1, 9)
    _, state = advance(one, empty, [prefix])
    before = fm.logical(state, 0)
    shared = fm.fork(state, [0, 0, 0])
    assert len({lease.pages[:2] for lease in shared.ledger.leases}) == 1
    out, after = advance(one, shared, tails)
    for row, tail in enumerate(tails):
        theirs = run(prefix + tail)
        close(per_row(out.logits, tails)[row], theirs.logits[len(prefix) :])
        close(fm.logical(after, row), theirs.entries)
    assert_bitwise(fm.logical(state, 0), before)
    kept = fm.select(after, [2, -1, 0])
    out, _ = advance(one, kept, [[3], [4, 5], [6]])
    close(out.logits[0], run([*prefix, *tails[2], 3]).logits[-1])
    close(out.logits[1:3], run([4, 5]).logits)
    fm.release(state)


def check_unread_places(
    one: Any, empty: fm.State, counts: Sequence[int], drawn: Callable[..., Any], **kernels: Any
) -> None:
    """What a forward of `counts` new tokens may not read holds NaN, and padding tokens are embedded as NaN.

    `empty` has four rows, whose pasts are 0, 8, 9 or 7, and longer than windows and selections: with pages of eight
    tokens they end below, at and above a page's end. `kernels` are asked for by name.
    """
    assert one.params.head is not None
    pasts, bad = (19 if counts[0] > 1 else 7, 0, 8, 9), one.config.vocab_size - 1
    ids = [[token % bad for token in row] for row in drawn(*(p + c for p, c in zip(pasts, counts, strict=True)))]
    broken = one.params.embed.weight.clone()
    broken[bad] = torch.nan
    spoiled = params.put(one.params, "embed.weight", broken)
    fed = [row[past:] for row, past in zip(ids, pasts, strict=True)]
    _, state = advance(one, empty, [row[:past] for row, past in zip(ids, pasts, strict=True)])
    clean, expected = advance(one, fm.fork(state), fed)
    dirty, count = poison(state), sum(counts)
    batch = fm.Batch.from_lists(fed, dirty).pad(count + 5)
    batch = replace(batch, tokens=batch.tokens.index_fill(0, torch.arange(count, count + 5), bad))
    with lowering.use(**kernels):
        out, after = one.model.forward(spoiled, dirty, batch)
    close((out.logits[:count], out.hidden[:count]), (clean.logits, clean.hidden))
    assert_rows_close(after, expected)
