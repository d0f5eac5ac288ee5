"""What captured calls refuse, what they say when they capture again, and that a call that fails leaves its state."""

from __future__ import annotations

import gc
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import funcmodels as fm
import lowering
from lowering import CaptureError, LoweringError
from params import tree
from params.tree import tree_map
from tests.oracle.mtp import small
from tests.oracle.states import advance

DONATED = "this state was donated to a captured call and cannot be used again; use the state that replaced it"


def captured(one: Any, **kwargs: Any) -> Any:
    return lowering.jit(one.model.forward, donate=("state",), backend="fx", **kwargs)


def fresh(one: Any, rows: int = 2, **kwargs: Any) -> fm.State:
    return one.model.init_state(rows, 16, **{"page_size": 4, **kwargs})


def tokens(state: fm.State, *counts: int) -> fm.Batch:
    return fm.Batch.from_lists([[1] * count for count in counts], state)


def said(act: Any) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        act()
    return [str(one.message) for one in found]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_a_donated_state_cannot_be_used_again() -> None:
    one = small("dense")
    step, commit = captured(one), lowering.jit(fm.commit, donate=("state",), backend="fx")
    state = fresh(one)
    batch = tokens(state, 2, 2)
    _, pending = step(one.params, state, batch, keep_steps=True)
    assert repr(state).endswith(", donated to a captured call)")
    done = commit(pending, torch.tensor([1, 2]))
    for use in (
        lambda: step(one.params, state, batch), lambda: one.model.forward(one.params, state, batch),
        lambda: fm.fork(state), lambda: fm.select(state, [0, 1]), lambda: fm.release(state),
        lambda: fm.logical(state, 0), lambda: commit(pending, [0, 0]), lambda: fm.commit(pending, [0, 0]),
    ):  # fmt: skip
        with pytest.raises(fm.StateError, match=DONATED):
            use()
    assert done.ledger.lengths == (1, 2) and done.lengths.tolist() == [1, 2]
    step(one.params, done, tokens(done, 1, 1))


@torch.no_grad()
def test_older_versions_that_share_what_was_overwritten_are_used_up_too() -> None:
    """A pending state still holds the recurrent entries of the one before it; other versions share only pools."""
    one = small("dense")
    commit = lowering.jit(fm.commit, donate=("state",), backend="fx")
    _, first = advance(one, fresh(one), [[1, 2], [3]])
    _, second = advance(one, first, [[4], [5, 6]])
    held = [fm.logical(first, row) for row in range(2)]
    _, pending = advance(one, second, [[7, 8], [9, 1]], keep_steps=True)
    after = commit(pending, [1, 2])
    for state in (second, pending):
        with pytest.raises(fm.StateError, match=DONATED):
            fm.fork(state)
    for row in range(2):
        assert all(torch.equal(held[row][name], value) for name, value in fm.logical(first, row).items())
    advance(one, after, [[1], [1]])


@torch.no_grad()
def test_without_a_state_there_is_nothing_to_donate() -> None:
    one = small("moe")
    step = captured(one, buckets=(8,))
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]])
    with lowering.use(experts="torch"):
        right, _ = one.model.forward(one.params, None, batch.pad(8, 8))
    out, state = step(one.params, None, batch)
    assert state is None and torch.equal(out.logits, right.logits[:5])
    with pytest.raises(CaptureError, match="'x' is a Tensor; only states can be donated"):
        lowering.jit(lambda x: x + 1, donate=("x",), backend="fx")(torch.ones(2))


def test_a_new_policy_dtype_or_number_of_rows_captures_again_and_says_so_once() -> None:
    one = small("dense")
    step = captured(one)
    half = tree.to(one.params, dtype=torch.bfloat16)

    def call(params: Any = one.params, rows: int = 2, dtype: torch.dtype = torch.float32, **kwargs: Any) -> None:
        state = fresh(one, rows, dtype=dtype, recurrent_dtype=dtype)
        step(params, state, tokens(state, *[1] * rows), **kwargs)

    assert said(call) == []
    with lowering.use(rms_norm="torch"):
        assert (
            said(call)
            == [
                "jit(forward): captured again, under another policy or target; both captures are kept",
                "jit(forward): captured again, over another pool of pages; the compiled code is kept",
            ][:1]
        )
    dtypes = said(partial(call, half, dtype=torch.bfloat16))
    assert dtypes == [
        f"jit(forward): captured again, since the dtypes of {name!r} changed; both captures are kept"
        for name in ("params", "state")
    ]
    assert said(partial(call, rows=3)) == [
        "jit(forward): captured again, since the shapes of 'state' changed; both captures are kept"
    ]
    assert said(partial(call, logits="last")) == [
        "jit(forward): captured again, since 'logits' changed from 'all' to 'last'; both captures are kept"
    ]
    assert step.captures == 5
    assert said(partial(call, rows=4)) == [] and step.captures == 6
    with lowering.use(rms_norm="torch"):
        assert [line for line in said(call) if "pool" not in line] == []
    assert len(step._graphs) == 6


@torch.no_grad()
def test_another_pool_is_said_once_and_traces_nothing() -> None:
    one = small("dense")
    step = captured(one)
    first, second, third = (fresh(one) for _ in range(3))
    batch = tokens(first, 1, 1)
    out, first = step(one.params, first, batch)
    lines = said(lambda: step(one.params, second, batch))
    assert lines == ["jit(forward): captured again, over another pool of pages; the compiled code is kept"]
    assert said(lambda: step(one.params, third, batch)) == []
    assert step.captures == 3 and len(step._graphs) == 1
    again, _ = step(one.params, first, batch)
    assert step.captures == 3 and not torch.equal(out.logits, again.logits)


