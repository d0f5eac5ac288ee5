"""Pipes of cores and the order between them: what has surely ended when something begins.

A core gives its work to pipes that run at their own pace. S are the scalars. On a vector core V are the vectors, MTE2
what comes in, MTE3 what goes out. On a cube core MTE2 is what comes into L1, MTE1 what goes on to the memories of
operands, M products, FIX their results on the way out. Work of one pipe begins in order, and may overlap: only
`pipe_barrier` makes the next wait for what is before. A flag is set by one pipe when all its work so far is done, and
held by another before its next. Block flags do the same between the cores of a block; they count, and each vector core
has its own. So each pipe knows of every pipe how much of its work has ended (a vector clock), and a place in memory
remembers who wrote and read it last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import Hang, Race
from .memory import Memory, View

S, V, MTE1, MTE2, MTE3, M, FIX = PIPES = (
    "PIPE_S",
    "PIPE_V",
    "PIPE_MTE1",
    "PIPE_MTE2",
    "PIPE_MTE3",
    "PIPE_M",
    "PIPE_FIX",
)
ALL = "PIPE_ALL"


class CoreName(NamedTuple):
    """A block's only core, or one of three: its cube core, or a vector core by its number, 0 or 1."""

    block: int
    unit: str = ""
    vector: int | None = None

    def __str__(self) -> str:
        number = "" if self.vector is None else f" {self.vector}"
        return f"{self.unit} core{number} of block {self.block}" if self.unit else f"block {self.block}"


Pipe = tuple[CoreName, str]
"""A core and the name of one of its pipes."""
Known = dict[Pipe, int]
"""How much of each pipe's work has ended."""


@dataclass
class Clock:
    """How much a pipe has begun, and how much of each pipe's work it knows to have ended."""

    begun: int = 0
    ended: Known = field(default_factory=dict)

    def learn(self, others: Known) -> None:
        """Know what somebody else knew."""
        for pipe, count in others.items():
            self.ended[pipe] = max(self.ended.get(pipe, 0), count)


@dataclass(frozen=True)
class Access:
    """One piece of work: the pipe that does it, its line, the views it reads and writes, and those it works in.

    `twin` is a core that may do the same at the same time, as when both store equal values.
    """

    who: Pipe
    line: int
    reads: Sequence[View]
    writes: Sequence[View]
    scratch: Sequence[View] = ()
    twin: CoreName | None = None

    @property
    def all_writes(self) -> tuple[View, ...]:
        """What is written, what it works in included."""
        return (*self.writes, *self.scratch)


class Touched:
    """Who wrote each unit of a memory last, and who read it since: a pipe by its number, a time, a line."""

    def __init__(self, units: int) -> None:
        self.writes = torch.zeros(3, units, dtype=torch.int64, device="cpu")
        self.reads: dict[int, Tensor] = {}

    def readers(self, pipe: int) -> Tensor:
        """Time and line of a pipe's last reads."""
        return self.reads.setdefault(pipe, torch.zeros_like(self.writes[:2]))


