"""What the host knows about a batch's rows, for kernels whose operators take lists instead of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HostLengths:
    """Row lengths and page ids as Python values, so that nothing is read back from the device.

    `query[r]` is the number of new tokens of row r, `length[r]` its length with them: exact, or an upper bound when
    `exact` is false (after a commit whose accepted counts stayed on the device). `pages[r]` are the page ids that
    row r holds, in order; `fits` says that the pool has as many as all rows hold, those they share counted for each. It
    takes no part in a tree's structure, and only `exact` and `fits` can sway a choice of kernel.
    """

    query: tuple[int, ...]
    length: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    exact: bool
    fits: bool = True

    def static_key(self) -> tuple[bool, bool]:
        """What a choice of kernel may depend on."""
        return self.exact, self.fits


def tracing() -> bool:
    """Whether operators are being recorded instead of run, so that values cannot be read and nothing may be kept."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch.compiler.is_compiling()
