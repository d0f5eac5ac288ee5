"""How much memory a call takes at once, by the largest tensor that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor))])
        return made


def largest(call: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Elements of the largest tensor that the call makes, views and results among them."""
    with _Largest() as mode:
        call(*args, **kwargs)
    return mode.found
