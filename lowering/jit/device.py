"""Graphs of a device: a program recorded once over tensors at fixed addresses, and launched as one.

All graphs of a backend share a memory pool, so what a replay makes lasts until the next one: it is copied out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from ..errors import CaptureError
from .capture import Rehearsal, Run
from .program import Program
from .updates import check_frozen

WARM_UPS = 2
"""Runs before a capture, in which libraries set themselves up."""


class DeviceGraphs:
    """Captures on one type of device. `api` is Torch's module for it (`torch.cuda`), or what stands for that."""

    fixed: ClassVar[bool] = True
    name: ClassVar[str]
    graph_class: ClassVar[str]

    def __init__(self, api: Any, device: str) -> None:
        self.api = api
        self.device = device
        self.pool: Any = None

    def check(self, device: str) -> None:
        """`CaptureError` unless tensors lie where this captures."""
        if device != self.device:
            raise CaptureError(f"jit: backend {self.name!r} captures tensors on {self.device}, these lie on {device}")

    def capture(self, program: Program, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Run:
        """See `Backend`."""
        self.check_program(program)
        with self._aside():
            for _ in range(WARM_UPS):
                program.graph(*rehearsal.inputs(), *rehearsal.host)
        if self.pool is None:
            self.pool = self.api.graph_pool_handle()
        graph = getattr(self.api, self.graph_class)()
        with self.capturing(graph):
            outputs = program.graph(*inputs, *rehearsal.host)
        return self.run(program, graph, outputs)

    def check_program(self, program: Program) -> None:
        """`CaptureError` for a program that a graph would freeze row lengths of."""
        check_frozen(program.graph, {})

    def capturing(self, graph: Any) -> Any:
        """The context in which operators are recorded."""
        return self.api.graph(graph, pool=self.pool)

    def run(self, program: Program, graph: Any, outputs: Sequence[Tensor]) -> Run:
        """The replay of a graph that writes to `outputs`."""

        def replay(inputs: Sequence[Tensor], host: Sequence[int]) -> list[Tensor]:
            graph.replay()
            return [x.clone() for x in outputs]

        return replay

    def close(self) -> None:
        """Graphs go with their captures."""

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A side stream, ordered after and before the current one: where a capture will run too."""
        stream = self.api.Stream()
        stream.wait_stream(self.api.current_stream())
        with self.api.stream(stream):
            yield
        self.api.current_stream().wait_stream(stream)
