"""Capture: a function of trees as one flat program, and the backends that run such a program over static buffers.

`program` traces, `cpu` holds the backends of the host, `capture` replays. `lowering.jit` puts them together.
"""

from .capture import Capture
from .cpu import BACKENDS
from .program import Flat, Program, flattened, trace

__all__ = ["BACKENDS", "Capture", "Flat", "Program", "flattened", "trace"]
