"""What `jit` needs of arguments that know something on the host: base classes, asked for with `isinstance`."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor

from .host import HostInt


class HostValued(abc.ABC):
    """A tree with integers on the host that change from call to call, and that a program may compute with."""

    @abc.abstractmethod
    def host_ints(self) -> tuple[HostInt, ...]:
        """These integers."""

    @abc.abstractmethod
    def with_host_ints(self, values: tuple[HostInt, ...]) -> Any:
        """The tree with others in their place: symbols while a program is traced, none in its results."""

    @abc.abstractmethod
    def host_facts(self) -> tuple[bool, ...]:
        """What else a choice of kernel may depend on: true where more is known."""


class Ragged(HostValued):
    """New tokens of several rows, laid end to end: what programs are padded for. `counts` are those of the rows."""

    tokens: Tensor
    max_query: int
    uniform: bool
    counts: tuple[HostInt, ...]

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Number of rows."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise for what contradicts itself, before anything is done with it."""

    @abc.abstractmethod
    def pad(self, tokens: int, max_query: int | None = None) -> Any:
        """The same rows with padding, and another bound of their tokens."""

    @abc.abstractmethod
    def idle(self, tokens: int, max_query: int, uniform: bool) -> Any:
        """One of this size, all padding, to capture with."""


class HostSide(abc.ABC):
    """What the host knows of one version of a carried value. Immutable; its changes are functions to note on a tape."""

    @abc.abstractmethod
    def claim(self, before: Any) -> None:
        """Note that what this version has and `before` has not is being written."""

    @abc.abstractmethod
    def known_as(self, found: Any) -> Any:
        """`found`, which is this version, claimed already, when more is known of it."""

    @abc.abstractmethod
    def stale(self, row: int) -> Exception:
        """The error that the value is continued after another continuation has overwritten its newest tokens."""


class Carried(HostValued):
    """A value that programs carry on: tensors, some of them shared pools, and a ledger that is no part of its tree."""

    ledger: Any

    @abc.abstractmethod
    def check(self) -> None:
        """Raise if it can be used no more."""

    @abc.abstractmethod
    def with_ledger(self, ledger: Any) -> Any:
        """The tensors with this ledger, or with none; what was donated to make it is its own."""

    @abc.abstractmethod
    def mark_used(self, how: str, instead: str = ...) -> None:
        """Let nobody use this value again: it was `how`; `instead` says what to do."""

    @abc.abstractmethod
    def pools(self) -> list[Tensor]:
        """The tensors that all versions share, written in place."""

    @abc.abstractmethod
    def emptied(self) -> Any:
        """The same pools in a value that holds nothing: to run a program with that must leave this one alone."""
