"""Pipes of cores and the order between them: what has surely ended when something begins.

A core gives its work to pipes that run at their own pace: S the scalars, V the vectors, MTE2 what comes in, MTE3 what
goes out. Work of one pipe begins in order, and may overlap: only `pipe_barrier` makes the next wait for what is before.
A flag is set by one pipe when all its work so far is done, and held by another before its next. So each pipe knows of
every pipe how much of its work has ended (a vector clock), and a place in memory remembers who wrote and read it last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import Hang, Race
from .memory import Memory, View

S, V, MTE2, MTE3 = PIPES = ("PIPE_S", "PIPE_V", "PIPE_MTE2", "PIPE_MTE3")
ALL = "PIPE_ALL"
Pipe = tuple[int, str]
"""A core and the name of one of its pipes."""


@dataclass
class Clock:
    """How much a pipe has begun, and how much of each pipe's work it knows to have ended."""

    begun: int = 0
    ended: dict[Pipe, int] = field(default_factory=dict)

    def learn(self, others: dict[Pipe, int]) -> None:
        """Know what somebody else knew."""
        for pipe, count in others.items():
            self.ended[pipe] = max(self.ended.get(pipe, 0), count)


class Touched:
    """Who wrote each unit of a memory last, and who read it since: a pipe by its number, a time, a line."""

    def __init__(self, units: int) -> None:
        self.writes = torch.zeros(3, units, dtype=torch.int64, device="cpu")
        self.reads: dict[int, Tensor] = {}

    def readers(self, pipe: int) -> Tensor:
        """Time and line of a pipe's last reads."""
        return self.reads.setdefault(pipe, torch.zeros_like(self.writes[:2]))


class Order:
    """The clocks of all cores, the flags of each, and what they have touched."""

    def __init__(self) -> None:
        self.clocks: dict[Pipe, Clock] = {}
        self.flags: dict[tuple[int, str, str, int], tuple[dict[Pipe, int], int]] = {}
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

    def set(self, core: int, by: str, to: str, event: int, line: int) -> None:
        """`to` may go on when all that `by` has begun has ended."""
        key = core, by, to, event
        if key in self.flags:
            raise Hang(f"line {line} sets flag {by} -> {to} {event}, which line {self.flags[key][1]} has set")
        clock = self.clock((core, by))
        self.flags[key] = clock.ended | {(core, by): clock.begun}, line

    def wait(self, core: int, by: str, to: str, event: int, line: int) -> None:
        """Hold `to`; scalars hold everything, since they give out the work."""
        found = self.flags.pop((core, by, to, event), None)
        if found is None:
            raise Hang(f"line {line} waits for flag {by} -> {to} {event}, which nobody has set")
        for pipe in PIPES if to == S else (to,):
            self.clock((core, pipe)).learn(found[0])

    def barrier(self, core: int, pipe: str) -> None:
        """What a pipe does next waits for what it has begun; all of them for all."""
        named = PIPES if pipe == ALL else (pipe,)
        ended = {(core, name): self.clock((core, name)).begun for name in named}
        for name in named:
            self.clock((core, name)).learn(ended)

    def end(self, core: int) -> None:
        """`Hang` for a flag of the core that is left set."""
        left = next((key for key in self.flags if key[0] == core), None)
        if left is not None:
            raise Hang(f"flag {left[1]} -> {left[2]} {left[3]}, set in line {self.flags[left][1]}, is never waited for")

    def forget(self, memory: Memory) -> None:
        """A memory that is gone with its core."""
        self.touched.pop(id(memory), None)

    # Accesses

    def access(self, core: int, pipe: str, line: int, reads: Iterable[View], writes: Iterable[View]) -> None:
        """A pipe begins work that reads and writes views. `Race` where something is not ordered before it."""
        who, clock = (core, pipe), self.clock((core, pipe))
        read, written = [view for view in reads if view.count], [view for view in writes if view.count]
        for view in read:
            self._after_writes(who, clock, view, line, "reads")
        for view in written:
            self._after_writes(who, clock, view, line, "writes")
            self._after_reads(who, clock, view, line)
        clock.begun += 1
        number = self.numbers[who]
        for view in read:
            found = self._of(view).readers(number)
            found[0, view.units()], found[1, view.units()] = clock.begun, line
        for view in written:
            record, units = self._of(view), view.units()
            record.writes[0, units], record.writes[1, units] = number, clock.begun
            record.writes[2, units] = line

    def _of(self, view: View) -> Touched:
        memory = view.memory
        if id(memory) not in self.touched:
            units = -(-memory.data.numel() // 32) if memory.is_bytes else memory.data.numel()
            self.touched[id(memory)] = memory, Touched(units)
        return self.touched[id(memory)][1]

    def _after_writes(self, who: Pipe, clock: Clock, view: View, line: int, does: str) -> None:
        pipes, times, lines = self._of(view).writes[:, view.units()]
        for number in pipes[times > 0].unique().tolist():
            late = (pipes == number) & (times > clock.ended.get(self.pipes[number], 0))
            if late.any():
                self._tell(view, line, who, does, int(lines[late][0]), self.pipes[number], "wrote")

    def _after_reads(self, who: Pipe, clock: Clock, view: View, line: int) -> None:
        for number, (times, lines) in self._of(view).reads.items():
            # Work of one pipe begins in order: what is read has been read when the next one writes.
            if self.pipes[number] == who:
                continue
            late = times[view.units()] > clock.ended.get(self.pipes[number], 0)
            if late.any():
                self._tell(view, line, who, "writes", int(lines[view.units()][late][0]), self.pipes[number], "read")

    def _tell(self, view: View, line: int, who: Pipe, does: str, other: int, whom: Pipe, did: str) -> None:
        raise Race(
            f"line {line} ({who[1]} of block {who[0]}) {does} what line {other} ({whom[1]} of block {whom[0]}) {did} "
            f"in {view.memory.name}, and nothing orders the two"
        )
