"""What was chosen: a report of the kernels that the ops of a run, or of a dry run, got."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from params import tree
from params.spec import TensorSpec

from . import target as targets
from .policy import MODE, Policy, check
from .target import Target

if TYPE_CHECKING:
    from .op import Choice


@dataclass
class Row:
    """One op with one choice: how often it was called, the kernel it got, and why others were refused."""

    op: str
    kernel: str
    refused: dict[str, str]
    target: str
    count: int = 0


@dataclass
class Report:
    """The choices of one run. Prints as a table."""

    rows: list[Row] = field(default_factory=list)

    def add(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one call."""
        for row in self.rows:
            if (row.op, row.kernel, row.refused) == (choice.op, choice.kernel.name, choice.refused):
                row.count += 1
                return
        self.rows.append(Row(choice.op, choice.kernel.name, choice.refused, choice.target.name, 1))

    def table(self) -> Table:
        """The report as a rich table."""
        table = Table(title=f"lowered to {', '.join(sorted({row.target for row in self.rows}))}", title_justify="left")
        for column in ("op", "calls", "kernel", "refused before it"):
            table.add_column(column, justify="right" if column == "calls" else "left")
        for row in sorted(self.rows, key=lambda row: row.op):
            reasons = "\n".join(f"{name}: {reason}" for name, reason in row.refused.items())
            table.add_row(row.op, str(row.count), row.kernel, escape(reasons))
        return table

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=120, force_jupyter=False, force_terminal=False).print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

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
    check(policy or mode.policy)
    report = Report()
    chosen = mode.target if target is None else targets.named(target)
    token = MODE.set(replace(mode, policy=policy or mode.policy, target=chosen, report=report, dry=True))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
            function(*abstract(args, fake), **abstract(kwargs, fake))
    finally:
        MODE.reset(token)
    return report


def abstract(value: Any, fake: FakeTensorMode) -> Any:
    """The tree with fake tensors for its tensors and specs; what has no device of its own is put on the default one."""

    def leaf(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty(value.shape, dtype=value.dtype or torch.get_default_dtype())
        if not isinstance(value, Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype) if value.is_meta else fake.from_tensor(value)

    return tree.map(leaf, value)
