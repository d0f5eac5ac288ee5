"""Backends without graphs of a device: what runs a traced graph operator by operator, or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..errors import CaptureError
from .capture import Rehearsal, Run
from .program import Program


class Fx:
    """The operators of the graph, one after the other: every bit as they were traced. On any device."""

    fixed: ClassVar[bool] = False

    def check(self, device: str) -> None:
        """Every device with values will do."""
        if device == "meta":
            raise CaptureError("jit: tensors on meta have no values to run with")

    def capture(self, program: Program, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Run:
        """See `Backend`."""
        forward = program.graph.forward
        return lambda inputs, host: forward(*inputs, *host)

    def close(self) -> None:
        """Holds nothing."""


class Inductor(Fx):
    """The operators fused and compiled: rounds otherwise than `Fx`, within `lowering.tolerances`."""

    def capture(self, program: Program, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Run:
        """See `Backend`. `CaptureError` for a program that computes with row lengths of the host."""
        from torch._inductor import compile

        if program.host:
            raise CaptureError(
                "jit: the kernels chosen take row lengths from the host, which compiled code would freeze; name "
                'backend="fx", or ask for other kernels'
            )
        run: Any = compile(program.graph, list(inputs))
        return lambda inputs, host: run(*inputs)
