"""Write what is made from the code into the documents that show it: tables, a report, the picture of the packages.

    python docs/generate_tables.py

It stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

import funcmodels as fm
import lowering
from funcmodels.model import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/ascend.md", "docs/kernels.md")
PACKAGES = ("funcmodels", "lowering", "params")
"""From the outermost to the innermost: each imports those after it."""


def families() -> str:
    """One row a family, in the words of its model file."""
    lines = ["| family | `model_type` | layers |", "|---|---|---|"]
    for family in {id(family): family for family in FAMILIES.values()}.values():
        name, _, rest = first_line(sys.modules[family.forward.__module__].__doc__).partition(": ")
        kinds = ", ".join(f"`{kind}`" for kind, other in FAMILIES.items() if other is family)
        head = "" if family.mtp is None else "; draft head (MTP)"
        lines.append(f"| {name} | {kinds} | {rest.removesuffix('.')}{head} |")
    return "\n".join(lines)


def report() -> str:
    """What five tokens of the bundled model run on, on Ascend 910B: the picture in the README."""
    kind = torch.bfloat16
    model, params = fm.load("bundled", kind)
    state = model.init_state(rows=1, max_len=64, dtype=kind, recurrent_dtype=kind)
    batch = fm.Batch.from_lists([[1, 2, 3, 4, 5]], state)
    return f"```text\n{lowering.explain(model.forward, params, state, batch, target='ascend910b')}\n```"


def rooms() -> str:
    """The packages, the folders in each with what they say of themselves, and the files in these."""
    return "\n    │ imports\n    ▼\n".join(["```text\n" + house(PACKAGES[0]), *map(house, PACKAGES[1:])]) + "\n```"


def house(package: str) -> str:
    """One package of the picture."""
    inner = [(path.parent, f"  {path.parent.name}") for path in sorted((ROOT / package).glob("*/__init__.py"))]
    return "\n".join(line for folder, name in [(ROOT / package, package), *inner] for line in room(folder, name))


def room(folder: Path, name: str) -> Iterator[str]:
    """The lines of one folder."""
    module = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    files = " ".join(path.stem for path in sorted(folder.glob("[!_]*.py")))
    for text in (first_line(ast.get_docstring(module)), files):
        for line in textwrap.wrap(text, 102, break_on_hyphens=False):
            yield f"{name:<18}{line}"
            name = ""


def first_line(docstring: str | None) -> str:
    assert docstring is not None
    return docstring.strip().splitlines()[0]


def weighed() -> str:
    """The ops whose kernels a rule orders call by call."""
    names = ", ".join(f"`{name}`" for name, op in sorted(lowering.OPS.items()) if op.orders)
    return f"A rule weighs them by a call's shapes instead, and says why, for: {names}."


TABLES = {
    "families": families,
    "report": report,
    "rooms": rooms,
    "weighed": weighed,
    "kernels": lowering.table,
    "ascend_targets": lowering.npu_kernels.target_table,
    "ascend_ops": lowering.npu_kernels.op_table,
    "ascend_evidence": lowering.npu_kernels.evidence_table,
    "ascend_kernels": lowering.npu_kernels.kernel_table,
}


def filled(text: str) -> str:
    """The document with every table in it made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Rewrite the documents in place."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
