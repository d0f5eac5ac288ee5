"""Whole programs for the device check: who knows models enters them, and `check --import MODULE` brings them here.

Two right forwards in half precision differ by their roundings, layer after layer. So a program may be `FURTHER` times
as far from the same one in float32, on the whole of its result, as Torch's kernels are in its own dtype. It should
choose nothing at near ties: another expert is more than a rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..target import Target
from ..use import use
from .comparison import Fault, Outcome, timed

FURTHER, LEAST = 3.0, 2**-7
"""And the distance that any program may have: bfloat16's rounding."""
DTYPE = torch.bfloat16
KERNELS = "those chosen"


@dataclass(frozen=True)
class ModelPhase:
    """One phase of a model: `run(dtype, device)` gives a tensor, and `plain` the same but for roundings, in Torch."""

    model: str
    phase: str
    run: Callable[[torch.dtype, torch.device], Tensor]
    plain: Callable[[torch.dtype, torch.device], Tensor]

    @property
    def blank(self) -> Outcome:
        """The outcome of the program, yet to be filled in."""
        return Outcome(self.model, KERNELS, self.phase, str(DTYPE).removeprefix("torch."))

    @torch.no_grad()
    def tried(self, device: torch.device, target: Target) -> Outcome:
        """The outcome with the kernels that are chosen for the target, whatever is raised."""
        with Fault() as fault:
            exact, most = _expected(self)
        if fault.words is not None:
            return replace(self.blank, failed=f"the program in Torch: {fault.words}")
        with Fault() as fault, use(target=target):
            seconds, found = timed(device, self.run, DTYPE, device)
            return replace(self.blank, error=_distance(found, exact), bound=most, seconds=seconds)
        return replace(self.blank, failed=fault.words)


PROGRAMS: list[ModelPhase] = []
"""All that were entered."""


@functools.lru_cache(maxsize=1)
def _expected(program: ModelPhase) -> tuple[Tensor, float]:
    """The result in float32, and how far from it another may be."""
    cpu = torch.device("cpu")
    with use(target="cpu"):
        exact, own = (program.plain(dtype, cpu) for dtype in (torch.float32, DTYPE))
    return exact, max(FURTHER * _distance(own, exact), LEAST)


def _distance(found: Tensor, exact: Tensor) -> float:
    """How far it is from the exact values, relative to their size; infinite for what is not finite."""
    found, exact = found.detach().cpu().double(), exact.double()
    if found.shape != exact.shape:
        raise ValueError(f"the program gives shape {list(found.shape)}, expected {list(exact.shape)}")
    distance = ((found - exact).norm() / exact.norm()).item()
    return distance if distance < float("inf") else float("inf")
