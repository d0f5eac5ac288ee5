"""What a forward returns beside the state: logits, hidden, and the intermediate values asked for by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import map, tree

from .step import Step

LogitsOf = Literal["all", "last"] | None
"""Logits of every token, of each row's last token, or of none."""


@tree
class Output:
    """`hidden` is taken after the final norm. `logits` are those of all tokens, of each row's last, or none at all."""

    logits: Float[Tensor, "positions vocab"]
    hidden: Float[Tensor, "tokens hidden"]
    extra: dict[str, Any]


class Taps:
    """Collects intermediate values that were asked for: `layers.3` by its name, `router` from every layer, stacked."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = tuple(wanted)
        self._offered: list[str] = []
        self._taken: dict[str, list[Any]] = {name: [] for name in self._wanted}

    def offer(self, name: str, value: Any) -> None:
        """Keep `value` if its name, or the last word of it, was asked for."""
        if not self._wanted:
            return
        last = name.rpartition(".")[2]
        self._offered += [name, last] if not last.isdigit() else [name]
        for asked in {name, last} & set(self._wanted):
            self._taken[asked].append(value)

    def taken(self) -> dict[str, Any]:
        """The collected values; `ValueError` for a name that nothing offered."""
        found: dict[str, Any] = {}
        for name, values in self._taken.items():
            if not values:
                near = difflib.get_close_matches(name, self._offered, n=3)
                raise ValueError(
                    f"outputs={name!r}: this model offers no such value; nearest: {', '.join(near) or 'none'}"
                )
            whole = len(values) == 1 and name in self._offered and "." in name
            found[name] = values[0] if whole else map(lambda *xs: torch.stack(xs), *values)
        return found


def head_logits(
    hidden: Float[Tensor, "tokens hidden"], head: Any, step: Step, logits: LogitsOf
) -> Float[Tensor, "positions vocab"]:
    """Logits of the tokens asked for. An idle row's last logits are zeros."""
    if logits is None:
        return hidden.new_zeros(0, head.shape[0])
    if logits == "all":
        return ops.linear(hidden, head)
    if logits != "last":
        raise ValueError(f"logits={logits!r}: give 'all', 'last' or None")
    if step.uniform and step.max_query == 1:
        return ops.linear(hidden, head)
    last = (step.query_start[1:] - 1).clamp(min=0)
    found = ops.linear(hidden[last.long()], head)
    return torch.where(step.query_start.diff()[:, None] > 0, found, 0)
