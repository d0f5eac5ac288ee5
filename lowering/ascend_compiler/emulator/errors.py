"""What may be wrong with a program that is run; each error names the lines of the program."""

from __future__ import annotations

from ...errors import LoweringError


class EmulationError(LoweringError):
    """A program does what no program may."""


class OutOfBounds(EmulationError):
    """It reads or writes outside of an argument, or of a memory of the core."""


class Race(EmulationError):
    """Two pipes, or two cores, touch the same place, one of them writes, and nothing orders them."""


class Hang(EmulationError):
    """It waits for a flag that nobody sets, sets one that is set, or leaves one behind."""


class Unknown(EmulationError):
    """It has an operation, or a call of the library, whose meaning is not known here."""
