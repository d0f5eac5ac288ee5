"""A core while it runs, and the running of actions: one after the other, until one has to wait for another core."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

from .errors import Unknown
from .memory import Memory
from .pipes import CoreName, Order


@dataclass
class Core:
    """What a core has: its name, its memories by space, the block's cores it tells and hears, and values of names.

    `others` are the cores of the block of the other kind: both vector cores for a cube core, and it for each of these.
    """

    name: CoreName
    memories: Mapping[str, Memory]
    others: Sequence[CoreName]
    order: Order
    values: dict[str, Any]
    operations: int = field(default=0)

    def __getitem__(self, name: str) -> Any:
        """The value of `%name`, or of a number written out."""
        return self.values[name] if name.startswith("%") else int(name)

    def all(self, names: Sequence[str]) -> list[Any]:
        """The values of several."""
        return [self[name] for name in names]

    def memory(self, space: str, line: int) -> Memory:
        """The memory of a space. `Unknown` for one that this kind of core does not have."""
        if space not in self.memories:
            raise Unknown(f"line {line}: memory {space} is not known on {self.name}")
        return self.memories[space]

    @property
    def twin(self) -> CoreName | None:
        """The block's other vector core."""
        return None if self.name.vector is None else self.name._replace(vector=1 - self.name.vector)


Waiting = tuple[int, int]
"""A line that waits for other cores of the block, and the block flag that it waits for."""
Running = Generator[Waiting, None, Any]
"""Actions that are under way: it stops where a core waits, and goes on when it is asked again."""
Action = Callable[[Core], Any]
"""What an operation does. One that may wait for another core gives a `Running`; only `scf.yield` gives values."""


@dataclass(frozen=True)
class Jump:
    """Where a branch goes, and the values for the names that stand there."""

    label: str
    values: Sequence[Any] = ()


@dataclass(frozen=True)
class LabelledPart:
    """Actions from a label on, and the names that a jump to it gives values."""

    names: Sequence[str]
    actions: Sequence[Action]


START = "^bb0"
"""Where a function begins; the only part of one without branches."""


def run_parts(parts: Mapping[str, LabelledPart], core: Core) -> Running:
    """Go through a function from its beginning, part by part, until one does not jump."""
    jump: Any = Jump(START)
    while isinstance(jump, Jump):
        part = parts[jump.label]
        core.values.update(zip(part.names, jump.values, strict=True))
        jump = yield from run(part.actions, core)


def run(actions: Sequence[Action], core: Core) -> Running:
    """Do one after the other, until one yields values, which are the result."""
    for action in actions:
        core.operations += 1
        done = action(core)
        if isinstance(done, GeneratorType):
            done = yield from done
        if done is not None:
            return done
    return ()
