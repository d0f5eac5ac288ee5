"""A tape: what the host does beside a program, noted while that is traced and done anew beside each replay.

Functions of carried values say what the host does with `beforehand` and `noted`. Called plainly, that is done at once.
While a program is traced it is put on the tape: of which ledgers and counts among the arguments, and what came of it
before. A `HostCall` does it for a replay in three parts: checks, and pages for all that the program will write; what
notes the writing, right before the program runs; and the ledgers of the results, with what the program counted if that
can be read without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import CaptureError
from ..host import symbolic
from ..protocols import Carried, HostSide, Ragged

L = TypeVar("L", bound=HostSide)


Ready = Callable[[Any, Sequence[Any]], Any]


class At(NamedTuple):
    """Stands for the value at a place: an argument's, or what came of an earlier note."""

    place: int


class Read(NamedTuple):
    """Stands for the values of a tensor of the program, None until they can be read."""

    number: int


class ArgumentValue(NamedTuple):
    """Where a value comes from: an argument, or an attribute of it."""

    argument: str
    attribute: str | None = None

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """The value in these arguments."""
        value = arguments[self.argument]
        return value if self.attribute is None else getattr(value, self.attribute)


@dataclass(frozen=True)
class Note:
    """A function, and what it is called with. One that `makes` nothing is a check, one that `writes` is to be claimed.

    `ready(value, ledgers)` then makes the argument ready for versions of it with these ledgers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    makes: bool
    writes: str | None = None
    ready: Ready | None = None

    def done(self, values: Sequence[Any], reads: Sequence[Any]) -> Any:
        """What comes of it, with the values of all places before."""
        return self.function(*(_filled(arg, values, reads) for arg in self.args))


def _filled(arg: Any, values: Sequence[Any], reads: Sequence[Any]) -> Any:
    if isinstance(arg, At):
        return values[arg.place]
    return reads[arg.number] if isinstance(arg, Read) else arg


@dataclass(frozen=True)
class Tape:
    """Notes, in order; the values of their places follow those of the sources."""

    sources: tuple[ArgumentValue, ...]
    notes: tuple[Note, ...]

    def played(self, arguments: Mapping[str, Any], reads: Sequence[Any], checks: bool = False) -> list[Any]:
        """The values of all places."""
        values = [source.of(arguments) for source in self.sources]
        for note in self.notes:
            values.append(note.done(values, reads) if note.makes or checks else None)
        return values

    @cached_property
    def writings(self) -> list[tuple[int, int]]:
        """The places of the ledgers before and after each note that writes."""
        placed = enumerate(self.notes, len(self.sources))
        return [(note.args[0].place, at) for at, note in placed if note.writes is not None]

    @cached_property
    def grown(self) -> list[tuple[str, Ready, list[int]]]:
        """The arguments that grow, in their order, what makes each ready, and the places of its longer versions."""
        placed = list(enumerate(self.notes, len(self.sources)))
        kinds = {note.writes: note.ready for note in self.notes if note.ready is not None}
        return [
            (name, kinds[name], [at for at, note in placed if note.writes == name])
            for name, attribute in self.sources
            if attribute == "ledger" and name in kinds
        ]


class HostCall:
    """The host's part of one replay. `arguments` are those of the program, carried ones with pages for all it writes.

    `reads` are the values that it counts with as far as they are known before. What raises here has changed nothing.
    """

    def __init__(self, tape: Tape, arguments: Mapping[str, Any], reads: Sequence[Any]) -> None:
        self.tape, self.arguments, self.reads = tape, arguments, reads
        self.values = tape.played(arguments, reads, checks=True)
        ready = {name: make(arguments[name], [self.values[at] for at in places]) for name, make, places in tape.grown}
        if any(arguments[name] is not value for name, value in ready.items()):
            self.arguments = {**arguments, **ready}
            self.values = tape.played(self.arguments, reads)

    def claim(self) -> None:
        """Note that the program writes: the last thing before it does."""
        for before, at in self.tape.writings:
            self.values[at].claim(self.values[before])

    def ledgers(self, reads: Sequence[Any]) -> list[Any]:
        """The ledgers after the program, by place, when `reads` are what it counted with."""
        if all(one is other for one, other in zip(self.reads, reads, strict=True)):
            return self.values
        values = [source.of(self.arguments) for source in self.tape.sources]
        for note in self.tape.notes:
            found = note.done(values, reads) if note.makes else None
            values.append(found if note.writes is None else self.values[len(values)].known_as(found))
        return values


@dataclass
class Recording:
    """The tape of a program that is being traced.

    `reads` are the tensors that the host counts with, `lengthwise` by their ids those with an entry a token of a ragged
    argument, with its name and the axis.
    """

    arguments: Mapping[str, Any]
    sources: list[ArgumentValue] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    reads: list[Tensor] = field(default_factory=list)
    lengthwise: dict[int, tuple[Tensor, str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept: list[Any] = []  # nothing else may get the id of one of these
        self._places: dict[int, int] = {}
        # Of each ledger, by place: whose rows it has, and the writings that it stands on.
        self._lines: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._newest: dict[str, tuple[int, ...]] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Carried):
                self._lines[self._source(ArgumentValue(name, "ledger"))] = (name, ())
                self._newest[name] = ()
            elif isinstance(value, Ragged):
                self._source(ArgumentValue(name))
                if value.host_ints():
                    self._source(ArgumentValue(name, "counts"))

    def _source(self, source: ArgumentValue) -> int:
        self.sources.append(source)
        return self._enter(source.of(self.arguments))

    def _enter(self, value: Any) -> int:
        self._kept.append(value)
        return self._places.setdefault(id(value), len(self._kept) - 1)

    @property
    def tape(self) -> Tape:
        """What has been noted."""
        return Tape(tuple(self.sources), tuple(self.notes))

    def place(self, ledger: Any) -> int:
        """The place of a ledger. `CaptureError` for one that no note made."""
        found = self._places.get(id(ledger))
        if found is None:
            raise CaptureError(
                "jit: the function makes a state whose lengths the host cannot follow; go on from those it is given, "
                "with forward, commit, extend and propose"
            )
        return found

    def check(self, function: Callable[..., None], subject: Any, args: Sequence[Any]) -> None:
        """Note a check, unless it is of something that the function has made itself, or is noted already."""
        if id(subject) in self._places:
            note = Note(function, tuple(map(self._arg, (subject, *args))), makes=False)
            if note not in self.notes:
                self._add(note, None)

    def note(self, function: Callable[..., L], before: L, args: Sequence[Any], made: L, ready: Ready | None) -> None:
        """Note that `made` is the ledger `function(before, *args)`. `StaleStateError` where that can be none."""
        name, line = self._lines[self.place(before)]
        given = tuple(map(self._arg, (before, *args)))
        for arg in given:  # what goes back to another version stands on what that does
            if isinstance(arg, At) and arg.place in self._lines:
                name, line = self._lines[arg.place]
        if ready is not None:
            if self._newest[name][: len(line)] != line:
                raise before.stale(0)
            line = self._newest[name] = (*line, len(self.notes))
        note = Note(function, given, True, None if ready is None else name, ready)
        self._lines[self._add(note, made)] = (name, line)

    def _add(self, note: Note, made: Any) -> int:
        self.notes.append(note)
        return self._enter(made if note.makes else note)

    def _arg(self, arg: Any) -> Any:
        if id(arg) in self._places:
            return At(self._places[id(arg)])
        if isinstance(arg, Tensor):
            if arg.device.type != "cpu":
                return None
            self.reads.append(arg)
            return Read(len(self.reads) - 1)
        if isinstance(arg, tuple) and symbolic(arg):
            raise CaptureError(
                "jit: the function makes a batch of counts that change from call to call; pass it in as an argument"
            )
        return arg


_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(arguments: Mapping[str, Any]) -> Iterator[Recording]:
    """Note what the host does with these arguments meanwhile."""
    token = _RECORDING.set(found := Recording(arguments))
    try:
        yield found
    finally:
        _RECORDING.reset(token)


def _recording() -> Recording | None:
    # Dynamo cannot ask for it, and nothing that it compiles is captured.
    return None if torch.compiler.is_dynamo_compiling() else _RECORDING.get()


def beforehand(function: Callable[..., None], subject: Any, *args: Any) -> None:
    """Check `function(subject, *args)`: now, or before each replay of what is being traced.

    The subject is a ledger, or what jit pads: others, which a captured function has made itself, are not checked there.
    """
    tape = _recording()
    if tape is None:
        function(subject, *args)
    else:
        tape.check(function, subject, args)


def noted(function: Callable[..., L], before: L, *args: Any, writes: Ready | None = None) -> L:
    """The ledger `function(before, *args)`, now and beside each replay of what is being traced.

    The function is pure. With `writes` rows are written to behind the lengths of `before`. Of a plain call the caller
    makes the value ready for that with it, and has the ledger claim what is written.
    """
    made = function(before, *args)
    tape = _recording()
    if tape is not None:
        tape.note(function, before, args, made, writes)
    return made


def lengthwise(batch: Any, axis: int, *tensors: Tensor) -> None:
    """Say that these results have an entry a token of `batch` on an axis: a replay cuts its padding off."""
    tape = _recording()
    if tape is not None and id(batch) in tape._places:
        name = tape.sources[tape._places[id(batch)]].argument
        tape.lengthwise |= {id(x): (x, name, axis) for x in tensors}
