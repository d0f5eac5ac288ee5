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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from params import tree
from params.spec import TensorSpec

from .. import registry
from ..errors import LoweringError
from ..policy import Policy
from ..stages import Lowered, argument_bytes
from ..target import Target
from ..trace import Shape
from .stubs import stubs
from .wheel import fetched

QUOTED = 2000
"""Characters that an error quotes of the beginning and of the end of an ended process's messages."""


@dataclass(frozen=True)
class Request:
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
    """What a program raised, and where."""

    error: BaseException
    traceback: str


@dataclass(frozen=True)
class Answer:
    """The lowered program, and the kernels that the process knows by op."""

    lowered: Lowered
    kernels: dict[str, tuple[str, ...]]


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
    modules = sorted({run.__module__ for run in _registered()} - {"__main__"})
    shapes = tree.map(_shape, (args, kwargs))
    answer = _child().ask(_pickled(Request(function, *shapes, target, policy, sizes, tuple(modules))))
    if isinstance(answer, Failure):
        raise answer.error from RemoteError(answer.traceback)
    _check_kernels(answer, target)
    return answer.lowered


def _registered() -> list[Callable[..., Any]]:
    """Bodies and kernels that a module holds by name; those made inside functions cannot be imported elsewhere."""
    runs = [kernel.run for op in registry.OPS.values() for kernel in op.kernels.values()]
    return [run for run in runs if "<locals>" not in run.__qualname__]


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec):
        return Shape.like(torch.empty(leaf.shape, dtype=leaf.dtype or torch.get_default_dtype(), device="meta"))
    return Shape.like(leaf)


def _check_kernels(answer: Answer, target: Target) -> None:
    """`LoweringError` when an op that was called has a kernel for `target` here that the process did not know."""
    for name in dict.fromkeys(call.op for call in answer.lowered.calls):
        op = registry.find(name)
        known = answer.kernels[name]
        lost = [kernel.name for kernel in op.kernels.values() if kernel.serves(target) and kernel.name not in known]
        if lost:
            raise LoweringError(
                f"{name}: kernel {', '.join(lost)} was not registered at the top level of a module, so the dry run's "
                "process cannot import it; move it into a module, or see its choice with lowering.explain"
            )


class _Pickler(pickle.Pickler):
    """Refuses what is defined in `__main__`, which is another module in the other process."""

    def reducer_override(self, value: Any) -> Any:
        """As pickle does, but for functions and classes of `__main__`."""
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in __main__ (a script or a notebook)")
        return NotImplemented


def _pickled(request: Request) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out).dump(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LoweringError(
            f"{request.function!r} or one of its arguments cannot be sent to the dry run's process: {error}; give a "
            "function from the top level of a module, or a method of an object that pickles (model.forward)"
        ) from error
    return out.getvalue()


@functools.cache
def _child() -> Child:
    """The process, started once and kept: loading torch_npu takes seconds, a request a fraction of one."""
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

    def ask(self, request: bytes) -> Answer | Failure:
        """Send a request and wait. `LoweringError` with the process's last words when it ends instead."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.ExitStack() as interrupted:
            # A wait that is broken off leaves half an answer in the pipe.
            interrupted.callback(self.close)
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(len(request).to_bytes(8, "little") + request)
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
