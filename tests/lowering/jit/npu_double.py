"""A strict stand-in for `torch.npu`'s graphs, on the CPU, written from what their documentation and sources say.

A capture runs nothing: it records operators over tensors where they lie, with results that hold NaN until a replay. A
replay runs the operators, the CPU references of the `npu` ones among them, over the same memory, with the host lists of
the last update: stale lists give wrong numbers. Operators of the handler registry wait for an update in every replay;
one too few is an error here, where a device would hang. Keys that an operator does not consume are dropped silently, as
on the device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

HANDLED = {
    "npu_fused_infer_attention_score.default": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2.default": ("actual_seq_qlen", "actual_seq_kvlen"),
}
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
DEVICE = 3


class HangError(RuntimeError):
    """The device would wait for ever."""


@dataclass
class Record:
    """An operator that waits for updates: as many of the fields of torch_npu's as there are uses for."""

    op_cache_entry: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    updated: bool = False


@dataclass
class Call:
    """A recorded operator, and the tensors that its results go to; none for one that writes to its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]
    record: Record | None = None


class Recording(TorchDispatchMode):
    """Records the operators of a capture."""

    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self.graph = graph
        self.graph_dispatch_records: list[Record] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError(f"{func} reads the device while a graph is captured")
        if func.is_view:
            return func(*args, **kwargs)
        out = func(*args, **kwargs) if func.namespace == "prim" else self._allocated(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, at_its_address, (args, kwargs))
        call = Call(func, args, kwargs, [x for x in pytree.tree_leaves(out) if id(x) in self.own])
        if self.graph.auto_dispatch_capture and func.__name__ in HANDLED:
            named = SimpleNamespace(__name__=func.__name__.replace(".default", ".out"))
            kept = {key: self._kept(value) for key, value in kwargs.items() if key not in self.graph.double.stripped}
            call.record = Record(named, args, kept)
            self.graph_dispatch_records.append(call.record)
            out = list(out)
        self.graph.calls.append(call)
        return out

    def _allocated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Results of the right shapes: those of arguments that are written are these themselves."""
        written = [
            (kwargs.get(argument.name) if at >= len(args) else args[at])
            for at, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returns = [x.alias_info is not None for x in func._schema.returns]
        if written and all(returns):
            assert len(returns) <= len(written), f"{func} returns more than what it writes"
            return written[0] if len(returns) == 1 else tuple(written)[: len(returns)] if returns else None
        assert not any(returns), f"{func} returns what it writes among other things"
        with self.fake:
            given = pytree.tree_map_only(Tensor, self.fake.from_tensor, (args, kwargs))
            shapes = func(*given[0], **given[1])
        return pytree.tree_map_only(Tensor, self._unwritten, shapes)

    def _unwritten(self, shape: Tensor) -> Tensor:
        x = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        self.graph.memory.append(x)
        self.own.add(id(x))
        return spoiled(x)

    def _kept(self, value: Any) -> Any:
        return value if isinstance(value, Tensor) else deepcopy(value)


def at_its_address(x: Tensor) -> Tensor:
    """The tensor as a graph knows it: an address, which keeps no memory."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return x
    held = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return torch.empty(0, dtype=x.dtype).set_(held.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def spoiled(x: Tensor) -> Tensor:
    """The tensor with NaN everywhere, or with a number that is no index."""
    return x.fill_(torch.nan if x.is_floating_point() else x.dtype == torch.bool or -77)


class NPUGraph:
    """A graph. `memory` is what it holds of its pool."""

    def __init__(self, double: Double) -> None:
        self.double = double
        self.calls: list[Call] = []
        self.memory: list[Tensor] = []
        self.graph_dispatch_mode = Recording(self)
        self.auto_dispatch_capture = False
        self.pool: Any = None
        self.captured = False

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        """New host lists for the records, in the order of the capture; then each may run once."""
        self.double.log.append("update begins")
        self.double.updating(self)
        records = self.graph_dispatch_mode.graph_dispatch_records
        if not self.auto_dispatch_capture:
            raise RuntimeError("captured without auto_dispatch_capture")
        if self.double.device != DEVICE:
            raise RuntimeError(f"update on device {self.double.device}, the graph is of {DEVICE}")
        if self.double.unread:
            raise RuntimeError("a replay may still read the lists that this update writes over")
        given = cpu_update_input * len(records) if len(cpu_update_input) == 1 else cpu_update_input
        if len(given) != len(records):
            raise RuntimeError(f"{len(given)} updates for {len(records)} operators")
        for record, update in zip(records, given, strict=True):
            self._update_one(record, update)
        self.double.log.append("update ends")

    def _update_one(self, record: Record, update: dict[str, Any]) -> None:
        if record.updated:
            raise RuntimeError("a second update before the replay of the first")
        for key in update.keys() & record.kwargs.keys():
            if len(update[key]) != len(record.kwargs[key]):
                raise RuntimeError(f"{key} was captured with {len(record.kwargs[key])} entries, got {len(update[key])}")
            record.kwargs[key] = update[key]
        record.updated = True

    def replay(self) -> None:
        """Run what was recorded, from memory to memory."""
        self.double.log.append("replay begins")
        assert self.captured, "replayed before its capture was complete"
        waiting = [x for x in self.graph_dispatch_mode.graph_dispatch_records if not x.updated]
        if waiting:
            raise HangError(f"{len(waiting)} operators wait for an update that never comes")
        for other in self.double.graphs:
            if other is not self and other.pool == self.pool:
                for x in other.memory:
                    spoiled(x)
        for call in self.calls:
            self._run(call)
        self.double.unread = bool(self.graph_dispatch_mode.graph_dispatch_records)
        self.double.log.append("replay ends")

    def _run(self, call: Call) -> None:
        kwargs = call.kwargs
        if call.record is not None:
            kwargs, call.record.updated = call.record.kwargs, False
        made = [x for x in pytree.tree_leaves(call.func(*call.args, **kwargs)) if isinstance(x, Tensor)]
        if call.results:
            for target, x in zip(call.results, made, strict=True):
                target.copy_(x)


class Event:
    """Marks the end of what was launched before it."""

    def __init__(self, double: Double) -> None:
        self.double = double

    def record(self) -> None:
        self.double.log.append("fence")

    def synchronize(self) -> None:
        self.double.log.append("fence passed")
        self.double.unread = False


class Stream:
    """A stream that runs everything at once."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


@dataclass
class Double:
    """What stands for `torch.npu`. `updating` is called when an update begins, to make it late or fail.

    `unread` says that a replay has been launched whose host lists the device may not have read yet. `stripped` are
    arguments that do not reach the recorder, as none does that is equal to its default.
    """

    log: list[str] = field(default_factory=list)
    updating: Callable[[NPUGraph], None] = lambda graph: None
    unread: bool = False
    stripped: tuple[str, ...] = ()
    graphs: list[NPUGraph] = field(default_factory=list)
    capturing: NPUGraph | None = None
    threads: list[int] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=lambda: [Stream()])
    pools: int = 0

    def __post_init__(self) -> None:
        self.local = threading.local()
        self.local.device = DEVICE

    @property
    def device(self) -> int:
        """The device of the calling thread; that of a thread that chose none is 0."""
        return getattr(self.local, "device", 0)

    def NPUGraph(self) -> NPUGraph:  # noqa: N802
        self.graphs.append(NPUGraph(self))
        return self.graphs[-1]

    @contextmanager
    def graph(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False
    ) -> Iterator[None]:
        if self.capturing is not None:
            raise RuntimeError("another capture is underway")
        assert len(self.streams) == 1, "the warm-ups' stream is still current"
        self.capturing = npu_graph
        npu_graph.pool, npu_graph.auto_dispatch_capture = pool, auto_dispatch_capture
        try:
            with npu_graph.graph_dispatch_mode:
                yield
            npu_graph.captured = True
        finally:
            self.capturing = None

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    def Stream(self) -> Stream:  # noqa: N802
        return Stream()

    def current_stream(self) -> Stream:
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def current_device(self) -> int:
        return self.device

    def set_device(self, index: int) -> None:
        self.local.device = index
        self.threads.append(threading.get_ident())
