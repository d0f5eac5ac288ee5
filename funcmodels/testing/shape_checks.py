"""Shape checks for notebooks: a wrong shape then fails at the function whose contract it breaks, by name.

    fm.enable_shape_checks()     # also with the environment variable FUNCMODELS_SHAPE_CHECKS=1
    fm.disable_shape_checks()

The functions of the three packages carry jaxtyping annotations and check nothing. Enabling puts a checking function in
the place of every loaded one that takes or returns an annotated tensor, and checks every op call, whichever kernel
runs it. Axis names hold for one call: `tokens` is one size in all arguments and in the result. `shape_checked` does
the same for a function of your own. Nothing is checked inside `torch.compile`.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from jaxtyping import AbstractArray, TypeCheckError, jaxtyped
from torch import Tensor

from lowering import OPS, Op
from params.tree import describe

F = TypeVar("F", bound=Callable[..., Any])

PACKAGES = ("funcmodels", "lowering", "params")

_MARK = "__shape_checked__"
_OP_CALL = Op.__call__


@dataclass(frozen=True)
class _Contract:
    """What a function promises: the hint of each argument that names an array shape, and of the result (`return`)."""

    name: str
    signature: inspect.Signature
    hints: Mapping[str, Any]


def enable_shape_checks() -> None:
    """Check the shapes of every call into the loaded modules of the three packages, from now on.

    A call that breaks a contract raises `jaxtyping.TypeCheckError`, which names the function, the argument, the axis,
    its size and the size expected. Names imported elsewhere are replaced too; a `functools.partial` or a closure made
    before keeps the plain function. Enabling again covers what was loaded since. A checked call costs some tens of
    microseconds more.
    """
    _replace(lambda function: function if hasattr(function, _MARK) else _checking(function))
    for op in OPS.values():
        if not hasattr(op.body, _MARK):
            op.body = _checking(op.body) or op.body
    Op.__call__ = _checked_op_call  # type: ignore[method-assign]


def disable_shape_checks() -> None:
    """Put the plain functions back."""
    _replace(_plain)
    for op in OPS.values():
        op.body = _plain(op.body)
    Op.__call__ = _OP_CALL


def shape_checked(function: F) -> F:
    """`function` with its annotated shapes checked on every call, for one written in a notebook."""
    checking = _checking(function)
    if checking is None:
        raise TypeError(f"{function.__qualname__}: no annotation names an array shape, so there is nothing to check")
    return checking


def _checking(function: F) -> F | None:
    """The checking function for `function`, None when it promises no shapes."""
    contract = _contract(function)
    if contract is None:
        return None

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        return _call(contract, function, args, kwargs)

    setattr(checking, _MARK, True)
    return checking  # type: ignore[return-value]


def _plain(function: Any) -> Any:
    return function.__wrapped__ if hasattr(function, _MARK) else function


def _checked_op_call(op: Op, /, *args: Any, **kwargs: Any) -> Any:
    contract = _contract(_plain(op.body))
    run = functools.partial(_OP_CALL, op)
    return run(*args, **kwargs) if contract is None else _call(contract, run, args, kwargs)


def _call(contract: _Contract, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    try:
        given = contract.signature.bind(*args, **kwargs).arguments
    except TypeError:
        return function(*args, **kwargs)  # raises the same, in the function's own name
    is_bearable = _checker()
    # jaxtyping binds axis names to the innermost open context, so all checks of a call are made in this one.
    with jaxtyped("context"):
        for name, value in given.items():
            if name in contract.hints and not is_bearable(value, contract.hints[name]):
                raise TypeCheckError(_complaint(contract, given, name, value))
        result = function(*args, **kwargs)
        if "return" in contract.hints and not is_bearable(result, contract.hints["return"]):
            raise TypeCheckError(_complaint(contract, given, "return", result))
    return result


@functools.cache
def _checker() -> Callable[[Any, Any], bool]:
    """Whether a value fits a hint. Made at the first checked call: beartype takes long to import."""
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    return functools.partial(is_bearable, conf=BeartypeConf(is_pep484_tower=True))


# Finding the functions.


def _replace(function_for: Callable[[Any], Any]) -> None:
    """Put `function_for(f)` in the place of every function f of the packages, unless it is None."""
    known: dict[int, Any] = {}

    def replacement(value: Any) -> Any:
        if type(value) is not types.FunctionType or not _ours(value.__module__ or ""):
            return value
        if id(value) not in known:
            known[id(value)] = function_for(value) or value
        return known[id(value)]

    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            new = replacement(value)
            if new is not value:
                setattr(module, name, new)
    for cls in _classes():
        for name, value in list(vars(cls).items()):
            new = _in_class(value, replacement)
            if new is not value:
                setattr(cls, name, new)


def _in_class(value: Any, replacement: Callable[[Any], Any]) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        new = replacement(value.__func__)
        return value if new is value.__func__ else type(value)(new)
    if isinstance(value, property):
        new = replacement(value.fget)
        return value if new is value.fget else property(new, value.fset, value.fdel, value.__doc__)
    return replacement(value)


def _classes() -> Iterator[type]:
    for module in _modules():
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value


def _modules() -> list[types.ModuleType]:
    return [module for name, module in list(sys.modules.items()) if _ours(name)]


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES and module != __name__


@functools.cache
def _contract(function: Callable[..., Any]) -> _Contract | None:
    hints = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        hint = _resolved(annotation, function)
        if _arrays(hint):
            hints[name] = hint
    name = f"{function.__module__}.{function.__qualname__}"
    return _Contract(name, inspect.signature(function), hints) if hints else None


def _resolved(annotation: Any, function: Callable[..., Any]) -> Any:
    names, holder = inspect.unwrap(function).__globals__, types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, names)["it"]
    except NameError:  # a class that the module imports for type checkers only: one of ours, or no array
        classes = {cls.__name__: cls for cls in _classes()}
        known = defaultdict(lambda: _Elsewhere, {**vars(builtins), **classes, **names})
        return get_type_hints(holder, {}, known)["it"]


class _NotImported(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Elsewhere(metaclass=_NotImported):
    """Stands in annotations for a class that was not imported, which is no array; or for a module of such classes."""


# Saying what is wrong.


def _arrays(hint: Any) -> list[Any]:
    """The array hints inside a hint, in order."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return [hint]
    return [array for part in get_args(hint) for array in _arrays(part)]


