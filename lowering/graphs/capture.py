"""One captured program over static buffers, and its replay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cpu import Run
from .program import Program


@dataclass
class Capture:
    """A program and how it runs, with a static buffer for each staged input (by its place among the inputs).

    `pools` are the pools of pages, by their addresses, that it was captured over.
    """

    program: Program
    run: Run
    buffers: dict[int, Tensor]
    pools: set[tuple[int, ...]] = field(default_factory=set)

    @staticmethod
    def buffers_for(inputs: Sequence[Tensor], staged: Collection[int]) -> dict[int, Tensor]:
        """A buffer for each staged input."""
        return {place: torch.empty_like(inputs[place]) for place in staged}

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Stage the inputs, run, and put the results together. Donated inputs are overwritten."""
        inputs = list(inputs)
        for place, buffer in self.buffers.items():
            inputs[place] = buffer.copy_(inputs[place])
        return self.program.results(inputs, self.run(*inputs))
