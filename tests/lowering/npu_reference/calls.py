"""What the tests of all operators share: how to call one, and how near a result rounded once must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lowering.npu_reference import OperatorError
from tests.tolerances import assert_close


def call(name: str, arguments: dict[str, Any]) -> Any:
    """`npu::name` with every argument by its name in the schema."""
    return getattr(torch.ops.npu, name)(**arguments)


def refused(name: str, arguments: dict[str, Any], words: str) -> None:
    """The call must raise, naming the operator and saying `words`, a regular expression."""
    with pytest.raises(OperatorError, match=rf"^{name}: .*{words}"):
        call(name, arguments)


def as_fake(name: str, arguments: dict[str, Any]) -> Any:
    """The outputs for tensors without values."""
    hollow = {key: pytree.tree_map_only(Tensor, _hollow, value) for key, value in arguments.items()}
    return call(name, hollow)


def _hollow(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def assert_like(name: str, arguments: dict[str, Any]) -> None:
    """Outputs without values have the shapes and dtypes of the real ones."""
    flat = pytree.tree_leaves
    fake, real = flat(as_fake(name, arguments)), flat(call(name, arguments))
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """`actual` is the float64 value rounded to its dtype, but for a few last places."""
    assert_close(actual, expected.to(actual.dtype))
    if actual.dtype != torch.float32:
        assert (actual == expected.to(actual.dtype)).float().mean() > 0.98
