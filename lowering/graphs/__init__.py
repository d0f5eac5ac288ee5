"""Capture: a function of trees as one flat program, and the backends that run such a program over static buffers.

`program` traces, `symbols` are the host integers of a trace, `capture` replays. `cpu` holds the backends that run a
program by its operators or compiled, `device` what graphs of devices share, `cuda` and `npu` those of two; `updates`
finds the row lengths that a replay has to renew. `lowering.jit` puts them together.
"""

from collections.abc import Callable

from .capture import MOST_PLACES, TRACING, Backend, Capture, Placed, Rehearsal
from .cpu import Fx, Inductor
from .cuda import CudaGraphs
from .npu import NpuGraphs
from .program import Flat, Program, flattened, trace

BACKENDS: dict[str, Callable[[], Backend]] = {"inductor": Inductor, "fx": Fx, "cuda": CudaGraphs, "npu": NpuGraphs}
"""What makes a backend, by name."""

DEFAULTS = {"cpu": "inductor", "cuda": "cuda", "npu": "npu"}
"""The backend for each type of device, where none is named."""

__all__ = [
    "BACKENDS", "DEFAULTS", "MOST_PLACES", "TRACING", "Backend", "Capture", "Flat", "Placed", "Program", "Rehearsal",
    "flattened", "trace",
]  # fmt: skip
