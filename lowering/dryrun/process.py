"""The side that asks: sends a function with the shapes of its arguments to the dry run's process, and waits."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from params.spec import TensorSpec
from params.tree import tree_map

from ..errors import LoweringError
from ..explain.stages import Lowered, argument_bytes
from ..explain.trace import Shape
from ..op import OPS, find
from ..policy import Policy
from ..target import Target
from .stubs import stubs
from .wheel import fetched

QUOTED = 2000
"""Characters that an error quotes of the beginning and of the end of an ended process's messages."""


@dataclass(frozen=True)
class Question:
    """A program to trace. `modules` are those that register ops and kernels."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Target
    policy: Policy
    sizes: dict[str, int]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """What a program raised, and where, and the kernels that the process knows."""

    error: BaseException
    traceback: str
    kernels: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """The lowered program, and where the kernels that the process knows come from, by op and name."""

    lowered: Lowered
    kernels: dict[str, dict[str, str]]


class RemoteError(Exception):
    """The traceback of an error in the dry run's process, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def lower(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, policy: Policy
) -> Lowered:
    """`lowering.lower` for an Ascend target.

    Raises `LoweringError` when gcc or the wheel is missing, when `function` cannot be sent, when an op that it calls
    has kernels that the other process cannot import, and when that process ends.
    """
    sizes = argument_bytes(function, args, kwargs)
    found = kernels()
    origins = {origin for of_op in found.values() for origin in of_op.values() if "<locals>" not in origin}
    modules = sorted({origin.partition(":")[0] for origin in origins} - {"__main__", ""})
    shapes = tree_map(_shape, (args, kwargs))
    answer = _child().ask(_pickled(Question(function, *shapes, target, policy, sizes, tuple(modules))))
    asked = {op: [name] for op, name in policy.prefer.items()}
    if isinstance(answer, Failure):
        _check_known(asked, found, answer.kernels)
        raise answer.error from RemoteError(answer.traceback)
    called = (find(name) for name in dict.fromkeys(call.op for call in answer.lowered.calls))
    tried = {op.name: [k.name for k, refusal in op.candidates(policy, target) if refusal is None] for op in called}
    _check_known(asked | tried, found, answer.kernels)
    return answer.lowered


def kernels() -> dict[str, dict[str, str]]:
    """Where every kernel comes from, `module:name`, by op and name."""
    return {op.name: {name: _origin(kernel.run) for name, kernel in op.kernels.items()} for op in OPS.values()}


def _origin(run: Any) -> str:
    return f"{getattr(run, '__module__', '')}:{getattr(run, '__qualname__', type(run).__name__)}"


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return Shape.like(torch.empty(leaf.shape, dtype=leaf.dtype or torch.get_default_dtype(), device="meta"))
    return Shape.like(leaf)


def _check_known(
    tried: Mapping[str, Sequence[str]], here: Mapping[str, Mapping[str, str]], there: Mapping[str, Mapping[str, str]]
) -> None:
    """`LoweringError` when one of these kernels is not known to the process, or as another one."""
    for op, names in tried.items():
        known = there.get(op, {})
        lost = [f"{name} ({here[op][name]})" for name in names if known.get(name) != here[op][name]]
        if lost:
            raise LoweringError(
                f"{op}: kernel {', '.join(lost)} is known to this process alone: the dry run's own process imports the "
                "modules that register kernels, and a notebook, a script or the inside of a function is none; put it "
                "at the top level of a module and import that, or see its choice with lowering.explain"
            )


class _Pickler(pickle.Pickler):
    """Refuses what is defined in `__main__`, which is another module in the other process."""

    def reducer_override(self, value: Any) -> Any:
        """As pickle does, but for functions and classes of `__main__`."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__ (a script or a notebook)")
        return NotImplemented


def _pickled(question: Question) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out).dump(question)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LoweringError(
            f"{question.function!r} or one of its arguments cannot be sent to the dry run's process: {error}; give a "
            "function from the top level of a module, or a method of an object that pickles (model.forward)"
        ) from error
    return out.getvalue()


@functools.cache
def _child() -> Child:
    """The process, started once and kept: loading torch_npu takes seconds, a question a fraction of one."""
    child = Child(fetched())
    atexit.register(child.close)
    return child


class Child:
    """A Python process with torch_npu from the `wheel` directory loaded."""

    def __init__(self, wheel: Path) -> None:
        search = os.pathsep.join([str(stubs(wheel)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": search,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        # What torch_npu prints must not mix with the answers, so its standard output goes to the messages too.
        with contextlib.ExitStack() as opened:
            self.messages = opened.enter_context(tempfile.TemporaryFile())
            self.resources = opened.pop_all()
        self.heard = 0
        command = [sys.executable, "-m", "lowering.dryrun.child", str(wheel)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages
        )

    def ask(self, question: bytes) -> Answer | Failure:
        """Send a question and wait. `LoweringError` with the process's last words when it ends instead."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.ExitStack() as interrupted:
            # A wait that is broken off leaves half an answer in the pipe.
            interrupted.callback(self.close)
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(len(question).to_bytes(8, "little") + question)
                self.process.stdin.flush()
            size = int.from_bytes(self.process.stdout.read(8), "little")
            answer = self.process.stdout.read(size)
            interrupted.pop_all()
        if not answer:
            raise LoweringError(self._last_words())
        self.heard = os.fstat(self.messages.fileno()).st_size
        return pickle.loads(answer)

    def _last_words(self) -> str:
        _child.cache_clear()
        code = self.process.wait()
        self.messages.seek(self.heard)
        said = self.messages.read().decode(errors="replace").strip()
        self.close()
        if len(said) > 2 * QUOTED:
            said = f"{said[:QUOTED]}\n...\n{said[-QUOTED:]}"
        return f"the dry run's process ended with code {code}; its last messages were:\n{said}"

    def close(self) -> None:
        """End the process."""
        _child.cache_clear()
        self.process.kill()
        self.process.wait()
        self.resources.close()
        for pipe in filter(None, (self.process.stdin, self.process.stdout)):
            # What was not sent cannot be sent any more.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
