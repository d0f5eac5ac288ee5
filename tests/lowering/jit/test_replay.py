"""Captured calls equal plain ones bit for bit, in any order of prefill, decoding, verifying, forking and selecting."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from lowering.jit import jitted, program
from tests.lowering.jit.twins import Twins, plain_kernels
from tests.oracle.mtp import small
from tests.oracle.qwen3_5 import Pair
from tests.oracle.states import advance

ROWS = 3


def bundled() -> Pair:
    """The trained model, which nothing here compares with transformers."""
    model, params = fm.load("bundled", dtype=torch.float32)
    return Pair(None, model, params)


POOLS = ((1, None, False), (2, 30, True), (3, 30, False))


@pytest.mark.parametrize(
    ("kind", "seed", "pages", "checked"),
    [
        *(("dense", *pool) for pool in POOLS),
        *(("moe", *pool) for pool in POOLS),
        pytest.param("bundled", 4, 30, False, marks=pytest.mark.plain),
    ],
)
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_replays_equal_plain_calls(kind: str, seed: int, pages: int | None, checked: bool) -> None:
    one = bundled() if kind == "bundled" else small(kind)
    twins = Twins(one, seed, rows=ROWS, max_len=40, page_size=3, pages=pages, checked=checked)
    draw = twins.draw
    moves = ["prefill", "decode", "verify", "windows", "fork", "select", "release", "poison", *["decode", "verify"] * 3]
    draw.shuffle(moves)
    twins.forward([4, 2, 3])
    for move in moves:
        if move == "prefill":
            twins.forward([draw.randint(0, 4) for _ in range(ROWS - 1)] + [1], logits="last")
        elif move == "decode":
            twins.forward([1] * ROWS)
        elif move == "verify":
            twins.verify([3] * ROWS)
        elif move == "windows":
            twins.verify([draw.randint(1, 4) for _ in range(ROWS)])
        elif move == "fork":
            twins.both(fm.fork, [draw.randrange(ROWS) for _ in range(ROWS)])
        elif move == "select":
            twins.both(fm.select, draw.sample(range(ROWS), ROWS))
        elif move == "release":
            twins.both(fm.release, [draw.randrange(ROWS)])
        else:
            twins.poison()
        twins.check()
    # Nine moves on three rows, and four captures: prompts, tokens, and windows of either kind; one a rank of `commit`.
    assert len(twins.step._graphs) <= 6


def test_a_decode_loop_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counted(*args: Any) -> Any:
        traced.append(args)
        return trace(*args)

    trace = program.trace
    monkeypatch.setattr(jitted, "trace", counted)
    twins = Twins(small("dense"), 5, rows=2, max_len=40, page_size=3)
    twins.forward([5, 3])
    buffers = [leaf.data_ptr() for leaf in twins.captured.pools()]
    for _ in range(20):
        twins.forward([1, 1])
    twins.check()
    assert len(traced) == 2 and twins.step.captures == 2
    assert [leaf.data_ptr() for leaf in twins.captured.pools()] == buffers


@torch.no_grad()
def test_a_donated_state_is_updated_in_place() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    state = one.model.init_state(2, 12, page_size=4)
    before = [(path, leaf) for path, leaf in params_items(state)]
    _, after = step(one.params, state, fm.Batch.from_lists([[1, 2], [3, 4]], state))
    for (path, old), (_, new) in zip(before, params_items(after), strict=True):
        assert old.data_ptr() == new.data_ptr(), path


def params_items(value: Any) -> list[tuple[str, Tensor]]:
    from params import tree

    return list(tree.items(value))


@torch.no_grad()
def test_outputs_survive_later_replays() -> None:
    one = small("moe")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    state = one.model.init_state(2, 12, page_size=4)
    kept = []
    for token in range(4):
        batch = fm.Batch.from_lists([[token], [token + 1]], state)
        out, state = step(one.params, state, batch, outputs=("router", "layers.1"))
        values = params_items(out)
        kept.append((values, [leaf.clone() for _, leaf in values]))
        padding = [torch.empty(2**20).fill_(torch.nan) for _ in range(4)]
        del padding
    for values, copies in kept:
        for (path, leaf), then in zip(values, copies, strict=True):
            assert torch.equal(leaf, then), path


@torch.no_grad()
def test_values_asked_for_by_name_are_cut_to_the_tokens() -> None:
    one = small("moe")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    state, plain = (one.model.init_state(2, 12, page_size=4) for _ in range(2))
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]], state)
    names = ("router", "layers.1", "layers.0.router")
    out, _ = step(one.params, state, batch, outputs=names)
    right, _ = advance(one, plain, [[1, 2, 3], [4, 5]], outputs=names)
    assert [(path, x.shape) for path, x in params_items(out)] == [(path, x.shape) for path, x in params_items(right)]


@torch.no_grad()
def test_a_state_that_is_not_donated_stays() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, backend="fx")
    state = one.model.init_state(2, 12, page_size=4)
    _, state = advance(one, state, [[1, 2, 3], [4]])
    held = [fm.logical(state, row) for row in range(2)]
    batch = fm.Batch.from_lists([[5], [6]], state)
    out, _ = step(one.params, state, batch)
    again, after = step(one.params, state, batch)
    with plain_kernels(batch):
        right, expected = one.model.forward(one.params, copy.deepcopy(state), batch)
    assert torch.equal(out.logits, right.logits) and torch.equal(again.logits, right.logits)
    for row in range(2):
        assert all(torch.equal(held[row][name], value) for name, value in fm.logical(state, row).items())
        assert all(
            torch.equal(value, fm.logical(after, row)[name]) for name, value in fm.logical(expected, row).items()
        )


@torch.no_grad()
def test_forks_share_pages_until_a_replay_writes_them() -> None:
    """The second continuation of a shared page gets a copy of it; the page table changes, the captures do not."""
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    state = one.model.init_state(1, 30, page_size=4, pages=12)
    _, state = step(one.params, state, fm.Batch.from_lists([[1, 2, 3, 4, 5]], state))
    fork = fm.fork(state)
    _, straight = advance(one, one.model.init_state(1, 30, page_size=4), [[1, 2, 3, 4, 5]])
    for token in (7, 8, 9):
        batch = fm.Batch.from_lists([[token]], state)
        _, state = step(one.params, state, batch)
        _, fork = step(one.params, fork, fm.Batch.from_lists([[token + 10]], fork))
        _, straight = advance(one, straight, [[token]])
    assert step.captures == 2
    right = fm.logical(straight, 0)
    assert all(torch.allclose(value, right[name], atol=1e-5) for name, value in fm.logical(state, 0).items())
    assert not torch.allclose(fm.logical(fork, 0)["layers.1.k"], right["layers.1.k"], atol=1e-3)


@torch.no_grad()
def test_buckets_captured_ahead_are_replayed() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), buckets=(4, 16), backend="fx")
    state = one.model.init_state(2, 20, page_size=4)
    batch = fm.Batch.from_lists([[1, 2, 3], [4]], state)
    before = copy.deepcopy(state)
    step.warm([(2, 1), 4, (16, 4)], one.params, state, batch)
    assert step.captures == 3 and state == before and state.ledger.lengths == (0, 0)
    for counts in ([4, 0], [1, 1], [4, 2], [2, 2]):
        batch = fm.Batch.from_lists([[7] * count for count in counts], state)
        _, state = step(one.params, state, batch)
        assert step.captures == 3 + (counts == [2, 2]), counts
    with pytest.raises(ValueError, match="warm: forward was given 0 batches"):
        step.warm([4], one.params, state, None)


@torch.no_grad()
def test_a_batch_larger_than_the_largest_bucket_runs_plainly_and_says_so_once() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), buckets=(2, 4), backend="fx")
    state, plain = (one.model.init_state(2, 30, page_size=4) for _ in range(2))
    for repeat in range(2):
        batch = fm.Batch.from_lists([[1, 2, 3, 4, 5], [6]], state)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out, after = step(one.params, state, batch)
        right, plain = advance(one, plain, [[1, 2, 3, 4, 5], [6]])
        assert torch.equal(out.logits, right.logits)
        assert [str(one.message) for one in said] == [
            "jit(forward): a batch of 6 tokens is larger than the largest bucket, 4; it runs uncaptured"
        ] * (repeat == 0)
        assert step.captures == 0
        with pytest.raises(fm.StateError, match="donated"):
            step(one.params, state, batch)
        state = after


@torch.no_grad()
def test_a_lowered_call_compiles_to_its_capture() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), buckets=(4, 16), backend="fx")
    state = one.model.init_state(2, 20, page_size=4)
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]], state)
    low = step.lower(one.params, state, batch, logits="last")
    (tokens,) = {call.arguments.split(",")[0] for call in low.calls if call.op == "embedding"}
    assert tokens.endswith("[16]")
    assert low.compile() is step and step.captures == 1 and state.ledger.lengths == (0, 0)
    with pytest.raises(lowering.CaptureError, match="compile: lowered to cuda"):
        step.lower(one.params, state, batch, target="cuda").compile()
    step(one.params, state, batch, logits="last")
    assert step.captures == 1
