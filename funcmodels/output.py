"""What a forward returns beside the state: logits, hidden, and the intermediate values asked for by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from lowering.jit.tape import lengthwise
from params.tree import leaves, tree, tree_map

from .state.batch import Batch
from .state.step import Step

LogitsOf = Literal["all", "last"] | None
"""Logits of every token, of each row's last token, or of none."""


@tree
class Output:
    """What a forward gives. `logits` are those of all tokens, of each row's last, or none at all.

    `hidden` is what the family's draft head takes: values after the final norm, or, where there are several residual
    streams, all of them laid end to end.
    """

    logits: Float[Tensor, "positions vocab"]
    hidden: Float[Tensor, "tokens hidden"]
    extra: dict[str, Any]

    @classmethod
    def of(cls, hidden: Float[Tensor, "tokens hidden"], extra: dict[str, Any] | None = None) -> Output:
        """Hidden states that something else has made, without logits: what the `extend` of a draft takes.

        `extra` are the values that the draft's `outputs` name.
        """
        return cls(hidden.new_zeros(0, 0), hidden, extra or {})


def mark_lengths(out: Output, batch: Batch, logits: LogitsOf) -> None:
    """Say which tensors of an output have an entry a token of the batch: a captured call takes the padding off."""
    lengthwise(batch, 0, out.hidden, *((out.logits,) if logits == "all" else ()))
    for name, value in out.extra.items():
        # Values of every layer, asked for by the last word of their names, are stacked before the tokens.
        lengthwise(batch, 0 if "." in name else 1, *leaves(value))


class Taps:
    """Collects intermediate values that were asked for: `layers.3` by its name, `router` from every layer, stacked.

    `offered` are the names of all values that the model can give. `ValueError` for a wanted name that is not among
    them, nor the last word of one.
    """

    def __init__(self, wanted: Sequence[str], offered: Sequence[str]) -> None:
        if isinstance(wanted, str):
            raise ValueError(f"outputs={wanted!r:.100}: give a list of names, [{wanted!r:.100}]")
        self._whole = set(offered)
        known = self._whole | {_last(name) for name in offered if not _last(name).isdigit()}
        for name in wanted:
            if not isinstance(name, str) or name not in known:
                near = ", ".join(difflib.get_close_matches(str(name), sorted(known), n=3)) or "none"
                kinds = ", ".join(sorted({re.sub(r"\d+", "N", shown) for shown in known}))
                raise ValueError(
                    f"outputs={name!r:.100}: this model offers no such value; nearest: {near}; it offers {kinds}"
                )
        self._taken: dict[str, list[Any]] = {name: [] for name in wanted}

    def asks(self, name: str) -> bool:
        """Whether a value of this name was asked for: to make one that costs something only then."""
        return name in self._taken or _last(name) in self._taken

    def offer(self, name: str, value: Any) -> None:
        """Keep `value` if its name, or the last word of it, was asked for."""
        if self._taken:
            for asked in {name, _last(name)} & self._taken.keys():
                self._taken[asked].append(value)

    def taken(self) -> dict[str, Any]:
        """The values by the names they were asked for; those from every layer are stacked."""
        return {
            name: values[0] if name in self._whole else tree_map(lambda *xs: torch.stack(xs), *values)
            for name, values in self._taken.items()
        }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def check_logits(logits: LogitsOf) -> None:
    """`ValueError` for what is no choice of logits: before a forward, which has written to pages when it uses it."""
    if logits not in ("all", "last", None):
        raise ValueError(f"logits={logits!r:.100}: give 'all', 'last' or None")


def head_logits(
    hidden: Float[Tensor, "tokens hidden"], head: Any, step: Step, logits: LogitsOf
) -> Float[Tensor, "positions vocab"]:
    """Logits of the tokens asked for. An idle row's last logits are zeros."""
    if logits is None:
        return hidden.new_zeros(0, head.shape[0])
    if logits == "all":
        return ops.linear(hidden, head)
    if step.rows.uniform and step.rows.max_query == 1:
        return ops.linear(hidden, head)
    last = (step.rows.query_start[1:] - 1).clamp(min=0)
    found = ops.linear(hidden[last.long()], head)
    return torch.where(step.rows.new[:, None] > 0, found, 0)
