"""Nothing in a step waits for the device: no value is read on the host, no shape depends on one, nothing is copied.

All runs are on the meta device, whose tensors have no values: what would read one cannot run. Lengths that the host
would have to read stay upper bounds there, as on a device.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

import funcmodels as fm
import lowering
from funcmodels.sampling.draws import law
from params import tree
from tests.oracle.mtp import MtpPair, small

ROWS, STEPS = 3, 3
TORCH = str(Path(torch.__file__).parent)
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class HostSyncError(AssertionError):
    """A call that waits for the device; the message names its line."""


class NoSync(TorchFunctionMode):
    """Raises `HostSyncError` for calls of Torch that read values of a device, or copy between it and the host.

    Copies are put down in `copies` instead where that is given.
    """

    def __init__(self, copies: list[str] | None = None) -> None:
        super().__init__()
        self.copies = copies

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call's own result."""
        if _picks_by_value(function, args):
            raise HostSyncError(f"{_line()}: {resolve_name(function)} has a shape that depends on values")
        try:
            result = function(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise HostSyncError(f"{_line()}: {resolve_name(function)} reads values: {error}") from error
        places = _places((args, kwargs, result)) | ({"cpu"} if function in FROM_HOST else set())
        if len(places) > 1:
            self._copies(f"{_line()}: {resolve_name(function)} copies between {' and '.join(sorted(places))}")
        return result

    def _copies(self, what: str) -> None:
        if self.copies is None:
            raise HostSyncError(what)
        self.copies.append(what)


def _places(value: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


def _picks_by_value(function: Any, args: Any) -> bool:
    """Whether this is a boolean index; a list is one of the host, copied for the call."""
    if function not in (Tensor.__getitem__, Tensor.__setitem__) or args[0].device.type == "cpu":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(x, list) or (isinstance(x, Tensor) and x.dtype == torch.bool) for x in index)


def _line() -> str:
    """The line outside Torch and this mode that made the call."""
    frames = [x for x in traceback.extract_stack() if not x.filename.startswith(TORCH)]
    frame = [x for x in frames if x.name not in ("__torch_function__", "_line")][-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})"


@dataclass
class Run:
    """A model, its head, and the values of a loop, all on the meta device."""

    model: fm.Model
    head: Any
    params: Any
    state: fm.State
    drafted: fm.State

    @staticmethod
    def of(kind: str, **kwargs: Any) -> Run:
        one: MtpPair = small(kind)
        head = fm.draft(one.model, "mtp")
        state = one.model.init_state(ROWS, 60, **{"page_size": 4, "device": "meta", **kwargs})
        return Run(one.model, head, tree.to(one.params, device="meta"), state, head.init_state(state))

    def forward(
        self, counts: list[int], copies: list[str] | None = None, **kwargs: Any
    ) -> tuple[fm.Batch, fm.Output, fm.State]:
        tokens = torch.zeros(sum(counts), dtype=torch.int64, device="meta")
        batch = fm.Batch.from_tokens(tokens, counts, self.state)
        with NoSync(copies):
            out, state = self.model.forward(self.params, self.state, batch, **kwargs)
        return batch, out, state

    def begun(self) -> tuple[fm.Output, fm.Carry]:
        """Run the prompts, and the head over them."""
        batch, out, self.state = self.forward([5, 1, 3])
        with NoSync():
            following = fm.next_tokens(batch, torch.ones(ROWS, dtype=torch.int64, device="meta"))
            self.drafted, carry = self.head.extend(self.params, self.drafted, out, batch, following)
        return out, carry


def settings(**kwargs: Any) -> fm.RowSampling:
    rows = [fm.Sampling(seed=row, **{name: value[row] for name, value in kwargs.items()}) for row in range(ROWS)]
    return fm.RowSampling.of(rows, "meta")


