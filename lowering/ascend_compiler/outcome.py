"""What comes of showing a kernel to Ascend's compiler: one of three values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """The compiler made a program of the kernel, up to machine code, which needs CANN.

    `bits_used` of `bits_available` is the highest place in the unified buffer that the plan of memory reaches. `calls`
    are those of the device library in the text of the program, by unit (load, store, vector, cube, other) and name;
    one in a loop counts once. `mix` says that cube cores take part, `multi_buffer` that second buffers were asked for.
    `arguments` are the names of those that the program takes, in order. `ttir`, `linalg` and `program` are the kernel
    in Triton's IR, in the IR after its adapter, and as the compiler ends: physical addresses, transfers, flags.
    """

    chip: str
    bits_used: int
    bits_available: int
    calls: dict[str, dict[str, int]]
    mix: bool
    multi_buffer: bool
    arguments: list[str]
    ttir: str
    linalg: str
    program: str

    @property
    def used(self) -> float:
        """The part of the unified buffer that the plan reaches."""
        return self.bits_used / self.bits_available

    def __str__(self) -> str:
        calls = ", ".join(f"{sum(names.values())} {unit}" for unit, names in self.calls.items())
        return f"compiled for {self.chip}: {self.used:.0%} of the unified buffer; calls: {calls}"


@dataclass(frozen=True)
class Overflow:
    """The kernel's tiles need `needs` bits of a memory that has `has`; `space` is the compiler's name for it."""

    chip: str
    space: str
    needs: int
    has: int

    def __str__(self) -> str:
        return f"does not fit {self.chip}: {self.space} has {self.has} bits, and {self.needs} are needed"


@dataclass(frozen=True)
class Refused:
    """The compiler takes no such kernel, or ends without a word. `line` is that of the source where it says one.

    It is not `sure` where a signal or the time ended the compiler: such an outcome is not kept.
    """

    chip: str
    reason: str
    line: int | None
    sure: bool = True

    def __str__(self) -> str:
        return f"refused for {self.chip}{f' at line {self.line}' if self.line else ''}: {self.reason}"


Outcome = Compiled | Overflow | Refused
