"""What versions of torch_npu other than the loaded one would say to an operator call, by their recorded schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..npu import host_checks
from ..npu.features import recorded, recorded_version
from ..target import Target

_PLAIN: dict[str, tuple[type, ...]] = {
    "TensorType": (Tensor,),
    "IntType": (int, torch.dtype),
    "SymIntType": (int,),
    "FloatType": (float, int),
    "NumberType": (float, int),
    "BoolType": (bool,),
    "StringType": (str,),
}
"""Python types that an argument takes, by its kind. An `int` argument may stand for a dtype."""


def problems(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], loaded: str) -> tuple[tuple[str, str], ...]:
    """Pairs of version and sentence for every recorded version but `loaded` that would refuse this call of `npu::x`."""
    operator = _operator(name)
    if operator is None:
        return ()
    if not any(operator in known for known in recorded().values()):
        # Only what our own kernels call is recorded; a kernel of someone else's may call more.
        return ((f"other than {loaded}", f"cannot be checked: no schema of {operator} is recorded"),)
    found = []
    for version in recorded():
        schema = _schema(version, operator)
        reason = f"has no {operator}" if schema is None else mismatch(schema, args, kwargs)
        if version != loaded and reason is not None:
            found.append((version, reason))
    return tuple(found)


def host_refusal(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target) -> str | None:
    """What the host code of the target's CANN refuses of this call of `npu::x`; None when it takes it."""
    operator = _operator(name)
    schema = None if operator is None else _schema(recorded_version(target), operator)
    if operator is None or schema is None:
        return None
    arguments = {one.name: one.default_value for one in schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | dict(kwargs)
    return host_checks.refused(operator, arguments, target)


def _operator(name: str) -> str | None:
    """An operator's name in `features.py`; None for one of neither torch_npu nor ATB."""
    space, _, operator = name.partition("::")
    return {"npu": operator, "atb": f"atb.{operator}"}.get(space)


@functools.cache
def _schema(version: str, operator: str) -> torch.FunctionSchema | None:
    text = recorded()[version].get(operator)
    return None if text is None else torch._C.parse_schema(text)


def mismatch(schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a schema does not take these arguments, in words; None when it does."""
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        return f"takes {len(positional)} positional arguments, {len(args)} are given"
    given = dict(zip(positional, args, strict=False))
    for name in kwargs:
        if name in given:
            return f"gets {name} by position and by name"
    given |= kwargs
    unknown = sorted(set(given) - {argument.name for argument in schema.arguments})
    if unknown:
        return f"has no argument {', '.join(unknown)}"
    for argument in schema.arguments:
        if argument.name not in given and not argument.has_default_value():
            return f"needs argument {argument.name}"
        if argument.name in given and not _fits(argument.type, given[argument.name]):
            return f"takes {argument.type} for {argument.name}, which is given as {type(given[argument.name]).__name__}"
    return None


def _fits(kind: Any, value: Any) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(kind.getElementType(), value)
    if name == "ListType":
        return isinstance(value, (list, tuple)) and all(_fits(kind.getElementType(), x) for x in value)
    if isinstance(value, bool) and name != "BoolType":
        return False
    return isinstance(value, _PLAIN.get(name, object))