def _complaint(contract: _Contract, given: Mapping[str, Any], wrong: str, value: Any) -> str:
    bound: dict[str, tuple[Any, str]] = {}
    lines: list[str] = []
    for name, argument in given.items():
        if name == wrong:
            break
        for label, part, hint in _parts(name, argument, contract.hints.get(name)):
            _misfit(part, hint, bound, label)
            lines.append(f"  {label}: {describe(part)} for {hint.__name__}")
    reason = f"{wrong}: {describe(value)} is not {str(contract.hints[wrong]).replace('jaxtyping.', '')}"
    for label, part, hint in _parts("the result" if wrong == "return" else wrong, value, contract.hints[wrong]):
        lines.append(f"  {label}: {describe(part)} for {hint.__name__}")
        found = _misfit(part, hint, bound, label)
        if found is not None:
            reason = f"{label}: {found}"
            break
    return "\n".join((f"{contract.name}: {reason}", *lines))


def _parts(label: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """Label, value and array hint of each array in an argument."""
    arrays = _arrays(hint)
    if isinstance(value, tuple) and isinstance(hint, types.GenericAlias):
        for index, (part, inner) in enumerate(zip(value, get_args(hint), strict=False)):
            yield from _parts(f"{label}[{index}]", part, inner)
    elif arrays and (value is not None or type(None) not in get_args(hint)):
        yield label, value, next((array for array in arrays if _has_axes(value, array)), arrays[0])


def _has_axes(value: Any, hint: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == len(hint.dim_str.split())


def _misfit(value: Any, hint: Any, bound: dict[str, tuple[Any, str]], label: str) -> str | None:
    """Why `value` does not fit, or None. Sizes of axes met for the first time are entered in `bound`."""
    if not isinstance(value, Tensor):
        return f"expected a tensor, {hint.__name__}, found {type(value).__name__}"
    if not isinstance(value, hint.dtype[Tensor, "..."]):
        return f"dtype is {value.dtype}, expected {hint.dtype.__name__}"
    axes, shape = hint.dim_str.split(), list(value.shape)
    lead = next((index for index, axis in enumerate(axes) if axis.startswith(("*", "..."))), None)
    if len(shape) != len(axes) if lead is None else len(shape) < len(axes) - 1:
        count = f"{len(axes)} axes" if lead is None else f"{len(axes) - 1} axes or more"
        return f"shape is {shape}, expected {count}: {hint.dim_str}"
    sizes: list[Any] = shape
    if lead is not None:
        cut = lead + len(shape) - len(axes) + 1
        sizes = [*shape[:lead], shape[lead:cut], *shape[cut:]]
    for axis, size in zip(axes, sizes, strict=True):
        expected, where = bound.setdefault(axis, (int(axis) if axis.isdigit() else size, label))
        if size != expected:
            return f"axis {axis!r} is {size}, expected {expected}{'' if axis.isdigit() else f' as in {where}'}"
    return None
