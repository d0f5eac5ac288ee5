"""What the host knows about a batch's rows, for kernels whose operators take lists instead of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    HostInt = int
else:
    # It computes as an integer does; a branch on one is what a trace refuses.
    HostInt = int | torch.SymInt
"""A number on the host; while a captured call is traced, a symbol that others can be computed from."""


@dataclass(frozen=True)
class HostLengths:
    """Row lengths and page ids as Python values, so that nothing is read back from the device.

    `query[r]` is the number of new tokens of row r, `length[r]` its length with them: exact, or an upper bound when
    `exact` is false (after a commit whose accepted counts stayed on the device). `pages[r]` are the page ids that
    row r holds, in order; `fits` says that the pool has as many as all rows hold, those they share counted for each. It
    takes no part in a tree's structure. Only `exact`, `fits` and whether lengths are symbols can sway a choice of
    kernel.

    While a captured call is traced, lengths are symbols: lists computed from them (with `+`, `torch.sym_min` and the
    like) are computed anew in each replay, a branch on one raises `CaptureError`, and `pages` is empty.
    """

    query: tuple[HostInt, ...]
    length: tuple[HostInt, ...]
    pages: tuple[tuple[int, ...], ...]
    exact: bool
    fits: bool = True

    def static_key(self) -> tuple[bool, bool, bool]:
        """What a choice of kernel may depend on."""
        return self.exact, self.fits, bool(self.length) and isinstance(self.length[0], torch.SymInt)


_Modes = torch._C._TorchDispatchModeKey


def _in_force(mode: torch._C._TorchDispatchModeKey) -> bool:
    return torch._C._get_dispatch_mode(mode) is not None


def tracing() -> bool:
    """Whether operators are being recorded instead of run, so that values cannot be read and nothing may be kept."""
    # Not `is_compiling`: that is true in every thread while one of them compiles. And first: Dynamo stops at the other.
    return torch.compiler.is_dynamo_compiling() or bool(torch._C._len_torch_dispatch_stack())


def valueless(x: Tensor) -> bool:
    """Whether `x` stands for a tensor in a trace, so that nothing is written where its program would write.

    Not asked of the mode in force: operators can be watched (their FLOPs counted, say) and run all the same.
    """
    return torch.compiler.is_dynamo_compiling() or isinstance(x, FakeTensor) or _in_force(_Modes.FAKE)


def readable(x: Tensor) -> bool:
    """Whether the values of `x` can be read without waiting for a device, and are those of the call."""
    if x.device.type != "cpu" or valueless(x) or is_functorch_wrapped_tensor(x):
        return False
    # What is computed from a tensor while operators are traced belongs to the trace, though the tensor is a real one.
    return not _in_force(_Modes.PROXY)


def symbolic(values: Iterable[HostInt]) -> bool:
    """Whether any of these host values is a symbol, so that what the host checks has been checked already."""
    return any(isinstance(value, torch.SymInt) for value in values)


def certainly(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; of symbols, whether it does for all that they stand for. Guards nothing."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def known_equal(one: HostInt, other: HostInt) -> bool:
    """Whether two host values are equal; of symbols, whether they are for all values."""
    return certainly(one == other)
