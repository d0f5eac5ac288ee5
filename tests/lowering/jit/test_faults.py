"""Faults in captured calls: what raises half-way, rows without pages, and inputs that a replay might not read anew."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.exc import InductorError, InvalidCxxCompiler

import funcmodels as fm
import lowering
from lowering.jit import jitted
from params import tree
from params.tree import tree_map
from tests.oracle.mtp import MtpPair, begun, small

LOST = (
    "this state was partly overwritten by a captured call that failed and cannot be used again; go on from a fork of "
    "it, or fill a new state"
)
Logical = list[dict[str, Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")


class FaultError(Exception):
    """What the tests break things with."""


def held(state: fm.State) -> Logical:
    return [fm.logical(state, row) for row in range(state.rows)]


def same(one: Logical, two: Logical) -> bool:
    pairs = zip(one, two, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs)


def tokens(state: fm.State, *counts: int, first: int = 1) -> fm.Batch:
    return fm.Batch.from_lists([list(range(first, first + count)) for count in counts], state)


CHOSEN: weakref.WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The kernels that captured functions chose for batches of one kind."""


def plainly(
    step: Any, one: MtpPair, state: fm.State, batch: fm.Batch, params: Any = None, **kwargs: Any
) -> tuple[fm.Output, fm.State]:
    """What `step` should give: its kernels, run plainly on a copy of the state and the padded batch."""
    params = one.params if params is None else params
    chosen = CHOSEN.setdefault(step, {})
    kind = (batch.tokens.shape, batch.max_query, batch.uniform, *kwargs.items())
    if kind not in chosen:
        with lowering.record() as report:
            lowering.jit(step.function, step.donate, step.buckets.sizes, "fx").ahead(params, state, batch, **kwargs)
        chosen[kind] = {row.op: row.kernel for row in report.rows}
    with lowering.use(**chosen[kind]):
        return one.model.forward(params, copy.deepcopy(state), step.buckets.fit(batch), **kwargs)


def prompted(one: MtpPair, *counts: int, **kwargs: Any) -> fm.State:
    state = one.model.init_state(len(counts), 24, **{"page_size": 4, **kwargs})
    return one.model.forward(one.params, state, tokens(state, *counts))[1]


def breaking(model: fm.Model, armed: list[bool]) -> fm.Model:
    """The model, which fails after its last layer while it is armed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = model.family.forward(*args, **kwargs)
        if armed:
            raise FaultError("the last layer")
        return result

    return replace(model, family=replace(model.family, forward=forward))


@torch.no_grad()
def test_a_function_that_raises_while_it_is_captured() -> None:
    one, armed = small("dense"), [True]
    step = lowering.jit(breaking(one.model, armed).forward, donate=("state",), backend="fx")
    state = prompted(one, 3, 2, pages=8)
    before, batch = held(state), tokens(state, 2, 1)
    with pytest.raises(FaultError, match="the last layer"):
        step(one.params, state, batch)
    assert same(held(state), before) and step.captures == 0
    armed.clear()
    right, after = plainly(step, one, state, batch)
    out, state = step(one.params, state, batch)
    assert torch.equal(out.logits, right.logits[:3]) and same(held(state), held(after)) and step.captures == 1


@torch.no_grad()
@pytest.mark.filterwarnings("error::lowering.RecaptureWarning")
@pytest.mark.parametrize("error", [FaultError, KeyboardInterrupt])
def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise error("no compiler")

    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), backend="inductor")
    state = prompted(one, 3, 2)
    before, batch = held(state), tokens(state, 1, 1)
    monkeypatch.setattr("torch._inductor.compile", compiled)
    for _ in range(2):
        with pytest.raises(error, match="no compiler"):
            step(one.params, state, batch)
        assert same(held(state), before) and step.captures == 0
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs: graph)
    right, after = plainly(step, one, state, batch)
    out, state = step(one.params, state, batch)
    assert torch.equal(out.logits, right.logits) and same(held(state), held(after)) and step.captures == 1


@torch.no_grad()
def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr("torch._inductor.compile", compiled)
    with pytest.raises(lowering.CaptureError, match=r'No working C\+\+ compiler found .* or take backend="fx"'):
        lowering.jit(lambda x: x.sin(), backend="inductor")(torch.zeros(1))


@torch.no_grad()
def test_a_draft_that_raises_while_a_round_is_captured() -> None:
    one, armed = small("dense"), [True]
    head = fm.draft(one.model, "mtp")

    class Breaking(type(head)):
        def extend(self, *args: Any, **kwargs: Any) -> Any:
            if armed:
                raise FaultError("extend")
            return super().extend(*args, **kwargs)

    step = lowering.jit(fm.Round(one.model, Breaking(one.model)).run, donate=("state", "drafted"), backend="fx")
    state, drafted, carry = begun(one, [[5, 6, 7], [8]])
    before = held(state) + held(drafted)
    rest = (fm.RowSampling.of([fm.Sampling()] * 2), torch.arange(2), torch.tensor([4, 4]))
    with pytest.raises(FaultError, match="extend"):
        step(one.params, state, drafted, carry, *rest)
    assert same(held(state) + held(drafted), before)
    armed.clear()
    verdict, state, drafted, _ = step(one.params, state, drafted, carry, *rest)
    assert state.ledger.lengths == drafted.ledger.lengths == tuple((verdict.accepted + torch.tensor([3, 1])).tolist())


class Failing:
    """Captures whose operator number `at` of the last writes (-1: before all of them) fails while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.writes = 0
        self.trace: Callable[..., Any] = jitted.trace
        monkeypatch.setattr(jitted, "trace", self.traced)

    def traced(self, *args: Any) -> Any:
        program = self.trace(*args)
        nodes = [x for x in program.graph.graph.nodes if x.target == torch.ops.aten.copy_.default]
        self.writes = len(nodes)
        for number, node in enumerate(nodes):
            with program.graph.graph.inserting_before(node):
                program.graph.graph.call_function(self.check, (number,))
        program.graph.recompile()
        return program

    def check(self, number: int) -> None:
        if number == self.at:
            raise FaultError(f"write {number}")


