"""A launch: which kernel, with which arguments, computes a call of an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ascend_compiler.compile import TritonSource, compile_for
from ..ascend_compiler.outcome import Outcome
from ..target import Target

SOURCES = Path(__file__).with_name("sources")
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel of `sources/` by file and name, its arguments, and its constants.

    `jobs` is the work that programs share: a grid of min(jobs, cores) serves. `pools` are the arguments that grow with
    rows or slots, so that their places need 64 bits. Tensors may be without values: they give dtypes.
    """

    file: str
    name: str
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, Any]
    jobs: int
    pools: tuple[str, ...]

    @property
    def source(self) -> TritonSource:
        """Where the kernel stands."""
        return TritonSource(SOURCES / f"{self.file}.py", self.name)

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of each argument."""
        return {name: _type(value) for name, value in self.arguments.items()}

    def compiled(self, target: Target | str, **constants: Any) -> Outcome:
        """What Ascend's compiler makes of it, perhaps with other constants."""
        return compile_for(self.source, self.signature, {**self.constants, **constants}, target)


def _type(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
