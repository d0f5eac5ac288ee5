"""Numbers that stand in a checkpoint though the config fixes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.tree import dotted


@dataclass(frozen=True)
class Constant:
    """Numbers of one name: `load` compares them, `save` writes the `saved`."""

    values: tuple[int, ...] | tuple[float, ...]
    saved: bool = True

    def tensor(self) -> Tensor:
        """The numbers [count], int64 or float32."""
        dtype = torch.float32 if isinstance(self.values[0], float) else torch.int64
        return torch.tensor(self.values, dtype=dtype, device="cpu")

    def equals(self, other: Tensor) -> bool:
        """Whether a tensor of any shape and type holds these numbers."""
        return other.flatten().tolist() == list(self.values)


@runtime_checkable
class WithConstants(Protocol):
    """A parameter node that has such numbers."""

    def constants(self) -> dict[str, Constant]:
        """The numbers by name."""
        ...


def constants(spec: Any) -> dict[str, Constant]:
    """The constants of all nodes of a tree by their paths."""
    found: dict[str, Constant] = {}
    for path, node in pytree.tree_flatten_with_path(spec, is_leaf=lambda node: isinstance(node, WithConstants))[0]:
        if isinstance(node, WithConstants):
            found |= {f"{dotted(path)}.{name}": value for name, value in node.constants().items()}
    return found
