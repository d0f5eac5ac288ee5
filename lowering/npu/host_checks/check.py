"""A check of the host code, and the table that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ...target import ASCEND, Target

ASCEND_910 = ("ascend910b", "ascend910_93")
ASCEND_950 = ("ascend950",)

OP = "op-plugin 517f2e7d"
OT = "ops-transformer"
ONN = "ops-nn"
"""The repositories that were read; a source adds the tag or commit, the folder and the function."""


@dataclass(frozen=True)
class HostCheck:
    """One condition of the host code.

    `holds(call)` tells whether a call meets it; `call` has every argument of the operator's schema by name, defaults
    filled in, and its `target`. Shapes, dtypes, strides and host-side arguments are all it may read. It is in force on
    `targets` from CANN `since` on, up to but without `until`. `takes` completes the sentence "the operator takes ...".
    """

    takes: str
    holds: Callable[[Any], bool]
    source: str
    targets: tuple[str, ...] = ASCEND
    since: str = "8.5.0"
    until: str | None = None

    def governs(self, target: Target) -> bool:
        """Whether it is in force on the target, by SoC and CANN."""
        over = self.until is not None and target.has_cann(self.until)
        return target.name in self.targets and target.has_cann(self.since) and not over


CHECKS: dict[str, tuple[HostCheck, ...]] = {}
"""The checks of each operator, by its name in `features.py`."""


def enter(operator: str, *checks: HostCheck) -> None:
    """Enter the checks of an operator."""
    CHECKS[operator] = CHECKS.get(operator, ()) + checks


def refused(operator: str, arguments: Mapping[str, Any], target: Target) -> str | None:
    """One sentence about the first check that a call on the target fails; None when it meets them all."""
    call = SimpleNamespace(**arguments, target=target)
    for check in CHECKS.get(operator, ()):
        if check.governs(target) and not check.holds(call):
            given = "; ".join(_described(arguments))
            return (
                f"on {target.name} the host code of CANN {target.cann} takes {check.takes}; found {given} "
                f"({check.source})"
            )
    return None


def _described(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            yield f"{name} {len(value)} x {str(value[0].dtype).removeprefix('torch.')} {list(value[0].shape)}"
        elif value is not None:
            yield f"{name}={value!r:.60}"
