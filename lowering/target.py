"""Targets: the machines that a program can be lowered to, by name.

A target may be named on any machine, so that a laptop can ask what an Ascend 950 would run; `detect` finds the one that
is here.
"""

from __future__ import annotations

import difflib
import functools
from contextvars import ContextVar
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from .errors import LoweringError


@dataclass(frozen=True)
class Peaks:
    """What a machine could do at best, as its maker has published it: FLOP/s in bfloat16, bytes/s of memory."""

    flops: float
    bandwidth: float
    source: str

    def seconds(self, flops: int, moved: int) -> float:
        """The least time for this many operations and bytes: an estimate from the figures, nothing measured."""
        return max(flops / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class Target:
    """A machine by name: the Torch device type it shows up as, and what people call it.

    For Ascend, also what tells the machines apart: `soc` is a regular expression of the names that the driver gives
    them, `unified_buffer` the bytes a vector core works in, `torch_npu` the version whose operators are taken to be
    there, `cann` that of the toolkit beneath it, whose host code checks each call. `seen` are the operators that a
    probe of this machine has run, `failed` those that did not hold there, with why. `peaks` are public figures of one
    device; without any, nothing is estimated.
    """

    name: str
    device: str
    title: str
    refused: str | None = None
    soc: str | None = None
    unified_buffer: int | None = None
    torch_npu: str | None = None
    cann: str | None = None
    seen: frozenset[str] = frozenset()
    failed: tuple[tuple[str, str], ...] = ()
    peaks: Peaks | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def described(self) -> str:
        """The name, and the versions that are taken to be there."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.name} ({versions})" if versions else self.name

    def has_cann(self, first: str) -> bool:
        """Whether its CANN is `first` or newer."""
        return self.cann is not None and release(self.cann) >= release(first)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what lies between Torch and the device, by name."""
        found = {"torch_npu": self.torch_npu, "CANN": self.cann}
        return {name: version for name, version in found.items() if version}


KIB = 1024
DEFAULT_TORCH_NPU = "2.13.0"
"""The version of torch_npu that a target named without one is taken to have."""
DEFAULT_CANN = "9.1.0"
"""The version of CANN likewise: the newest released one whose host code was read, which torch_npu 26.1 pairs with."""
UNRELEASED = "master"
"""Stands for the version of what only CANN's development branch has."""


@functools.cache
def release(version: str) -> Version:
    """A version of CANN to compare by: 9.1.0-beta.1, 9.1.0.pre, 9.1.0 and `master` are in rising order.

    Raises `LoweringError` for what is no version.
    """
    try:
        return Version("9999" if version == UNRELEASED else version)
    except InvalidVersion:
        raise LoweringError(f"cann={version!r:.100} is no version of CANN; expected one such as '9.0.0'") from None


def _ascend(
    name: str, title: str, soc: str, unified_buffer: int | None, refused: str | None = None, peaks: Peaks | None = None
) -> Target:
    return Target(name, "npu", title, refused, soc, unified_buffer, DEFAULT_TORCH_NPU, DEFAULT_CANN, peaks=peaks)


A_DIE = Peaks(390e12, 1.6e12, "one of the 768 dies of a CloudMatrix 384, of which press gives 300 PFLOP/s and 1.2 PB/s")
"""Devices of Ascend 910_93 are dies. Figures for 910B differ by model and source; 950's bfloat16 rate is not public."""


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "cpu", "any CPU"),
        Target("cuda", "cuda", "NVIDIA GPU"),
        _ascend("ascend910b", "Ascend 910B (Atlas A2)", r"Ascend910B\d", 192 * KIB),
        _ascend("ascend910_93", "Ascend 910_93 (Atlas A3)", r"Ascend910_93", 192 * KIB, peaks=A_DIE),
        _ascend("ascend950", "Ascend 950 (Atlas A5)", r"Ascend(950|910_95)", 248 * KIB),
        _ascend(
            "ascend310p", "Ascend 310P", r"Ascend310P", None, refused="no operator has been checked for Ascend 310P"
        ),
    )
}

CHOSEN_FOR: ContextVar[Target | None] = ContextVar("lowering_chosen_for", default=None)
"""The target that a kernel is being chosen for, while its `refuse` or `prepare` runs."""

EVERY = tuple(name for name, target in TARGETS.items() if target.refused is None)
"""Names of the targets that are not refused: what a kernel of plain Torch operators serves."""

ALSO_CALLED = {
    "a2": "ascend910b",
    "a3": "ascend910_93",
    "910c": "ascend910_93",
    "a5": "ascend950",
    "910_95": "ascend950",
}
"""Other names that people have for targets; only a hint, since a name is part of a program."""

ASCEND = tuple(name for name in EVERY if TARGETS[name].device == "npu")
"""Names of the Ascend targets that are not refused."""


def named(name: str | Target, *, torch_npu: str | None = None, cann: str | None = None) -> Target:
    """The target called `name`, with other versions of torch_npu and CANN where they are given.

    Raises `LoweringError` for a target that is unknown or refused, for what is no version, and for a version of what
    the machine does not have.
    """
    target = name if isinstance(name, Target) else TARGETS.get(name)
    if target is None:
        asked = str(name).lower().removeprefix("ascend").removeprefix("atlas").strip(" _-")
        near = [ALSO_CALLED[asked]] if asked in ALSO_CALLED else difflib.get_close_matches(str(name), TARGETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise LoweringError(f"unknown target {name!r:.100}; {hint}known targets: {', '.join(TARGETS)}")
    if target.refused is not None:
        raise LoweringError(f"target {target.name!r} is refused: {target.refused}")
    asked = {key: version for key, version in (("torch_npu", torch_npu), ("cann", cann)) if version is not None}
    if asked and target.device != "npu":
        key, version = next(iter(asked.items()))
        raise LoweringError(f"target {target.name!r} has no {key}, found {key}={version!r:.100}; leave it out")
    if cann is not None:
        release(cann)
    return replace(target, **asked) if asked else target
