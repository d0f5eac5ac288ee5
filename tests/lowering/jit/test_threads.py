"""One engine, one function, one pool of pages in many threads at once: the values of one thread."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from funcmodels.state.pages import Lease, PagePool
from lowering.jit import backends as graphs
from lowering.jit.cuda import CudaGraphs
from lowering.policy import Mode, Policy
from tests.lowering.jit.test_cuda_graph import CudaDouble
from tests.oracle.states import ROUNDING
from tests.sharding.kinds import KINDS, whole
from tests.tolerances import assert_close

T = TypeVar("T")
THREADS, REQUESTS = 8, 50
SMALL = KINDS["gemma3"] | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
OURS = tuple(str(Path(module.__file__ or "").parent) for module in (fm, lowering))

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads that are switched as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], T], each_line: bool = False, count: int = THREADS) -> list[T]:
    """What `work` gives in each of `count` threads that begin together; the error of any of them.

    With `each_line` they take turns at every line of our Python.
    """
    ready = threading.Barrier(count)

    def turn(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        time.sleep(0)
        return turn

    def run(number: int) -> T:
        ready.wait()
        try:
            sys.settrace(turn if each_line else None)
            return work(number)
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run, number) for number in range(count)]
        return [one.result() for one in running]


def test_threads_that_generate_with_one_engine_capture_and_replay_what_one_does() -> None:
    """All of them begin with nothing captured, and go through the same programs."""
    model = fm.build(SMALL)
    plain, captured = (fm.Engine(model, model.init_params(), backend=one, page_size=4) for one in (None, "fx"))

    def tokens(number: int, engine: fm.Engine) -> list[list[int]]:
        prompts = [[1 + (number * 7 + at) % 60, 5] for at in range(REQUESTS)]
        return [result.tokens for result in engine.generate(prompts, 2, eos=())]

    assert at_once(lambda number: tokens(number, captured)) == [tokens(number, plain) for number in range(THREADS)]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
@torch.no_grad()
def test_threads_that_share_a_compiled_step_get_what_one_does() -> None:
    model = fm.build(SMALL)
    params = model.init_params()
    step = lowering.jit(model.forward, donate=("state",), backend="inductor")

    def tokens(number: int, run: Callable[..., Any]) -> list[int]:
        state, last, found = model.init_state(1, REQUESTS, page_size=8), number, []
        for _ in range(REQUESTS):
            out, state = run(params, state, fm.Batch.from_lists([[last]], state))
            last = (int(out.logits.argmax()) + number) % model.config.vocab_size
            found.append(last)
        return found

    def compiled(number: int) -> list[int]:
        with torch.no_grad():  # of a thread, as all modes are
            return tokens(number, step)

    assert at_once(compiled) == [tokens(number, model.forward) for number in range(THREADS)]
    assert len(step._graphs) == 1


@pytest.mark.parametrize(("backend", "count"), [("fx", 8), ("cuda", 2)])
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_replays_in_many_threads(backend: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with states of its own, which graphs of a device move to the memory of a capture."""
    monkeypatch.setitem(graphs.BACKENDS, "cuda", lambda: CudaGraphs(CudaDouble(), "cpu"))
    model = fm.build(SMALL)
    params = model.init_params()
    step = lowering.jit(model.forward, donate=("state",), backend=backend)
    pools = model.init_state(1, 8, pages=2 * THREADS, page_size=4)

    def logits(number: int, run: Callable[..., Any]) -> list[Tensor]:
        state, found = fm.fork(pools), []
        for at in range(3):
            with torch.no_grad():
                out, state = run(params, state, fm.Batch.from_lists([[number + at]], state))
            found.append(out.logits)
        return found

    for mine, right in zip(
        at_once(lambda number: logits(number, step), True, count),
        [logits(number, model.forward) for number in range(count)], strict=True,
    ):  # fmt: skip
        assert_close(mine, right, looser=5, reason=ROUNDING)
    assert len(step._graphs) == 1


def test_threads_share_the_pages_of_one_pool() -> None:
    """More of them than it has pages for: a thread gets all that it asks for or none, and no page is lost."""
    pool = PagePool(2 * THREADS - 1, owned=False)

    def work(number: int) -> None:
        for _ in range(20):
            try:
                lease = Lease(pool, pool.take(2))
            except fm.OutOfPages:
                continue
            assert [pool.references(page) for page in lease.pages] == [1, 1]

    at_once(work, each_line=True)
    assert sorted(pool.take(pool.pages)) == list(range(1, pool.pages + 1))


def test_policies_that_threads_make_at_once_are_told_apart() -> None:
    made = at_once(lambda number: [Mode(Policy({"rms_norm": f"{number} {at}"})).key for at in range(3)], each_line=True)
    assert len({key for keys in made for key in keys}) == THREADS * 3


def test_nothing_is_traced_here_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes no pages; Torch's own flag is that of the process."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    model, params = whole("gemma3")
    state = model.init_state(1, 8, page_size=4, pages=2)
    _, state = model.forward(params, state, fm.Batch.from_lists([[3, 5]], state))
    assert state.ledger.leases[0].pool.free == 1


def test_a_report_counts_what_runs_in_copies_of_its_context() -> None:
    run = partial(lowering.ops.rms_norm, torch.ones(2, 4), torch.ones(4), eps=1e-6)
    with lowering.record() as report:
        contexts = [contextvars.copy_context() for _ in range(THREADS)]
    at_once(lambda number: contexts[number].run(run), each_line=True)
    assert [(row.op, row.count) for row in report.rows] == [("rms_norm", THREADS)]
