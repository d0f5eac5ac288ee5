"""What `lower` gives: a program lowered to a target and not run, what it would call there, and at what cost."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from params import tree
from params.spec import TensorSpec

from ..errors import CaptureError
from ..target import Target
from .costs import Cost
from .report import Report
from .sheet import Sheet
from .trace import Call, DryRun, Operator

BETWEEN = "between ops"
"""What the operators that a program calls outside any op are listed under."""


TORCH = ("aten.", "_c10d_functional.", "funcmodels.", "params.")
"""How names of operators begin that are fused from nothing: Torch's, its collectives, and our own around them."""


@dataclass(frozen=True)
class CostRow:
    """An op with the kernel it got: how often it is called, and what all these calls cost together.

    `fused` is the number of operator calls in them that are not Torch's own.
    """

    op: str
    kernel: str
    calls: int
    cost: Cost
    fused: int = 0


@dataclass(frozen=True)
class Costs:
    """What a lowered program costs: a row for each op and kernel, and the bytes of each argument by name."""

    rows: tuple[CostRow, ...]
    argument_bytes: dict[str, int]

    @property
    def total(self) -> Cost:
        """The cost of the whole program."""
        return sum((row.cost for row in self.rows), Cost())

    def sheet(self) -> Sheet:
        """As a table, the most expensive first."""
        total = self.total
        rows = [
            (row.op, row.kernel, str(row.calls), str(row.fused or ""), tree.size(row.cost.bytes),
             share(row.cost.bytes, total.bytes), flops(row.cost.flops), share(row.cost.flops, total.flops))
            for row in sorted(self.rows, key=lambda row: -row.cost.bytes)
        ]  # fmt: skip
        columns = ("op", "kernel", "calls", "fused operators", "bytes", "share of bytes", "FLOPs", "share of FLOPs")
        return Sheet("cost", columns, rows, numbers=columns[2:], notes=(_memory(self.argument_bytes),))

    def __repr__(self) -> str:
        return self.sheet().drawn()


@dataclass(frozen=True)
class Lowered:
    """A program lowered to a target: the kernel of each op, and the operators that these call.

    `through` is what answered for shapes: torch, or the torch_npu whose operator schemas and shape functions the
    program was traced through. `problems` are the calls that other recorded versions of it would refuse.
    """

    target: Target
    through: str
    calls: tuple[Call, ...]
    between: tuple[Operator, ...]
    report: Report
    argument_bytes: dict[str, int]
    capture: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    def compile(self) -> Any:
        """The function as `jit` captures it, captured for these arguments. `CaptureError` for another machine's."""
        if self.capture is None:
            raise CaptureError(
                f"compile: lowered to {self.target}, and the arguments lie elsewhere; move them to a device of type "
                f"{self.target.device!r}, or lower to the machine that they are on"
            )
        return self.capture()

    def explain(self) -> Report:
        """The kernel of each op, and why others were refused."""
        return self.report

    def cost_analysis(self) -> Costs:
        """Calls, FLOPs and bytes moved of each op and kernel, and the bytes of each argument."""
        found: dict[tuple[str, str], CostRow] = {}
        for call in self.calls:
            before = found.get((call.op, call.kernel), CostRow(call.op, call.kernel, 0, Cost()))
            fused = call.count * sum(not operator.name.startswith(TORCH) for operator in call.operators)
            row = CostRow(
                call.op, call.kernel, before.calls + call.count, before.cost + call.cost, before.fused + fused
            )
            found[call.op, call.kernel] = row
        rest = sum((operator.cost for operator in self.between), Cost())
        rows = (*found.values(), CostRow(BETWEEN, "", len(self.between), rest))
        return Costs(rows, self.argument_bytes)

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each operator call that another version of torch_npu would refuse."""
        called = [(call.op, operator) for call in self.calls for operator in call.operators]
        called += [(BETWEEN, operator) for operator in self.between]
        found = [
            f"{op}: {operator.name}: torch_npu {version} {reason}"
            for op, operator in called
            for version, reason in operator.problems
        ]
        return tuple(dict.fromkeys(found))

    def as_text(self) -> str:
        """Every op, and the operators that its kernel calls with the shapes and dtypes of their arguments.

        Operators that only change how a tensor is looked at are left out.
        """
        lines = [f"lowered to {self.target}, traced through {self.through}", _memory(self.argument_bytes)]
        for op, kernel in dict.fromkeys((call.op, call.kernel) for call in self.calls):
            lines += ["", f"{op}: {kernel}"]
            for call in self.calls:
                if (call.op, call.kernel) == (op, kernel):
                    lines += _call_lines(call)
        lines += ["", BETWEEN, *(f"  {count} x {text}" for text, count in Counter(map(str, self.between)).items())]
        return "\n".join([*lines, *(["", "other versions", *self.problems] if self.problems else [])])

    def __repr__(self) -> str:
        return compared([self]).drawn()


def _call_lines(call: Call) -> list[str]:
    remark = "  (by the reference: the kernel needs values or operators that are not here)" if call.by_reference else ""
    head = f"  {call.count} x ({call.arguments}) -> {call.result}{remark}"
    # Loops repeat operators: those alike are told once, with their number.
    counted = Counter(map(str, call.operators))
    return [head, *(f"      {text}{f'  ({count} times)' if count > 1 else ''}" for text, count in counted.items())]


def lowered(target: Target, through: str, run: DryRun, report: Report, sizes: dict[str, int]) -> Lowered:
    """What a dry run found."""
    return Lowered(target, through, tuple(run.calls.values()), tuple(run.outside), report, sizes)


def argument_bytes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Bytes of the tensors and specs in each argument that has any, by the argument's name."""
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    sizes = {name: sum(map(_leaf_bytes, tree.leaves(value))) for name, value in bound.items()}
    return {name: size for name, size in sizes.items() if size}


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, TensorSpec):
        return leaf.numel * (leaf.dtype or torch.get_default_dtype()).itemsize
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def compared(programs: Sequence[Lowered], title: str | None = None) -> Sheet:
    """One program lowered to one target, or to several side by side: op, calls, kernels, shares; reasons as notes."""
    names = [str(program.target) for program in programs]
    heads = ["kernel"] if len(programs) == 1 else [f"kernel on {name}" for name in names]
    found = [_kernels(program) for program in programs]
    rows, marked = [], []
    for key in sorted({key for kernels in found for key in kernels}, key=lambda key: (key[0] == BETWEEN, key)):
        cells = [kernels.get(key) for kernels in found]
        kernels = [cell.kernel if cell else "-" for cell in cells]
        differ = len(set(kernels)) > 1
        if differ:
            marked.append(len(rows))
        rest = [_joined([getattr(cell, part) if cell else "-" for cell in cells], names) for part in _PARTS]
        rows.append((f"{key[0]} *" if differ else key[0], rest[0], *kernels, *rest[1:]))
    numbers, said = _numbered([row[-1] for row in rows])
    rows = [(*row[:-1], number) for row, number in zip(rows, numbers, strict=True)]
    columns = ("op", "calls", *heads, "bytes", "FLOPs", "why")
    notes = said + [_total(program) for program in programs]
    notes += [line for program in programs for line in program.problems]
    if marked:
        notes.append("* the targets get different kernels")
    title = title or f"lowered to {' and '.join(names)}"
    return Sheet(title, columns, rows, numbers=("calls", "bytes", "FLOPs"), marked=marked, notes=notes)


