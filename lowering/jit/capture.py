"""One captured program, and its replays over static buffers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..ops.collective import captured_failure
from .program import Program

Run = Callable[[Sequence[Tensor], Sequence[int]], Sequence[Tensor]]
"""From the inputs of a graph, tensors and host integers, to its outputs, in tensors of their own."""

MOST_PLACES = 4
"""Runs over other addresses that one program keeps: each holds a graph of the device and its buffers."""

TRACING = threading.RLock()
"""Held by the one thread of a process that traces or compiles: torch.fx changes classes of Torch while it does."""
ON_DEVICE = threading.RLock()
"""Held while graphs of devices are captured or replayed: those of one function share memory, and states move between
the homes of several."""


@runtime_checkable
class Backend(Protocol):
    """What runs traced graphs. One serves all captures of a jitted function.

    `fixed` says that captured code reads tensors where they lay at capture.
    """

    fixed: ClassVar[bool]

    def check(self, device: str) -> None:
        """`CaptureError` for a type of device that it does not run on."""
        ...

    def capture(self, program: Program, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Run:
        """The program captured over `inputs`, which on a device are where every replay finds them."""
        ...

    def close(self) -> None:
        """Free what it holds beside its captures."""
        ...


@dataclass(frozen=True)
class Rehearsal:
    """Inputs that a program may be run with before it is captured: what it writes then, nobody reads.

    `host` are integers for all arguments that have some; a capture is given those that the program takes.
    """

    inputs: Callable[[], Sequence[Tensor]]
    host: Sequence[int]


@dataclass
class Placed:
    """A run, with a static buffer for each staged input (by its place), and where other inputs must lie.

    `homes` are the donated tensors that it writes to. Other ones are moved there, if nobody holds the former any more.
    """

    run: Run
    buffers: dict[int, Tensor]
    fixed: dict[int, int]
    homes: dict[int, Home]

    def serves(self, inputs: Sequence[Tensor]) -> bool:
        """Whether all inputs that must lie where they lay at capture do, or can be moved there."""
        return all(inputs[place].data_ptr() == address for place, address in self.fixed.items()) and all(
            home.is_at(inputs[place]) or home.is_free() for place, home in self.homes.items()
        )


class Home:
    """Memory that a capture writes a donated tensor's successors to, kept for as long as the capture is."""

    keepers: ClassVar[dict[int, int]] = {}
    """The storage of each home there is, by the home's id: entered and taken out at any time, by any thread."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.storage = tensor.untyped_storage()._cdata
        self.keepers[id(self)] = self.storage
        weakref.finalize(self, self.keepers.pop, id(self))

    def is_at(self, x: Tensor) -> bool:
        """Whether `x` lies here already."""
        return x.data_ptr() == self.tensor.data_ptr()

    def is_free(self) -> bool:
        """Whether only captures hold this memory. One more count is that of the handle it is read by."""
        held = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return held - 1 <= list(self.keepers.values()).count(self.storage)

    def lent(self, x: Tensor) -> Tensor:
        """`x`, or where it has been moved to this memory, a tensor over that."""
        return x if self.is_at(x) else self.tensor.copy_(x).detach()


@dataclass
class Capture:
    """A program, and the runs of it. `staged` are the places of the inputs that are copied into buffers.

    `pools` are the storages of the newest pools of pages that it was captured over; `used` is the time of its
    last call, in calls. `lock` is held from the choice of a run to the end of its replay.
    """

    program: Program
    backend: Backend
    staged: Collection[int]
    runs: list[Placed] = field(default_factory=list)
    pools: tuple[tuple[StorageWeakRef, ...], ...] = ()
    used: int = 0
    lock: AbstractContextManager[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.lock = ON_DEVICE if self.backend.fixed else threading.RLock()

    def placed(self, inputs: Sequence[Tensor]) -> Placed | None:
        """The run for inputs that lie where these do, if there is one."""
        return next((run for run in self.runs if run.serves(inputs)), None)

    @torch.no_grad()
    def place(self, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Placed:
        """Capture over these inputs."""
        buffers = {place: torch.empty_like(inputs[place]).copy_(inputs[place]) for place in self.staged}
        given = [buffers.get(place, x) for place, x in enumerate(inputs)]
        host = [rehearsal.host[at] for at in self.program.host]
        run = self.backend.capture(self.program, given, replace(rehearsal, host=host))
        fixed, homes = {}, {}
        if self.backend.fixed:
            homes = {place: Home(inputs[place]) for place in self.program.homes}
            fixed = {at: x.data_ptr() for at, x in enumerate(inputs) if at not in buffers and at not in homes}
        placed = Placed(run, buffers, fixed, homes)
        self.runs = [placed, *self.runs][:MOST_PLACES]
        return placed

    @torch.no_grad()
    def replay(
        self, placed: Placed, inputs: Sequence[Tensor], host: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Stage the inputs and run: what the results are put together from. Donated inputs are overwritten.

        `host` are the host integers of all arguments. A run that fails on a device is given up. `CollectiveError`
        when a rank that takes part in the program does not answer.
        """
        own = list(inputs)
        for at, home in placed.homes.items():
            own[at] = home.lent(inputs[at])
        given = list(own)
        for at, buffer in placed.buffers.items():
            given[at] = buffer.copy_(inputs[at])
        kept, self.runs = self.runs, [run for run in self.runs if run is not placed or not self.backend.fixed]
        try:
            outputs = placed.run(given, [host[at] for at in self.program.host])
        except RuntimeError as error:
            lost = captured_failure(error)
            if lost is None:
                raise
            raise lost from error
        self.runs = kept
        return own, outputs
