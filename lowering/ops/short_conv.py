"""Causal depthwise convolution over the last few tokens of each row, with the window carried between calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from params.tree import tree

from ..op import op
from ..rows import Rows
from .widen import wide


@tree
class WindowTrail:
    """Enough to stand after any of the newest tokens: the old window followed by the new inputs of each row."""

    inputs: Float[Tensor, "slots steps channels"]

    def at(self, accepted: Int[Tensor, " rows"], past: int) -> Float[Tensor, "slots past channels"]:
        """The window after the first `accepted` of each row's new tokens: one gather."""
        return window_after(self.inputs, accepted, past)


@op
def short_conv(
    x: Float[Tensor, "tokens channels"],
    weight: Float[Tensor, "channels width"],
    window: Float[Tensor, "slots past channels"] | None,
    rows: Rows,
    *,
    keep_steps: bool,
    dilation: int = 1,
) -> tuple[Float[Tensor, "tokens channels"], Float[Tensor, "slots past channels"] | None, WindowTrail | None]:
    """silu(sum_j weight[:, j] * x at t - (width - 1 - j) * dilation), the window supplying what lies before the first.

    That is (width - 1) * dilation tokens. Slots are rows plus one scratch slot, the last. Returns the output, the
    window after each row's last token, and with `keep_steps` the old window and a trail instead. `window=None` starts
    from zeros and keeps nothing.
    """
    new = rows.rectangle(x)
    count, past = new.shape[0], (weight.shape[1] - 1) * dilation
    before = new.new_zeros(count, past, x.shape[1]) if window is None else window[:count].to(x.dtype)
    inputs = torch.cat((before, new), 1)
    taps = wide(weight).T.contiguous()
    seen = [wide(inputs[:, tap * dilation : tap * dilation + rows.max_query]) for tap in range(weight.shape[1])]
    y = torch.stack([x * tap for x, tap in zip(seen, taps, strict=True)]).sum(0)
    y = rows.flat(F.silu(y).to(x.dtype), x.shape[0])
    if window is None:
        return y, None, None
    if keep_steps:
        return y, window, WindowTrail(with_scratch(inputs))
    return y, window_after(with_scratch(inputs), rows.new, past).to(window.dtype), None


def with_scratch(x: Tensor) -> Tensor:
    """[rows ...] with an empty slot behind."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))


def window_after(inputs: Tensor, accepted: Tensor, past: int) -> Tensor:
    """inputs [slots past+steps channels] cut to the `past` entries that end after `accepted` new ones."""
    accepted = F.pad(accepted, (0, 1))
    index = accepted[:, None] + torch.arange(past, device=inputs.device)
    return inputs.gather(1, index[..., None].expand(-1, -1, inputs.shape[2]))
