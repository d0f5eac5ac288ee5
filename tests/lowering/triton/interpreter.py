"""Triton's interpreter, as a function: runs a launch on CPU tensors. The one of triton-ascend, in its own process."""

from __future__ import annotations

import atexit
import functools
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lowering.ascend_compiler.packages import fetched
from lowering.triton.launch import SOURCES, Launch


@functools.cache
def process() -> subprocess.Popen[bytes]:
    tools = fetched()
    script = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, str(script), str(tools.numpy), str(tools.triton)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(started.kill)
    return started


def run(launch: Launch, programs: int = 3) -> None:
    """Fill the tensors that the kernel writes, with a grid of so many programs, or fewer where there is less to do."""
    runner(launch.file, launch.name, launch.jobs, launch.arguments, launch.constants, programs)


def runner(
    file: str, name: str, jobs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any], programs: int = 3
) -> None:
    """The same of a launch's parts, in the place of `lowering.triton.launch.RUNNER`."""
    child = process()
    assert child.stdin is not None and child.stdout is not None
    call = (str(SOURCES / f"{file}.py"), name, max(1, min(jobs, programs)), dict(arguments), dict(constants))
    pickle.dump(call, child.stdin)
    child.stdin.flush()
    answer = pickle.load(child.stdout)
    assert not isinstance(answer, str), answer
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            value.copy_(answer[argument])
