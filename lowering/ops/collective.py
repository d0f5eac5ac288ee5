"""Collectives between the ranks that share a model, as functions: a value in, a value out.

`group` is the name of a process group (`torch.distributed`). Ranks must call the same collectives in the same order.
"""

from __future__ import annotations

import traceback

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..errors import CollectiveError
from ..op import op

_RAW = torch.ops._c10d_functional


@op
def all_reduce(x: Shaped[Tensor, "*lead"], *, group: str) -> Shaped[Tensor, "*lead"]:
    """The sum of every rank's `x`, the same bits on all of them. `CollectiveError` when a rank does not answer."""
    try:
        return _RAW.wait_tensor(_RAW.all_reduce(x.contiguous(), "sum", group))
    except RuntimeError as error:
        raise CollectiveError(_silent("all_reduce", group, error)) from error


@op
def all_gather(x: Shaped[Tensor, "*lead part"], *, group: str, ranks: int) -> Shaped[Tensor, "*lead whole"]:
    """Every rank's `x` side by side, in the order of ranks. `CollectiveError` when a rank does not answer."""
    try:
        found = _RAW.wait_tensor(_RAW.all_gather_into_tensor(x.contiguous(), ranks, group))
    except RuntimeError as error:
        raise CollectiveError(_silent("all_gather", group, error)) from error
    # The ranks' values come one below the other. For one row, putting them side by side is a view.
    return found.unflatten(0, (ranks, x.shape[0])).movedim(0, -2).flatten(-2) if x.ndim > 1 else found


@op
def from_first(x: Shaped[Tensor, "*lead"], *, group: str) -> Shaped[Tensor, "*lead"]:
    """The `x` of rank 0 on every rank. `CollectiveError` when a rank does not answer."""
    try:
        return _RAW.wait_tensor(_RAW.broadcast(x.contiguous(), 0, group))
    except RuntimeError as error:
        raise CollectiveError(_silent("from_first", group, error)) from error


def captured_failure(error: RuntimeError) -> CollectiveError | None:
    """What a captured program's error is if it came from a collective: there, no op of this file stands around it."""
    for frame in traceback.extract_tb(error.__traceback__):
        if "_c10d_functional" in (frame.line or ""):
            return CollectiveError(_silent("a captured program", None, error))
    return None


def _silent(what: str, group: str | None, error: RuntimeError) -> str:
    rank = "a rank" if group is None else f"a rank of group {group!r}"
    return (
        f"{what}: {rank} did not answer; it has ended, or hangs, or is at another call. Look at its "
        f"own output first. From here: {error}"
    )
