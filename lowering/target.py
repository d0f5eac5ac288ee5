"""Targets: the machines that a program can be lowered to.

A target is detected from a tensor's device, and may be named on any machine, so that a laptop can ask what an
Ascend 950 would run.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from .errors import LoweringError


@dataclass(frozen=True)
class Target:
    """A machine by name: the Torch device type it shows up as, and what people call it."""

    name: str
    device: str
    title: str
    refused: str | None = None

    def __str__(self) -> str:
        return self.name


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "cpu", "any CPU"),
        Target("cuda", "cuda", "NVIDIA GPU"),
        Target("ascend910b", "npu", "Ascend 910B (Atlas A2)"),
        Target("ascend910_93", "npu", "Ascend 910_93 (Atlas A3)"),
        Target("ascend950", "npu", "Ascend 950 (Atlas A5)"),
        Target("ascend310p", "npu", "Ascend 310P", refused="no operator has been checked for Ascend 310P"),
    )
}

EVERY = tuple(name for name, target in TARGETS.items() if target.refused is None)
"""Names of the targets that are not refused: what a kernel of plain Torch operators serves."""


def named(name: str | Target) -> Target:
    """The target called `name`; `LoweringError` for one that is unknown or refused."""
    target = name if isinstance(name, Target) else TARGETS.get(name)
    if target is None:
        near = difflib.get_close_matches(str(name), TARGETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise LoweringError(f"unknown target {name!r}; {hint}known targets: {', '.join(TARGETS)}")
    if target.refused is not None:
        raise LoweringError(f"target {target.name!r} is refused: {target.refused}")
    return target


def of_device(device: torch.device) -> Target:
    """The target behind a device of this machine."""
    if device.type in ("cpu", "meta"):
        return TARGETS["cpu"]
    if device.type == "cuda":
        return TARGETS["cuda"]
    raise LoweringError(
        f"tensors are on {device}, and no target is known for device type {device.type!r}; "
        f"name one with lowering.use(target=...): {', '.join(TARGETS)}"
    )
