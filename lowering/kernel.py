"""Kernels: one way to run an op each, with what it says of itself when one is to be chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from params.weights import WeightValue

from .signature import DIFFERENTIATED, SECOND, OpCall
from .target import CHOSEN_FOR, Target
from .weights import PreparedWeight

Refusal = Callable[..., "str | None"]

REFERENCE = "torch"
FUSED = "fused"
"""Stands among the refused kernels for the operator that a target does not have."""


def there(target: Target, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a kernel's `refuse` or `prepare` gives for a target, which it may ask for."""
    token = CHOSEN_FOR.set(target)
    try:
        return function(*args, **kwargs)
    finally:
        CHOSEN_FOR.reset(token)


@dataclass(frozen=True)
class Kernel:
    """One way to run an op.

    `refuse(*args, **kwargs)` reads shapes, dtypes and static arguments and returns `None`, or one sentence with the
    limit in it. `host_reads` marks a kernel that reads tensor values on the host: it is refused while a program is
    being traced or mapped. `batches=False` marks one whose operators have no batching rule: it is refused under vmap.
    `backward_once=True` marks one whose operators have a first derivative, in reverse mode, and no other: it is refused
    under jvp and where derivatives are nested; a second backward of autograd's, which cannot be foreseen, raises.
    `differentiable=False` marks one whose operators have no derivative at all: it is refused under every derivative.
    `eager=True` marks one that writes in place and loops to spare memory passes: it is refused where anything records
    or maps the operators (tracing, function transforms, gradients).
    `prepare(weight)` makes, once, the weight layout that the kernel wants, or returns None for a weight it leaves.
    `operators` are the operators outside Torch that it calls. Who registers such a kernel knows the device:
    `available(target, wanted)` returns None, or one sentence about what the target lacks, be it the `wanted` evidence
    (`Policy.evidence`); `evidence(target)` says in a word what it is that speaks for the kernel there; `loaded()`
    whether the operators can be called in this process; `remark(target)` what reports say of it there.
    `weights` are the kinds of weights that it reads, quantised ones and perhaps `Tensor`; without any it reads plain
    ones only. What `refuse` says includes what it does not read.
    `only_by_name=True` marks one that runs only where a policy names it.
    """

    name: str
    run: Callable[..., Any]
    targets: tuple[str, ...]
    refuse: Refusal | None = None
    host_reads: bool = False
    batches: bool = True
    backward_once: bool = False
    differentiable: bool = True
    eager: bool = False
    prepare: Callable[[Any], Any] | None = None
    operators: tuple[str, ...] = ()
    weights: tuple[type[WeightValue] | type[Tensor], ...] = ()
    only_by_name: bool = False
    available: Callable[[Target, str], str | None] | None = None
    evidence: Callable[[Target], str] | None = None
    loaded: Callable[[], bool] | None = None
    remark: Callable[[Target], str] | None = None

    @functools.cached_property
    def limited(self) -> bool:
        """Whether it is not for gradients, or not for all of them. Asked on every call."""
        return self.eager or not self.differentiable or self.backward_once

    @property
    def portable(self) -> bool:
        """Whether it is plain Torch: it calls no operator of a device's library, and none was compiled for a device."""
        return not self.operators and self.evidence is None

    def serves(self, target: Target) -> bool:
        """Whether the kernel was written for this target."""
        return target.name in self.targets

    def reads(self, weight: Any) -> bool:
        """Whether the kernel was written for weights of this kind, quantised or plain. The reference reads all."""
        return self.name == REFERENCE or isinstance(weight, self.weights or Tensor)

    def refusal(self, target: Target, call: OpCall | None, wanted: str) -> str | None:
        """Why it does not run on `target`, or there does not take the call; None when it does."""
        if not self.serves(target):
            return f"serves {', '.join(self.targets)}; target is {target.name}"
        reason = self.available and self.available(target, wanted)
        if reason is None and call is not None and call.around:
            reason = self._refusal_under(call.around)
        if reason is None and call is not None and self.refuse is not None:
            reason = there(target, self.refuse, *call.args, **call.kwargs)
        return reason

    def _refusal_under(self, surroundings: str) -> str | None:
        around = set(surroundings.split(" and "))
        if self.host_reads and around - DIFFERENTIATED:
            return f"reads lengths or ids on the host, which {surroundings} does not allow"
        if self.eager:
            return f"writes in place, which {surroundings} does not allow"
        if not self.batches and "vmap" in around:
            return "has no batching rule, so it is left out under vmap"
        if not self.differentiable and around & DIFFERENTIATED:
            return f"has no derivative, so it is left out under {surroundings}"
        if self.backward_once and "jvp" in around:
            return "has no forward derivative, so it is left out under jvp"
        if self.backward_once and SECOND in around:
            return f"has a first derivative alone, so it is left out under {SECOND}"
        return None


@dataclass(frozen=True)
class Choice:
    """The kernel that a call gets, and why not those tried before it, nor those that a rule of order puts later.

    `asked` is the op whose preference named the kernel: this one, or one that it contains; None without a preference.
    """

    op: str
    kernel: Kernel
    refused: dict[str, str]
    target: Target
    asked: str | None = None


def with_weights(name: str, kinds: tuple[type, ...], refuse: Refusal | None) -> Refusal:
    """A kernel's refusal, after that of weights in a form that it was not written for."""

    def refused(*args: Any, **kwargs: Any) -> str | None:
        return unread_weight(name, kinds, (*args, *kwargs.values())) or (refuse and refuse(*args, **kwargs))

    return refused


def unread_weight(name: str, kinds: tuple[type, ...], values: tuple[Any, ...]) -> str | None:
    """A sentence about a weight that the kernel of this name, which reads weights of these kinds, does not read."""
    owners = [value.kernels for value in values if isinstance(value, PreparedWeight)]
    if any(name not in names for names in owners):
        return f"takes no weight that was prepared for {', '.join(owners[0])}"
    special = [value for value in values if isinstance(value, WeightValue)]
    for value in special:
        if not isinstance(value, kinds):
            return f"takes no {type(value).__name__} ({value.scheme})"
    if kinds and Tensor not in kinds and not special and not owners:
        return f"takes {' and '.join(kind.__name__ for kind in kinds)}; the weight of this call is plain"
    return None
