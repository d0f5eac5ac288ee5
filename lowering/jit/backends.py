"""The backends that run a captured program over static buffers, by name.

`program` traces, `symbols` are the host integers of a trace, `capture` replays. `cpu` holds the backends that run a
program by its operators or compiled, `device` what graphs of devices share, `cuda` and `npu` those of two; `updates`
finds the row lengths that a replay has to renew. `jitted` puts them together.
"""

from collections.abc import Callable

from .capture import Backend
from .cpu import Fx, Inductor
from .cuda import CudaGraphs
from .npu import NpuGraphs

BACKENDS: dict[str, Callable[[], Backend]] = {"inductor": Inductor, "fx": Fx, "cuda": CudaGraphs, "npu": NpuGraphs}
"""What makes a backend, by name."""

DEFAULTS = {"cpu": "inductor", "cuda": "cuda", "npu": "npu"}
"""The backend for each type of device, where none is named."""
