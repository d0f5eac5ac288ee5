"""Kernels with one derivative, in reverse mode: another that is asked of it later is an error that names a way round.

Where derivatives are nested when the kernel is chosen, it is refused. What is done with a result later nobody knows
then: autograd's `create_graph=True` and another backward, or a `vjp` whose function is differentiated forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from params import tree
from params.tree import tree_map

from .errors import LoweringError
from .kernel import Kernel


class _Final(torch.autograd.Function):
    """The identity, of a gradient that has no derivative itself: taking one raises the message."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str) -> Tensor:
        """The gradient."""
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """`LoweringError`."""
        raise LoweringError(ctx.message)


def differentiated_once(op: str, kernel: Kernel, around: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernel's result, under "autograd" or a transform's "grad", where a further derivative raises."""
    message = (
        f"{op}: kernel {kernel.name!r} has a first derivative, in reverse mode, and no other; to take one of it, run "
        f'the forward inside lowering.use({op}="torch")'
    )

    def before(gradient: Tensor) -> None:
        if forward_ad._current_level >= 0:
            raise LoweringError(message)

    def after(gradient: Tensor) -> Tensor | None:
        return _Final.apply(gradient, message) if torch.is_grad_enabled() else None

    def watched(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(after)
        return x

    # A transform records the graph of its own backward, whether it is wanted or not.
    if around == "autograd":
        args, kwargs = tree_map(watched, (args, kwargs))
    result = kernel.run(*args, **kwargs)
    for y in tree.leaves(result):
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(before)
    return result