@dataclass
class _Cell:
    """An op with one kernel on one target, as text."""

    calls: str
    kernel: str
    bytes: str
    flops: str
    refused: str


_PARTS = ("calls", "bytes", "flops", "refused")


def _kernels(program: Lowered) -> dict[tuple[str, int], _Cell]:
    """By op and the place of the kernel among those that the op got, the most called first."""
    costs = program.cost_analysis()
    found: dict[tuple[str, int], _Cell] = {}
    for row in sorted(costs.rows, key=lambda row: -row.calls):
        if row.calls:
            place = sum(op == row.op for op, _ in found)
            same = [choice for choice in program.report.rows if (choice.op, choice.kernel) == (row.op, row.kernel)]
            refused = dict.fromkeys(line for choice in same for line in choice.reasons().splitlines())
            price = share(row.cost.bytes, costs.total.bytes), share(row.cost.flops, costs.total.flops)
            found[row.op, place] = _Cell(str(row.calls), row.kernel, *price, "\n".join(refused))
    return found


def _numbered(reasons: Sequence[str]) -> tuple[list[str], list[str]]:
    """For each row the number of its note, the same for the same reasons, and the notes: whole sentences fold badly."""
    said = list(dict.fromkeys(filter(None, reasons)))
    notes = [f"({number}) {'; '.join(text.splitlines())}" for number, text in enumerate(said, 1)]
    return [f"({said.index(text) + 1})" if text else "" for text in reasons], notes


def _joined(texts: list[str], names: list[str]) -> str:
    """One text where all say the same, else each under the name of its target."""
    if len(set(texts)) == 1:
        return texts[0]
    if any("\n" in text or ": " in text for text in texts):
        named = ((name, line) for name, text in zip(names, texts, strict=True) for line in text.split("\n"))
        return "\n".join(f"{name}: {line}" for name, line in named if line)
    return " / ".join(texts)


def _total(program: Lowered) -> str:
    total = program.cost_analysis().total
    return (
        f"{program.target}: {flops(total.flops)}, {tree.size(total.bytes)} moved; {_memory(program.argument_bytes)}; "
        f"traced through {program.through}"
    )


def _memory(sizes: dict[str, int]) -> str:
    return "memory of " + ", ".join(f"{name} {tree.size(count)}" for name, count in sizes.items())


def flops(count: int) -> str:
    """FLOPs for people: `3.4 GFLOP`."""
    return tree.size(count).replace("B", "FLOP").replace("k", "K")


def share(part: int, whole: int) -> str:
    """A percentage, with one decimal below ten."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f}%" if percent >= 10 or not part else f"{percent:.1f}%"
