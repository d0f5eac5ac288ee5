"""Definition of the operators on the CPU: schemas as recorded from one torch_npu version, implementations ours.

An implementation comes in two parts. `shapes` checks all that can be checked without values and returns empty
outputs: it answers for meta and fake tensors. `run` checks values and computes. Both get every argument of the schema
by name, defaults filled in from the version's own schema.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import LoweringError
from ..npu import host_checks
from ..npu.evidence import doubt
from ..npu.features import home, recorded, recorded_version, registered
from ..policy import EVIDENCE
from ..target import named
from .checks import OperatorError, machine, need

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class OperatorReference:
    """The two parts of an implementation."""

    shapes: Callable[..., Any]
    run: Callable[..., Any]


OPERATORS: dict[str, OperatorReference] = {}
"""Implementations by the operator's name in `lowering/npu/features.py`."""

_libraries: dict[str, dict[str, torch.library.Library]] = {}
"""By version, those of the namespaces that its operators lie in."""


def operator(name: str, shapes: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated function as the CPU implementation of an operator."""

    def register(run: F) -> F:
        OPERATORS[name] = OperatorReference(shapes, run)
        return run

    return register


def load(version: str = "2.13.0") -> None:
    """Define the operators that torch_npu `version` has, of those our kernels call, and implement them on the CPU.

    A second call does nothing. `LoweringError` where torch_npu itself is loaded, or another version was asked for
    before in this process: a dispatcher holds one schema an operator.
    """
    if "torch_npu" in sys.modules:
        raise LoweringError(
            "torch_npu is loaded, so the namespace npu holds its operators; the CPU references are for a process "
            "without it (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading it)"
        )
    exact = recorded_version(named("ascend910b", torch_npu=version))
    if exact in _libraries:
        return
    if _libraries:
        raise LoweringError(
            f"the references of torch_npu {', '.join(_libraries)} are loaded in this process; "
            f"those of {exact} need a process of their own"
        )
    # Kept alive: the definitions vanish with the library.
    libraries = _libraries[exact] = {}
    for name, schema in recorded()[exact].items():
        space, _ = home(name)
        if space not in libraries:
            libraries[space] = torch.library.Library(space, "FRAGMENT")
        libraries[space].define(schema)
        _implement(libraries[space], name, schema)


SHAPELESS = ("npu_convert_weight_to_int4pack", "npu_format_cast")
"""Operators of torch_npu itself that come without a shape function."""


def give_shapes() -> None:
    """Give operators that torch_npu has no shape functions for, all of ATB's among them, those of the references.

    For a process that has torch_npu.
    """
    for name, one in OPERATORS.items():
        space, own = home(name)
        found = registered(name) if space == "atb" or name in SHAPELESS else None
        if found is not None:
            schema = str(found.default._schema).partition("::")[2]
            torch.library.register_fake(f"{space}::{own}", _named(name, schema, one.shapes))


def _implement(library: torch.library.Library, name: str, schema: str) -> None:
    """Put the two parts of operator `name` behind its schema."""
    _, own = home(name)
    library.impl(own, _named(own, schema, functools.partial(_shapes, name)), "Meta")
    library.impl(own, _named(own, schema, functools.partial(_checked, name)), "CPU")


def _shapes(name: str, **arguments: Any) -> Any:
    """The outputs without values of a call that neither documentation nor host code forbids, where it is built."""
    found = OPERATORS[name].shapes(**arguments)
    refusal = doubt((name,), machine(), EVIDENCE[-1]) or host_checks.refused(name, arguments, machine())
    need(refusal is None, refusal or "")
    return found


def _checked(name: str, **arguments: Any) -> Any:
    _shapes(name, **arguments)
    with torch.device("cpu"):
        return OPERATORS[name].run(**arguments)


def _named(operator_name: str, schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as the dispatcher calls it, which strips arguments equal to their defaults."""
    arguments = torch._C.parse_schema(schema).arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(**defaults | dict(zip(names, args, strict=False)) | kwargs)
        except OperatorError as error:
            raise OperatorError(f"{operator_name}: {error}") from None

    return call
