"""Triton's interpreter, as a function: runs a launch on CPU tensors. The one of triton-ascend, in its own process."""

from __future__ import annotations

import atexit
import functools
import pickle
import subprocess
import sys
from pathlib import Path

from torch import Tensor

from lowering.ascend_compiler.packages import fetched
from lowering.triton.launch import Launch


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
    child = process()
    assert child.stdin is not None and child.stdout is not None
    grid = max(1, min(launch.jobs, programs))
    call = (str(launch.source.path), launch.name, grid, dict(launch.arguments), dict(launch.constants))
    pickle.dump(call, child.stdin)
    child.stdin.flush()
    answer = pickle.load(child.stdout)
    assert not isinstance(answer, str), answer
    for name, value in launch.arguments.items():
        if isinstance(value, Tensor):
            value.copy_(answer[name])