class Order:
    """The clocks of all cores, the flags of each, and what they have touched.

    Work of the pipes `in_turn` ends before the next of the same pipe begins.
    """

    def __init__(self, in_turn: Sequence[str]) -> None:
        self.in_turn = in_turn
        self.clocks: dict[Pipe, Clock] = {}
        self.flags: dict[tuple[CoreName, str, str, int], tuple[Known, int]] = {}
        self.block_flags: dict[tuple[CoreName, CoreName, int], list[tuple[Known, int]]] = {}
        self.touched: dict[int, tuple[Memory, Touched]] = {}
        self.numbers: dict[Pipe, int] = {}
        self.pipes: list[Pipe] = []

    def clock(self, pipe: Pipe) -> Clock:
        """The clock of a pipe, which begins when it is first asked for."""
        if pipe not in self.clocks:
            self.clocks[pipe] = Clock()
            self.numbers[pipe] = len(self.pipes)
            self.pipes.append(pipe)
        return self.clocks[pipe]

    # Flags and barriers

    def set(self, core: CoreName, by: str, to: str, event: int, line: int) -> None:
        """`to` may go on when all that `by` has begun has ended."""
        key = core, by, to, event
        if key in self.flags:
            raise Hang(f"line {line} sets flag {by} -> {to} {event}, which line {self.flags[key][1]} has set")
        self.flags[key] = self.now(core, by), line

    def now(self, core: CoreName, pipe: str) -> Known:
        """What has ended when all that a pipe has begun has."""
        clock = self.clock((core, pipe))
        return clock.ended | {(core, pipe): clock.begun}

    def wait(self, core: CoreName, by: str, to: str, event: int, line: int) -> None:
        """Hold `to`; scalars hold everything, since they give out the work."""
        found = self.flags.pop((core, by, to, event), None)
        if found is None:
            raise Hang(f"line {line} waits for flag {by} -> {to} {event}, which nobody has set")
        self._hold(core, to, found[0])

    def _hold(self, core: CoreName, pipe: str, known: Known) -> None:
        for held in PIPES if pipe == S else (pipe,):
            self.clock((core, held)).learn(known)

    def barrier(self, core: CoreName, pipe: str) -> None:
        """What a pipe does next waits for what it has begun; all of them for all."""
        named = PIPES if pipe == ALL else (pipe,)
        ended = {(core, name): self.clock((core, name)).begun for name in named}
        for name in named:
            self.clock((core, name)).learn(ended)

    def send(self, core: CoreName, others: Iterable[CoreName], pipe: str, flag: int, line: int) -> None:
        """A block flag: each of the others may go on when all that the pipe has begun has ended."""
        for other in others:
            self.block_flags.setdefault((core, other, flag), []).append((self.now(core, pipe), line))

    def sent(self, core: CoreName, others: Iterable[CoreName], flag: int) -> bool:
        """Whether all of the others have set the flag."""
        return all(self.block_flags.get((other, core, flag)) for other in others)

    def receive(self, core: CoreName, others: Iterable[CoreName], pipe: str, flag: int) -> None:
        """Hold a pipe for one flag of each of the others."""
        for other in others:
            known, _ = self.block_flags[other, core, flag].pop(0)
            self._hold(core, pipe, known)

    def end(self, core: CoreName) -> None:
        """`Hang` for a flag of the core, or a block flag for it, that is left set."""
        left = next((key for key in self.flags if key[0] == core), None)
        if left is not None:
            raise Hang(f"flag {left[1]} -> {left[2]} {left[3]}, set in line {self.flags[left][1]}, is never waited for")
        late = next((key for key, sets in self.block_flags.items() if key[1] == core and sets), None)
        if late is not None:
            line = self.block_flags[late][0][1]
            raise Hang(f"block flag {late[2]}, set in line {line} on {late[0]}, is never waited for on {core}")

    def forget(self, memory: Memory) -> None:
        """A memory that is gone with its core."""
        self.touched.pop(id(memory), None)

    # Accesses

    def access(self, access: Access) -> None:
        """Work begins that reads and writes. `Race` where something is not ordered before it."""
        clock = self.clock(access.who)
        read, written = ([view for view in views if view.count] for views in (access.reads, access.all_writes))
        for view in read:
            self._after_writes(access, clock, view, "reads")
        for view in written:
            self._after_writes(access, clock, view, "writes")
            self._after_reads(access, clock, view)
        clock.begun += 1
        if access.who[1] in self.in_turn:
            clock.ended[access.who] = clock.begun
        self._remember(access, clock.begun, read, written)

    def _remember(self, access: Access, time: int, read: Iterable[View], written: Iterable[View]) -> None:
        number = self.numbers[access.who]
        for view in read:
            found = self._of(view).readers(number)
            found[0, view.units()], found[1, view.units()] = time, access.line
        for view in written:
            record, units = self._of(view), view.units()
            record.writes[0, units], record.writes[1, units] = number, time
            record.writes[2, units] = access.line

    def _of(self, view: View) -> Touched:
        memory = view.memory
        if id(memory) not in self.touched:
            units = -(-memory.data.numel() // 32) if memory.is_bytes else memory.data.numel()
            self.touched[id(memory)] = memory, Touched(units)
        return self.touched[id(memory)][1]

    def _after_writes(self, access: Access, clock: Clock, view: View, does: str) -> None:
        pipes, times, lines = self._of(view).writes[:, view.units()]
        for number in pipes[times > 0].unique().tolist():
            pipe = self.pipes[number]
            if pipe[0] == access.twin:
                continue
            late = (pipes == number) & (times > clock.ended.get(pipe, 0))
            if pipe == access.who and view in access.scratch:
                # A call that is repeated works in the same place, whose contents it does not use.
                late &= lines != access.line
            if late.any():
                self._tell(access, view, does, int(lines[late][0]), pipe, "wrote")

    def _after_reads(self, access: Access, clock: Clock, view: View) -> None:
        for number, (times, lines) in self._of(view).reads.items():
            pipe = self.pipes[number]
            # Work of one pipe begins in order: what is read has been read when the next one writes.
            if pipe == access.who or pipe[0] == access.twin:
                continue
            late = times[view.units()] > clock.ended.get(pipe, 0)
            if late.any():
                self._tell(access, view, "writes", int(lines[view.units()][late][0]), pipe, "read")

    def _tell(self, access: Access, view: View, does: str, other: int, whom: Pipe, did: str) -> None:
        core, pipe = access.who
        raise Race(
            f"line {access.line} ({pipe} of {core}) {does} what line {other} ({whom[1]} of {whom[0]}) {did} "
            f"in {view.memory.name}, and nothing orders the two"
        )
