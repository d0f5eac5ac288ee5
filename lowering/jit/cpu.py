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
    """The operators fused and compiled: rounds otherwise than `Fx`, within `lowering.check.tolerances`."""

    def capture(self, program: Program, inputs: Sequence[Tensor], rehearsal: Rehearsal) -> Run:
        """See `Backend`. `CaptureError` for a program that computes with row lengths of the host, or no compiler."""
        from torch._inductor import compile
        from torch._inductor.exc import InductorError, InvalidCxxCompiler

        if program.host:
            raise CaptureError(
                "jit: the kernels chosen take row lengths from the host, which compiled code would freeze; name "
                'backend="fx", or ask for other kernels'
            )
        try:
            run: Any = compile(program.graph, list(inputs))
        except InductorError as error:
            if not isinstance(error.inner_exception, InvalidCxxCompiler):
                raise
            raise CaptureError(
                f"jit: Inductor needs a C++ compiler, and there is none: {error.inner_exception}; install g++, name "
                'one in the environment variable CXX, or take backend="fx", which needs none'
            ) from error
        return lambda inputs, host: run(*inputs)