@torch.no_grad()
def test_a_replay_that_fails_half_way_uses_the_state_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write it reaches; forks and other states stay, and the same capture serves them."""
    one, failing = small("dense"), Failing(monkeypatch)
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    first = prompted(one, 3, 6, pages=60)
    step(one.params, fm.fork(first), tokens(first, 2, 1))
    assert failing.writes >= 3  # lengths, and the window and the matrix of one layer
    for number in range(failing.writes):
        state, other = fm.fork(first), fm.fork(first)
        before = held(other)
        failing.at = number
        with pytest.raises(FaultError, match=f"^write {number}$"):
            step(one.params, state, tokens(state, 2, 1))
        for use in (lambda state=state: step(one.params, state, tokens(first, 1, 1)), lambda state=state: held(state)):
            with pytest.raises(fm.StateError, match=f"^{re.escape(LOST)}$"):
                use()
        assert "partly overwritten by a captured call that failed" in repr(state)
        assert same(held(other), before) and same(held(first), before)
        failing.at = None
        batch = tokens(other, 2, 1, first=7)
        right, after = plainly(step, one, other, batch)
        out, other = step(one.params, other, batch)
        assert torch.equal(out.logits, right.logits[:3]) and same(held(other), held(after))
    pool = first.ledger.leases[0].pool
    del state, other, after, use
    assert pool.free == 60 - 3, "the pages of what was lost are free again"
    assert step.captures == 1


@torch.no_grad()
def test_a_round_that_fails_half_way_uses_both_states_up(monkeypatch: pytest.MonkeyPatch) -> None:
    one, failing = small("moe"), Failing(monkeypatch)
    step = lowering.jit(fm.Round(one.model, fm.draft(one.model, "mtp")).run, donate=("state", "drafted"), backend="fx")
    rest = (fm.RowSampling.of([fm.Sampling()] * 2), torch.arange(2), torch.tensor([4, 4]))
    state, drafted, carry = begun(one, [[5, 6, 7], [8]])
    kept = (fm.fork(state), fm.fork(drafted), tree_map(torch.clone, carry))
    failing.at = 1
    with pytest.raises(FaultError, match="write 1"):
        step(one.params, state, drafted, carry, *rest)
    for value in (state, drafted):
        with pytest.raises(fm.StateError, match=re.escape(LOST)):
            fm.fork(value)
    failing.at = None
    with lowering.use(paged_attention="torch", experts="torch"):
        right = fm.Round(one.model, fm.draft(one.model, "mtp")).run(one.params, *copy.deepcopy(kept), *rest)
    found = step(one.params, *kept, *rest)
    assert torch.equal(found[0].tokens, right[0].tokens) and same(held(found[1]), held(right[1]))


@torch.no_grad()
def test_rows_that_run_out_of_pages_while_they_decode() -> None:
    one = small("dense")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    state = prompted(one, 7, 2, 5, pages=8)
    for taken in range(5):
        _, state = step(one.params, state, tokens(state, 1, 1, 1, first=taken))
    before = held(state)
    with pytest.raises(fm.OutOfPages, match="1 more pages are needed and 0 of 8 are free"):
        step(one.params, state, tokens(state, 1, 1, 1))
    assert same(held(state), before) and state.ledger.lengths == (12, 7, 10)
    state = fm.release(state, [1])
    assert same(held(state)[::2], before[::2])
    batch = tokens(state, 1, 0, 1)
    right, expected = plainly(step, one, state, batch)
    out, state = step(one.params, state, batch)
    assert torch.equal(out.logits, right.logits) and same(held(state), held(expected))


@torch.no_grad()
@pytest.mark.parametrize("short", ["state", "drafted"])
def test_a_round_without_pages_in_either_pool_leaves_both_states(short: str) -> None:
    one = small("dense")
    step = lowering.jit(fm.Round(one.model, fm.draft(one.model, "mtp")).run, donate=("state", "drafted"), backend="fx")
    state, drafted, carry = begun(one, [[5] * 6, [6] * 3], pages=9)
    pool = (state if short == "state" else drafted).ledger.leases[0].pool
    rest = (fm.RowSampling.of([fm.Sampling()] * 2), torch.arange(2), torch.tensor([4, 4]))
    elsewhere, before = pool.take(pool.free), held(state) + held(drafted)
    with pytest.raises(fm.OutOfPages, match="2 more pages are needed and 0 of 9 are free"):
        step(one.params, state, drafted, carry, *rest)
    assert same(held(state) + held(drafted), before)
    pool.give_back(elsewhere)
    verdict, state, drafted, _ = step(one.params, state, drafted, carry, *rest)
    assert state.ledger.lengths == drafted.ledger.lengths == tuple((verdict.accepted + torch.tensor([6, 3])).tolist())


def other(path: str, x: Tensor) -> Tensor:
    """A tensor as valid as `x` with other values."""
    if x.is_floating_point():
        return x * 1.5 + 0.25
    if path == "page_table":
        return x.flip(1)
    return x.flip(0) if path == "tokens" else torch.where(x == x.max(), x - 1, x)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_replay_reads_every_input_anew(kind: str) -> None:
    """Each input alone is changed: the result is that of a plain call, and another one unless no operator takes it."""
    one = small(kind)
    step = lowering.jit(one.model.forward, backend="fx")
    state = prompted(one, 6, 9)
    batch = tokens(state, 3, 1, first=4)
    given: dict[str, Any] = {"params": one.params, "state": state, "batch": batch.pad(4, 4)}
    first = taken(step(**given))
    (capture,) = step._graphs.values()
    inputs = [node for node in capture.program.graph.graph.nodes if node.op == "placeholder"]
    paths = [(name, path) for name, value in given.items() for path, _ in tree.items(value)]
    unused = {where for where, node in zip(paths, inputs, strict=True) if not node.users}
    for name, path in paths:
        changed = given | {name: tree.put(given[name], path, other(path, tree.at(given[name], path)))}
        if path == "query_start":
            counts = tuple(changed[name].query_start.diff().tolist())
            changed[name] = replace(changed[name], counts=counts)
        if path == "lengths":
            known = state.ledger.at(changed[name].lengths.tolist())
            changed[name] = replace(changed[name], ledger=known)
        poisoned(capture)
        found = taken(step(**changed))
        right = taken(plainly(step, one, changed["state"], changed["batch"], changed["params"]))
        assert equal(found, right), f"{name}.{path}"
        assert equal(found, first) == ((name, path) in unused), f"{name}.{path}"
    assert {path.split(".")[0] for name, path in unused if name == "params"} == {"mtp"}
    assert {(name, path) for name, path in unused if name != "params"} == set()
    assert len(step._graphs) == 1


def poisoned(capture: Any) -> None:
    """Leave nothing in the buffers of a capture that a replay could use."""
    for run in capture.runs:
        for buffer in run.buffers.values():
            buffer.fill_(-(2**30))


Taken = tuple[list[torch.Tensor], Logical]


def taken(result: tuple[fm.Output, fm.State]) -> Taken:
    """Outputs and lengths, and all that rows hold as these say, before the same state is continued in another way."""
    out, state = result
    return [*tree.leaves(out), state.lengths], held(state)


def equal(one: Taken, two: Taken) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one[0], two[0], strict=True)) and same(one[1], two[1])


@torch.no_grad()
def test_replays_with_rollbacks_and_large_allocations_between() -> None:
    """Memory that was freed before a replay and taken again after it holds nothing that is still read."""
    one = small("moe")
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    commit = lowering.jit(fm.commit, donate=("state",), backend="fx")
    state = prompted(one, 2, 3)
    plain, kept = copy.deepcopy(state), []
    for number in range(5):
        for counts in ((1, 1), (3, 3)):
            batch = tokens(state, *counts, first=3 * number)
            pending = counts == (3, 3)
            right, plain = plainly(step, one, plain, batch, keep_steps=pending)
            out, state = step(one.params, state, batch, keep_steps=pending)
            torch.empty(2**24).fill_(torch.nan)
            if pending:
                accepted = torch.tensor([number % 4, (number + 2) % 3])
                plain, state = fm.commit(plain, accepted), commit(state, accepted)
            torch.empty(2**24).fill_(torch.nan)
            kept.append((out, right))
            assert same(held(state), held(plain)), f"round {number}"
    assert all(torch.equal(out.logits, right.logits) for out, right in kept), "outputs of all replays, held to the end"
    assert (step.captures, commit.captures) == (2, 1)
