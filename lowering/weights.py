"""Weights in the layout a kernel wants, and what they were made of."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from params.quant.values import QuantizedWeight

from .errors import LoweringError


class PreparedWeight:
    """A weight in a kernel's own layout, the first of its fields; it means nothing to other kernels.

    `kernels` are the names of those that read it, `shape` is that of the plain weight. A class whose plain values can
    be had back also has `plain`.
    """

    kernels: ClassVar[tuple[str, ...]]
    shape: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self._laid_out.device

    @property
    def _laid_out(self) -> Tensor:
        return next(iter(vars(self).values()))

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), self._laid_out.shape, self._laid_out.dtype

    def plain(self) -> Tensor:
        """The weight as the op's reference reads it. `LoweringError` where only its kernel knows the layout."""
        raise LoweringError(
            f"a {type(self).__name__} can only be read by {', '.join(self.kernels)}, and that kernel is refused here; "
            "use the plain parameters"
        )


def plain(weight: Tensor | PreparedWeight | QuantizedWeight) -> Tensor:
    """A weight as a tensor: a prepared one's plain values, a quantised one's in float32."""
    if isinstance(weight, QuantizedWeight):
        return weight.dequantized()
    return weight.plain() if isinstance(weight, PreparedWeight) else weight


def restored(weight: Any) -> Any:
    """The weight that a prepared one was made of, quantised or not, where its class can give it back."""
    readable = isinstance(weight, PreparedWeight) and type(weight).plain is not PreparedWeight.plain
    return weight.plain() if readable else weight
