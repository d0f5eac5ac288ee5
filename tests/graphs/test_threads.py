"""One model, one function, one pool of pages in many threads at once: the values of one thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

import funcmodels as fm
import lowering
from tests.sharding.kinds import KINDS, whole

T = TypeVar("T")
THREADS, REQUESTS = 8, 50

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads that are switched as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], T]) -> list[T]:
    """What `work` gives in each of eight threads that begin together; the error of any of them."""
    ready, found, errors = threading.Barrier(THREADS), dict[int, T](), list[BaseException]()

    def run(number: int) -> None:
        ready.wait()
        try:
            found[number] = work(number)
        except BaseException as error:  # to be raised where a test sees it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(THREADS)]


def test_threads_that_generate_with_one_model_capture_and_replay_what_one_does() -> None:
    """All of them begin with nothing captured, and go through the same programs."""
    model, params = whole("gemma3")

    def tokens(number: int, backend: str | None) -> list[list[int]]:
        prompts = [[1 + (number * 7 + at) % 60, 5] for at in range(REQUESTS)]
        results = fm.generate(model, params, prompts, 2, rows=8, page_size=4, eos=(), backend=backend)
        return [result.tokens for result in results]

    captured = at_once(lambda number: tokens(number, "fx"))
    assert captured == [tokens(number, None) for number in range(THREADS)]
    assert len({id(program) for program in vars(model)["_captured"].values()}) == 1


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
@torch.no_grad()
def test_threads_that_share_a_compiled_step_get_what_one_does() -> None:
    fields = KINDS["gemma3"] | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = fm.build(fields)
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
