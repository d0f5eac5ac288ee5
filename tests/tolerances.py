"""Comparing trees of tensors by the bounds of `lowering.check.tolerances`, which are the only ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lowering.check.tolerances import allowed, bound


def assert_close(
    actual: Any,
    expected: Any,
    *,
    length: int = 1,
    dtype: torch.dtype | None = None,
    looser: float = 1.0,
    scale: float = 0.0,
    reason: str | None = None,
) -> None:
    """Compare trees of tensors (None matches None): equal shapes, values within the bound of `dtype` (`actual`'s own).

    `looser` multiplies the bound; `scale` is a magnitude to take in place of a smaller root mean square. Both need a
    `reason`.
    """
    assert (looser == 1.0 and scale == 0.0) or reason, "a looser bound needs a reason"
    one, structure = pytree.tree_flatten(actual)
    two, other = pytree.tree_flatten(expected)
    assert structure == other, f"structures differ: {structure} and {other}"
    for index, (x, y) in enumerate(zip(one, two, strict=True)):
        if isinstance(x, Tensor):
            _assert_tensor_close(x, y, index, looser * bound(dtype or _compared(x), length), scale)
        else:
            assert x == y, f"leaf {index}: {x!r} is not {y!r}"


def _compared(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float64


def _assert_tensor_close(actual: Tensor, expected: Tensor, index: int, relative: float, scale: float) -> None:
    assert actual.shape == expected.shape, (
        f"leaf {index}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    x, y = actual.double(), expected.double()
    assert torch.isfinite(x).all() and torch.isfinite(y).all(), f"leaf {index}: not finite"
    most = allowed(y, relative, scale)
    excess = (x - y).abs() - most
    worst = int(excess.argmax())
    assert excess.max() <= 0, (
        f"leaf {index}: {x.flatten()[worst]:.9g}, expected {y.flatten()[worst]:.9g} "
        f"(difference {(x - y).flatten()[worst].abs():.3g}, allowed {most.flatten()[worst]:.3g})"
    )
