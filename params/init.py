"""Random parameters: every leaf of a spec tree drawn from its own stream."""

from __future__ import annotations

import hashlib
import math
import operator
from typing import TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params.modes import lasting
from params.spec import TensorSpec
from params.tree import dotted

T = TypeVar("T")

STD = 0.02
"""Standard deviation of projections and embeddings (`initializer_range` of the published configs)."""


@lasting
def init(spec: T, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> T:
    """A tree like `spec` with random values, floating point in `dtype` where the spec pins none.

    A leaf depends on the seed, its path and its spec only: adding a leaf changes no other, and another dtype or
    device gives the same values rounded. Draws are made on the CPU in float32; device `meta` draws nothing. `TypeError`
    for a seed that is no integer.
    """
    number = _integer(seed)

    def make(path: tuple, leaf: TensorSpec | None) -> Tensor | None:
        if leaf is None:
            return None
        wanted = leaf.dtype or dtype
        if torch.device(device).type == "meta":
            return torch.empty(leaf.shape, dtype=wanted, device=device)
        return _draw(leaf, _generator(number, dotted(path))).to(device=device, dtype=wanted)

    return pytree.tree_map_with_path(make, spec)


def _integer(seed: int) -> int:
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, found {seed!r:.100}") from None


def _generator(seed: int, path: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _draw(leaf: TensorSpec, generator: torch.Generator) -> Tensor:
    """Values in float32.

    `log_uniform`: log U(0.01, 16), the decay rates of transformers' Qwen3.5. `inverse_softplus`: softplus of it is
    log-uniform in [1e-3, 1e-1], the time steps of Mamba 2. `conv`: U(-1, 1)/sqrt(width), PyTorch's depthwise default.
    """
    values = torch.empty(leaf.shape, dtype=torch.float32, device="cpu")
    match leaf.init:
        case "zeros":
            return values.zero_()
        case "ones":
            return values.fill_(1)
        case "normal":
            return values.normal_(std=STD, generator=generator)
        case "conv":
            bound = leaf.shape[-1] ** -0.5
            return values.uniform_(-bound, bound, generator=generator)
        case "log_uniform":
            return values.uniform_(0.01, 16, generator=generator).log_()
        case "inverse_softplus":
            step = values.uniform_(-3, -1, generator=generator).mul_(math.log(10)).exp_()
            return step + torch.log(-torch.expm1(-step))
    raise ValueError(f"unknown initialiser {leaf.init!r}")
