"""What may be wrong with a program that is run; each error names the lines of the program."""

from __future__ import annotations

from ...errors import LoweringError


class EmulationError(LoweringError):
    """What no program may do."""


class OutOfBounds(EmulationError):
    """A read or a write outside of an argument, or of a memory of the core."""


class Race(EmulationError):
    """Two accesses of one place by two pipes or cores, of which one writes, and nothing orders them."""


class Hang(EmulationError):
    """A wait for a flag that nobody sets, a flag that is set twice, or one that is left behind."""


class Unknown(EmulationError):
    """An operation, or a call of the library, whose meaning is not known here."""
