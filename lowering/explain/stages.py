"""What `lower` gives: a program lowered to a target and not run, what it would call there, and at what cost."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from params import tree
from params.spec import TensorSpec

from ..errors import CaptureError
from ..kernel import FUSED, Kernel
from ..op import Op, find
from ..policy import EVIDENCE
from ..target import Peaks, Target
from .costs import Cost
from .report import Report
from .sheet import Roof, Sheet
from .trace import Call, DryRun, Operator

BETWEEN = "between ops"
"""What the operators that a program calls outside any op are listed under."""


PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm")
"""How those of Torch's begin that are an operator of the device as they are."""
TORCH = ("aten.", "_c10d_functional.", "funcmodels.", "params.")
"""How names of operators begin that are fused from nothing: Torch's, its collectives, and our own around them."""


@dataclass(frozen=True)
class CostRow:
    """An op with the kernel it got: how often it is called, and what all these calls cost together.

    `fused` is the number of operator calls in them that are not Torch's own, `loose` what the others cost: Torch's, but
    for a call that is one operator of the device, and for products beside fused ones: these leave nothing to fuse.
    """

    op: str
    kernel: str
    calls: int
    cost: Cost
    fused: int = 0
    loose: Cost = field(default_factory=Cost)

    def __add__(self, other: CostRow) -> CostRow:
        calls, fused = self.calls + other.calls, self.fused + other.fused
        return replace(self, calls=calls, cost=self.cost + other.cost, fused=fused, loose=self.loose + other.loose)

    @classmethod
    def of(cls, call: Call) -> CostRow:
        """The row of one call."""
        own = [operator for operator in call.operators if operator.name.startswith(TORCH)]
        costing = [operator for operator in call.operators if operator.cost != Cost()]
        loose = sum((operator.cost for operator in own), Cost()) if len(costing) > 1 else Cost()
        if len(own) < len(call.operators):
            apart = [operator.cost for operator in own if not operator.name.startswith(PRODUCTS)]
            loose = sum(apart, Cost())
        fused = call.count * (len(call.operators) - len(own))
        return cls(call.op, call.kernel, call.count, call.cost, fused, loose.times(call.count))


@dataclass(frozen=True)
class Costs:
    """What a lowered program costs: a row for each op and kernel, and the bytes of each argument by name."""

    rows: tuple[CostRow, ...]
    argument_bytes: dict[str, int]

    @property
    def total(self) -> Cost:
        """The cost of the whole program."""
        return sum((row.cost for row in self.rows), Cost())

    @property
    def loose(self) -> Cost:
        """The part of it that lies in Torch's operators where more than one stand for an op."""
        return sum((row.loose for row in self.rows), Cost())

    def left(self) -> list[tuple[CostRow, float]]:
        """Rows with loose operators and the share of bytes or of FLOPs that these are, the larger; largest first."""
        found = [(row, max(parts(row.loose, self.total))) for row in self.rows]
        return sorted((pair for pair in found if pair[1]), key=lambda pair: -pair[1])

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
            found[call.op, call.kernel] = found.get((call.op, call.kernel), _nothing(call)) + CostRow.of(call)
        rest = sum((operator.cost for operator in self.between), Cost())
        rows = (*found.values(), CostRow(BETWEEN, "", len(self.between), rest, loose=rest))
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


def _nothing(call: Call) -> CostRow:
    return CostRow(call.op, call.kernel, 0, Cost())


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
    notes = [_total(program) for program in programs]
    notes += [line for program in programs for line in program.problems]
    if marked:
        notes.append("* the targets get different kernels")
    columns = ("op", "calls", *heads, "evidence", "bytes", "FLOPs")
    return Sheet(
        title or f"lowered to {' and '.join(names)}",
        columns,
        [row[:-1] for row in rows],
        numbers=("calls", "bytes", "FLOPs"),
        marked=marked,
        notes=notes,
        head=[fused_share(program) for program in programs if program.target.device == "npu"],
        reasons=[row[-1] for row in rows],
        bars=columns[-2:],
        badges=("evidence",),
        roofs=[_roof(program, program.target.peaks) for program in programs if program.target.peaks],
    )


TOLD = 3
"""Ops that are named with the reason why their part is not fused."""
TELLING = 0.001
"""Share of bytes or FLOPs below which none is."""