@torch.no_grad()
def test_a_capture_that_fails_half_way_leaves_the_state() -> None:
    one = small("dense")
    step = captured(one)
    state, plain = fresh(one, pages=6), fresh(one)
    _, state = step(one.params, state, tokens(state, 2, 2))
    before = [fm.logical(state, row) for row in range(2)]
    with (
        lowering.use(gated_delta_rule="torch_step"),
        pytest.raises(LoweringError, match="in place, which tracing"),
    ):
        step(one.params, state, tokens(state, 1, 1))
    for row in range(2):
        assert all(torch.equal(before[row][name], value) for name, value in fm.logical(state, row).items())
    out, state = step(one.params, state, tokens(state, 1, 1))
    _, plain = advance(one, plain, [[1, 1], [1, 1]])
    right, _ = advance(one, plain, [[1], [1]])
    assert torch.allclose(out.logits, right.logits, atol=1e-5)
    assert state.ledger.lengths == (3, 3)


@torch.no_grad()
def test_a_row_without_pages_or_room_leaves_the_state() -> None:
    one = small("dense")
    step = captured(one)
    state = fresh(one, pages=3)
    _, state = step(one.params, state, tokens(state, 4, 4))
    with pytest.raises(fm.OutOfPages, match="2 more pages are needed and 1 of 3 are free"):
        step(one.params, state, tokens(state, 1, 1))
    with pytest.raises(ValueError, match="the batch has no tokens"):
        step(one.params, state, tokens(state, 0, 0))
    with pytest.raises(ValueError, match="row 1: 13 new tokens do not fit"):
        step(one.params, state, tokens(state, 0, 13))
    assert step.captures == 1
    _, state = step(one.params, state, tokens(state, 1, 0))
    assert state.ledger.lengths == (5, 4)


def test_a_value_read_on_the_host_is_refused_with_its_line() -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    def finds(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    for function, line in ((reads, "return x * x.sum().item()"), (finds, "return x[x > 0]")):
        with pytest.raises(CaptureError, match=rf"capture: .*test_misuse.py:\d+ \({re.escape(line)}\) reads a value"):
            lowering.jit(function, backend="fx")(torch.ones(3))


def test_what_cannot_be_captured_is_refused() -> None:
    one = small("dense")
    state = fresh(one)
    batch = tokens(state, 1, 1)
    with pytest.raises(ValueError, match=re.escape("donate names 'past', and forward takes params, state, batch")):
        lowering.jit(one.model.forward, donate=("past",))
    with pytest.raises(ValueError, match="backend='eager' is not known; there are: inductor, fx"):
        lowering.jit(one.model.forward, backend="eager")
    with pytest.raises(ValueError, match="give token counts of at least 1"):
        lowering.jit(one.model.forward, buckets=(0, 4))
    with pytest.raises(CaptureError, match="'state' lies on meta, other arguments on cpu; move it there"):
        captured(one)(one.params, fresh(one, device="meta"), batch)
    with pytest.raises(CaptureError, match="'x' lies on meta; what is captured lies on cpu, cuda, npu"):
        lowering.jit(lambda x: x + 1)(torch.ones(2, device="meta"))
    with pytest.raises(CaptureError, match="tensors on meta have no values to run with"):
        lowering.jit(lambda x: x + 1, backend="fx")(torch.ones(2, device="meta"))
    with pytest.raises(CaptureError, match="backend 'cuda' captures tensors on cuda, these lie on cpu"):
        lowering.jit(lambda x: x + 1, backend="cuda")(torch.ones(2))
    watched = tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), one.params)
    with pytest.raises(CaptureError, match="'params' requires gradients, and captured code records none"):
        captured(one)(watched, state, batch)
    with torch.no_grad():
        captured(one)(watched, state, batch)


def test_a_donated_argument_needs_a_successor() -> None:
    one = small("dense")

    def logits(params: Any, state: fm.State, batch: fm.Batch) -> torch.Tensor:
        return one.model.forward(params, state, batch)[0].logits

    state = fresh(one)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match="'state' is donated, and the function returns no new State"),
    ):
        lowering.jit(logits, donate=("state",), backend="fx")(one.params, state, tokens(state, 1, 1))


def test_under_transforms_and_traces_the_function_itself_runs() -> None:
    step = lowering.jit(lambda x: x.sin(), backend="fx")
    x = torch.randn(5)
    assert torch.equal(torch.func.grad(lambda x: step(x).sum())(x), x.cos())
    assert torch.equal(make_fx(step)(x)(x + 1), (x + 1).sin())
    assert step.captures == 0
    assert torch.equal(step(x), x.sin()) and step.captures == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_a_capture_keeps_no_pages() -> None:
    """Neither the program nor what is remembered of arguments holds a state that everybody else has dropped."""
    one = small("dense")
    step, commit = captured(one), lowering.jit(fm.commit, donate=("state",), backend="fx")
    state = fresh(one, pages=6)
    pool = state.ledger.leases[0].pool
    _, state = step(one.params, state, tokens(state, 2, 1))
    _, state = step(one.params, state, tokens(state, 2, 2), keep_steps=True)
    state = commit(state, [1, 2])
    assert pool.free < 6
    del state
    gc.collect()
    assert pool.free == 6
