"""NPU graphs, whose attention operators wait, in each replay, for their row lengths.

A graph stops before every operator that the device has a handler for until an update has given it new host lists. So a
replay is: wait until the replay before has read its lists, update, wait for the update, launch. Exactly one update for
each launch: after none the device would wait for ever, and after a failed one too, so that the graph is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import CaptureError
from ..npu.updates import UPDATED
from .capture import Run
from .device import DeviceGraphs
from .program import Program
from .updates import Lists, Record, check_frozen, list_maker, operator_of, records


class NpuGraphs(DeviceGraphs):
    """Captures with `torch.npu.NPUGraph`. `fence` marks the end of the newest replay that read host lists."""

    name: ClassVar[str] = "npu"
    graph_class: ClassVar[str] = "NPUGraph"

    def __init__(self, api: Any = None, device: str = "npu") -> None:
        super().__init__(getattr(torch, "npu", None) if api is None else api, device)
        self.fence: Any = None
        self.worker: ThreadPoolExecutor | None = None

    def check_program(self, program: Program) -> None:
        """`CaptureError` for a program that calls an operator with row lengths that no update reaches."""
        check_frozen(program.graph, UPDATED)

    def capturing(self, graph: Any) -> Any:
        """With operators recorded that wait for updates."""
        return self.api.graph(graph, pool=self.pool, auto_dispatch_capture=True)

    def run(self, program: Program, graph: Any, outputs: Sequence[Tensor]) -> Run:
        """See `DeviceGraphs`; with an update before each replay if anything waits for one."""
        expected = records(program.graph, UPDATED)
        check_records(expected, graph.graph_dispatch_mode.graph_dispatch_records)
        if not expected:
            return super().run(program, graph, outputs)
        return Updated(self, graph, outputs, list_maker(program.graph, UPDATED))

    def update(self, graph: Any, lists: list[Lists]) -> BaseException | None:
        """Give a graph new lists, once the newest replay has read its own; what went wrong, if anything did."""
        if self.fence is not None:
            self.fence.synchronize()
        if self.worker is None:
            # A thread starts on device 0, and one thread a replay has been seen to fail now and then.
            index = self.api.current_device()
            self.worker = ThreadPoolExecutor(1, "graph-update", self.api.set_device, (index,))
        return self.worker.submit(graph.update, cpu_update_input=lists).exception()

    def launched(self) -> None:
        """Mark the end of a replay."""
        self.fence = self.api.Event()
        self.fence.record()

    def close(self) -> None:
        """End the thread that updates."""
        if self.worker is not None:
            self.worker.shutdown(cancel_futures=True)


class Updated:
    """The replay of a graph that waits for updates. `trouble` says why it can be replayed no more."""

    def __init__(self, graphs: NpuGraphs, graph: Any, outputs: Sequence[Tensor], lists: Any) -> None:
        self.graphs, self.graph, self.outputs, self.lists = graphs, graph, outputs, lists
        self.trouble: str | None = None

    def __call__(self, inputs: Sequence[Tensor], host: Sequence[int]) -> list[Tensor]:
        """See `Run`. `CaptureError` when the update failed, or one before it did."""
        if self.trouble is not None:
            raise CaptureError(f"jit: this graph cannot be replayed: {self.trouble}; capture it anew")
        # Whatever interrupts what follows leaves an update without its replay.
        self.trouble = "a replay of it was interrupted"
        error = self.graphs.update(self.graph, self.lists(*host))
        if error is not None:
            self.trouble = f"an update of its row lengths failed ({error})"
            raise CaptureError(f"jit: {self.trouble}; nothing was replayed") from error
        self.graph.replay()
        self.graphs.launched()
        self.trouble = None
        return [x.clone() for x in self.outputs]


def check_records(expected: Sequence[Record], recorded: Sequence[Any]) -> None:
    """`CaptureError` unless the device recorded these operators, in this order, with these arguments to update."""
    names = [operator_of(record.op_cache_entry) for record in recorded]
    if names != [record.operator for record in expected]:
        raise CaptureError(
            f"capture: the program has {len(expected)} operators to update, {[x.operator for x in expected]}, and the "
            f"device recorded {len(names)}, {names}; its handlers are not those of lowering.npu.updates"
        )
    for place, (record, found) in enumerate(zip(expected, recorded, strict=True)):
        lost = [key for key in record.keys if key not in found.kwargs]
        if lost:
            raise CaptureError(
                f"capture: record {place} ({record.operator}) was captured without {lost[0]}, so an update of it would "
                "be dropped; pass the list by keyword, and not the argument's default"
            )