def fused_share(program: Lowered) -> str:
    """One line: how much of a program lies in fused operators, and what would raise that."""
    costs = program.cost_analysis()
    rest = [(share, why_loose(program, row)) for row, share in costs.left()[:TOLD] if share >= TELLING]
    of_flops, of_bytes = (percent(1 - part) for part in parts(costs.loose, costs.total))
    said = "; ".join(f"{why} ({percent(share)})" for share, why in rest)
    where = "fused operators, kernels of ours or single operators of the device"
    fused = f"{of_flops} of FLOPs and {of_bytes} of bytes lie in {where}"
    return f"{program.target}: {fused}" + (f"; most of what is left: {said}" if said else "")


def why_loose(program: Lowered, row: CostRow) -> str:
    """Why an op's work, or what stands beside its fused operators, is left to Torch."""
    if row.op == BETWEEN:
        return "operators of the program outside any op"
    fused = {FUSED, *(kernel.name for kernel in _better(find(row.op), row.kernel, program.target))}
    same = (choice for choice in program.report.rows if (choice.op, choice.kernel) == (row.op, row.kernel))
    refused = next(same).refused  # calls of other shapes are refused alike, with other numbers
    told = [why if name == FUSED else f"{name} {why}" for name, why in refused.items() if name in fused]
    return f"{row.op}: {' / '.join(told) or f'Torch operators around {row.kernel}'}"


def _better(op: Op, chosen: str, target: Target) -> list[Kernel]:
    """Fused kernels whose refusal cost the op one: those that lack something there, where it has another fused one."""
    fused = [kernel for kernel in op.serving(target) if kernel.operators]
    if all(kernel.name != chosen for kernel in fused):
        return fused
    return [kernel for kernel in fused if kernel.available and kernel.available(target, EVIDENCE[0])]


def parts(part: Cost, whole: Cost) -> tuple[float, float]:
    """The shares of FLOPs and of bytes."""
    return part.flops / max(whole.flops, 1), part.bytes / max(whole.bytes, 1)


def percent(part: float) -> str:
    """A share of all, never rounded up to the whole."""
    return f"{int(1000 * part) / 10:g}%"


POINTS = 6
"""Ops that are drawn under a roof, those that move most."""


def _roof(program: Lowered, peaks: Peaks) -> Roof:
    costs = program.cost_analysis()
    rows = sorted((row for row in costs.rows if row.cost.flops), key=lambda row: -row.cost.bytes)[:POINTS]
    points = [(f"{row.op} ({row.kernel})", row.cost.flops, row.cost.bytes) for row in rows]
    return Roof(program.target.title, peaks, [("the whole", costs.total.flops, costs.total.bytes), *points])


@dataclass
class _Cell:
    """An op with one kernel on one target, as text."""

    calls: str
    kernel: str
    evidence: str
    bytes: str
    flops: str
    refused: str


_PARTS = ("calls", "evidence", "bytes", "flops", "refused")


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
            evidence = next((choice.evidence for choice in same), "")
            found[row.op, place] = _Cell(str(row.calls), row.kernel, evidence, *price, "\n".join(refused))
    return found


def _joined(texts: list[str], names: list[str]) -> str:
    """One text where all say the same, else each under the name of its target."""
    if len(set(texts)) == 1:
        return texts[0]
    if any("\n" in text or ": " in text for text in texts):
        named = ((name, line) for name, text in zip(names, texts, strict=True) for line in text.split("\n"))
        return "\n".join(f"{name}: {line}" for name, line in named if line)
    return " / ".join(text or "-" for text in texts)


def _total(program: Lowered) -> str:
    total, peaks = program.cost_analysis().total, program.target.peaks
    return (
        f"{program.target.described}: {flops(total.flops)}, {tree.size(total.bytes)} moved; "
        f"{_memory(program.argument_bytes)}; traced through {program.through}"
        + (f"; {_estimate(peaks, total)}" if peaks else "")
    )


def _estimate(peaks: Peaks, total: Cost) -> str:
    bound = "bytes" if total.bytes / peaks.bandwidth > total.flops / peaks.flops else "FLOPs"
    least = f"{1e3 * peaks.seconds(total.flops, total.bytes):.2g} ms"
    return f"estimate from public peaks, nothing measured: at least {least}, bound by {bound} ({peaks.source})"


def _memory(sizes: dict[str, int]) -> str:
    return "memory of " + ", ".join(f"{name} {tree.size(count)}" for name, count in sizes.items())


def flops(count: int) -> str:
    """FLOPs for people: `3.4 GFLOP`."""
    return tree.size(count).replace("B", "FLOP").replace("k", "K")


def share(part: int, whole: int) -> str:
    """A percentage, with one decimal below ten."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f}%" if percent >= 10 or not part else f"{percent:.1f}%"
