"""The dry run's process: loads torch_npu from the directory it is given, then answers requests until its input ends."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..errors import LoweringError
from ..explain import stages
from ..explain.report import dry
from ..explain.stages import Lowered
from ..explain.trace import DryRun, Recorder, Shape
from ..npu_reference.registration import give_shapes
from ..target import Target
from .costs import NPU
from .process import Answer, Failure, Question, kernels
from .versions import host_refusal, problems


class _Given(TorchFunctionMode):
    """Keeps the arguments of `npu` operators as their caller gave them; the dispatcher fills in and reorders."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if isinstance(func, (torch._ops.OpOverloadPacket, torch._ops.OpOverload)):
            self.recorder.given = (args, kwargs or {})
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Answer requests on standard input: a length of eight bytes, then a pickle; answers have the same form."""
    # An abort inside a library then says which line of the program called it.
    faulthandler.enable(all_threads=False)
    # The parent decides when to stop; Ctrl-C reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    version = load(Path(sys.argv[1]))
    while question := _read(sys.stdin.buffer):
        answer = _pickled(_answer(question, version))
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def load(wheel: Path) -> str:
    """Import torch_npu from an unpacked wheel; its version. Some operators come without shapes and get ours."""
    sys.path.insert(0, str(wheel))
    version = importlib.import_module("torch_npu").__version__
    give_shapes()
    return version


def _read(stream: BinaryIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(8), "little"))


def _answer(question: bytes, version: str) -> Answer | Failure:
    # Whatever a program raises belongs to the one who asked: a future holds it, and this process goes on.
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: _trace(pickle.loads(question), version))
    error = future.exception()
    if error is not None:
        return Failure(error, "".join(traceback.format_exception(error)), kernels())
    return Answer(future.result(), kernels())


def _pickled(answer: Answer | Failure) -> bytes:
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        # An error whose class cannot be made again elsewhere travels as its text.
        assert isinstance(answer, Failure)
        data = pickle.dumps(Failure(LoweringError(repr(answer.error)), answer.traceback, answer.kernels))
    return data


def _trace(question: Question, version: str) -> Lowered:
    for module in question.modules:
        importlib.import_module(module)
    run = DryRun(Recorder(NPU, partial(_checked, target=question.target, version=version)))
    # In grad and no_grad mode one operator (moe_token_unpermute) ends the process when it is traced.
    with dry(question.target, question.policy, run) as (_, report), torch.inference_mode(), _Given(run.recorder):
        args, kwargs = tree_map(
            lambda x: x.made("npu") if isinstance(x, Shape) else x, (question.args, question.kwargs)
        )
        run.program(question.function, args, kwargs)
    return stages.lowered(question.target, f"torch_npu {version}", run, report, question.sizes)


def _checked(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target, version: str
) -> tuple[tuple[str, str], ...]:
    """What other versions of torch_npu would refuse of a call; `LoweringError` for what the target's CANN refuses."""
    refusal = host_refusal(name, args, kwargs, target)
    if refusal is not None:
        raise LoweringError(f"{name}: {refusal}")
    return problems(name, args, kwargs, version)


if __name__ == "__main__":
    main()
