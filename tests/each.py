"""Thousands of small cases in tens of tests: pytest's and xdist's cost of one test is more than that of such a case."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

from lowering.op import Kernel
from tests.cases import Rows
from tests.typechecker import HOOKED

Test = Callable[..., None]
Case = tuple[Any, ...]


def each(
    cases: Iterable[Any],
    by: Callable[..., str] | None = None,
    hooked: Callable[..., Sequence[Hashable]] | None = None,
) -> Callable[[Test], Test]:
    """The test is called with every case (a tuple is several arguments), and fails with the names of all that fail.

    One test holds the cases for which `by` gives the same; without it, all. A hooked run, whose checks are of shapes,
    has only those cases of which `hooked` names something that it named for none before. Fixtures are made once a
    test, not once a case.
    """
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    groups: dict[str, list[Case]] = {}
    for case in first_of_each(listed, hooked) if HOOKED and hooked is not None else listed:
        groups.setdefault("every" if by is None else by(*case), []).append(case)

    def decorate(test: Test) -> Test:
        @pytest.mark.parametrize("cases", groups.values(), ids=groups)
        def run(cases: list[Case], **fixtures: Any) -> None:
            try_all(cases, lambda *case: test(*case, **fixtures))

        parameters = list(inspect.signature(test).parameters.values())[len(listed[0]) :]
        given = inspect.Parameter("cases", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(run)["__signature__"] = inspect.Signature([given, *parameters])
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


def first_of_each(cases: Iterable[Case], named: Callable[..., Sequence[Hashable]]) -> list[Case]:
    """Those cases of which `named` gives something that it gave for none before."""
    seen: set[Hashable] = set()
    kept = []
    for case in cases:
        new = set(named(*case)) - seen
        if new:
            seen |= new
            kept.append(case)
    return kept


def try_all(cases: Iterable[Case], test: Test) -> None:
    """Call `test` with every case; `AssertionError` that names all that failed, from the first of their errors."""
    failed: list[tuple[str, BaseException]] = []
    tried = 0
    for case in cases:
        tried += 1
        try:
            test(*case)
        except (Exception, pytest.fail.Exception) as error:
            failed.append((" ".join(map(shown, case)), error))
    assert tried, "no case was tried"
    if failed:
        lines = [f"{name}: {type(error).__name__}: {str(error)[:500]}" for name, error in failed]
        raise AssertionError("\n".join([f"{len(failed)} of {tried} cases fail:", *lines])) from failed[0][1]


def shown(value: Any) -> str:
    """A case's part, as it is named."""
    return value.name if isinstance(value, (Kernel, Rows)) else str(value).removeprefix("torch.")
