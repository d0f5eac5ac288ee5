"""What the entries of an empty state are made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Space:
    """The room that a state's entries have: `rows` rows, and `pages` pages of `page_size` tokens beside a scratch page.

    `dtype` is that of pages and of convolution windows, `recurrent_dtype` that of delta-rule matrices. `layout` is that
    of pages of latents, None where the target decides.
    """

    rows: int
    pages: int
    page_size: int
    dtype: torch.dtype
    recurrent_dtype: torch.dtype
    device: torch.device
    layout: str | None = None
