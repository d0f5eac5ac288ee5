"""What a choice of kernel may depend on, read from a call: its shapes and static arguments, and its surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import SUPPORTED_NODES

from params import tree

from .errors import LoweringError
from .rows import Rows

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of static arguments that stand for themselves in the key of a choice."""

SECOND = "a second derivative"
DIFFERENTIATED = frozenset({"autograd", "grad", "jvp", SECOND})
"""Surroundings in which derivatives are taken. A tensor still has its values on the host there."""


class OpCall(NamedTuple):
    """The arguments of a call, and what records, maps or differentiates operators around it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: str = ""

    @property
    def device(self) -> torch.device:
        """The device of its first tensor, or tree of tensors; `LoweringError` where there is none."""
        for value in (*self.args, *self.kwargs.values()):
            device = getattr(value, "device", None)
            if isinstance(device, torch.device):
                return device
        raise LoweringError("an op was called without any tensor, so its target cannot be known; name one with use()")


def key_of(mode: int, surroundings: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the choice may depend on: never values.

    This runs on every op call, so it is flat. The tensors of a call lie on one device: the first speaks for all.
    """
    try:
        device = args[0].device
    except (IndexError, AttributeError):
        device = None
    key: list[Any] = [mode, surroundings, device, *kwargs]
    for value in args:
        if type(value) is Tensor:
            key.append(value.shape)
            key.append(value.dtype)
        else:
            key.append(_static(value))
    for value in kwargs.values():
        key.append(value if type(value) in _PLAIN else _static(value))
    return tuple(key)


def _static(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    return value.static_key() if hasattr(value, "static_key") else value


def surroundings() -> str:
    """What records, maps or differentiates operators here, joined by " and "; an empty string where they just run."""
    stack, forward = get_interpreter_stack(), forward_ad._current_level >= 0
    if not (stack or forward):
        return "tracing" if _len_torch_dispatch_stack() else ""
    keys = [level.key() for level in stack or ()]
    # Of forward mode every level counts, and one that is not a transform's: `linearize` and `dual_level` make those.
    jvps, grads = max(keys.count(TransformType.Jvp), forward), keys.count(TransformType.Grad)
    found = {
        "tracing": _len_torch_dispatch_stack(),
        "vmap": TransformType.Vmap in keys,
        "jvp": jvps,
        "grad": grads,
        SECOND: jvps + grads > 1,
        "functionalize": TransformType.Functionalize in keys,
    }
    return " and ".join(name for name, here in found.items() if here)


def with_autograd(around: str, args: tuple[Any, ...]) -> str:
    """`around` where `args` require gradients: those of a transform's own, or autograd's beneath it, which are more."""
    if not any(_innermost(x).requires_grad for x in _tensors(args)):
        return around
    word = SECOND if "grad" in around or "jvp" in around else "autograd"
    return f"{around} and {word}" if around else word


def _innermost(x: Tensor) -> Tensor:
    """The tensor beneath those that function transforms have wrapped around it."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def records_gradients(args: tuple[Any, ...]) -> bool:
    """Whether autograd records what is done with these arguments."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args))


def without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What stands for surroundings where a tensor has no values; an empty string where all have some."""
    tensors = _tensors((*args, *kwargs.values()))
    return "a tensor without values" if any(x.is_meta or isinstance(x, FakeTensor) for x in tensors) else ""


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among `values`, and in those that are trees; those of rows are integers, of the same device."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in SUPPORTED_NODES and not isinstance(value, Rows):
            yield from (leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor))