SETTINGS: dict[str, fm.RowSampling] = {
    "greedy": settings(),
    "drawn": settings(temperature=[0.8, 1.0, 1.3]),
    "top-k": settings(temperature=[0.8, 1.0, 1.3], top_k=[3, 0, 9]),
    "top-p": settings(temperature=[0.8, 1.0, 1.3], top_p=[0.5, 1.0, 0.9]),
    "all and greedy": settings(temperature=[0.8, 0.0, 1.3], top_k=[3, 0, 9], top_p=[0.5, 1, 0.9], min_p=[0, 0.1, 0.2]),
    "penalties and bias": settings(
        temperature=[0.8, 0.0, 1.3], repetition_penalty=[1.0, 1.2, 1.1], presence_penalty=[0.0, 0.5, 0.1],
        frequency_penalty=[0.2, 0.0, 0.0], logit_bias=[((1, 2.0), (3, -1.0)), (), ((0, 1.0),)],
    ),
}  # fmt: skip


@pytest.fixture(params=["dense", "moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[None, "cuda"], ids=["cpu", "cuda"])
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    with lowering.use(target=request.param), torch.no_grad():
        yield


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("logits", ["all", "last", None])
def test_a_forward_and_a_commit_wait_for_nothing(kind: str, logits: Any) -> None:
    run = Run.of(kind)
    _, _, run.state = run.forward([5, 0, 3], logits=logits)
    _, _, run.state = run.forward([1, 1, 1], logits=logits, outputs=("layers.1", "router") if kind == "moe" else ())
    for counts in ([STEPS + 1] * ROWS, [2, 4, 1]):
        _, _, pending = run.forward(counts, logits=logits, keep_steps=True)
        with NoSync():
            run.state = fm.commit(pending, torch.ones(ROWS, dtype=torch.int64, device="meta"))
    assert not run.state.ledger.exact and run.state.ledger.lengths == (12, 9, 9)


@pytest.mark.usefixtures("target")
def test_padding_and_no_state_wait_for_nothing(kind: str) -> None:
    run = Run.of(kind)
    batch = fm.Batch.from_tokens(torch.zeros(9, dtype=torch.int64, device="meta"), [5, 1, 3], run.state).pad(16, 8)
    with NoSync():
        run.model.forward(run.params, run.state, batch)
        run.model.forward(run.params, None, batch)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_and_a_round_by_its_parts_wait_for_nothing(name: str) -> None:
    run, sampling = Run.of("dense"), SETTINGS[name]
    out, carry = run.begun()
    requests, vocab = torch.arange(ROWS, device="meta"), run.model.config.vocab_size
    counts = fm.TokenCounts.of([[1, 2], [], [3]], vocab, "meta")
    with NoSync():
        counts = counts.add(fm.sample(out.logits[:ROWS], sampling, requests, run.state.lengths, counts)[:, None])
        law(out.logits[:ROWS], sampling, counts)
    for noise in (None, fm.DraftNoise(sampling, requests)):
        with NoSync():
            proposal, run.drafted = run.head.propose(run.params, run.drafted, carry, STEPS, noise=noise)
            window = proposal.batch(run.state)
            out, pending = run.model.forward(run.params, run.state, window, keep_steps=True)
            verdict = fm.verify(out, proposal, sampling, requests, counts)
            counts = counts.add(verdict.tokens)
            run.state = fm.commit(pending, verdict.accepted)
            run.drafted, carry = run.head.extend(run.params, run.drafted, out, window, verdict.tokens, carry)
    assert run.state.ledger.lengths == run.drafted.ledger.lengths == (13, 9, 11)
    assert run.state.ledger.least == (5, 1, 3) and carry.token.is_meta


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("name", ["greedy", "all and greedy"])
def test_a_whole_round_waits_for_nothing(kind: str, name: str, drawn: bool) -> None:
    run = Run.of(kind)
    _, carry = run.begun()
    now: Any = (run.state, run.drafted, carry)
    rest: Any = (SETTINGS[name], torch.arange(ROWS, device="meta"), torch.full((ROWS,), 2, device="meta"))
    counts = fm.TokenCounts.of([[1, 2], [], [3]], run.model.config.vocab_size, "meta")
    for _ in range(2):
        with NoSync():
            verdict, *now = fm.Round(run.model, run.head).run(run.params, *now, *rest, counts=counts, drawn=drawn)
            counts = counts.add(verdict.tokens)
    assert now[0].ledger.lengths == (13, 9, 11) and verdict.tokens.is_meta


@torch.no_grad()
def test_the_same_setting_for_all_rows_is_not_copied_to_the_device() -> None:
    """Where one `Sampling` is given in place of settings a row."""
    run = Run.of("dense")
    out, carry = run.begun()
    with NoSync():
        requests = torch.arange(ROWS, device="meta")
        for sampling in (fm.Sampling(), fm.Sampling(0.8, 20, 0.9, 0.02, seed=-(2**63))):
            fm.sample(out.logits[:ROWS], sampling, requests, run.state.lengths)
            proposal, _ = run.head.propose(run.params, run.drafted, carry, STEPS)
            window, _ = run.model.forward(run.params, run.state, proposal.batch(run.state), keep_steps=True)
            fm.verify(window, proposal, sampling)


@torch.no_grad()
def test_a_shared_pool_costs_one_copy_of_the_page_table_where_rows_need_pages(kind: str) -> None:
    run = Run.of(kind, pages=40)
    made = []
    for counts in ([5, 1, 3], [3, 3, 1], [1, 1, 1], [1, 2, 3]):  # the second ends where the pages do
        copies: list[str] = []
        _, _, run.state = run.forward(counts, copies)
        made.append(len(copies))
        assert all("max_pages" in line for line in copies)
    assert made == [1, 0, 1, 0]


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(4, dtype=dtype, device="meta")


SYNCS: dict[str, Callable[[], Any]] = {
    "item": lambda: x()[0].item(),
    "int": lambda: int(x()[0]),
    "if": lambda: 1 if x()[0] > 0 else 2,
    "is_nonzero": lambda: torch.is_nonzero(x()[0]),
    "list": lambda: x().tolist(),
    "numpy": lambda: x().numpy(),
    "slice": lambda: x()[: x(torch.int64)[0]],
    "equal": lambda: torch.equal(x(), x()),
    "to the host": lambda: x().cpu(),
    "copied to the host": lambda: torch.ones(4).copy_(x()),
    "nonzero": lambda: x().nonzero(),
    "where": lambda: torch.where(x() > 0),
    "mask": lambda: x()[x() > 0],
    "write by mask": lambda: x().__setitem__(x() > 0, 0),
    "masked_select": lambda: x().masked_select(x() > 0),
    "unique": lambda: x().unique(),
    "repeats": lambda: x().repeat_interleave(x(torch.int64)),
    "from the host": lambda: torch.tensor([1.0]).to("meta"),
    "made of a list": lambda: torch.tensor([1.0], device="meta"),
    "list as an index": lambda: x()[[0, 1]],
    "index of the host": lambda: x()[torch.tensor([0, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", SYNCS)
def test_what_waits_is_caught_with_its_line(name: str) -> None:
    SYNCS[name]() if name in ("write by mask", "from the host", "list as an index") else None  # fine in themselves
    with NoSync(), pytest.raises(HostSyncError, match=rf'^test_no_sync\.py:\d+ \("{re.escape(name)}": lambda'):
        SYNCS[name]()


@torch.no_grad()
def test_a_draft_and_a_checked_state_that_wait_are_caught() -> None:
    class Waiting(type(Run.of("dense").head)):
        def propose(self, params: Any, state: fm.State, carry: fm.Carry, steps: int = 3, **kwargs: Any) -> Any:
            return super().propose(params, state, carry, min(steps, int(state.lengths.max())), **kwargs)

    run = Run.of("dense")
    _, carry = run.begun()
    one = fm.Round(run.model, Waiting(run.model))
    rest = (SETTINGS["greedy"], torch.arange(ROWS, device="meta"), torch.full((ROWS,), 2, device="meta"))
    with NoSync(), pytest.raises(HostSyncError, match=r"test_no_sync\.py:\d+ \(return super.* reads values"):
        one.run(run.params, run.state, run.drafted, carry, *rest)
    run = replace(run, state=run.model.init_state(ROWS, 60, page_size=4, device="meta", checked=True))
    with pytest.raises(HostSyncError, match=r"state\.py:\d+ \(.*stale_rows"):
        run.forward([1, 1, 1])
