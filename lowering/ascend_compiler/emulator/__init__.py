"""What Ascend's compiler has made of a kernel, run: its last program, operation by operation, on an ordinary machine.

A program is loops, arithmetic on integers, and calls of a library that work on addresses in the memories of a core,
with flags between the pipes that run them. `parse` reads it, `memory` holds what it works on, `pipes` says what is
ordered before what. `library` is the meaning of each call on a vector core, `cube` that of products, `registers` that
of instructions on Ascend 950, `scalars` and `operations` what the rest does. `core` goes through it; `run` lets the
cores of a block take turns: one vector core, one cube core, or a cube core with two vector cores. What is not known is
refused by name.

It shows what the program says, not what the machine does: exponentials, divisions and the order of sums are Torch's.
"""

from .errors import EmulationError, Hang, OutOfBounds, Race, Unknown
from .run import Emulation, emulate

__all__ = ["Emulation", "EmulationError", "Hang", "OutOfBounds", "Race", "Unknown", "emulate"]
