"""Programs that a dry run's own process imports: it knows functions by module and name only."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lowering import ops


def norm_twice(x: Tensor, weight: Tensor) -> Tensor:
    """Two calls of one op with one signature, a product, and a sliced sum between the ops."""
    y = ops.rms_norm(ops.rms_norm(x, weight, eps=1e-5), weight, eps=1e-5)
    return y + x[:, :1]


def project(x: Tensor, weight: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """A product and a look-up."""
    return ops.linear(x + ops.embedding(ids, table), weight)


def wrong_argument(x: Tensor) -> Any:
    """What no version of the operator takes."""
    return torch.ops.npu.npu_rms_norm(x, x[0], eps=1e-5)


def wrong_shape(x: Tensor) -> Any:
    """Refused by the operator's own shape function: rows of another expert count."""
    return torch.ops.npu.npu_swiglu(x, dim=7)


def only_in_new_versions(q: Tensor, v: Tensor, state: Tensor, lengths: Tensor) -> Any:
    """An operator that torch_npu 2.8 does not have."""
    return torch.ops.npu.npu_chunk_gated_delta_rule(
        q, q, v, beta=v[..., 0], initial_state=state, actual_seq_lengths=lengths, scale=1.0
    )


def unrecorded(x: Tensor) -> Any:
    """An operator that no kernel of ours calls."""
    return torch.ops.npu.npu_silu(x)


class UnsendableError(Exception):
    """An error that does not unpickle: its constructor takes more than its arguments hold."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def raises_unsendable(x: Tensor) -> None:
    """An error of a class that cannot be made again in another process."""
    raise UnsendableError("trouble", "paradise")


def raises(x: Tensor, *, message: str) -> None:
    """A plain error of the program's own."""
    raise KeyError(message)


def dies(x: Tensor) -> None:
    """What an abort in a C++ library looks like."""
    os.abort()
