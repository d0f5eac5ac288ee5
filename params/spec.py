"""What a parameter leaf is before it has values: shape, dtype rule, initialiser, and the parts it is merged from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.utils._pytree as pytree

from params.errors import CheckpointError, ConfigError
from params.sharding import Rule

T = TypeVar("T")

MOST_ELEMENTS = 2**60
"""Beyond these not even the bytes of a tensor can be counted in 64 bits."""
Init = Literal["normal", "zeros", "ones", "log_uniform", "inverse_softplus", "conv"]


@dataclass(frozen=True)
class TensorSpec:
    """One leaf of a parameter tree.

    `dtype` pins the leaf (delta-rule gates stay float32 where the model runs in less); `None` follows the model.
    `parts` are the row counts of the checkpoint tensors that are merged along axis 0 into this leaf, in order:
    `(4096, 512, 512)` for a projection that computes query, key and value in one product. A `table` is read by rows:
    `load` can leave it on the host or in its files. `shard` says which part of it each of several ranks holds; without
    one, each holds it all.
    """

    shape: tuple[int, ...]
    init: Init = "normal"
    dtype: torch.dtype | None = None
    parts: tuple[int, ...] | None = None
    table: bool = False
    shard: Rule | None = None

    def __post_init__(self) -> None:
        if self.parts is not None and sum(self.parts) != self.shape[0]:
            raise ValueError(f"parts {self.parts} add up to {sum(self.parts)}, the leaf has {self.shape[0]} rows")
        if self.numel >= MOST_ELEMENTS:
            raise ConfigError(
                f"a parameter would be {list(self.shape)}, more numbers than any computer addresses; check the config"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


leaf: Callable[..., Any] = TensorSpec
"""A `TensorSpec` for where a tree takes a tensor: type checkers let it stand there."""


CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes a weight may be stored in and converted between. Everything else is payload and never converted."""


def check_dtype(dtype: torch.dtype | None) -> None:
    """`TypeError` for what is no dtype, a word among them, `CheckpointError` for one that parameters cannot have."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, found {dtype!r:.100}")
    if dtype is not None and dtype not in CASTABLE:
        raise CheckpointError(f"parameters cannot have dtype {dtype}; give one of {CASTABLE}, or None to keep theirs")


def widened(spec: T, dtype: torch.dtype | None) -> T:
    """The spec of parameters of this `dtype`, where a pinned dtype is the least that a leaf may have.

    Float32 stays where the model runs in less, and is float64 where it runs in that. Integers stay. Raises as
    `check_dtype`.
    """
    check_dtype(dtype)

    def wide(leaf: TensorSpec) -> TensorSpec:
        pinned = leaf.dtype
        if dtype is None or pinned is None or not pinned.is_floating_point:
            return leaf
        return replace(leaf, dtype=torch.promote_types(pinned, dtype))

    return pytree.tree_map_only(TensorSpec, wide, spec)
