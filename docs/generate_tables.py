"""Write the tables that are made from the code into the documents that show them.

    python docs/generate_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

import lowering

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/ascend.md")
TABLES = {
    "kernels": lowering.table,
    "ascend_targets": lowering.npu_kernels.target_table,
    "ascend_ops": lowering.npu_kernels.op_table,
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
