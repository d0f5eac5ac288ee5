"""What was chosen: a report of the kernels that the ops of a run, or of a dry run, got."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from params.quant.values import QuantizedWeight
from params.spec import TensorSpec
from params.tree import tree_map

from .. import target as targets
from ..kernel import FUSED, Choice, unread_weight
from ..op import find
from ..policy import MODE, Policy, enter, leave
from ..target import Target
from ..use import check_names
from .sheet import Sheet
from .trace import DryRun

_COUNTING = threading.Lock()
"""Threads that run in copies of one context count in one report."""


@dataclass
class Row:
    """One op with one choice: how often it was called, the kernel it got, and why others were refused.

    With `asked` the policy named the kernel for that op, this one or one that it contains, and no other was looked at.
    `remark` tells what a default has decided about the calls (`Op.remark`), or what is known of the kernel.
    `evidence` says what speaks for the kernel's operators on the target; nothing has to for Torch's own.
    `others` are kernels for weights of other kinds than the call's, whose refusals say nothing that is news.
    """

    op: str
    kernel: str
    refused: dict[str, str]
    target: Target
    count: int = 0
    asked: str | None = None
    others: frozenset[str] = frozenset()
    evidence: str = ""
    remark: str = ""

    def reasons(self) -> str:
        """One line a kernel that was refused, but for those that were written for other targets or weights."""
        if self.asked is not None:
            return "asked for by name" + ("" if self.asked == self.op else f", of {self.asked}")
        here = {kernel.name for kernel in find(self.op).serving(self.target)} - self.others
        lines = [f"{name}: {why}" for name, why in self.refused.items() if name in here or name == FUSED]
        return "\n".join([*lines, *filter(None, [self.remark])])


def _for_other_weights(choice: Choice, args: tuple[Any, ...]) -> frozenset[str]:
    """Kernels for weights of other kinds; no fused ones of a quantised weight that Torch has to multiply by."""
    kernels = find(choice.op).kernels.values()
    others = {kernel for kernel in kernels if unread_weight(kernel.name, kernel.weights, args)}
    if choice.kernel.portable and any(isinstance(arg, QuantizedWeight) for arg in args):
        others = {kernel for kernel in others if kernel.portable}
    return frozenset(kernel.name for kernel in others)


@dataclass
class Report:
    """The choices of one run. Prints as a table."""

    rows: list[Row] = field(default_factory=list)
    known: dict[int, tuple[Choice, Row]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The row of each choice by its id: an op makes one a signature, so that counting a call is one look-up."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows,)

    def add(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one call."""
        with _COUNTING:
            found = self.known.get(id(choice))
            if found is None:
                found = self.known[id(choice)] = choice, self._row(choice, args, kwargs)
            found[1].count += 1

    def _row(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
        """The row that says the same, made now if there is none."""
        others = _for_other_weights(choice, args)
        kernel, target = choice.kernel, choice.target
        evidence = kernel.evidence(target) if kernel.evidence else ""
        remarks = (kernel.remark and kernel.remark(target), find(choice.op).remark(target, *args, **kwargs))
        remark = "\n".join(filter(None, remarks))
        told = {"asked": choice.asked, "others": others, "evidence": evidence, "remark": remark}
        new = Row(choice.op, choice.kernel.name, choice.refused, choice.target, **told)
        row = next((row for row in self.rows if replace(row, count=0) == new), new)
        if row is new:
            self.rows.append(new)
        return row

    def sheet(self) -> Sheet:
        """The report as a table."""
        title = f"lowered to {', '.join(sorted({row.target.described for row in self.rows}))}"
        ordered = sorted(self.rows, key=lambda row: row.op)
        rows = [(row.op, str(row.count), row.kernel, row.evidence, row.reasons()) for row in ordered]
        return Sheet(title, ("op", "calls", "kernel", "evidence", "refused before it"), rows, numbers=("calls",))

    def __str__(self) -> str:
        return self.sheet().drawn()

    __repr__ = __str__


@contextmanager
def record() -> Iterator[Report]:
    """Collect the choices of everything that runs inside the block."""
    report = Report()
    token = MODE.set(replace(MODE.get(), report=report))
    try:
        yield report
    finally:
        MODE.reset(token)


@dataclass
class _Watch(Report):
    """Shows each call to somebody instead of counting it."""

    see: Callable[[str, tuple[Any, ...]], None] = lambda op, args: None

    def add(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show one call."""
        self.see(choice.op, args)


@contextmanager
def watch(see: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `see(op name, positional arguments)` before each op that runs inside the block."""
    token = MODE.set(replace(MODE.get(), report=_Watch(see=see)))
    try:
        yield
    finally:
        MODE.reset(token)


def explain(
    function: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    policy: Policy | None = None,
    **kwargs: Any,
) -> Report:
    """Which kernel each op of `function(*args, **kwargs)` gets on `target`, and why others were refused.

    Nothing is computed: tensors are replaced by fake ones, and `TensorSpec` leaves (a model without weights) and
    tensors on device "meta" are taken as tensors of their shape. Raises `LoweringError` for a policy or a target that
    names what does not exist.
    """
    mode = MODE.get()
    chosen = mode.target if target is None else targets.named(target)
    run = DryRun()
    with dry(chosen, policy or mode.policy, run) as (fake, report), torch.no_grad():
        run.program(function, abstract(args, fake), abstract(kwargs, fake))
    return report


@contextmanager
def dry(target: Target | None, policy: Policy, run: DryRun) -> Iterator[tuple[FakeTensorMode, Report]]:
    """Inside the block ops are chosen for `target` and go to `run`; the mode that makes tensors without values."""
    check_names(policy)
    report = Report()
    token = enter(replace(MODE.get(), policy=policy, target=target, report=report, dry=run))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, run.recorder:
            yield fake, report
    finally:
        leave(token)


def abstract(value: Any, fake: FakeTensorMode) -> Any:
    """The tree with fake tensors for its tensors and specs; what has no device of its own is put on the CPU."""

    def leaf(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty(value.shape, dtype=value.dtype or torch.get_default_dtype(), device="cpu")
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else fake.from_tensor(value)

    return tree_map(leaf, value)
