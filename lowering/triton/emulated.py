"""Whether Ascend's program of a kernel gives what its op gives: the op's smallest case, run in the emulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ascend_compiler.compile import compile_for
from ..ascend_compiler.emulator import EmulationError, Unknown, emulate
from ..ascend_compiler.outcome import Compiled
from ..cases import CASES
from ..cases.case import Case
from ..errors import LoweringError
from ..op import find
from ..target import Target
from ..use import use
from . import launch

PROGRAMS, CLOSE = 2, 1e-4
"""Programs that share a case's work, and how far results in float32 may lie apart, beside 1 and by size."""


@functools.cache
def emulated(op: str, target: Target) -> bool:
    """Whether the emulator has run the kernel `triton_<op>` for the target; False where it does not know the program.

    Raises `EmulationError` for a race or another fault of the program, `LoweringError` for other numbers than the op's.
    A case is the smallest that kernel and compiler take; where there is none, nothing was run.
    """
    for case in sorted((case for case in CASES if case.op == op and not case.bench), key=_elements):
        try:
            found, expected = _run(case, target)
        except Unknown:
            return False
        except EmulationError:
            raise
        except LoweringError:
            continue  # the kernel or the compiler refuses this case, and may take the next
        _compare(case, found, expected)
        return True
    return False


def _elements(case: Case) -> int:
    return sum(x.numel() for x in case.arguments()[0] if isinstance(x, Tensor))


def _run(case: Case, target: Target) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the kernel and of the op's body, but for trails.

    Not by a call of the op: that takes kernels which are on record for the target, and this is asked before they are.
    """
    args, kwargs = case.arguments()
    kernel = find(case.op).kernel_named(f"triton_{case.op}")
    assert kernel.refuse is not None
    with _emulator(target), use(target=target):
        reason = kernel.refuse(*args, **kwargs)
        if reason is not None:
            raise LoweringError(reason)
        found = kernel.run(*args, **kwargs)
    return _tensors(found), _tensors(find(case.op).body(*args, **kwargs))


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]


@contextlib.contextmanager
def _emulator(target: Target) -> Iterator[None]:
    """Launches go to the emulator, with what the compiler makes of them for the target."""

    def runner(file: str, name: str, jobs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
        asked = launch.Launch(file, name, arguments, constants, jobs, (), ())
        outcome = compile_for(asked.source, asked.signature, constants, target)
        if not isinstance(outcome, Compiled):
            raise LoweringError(f"{name} has no program to run: {outcome}")
        emulate(outcome, arguments, max(1, min(jobs, PROGRAMS)))

    before, launch.RUNNER = launch.RUNNER, runner
    try:
        yield
    finally:
        launch.RUNNER = before


def _compare(case: Case, found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        if not torch.allclose(one, other, rtol=CLOSE, atol=CLOSE, equal_nan=True):
            apart = (one - other).abs().max().item()
            raise LoweringError(f"{case}: the emulated program gives other numbers than the op, {apart:.2g} apart")
