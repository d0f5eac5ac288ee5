"""The tables of docs/ascend.md: the targets, every op with what runs it on each of them, and the kernels' operators."""

from __future__ import annotations

from ..kernel import Kernel
from ..op import OPS, Op
from ..target import ASCEND, KIB, TARGETS
from .evidence import OPERATORS, SOURCES, speaks_for
from .features import lacking, recorded


def target_table() -> str:
    """Markdown: one row an Ascend target, those that are refused included."""
    rows = [["target", "machine", "SoC names", "unified buffer", "torch_npu and CANN unless named"]]
    for target in TARGETS.values():
        if target.device == "npu":
            buffer = f"{target.unified_buffer // KIB} KiB" if target.unified_buffer else "not known"
            told = f"refused: {target.refused}" if target.refused else f"{target.torch_npu}, {target.cann}"
            rows.append([f"`{target.name}`", target.title, f"`{target.soc}`".replace("|", "\\|"), buffer, told])
    return _markdown(rows)


def op_table() -> str:
    """Markdown: one row an op, with its fused kernels on each target, and why there is none where Torch runs it."""
    rows = [["op", *ASCEND, "why Torch"]]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        reasons = dict.fromkeys(op.lacking.values())
        rows.append([f"`{op.name}`", *(_cell(op, target) for target in ASCEND), "; ".join(reasons)])
    return _markdown(rows)


def evidence_table() -> str:
    """Markdown: one row an operator, with what each of the three parties says of it on each target."""
    rows = [["operator", *ASCEND, "calls of engines"]]
    for name, found in sorted(OPERATORS.items()):
        rows.append([f"`{name}`", *("; ".join(_statements(name, target)) or "-" for target in ASCEND), found.engines])
    sources = "\n".join(f"- *{kind}*: {where}." for kind, where in SOURCES.items())
    return f"{_markdown(rows)}\n\n{sources}"


def _statements(operator: str, target: str) -> list[str]:
    found = OPERATORS[operator]
    said = [kind for kind, named in (("documented", found.documented), ("in use", found.in_use)) if target in named]
    return said + ([f"stated from CANN {found.stated[target]}"] if target in found.stated else [])


def kernel_table() -> str:
    """Markdown: one row a fused kernel, with the operators it calls and the first torch_npu that has them all."""
    rows = [["kernel", "of", "operators", "torch_npu"]]
    for kernel, ops in _kernels().items():
        of = ", ".join(f"`{name}`" for name in ops)
        rows.append([f"`{kernel.name}`", of, ", ".join(f"`{name}`" for name in kernel.operators), _since(kernel)])
    return _markdown(rows)


def _kernels() -> dict[Kernel, list[str]]:
    """Fused kernels and the ops they are of; those of one name and the same operators go together."""
    first: dict[tuple[str, tuple[str, ...]], Kernel] = {}
    found: dict[Kernel, list[str]] = {}
    for op in sorted(OPS.values(), key=lambda op: op.name):
        for kernel in (kernel for kernel in op.kernels.values() if kernel.operators):
            found.setdefault(first.setdefault((kernel.name, kernel.operators), kernel), []).append(op.name)
    return found


def _cell(op: Op, target: str) -> str:
    fused = {kernel.name: kernel.operators for kernel in op.serving(target) if kernel.operators}
    cells = (f"`{name}` ({speaks_for(operators, TARGETS[target])})" for name, operators in fused.items())
    return ", ".join(cells) or "Torch"


def _since(kernel: Kernel) -> str:
    having = [
        version
        for version, schemas in recorded().items()
        if all(lacking(name, schemas.get(name)) is None for name in kernel.operators)
    ]
    return "every recorded version" if len(having) == len(recorded()) else f"{having[0]} on"


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
