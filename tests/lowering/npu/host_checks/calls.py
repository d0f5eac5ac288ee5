"""What the tests of a family of checks are made of: a legal call, and changes of it that one check alone refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowering.npu.features import recorded

DEFAULTS = {
    name: {one.name: one.default_value for one in torch._C.parse_schema(schema).arguments}
    for name, schema in recorded()["2.13.0"].items()
}


@dataclass(frozen=True)
class Bad:
    """A change of a legal call, and words of the check that refuses it, on a target with a CANN."""

    takes: str
    changes: Mapping[str, Any]
    target: str = "ascend910b"
    cann: str = "9.1.0"


def completed(operator: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the schema, as the references and the dry run give them."""
    return DEFAULTS[operator] | dict(arguments)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers without values."""
    return meta(*shape, dtype=dtype)
