"""A launch: which kernel, with which arguments, computes a call of an op; and its run on a device.

A run is one operator, `triton_kernels::<name of the op>`, so that a dry run, a traced program and a report see our
calls as they see those of torch_npu. Triton is imported by the first run on a device, never before.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ascend_compiler.compile import TritonSource, compile_for
from ..ascend_compiler.outcome import Outcome
from ..errors import LoweringError
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
    rows or slots, so that their places need 64 bits. `writes` are those that the kernel fills, `flops` those of
    its products, a multiply and an add as two. Tensors may be without values: they give dtypes.
    """

    file: str
    name: str
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, Any]
    jobs: int
    pools: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int = 0

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

    def start(self, op: str) -> None:
        """Run it on the device of its tensors, as the operator of this name; nothing is there to run without jobs."""
        if not self.jobs:
            return
        kinds = {name: self._kind(name) for name in self.arguments}
        read, written, numbers = ([self.arguments[name] for name in kinds if kinds[name] == kind] for kind in "rwn")
        form = _form(self.file, self.name, tuple(kinds.items()), tuple(self.constants.items()))
        getattr(torch.ops.triton_kernels, op)(read, written, numbers, form, self.jobs, self.flops)

    def _kind(self, name: str) -> str:
        """r for a tensor that is read, w for one that is written, n for a number."""
        if not isinstance(self.arguments[name], Tensor):
            return "n"
        return "w" if name in self.writes else "r"


@dataclass(frozen=True)
class Product:
    """A product of matrices between launches, which Torch's own does: left [rows inner] @ right [outputs inner] ^ T."""

    left: Tensor
    right: Tensor
    out: Tensor

    def start(self, op: str) -> None:
        """Fill `out` [rows outputs]."""
        torch.mm(self.left, self.right.T, out=self.out)


Steps = Launch | tuple[Launch | Product, ...]
"""What computes a call: one launch, or some, one after the other, with products between them."""


def launches(steps: Steps) -> tuple[Launch, ...]:
    """The launches among them."""
    return tuple(step for step in (steps if isinstance(steps, tuple) else (steps,)) if isinstance(step, Launch))


@functools.lru_cache(maxsize=4096)
def _form(file: str, name: str, kinds: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...]) -> str:
    """What a launch is beside its tensors and numbers, as text: a traced program holds it."""
    return json.dumps([file, name, kinds, constants])


@functools.lru_cache(maxsize=4096)
def _formed(form: str) -> tuple[str, str, list[list[str]], dict[str, Any]]:
    file, name, kinds, constants = json.loads(form)
    return file, name, kinds, dict(constants)


SCHEMA = "(Tensor[] read, Tensor(a!)[] written, Scalar[] numbers, str form, int jobs, int flops) -> ()"
_LIBRARY = torch.library.Library("triton_kernels", "DEF")


def operator(op: str) -> None:
    """Define the operator by which launches for an op are run."""
    _LIBRARY.define(f"{op}{SCHEMA}")
    _LIBRARY.impl(op, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"triton_kernels::{op}", lambda *_: None, lib=_LIBRARY)


def _run(
    read: Sequence[Tensor], written: Sequence[Tensor], numbers: Sequence[Any], form: str, jobs: int, flops: int
) -> None:
    file, name, kinds, constants = _formed(form)
    values = {"r": iter(read), "w": iter(written), "n": iter(numbers)}
    RUNNER(file, name, jobs, {argument: next(values[kind]) for argument, kind in kinds}, constants)


def on_device(file: str, name: str, jobs: int, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    """Start the kernel on the device of its tensors, a program a core or fewer. `LoweringError` without Triton."""
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    with torch.get_device_module(device).device(device):
        _kernel(file, name)[(min(jobs, _cores(device, name in MIX)),)](**arguments, **constants)


RUNNER = on_device
"""What runs a kernel; a test puts Triton's interpreter in its place."""


@functools.cache
def _kernel(file: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{__package__}.sources.{file}"), name)
    except ImportError as error:
        raise LoweringError(f"kernel {name} needs Triton, and there is none here ({error}); {INSTALL}") from error


INSTALL = "install triton-ascend for an Ascend device, with the CANN that it is made for"


MIX = frozenset({"sparse_attention"})
"""Kernels with products: a program of theirs takes a cube core, with the vector cores that belong to it."""


@functools.cache
def _cores(device: torch.device, mix: bool) -> int:
    """Vector or cube cores of the device: as many programs run at a time."""
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    properties = driver.active.utils.get_device_properties(device.index or 0)
    return properties["num_aicore" if mix else "num_vectorcore"]


def _type(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"
