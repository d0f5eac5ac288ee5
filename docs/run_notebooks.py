"""Run every notebook of this folder in a kernel of its own.

    python docs/run_notebooks.py             # and store what the cells print
    python docs/run_notebooks.py --check     # see that every cell runs, and prints the words that are stored

A cell that is meant to fail carries the tag `raises-exception`. Fractions, and numbers with a unit, are not compared:
they depend on the machine.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
SECONDS = 300


MEASURED = r"0x[0-9a-f]+|\d+\.\d+|\d+(?= ?(?:us|ms|s|%|[kMG]?B|[KMGT]?FLOP|tokens/s)\b)"
FRAMES = r"[\s\u2500-\u257f]+"


def words(notebook: nbformat.NotebookNode) -> list[Counter[str]]:
    """What each cell prints, as words without the numbers that are measured. A table folds them as its width needs."""
    found = []
    for cell in notebook.cells:
        outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        text = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n" for output in outputs)
        found.append(Counter(re.split(FRAMES, re.sub(MEASURED, "#", text))))
    return found


def main() -> None:
    """Run them in the order of their names; the first cell that fails, or prints other words, ends it."""
    parser = argparse.ArgumentParser(description="Run every notebook of this folder.")
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    check = parser.parse_args().check
    for path in sorted(DOCS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        stored = words(notebook)
        options = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources={"metadata": {"path": DOCS}}, **options).execute()
        if not check:
            nbformat.write(notebook, path)
        for number, (before, now) in enumerate(zip(stored, words(notebook), strict=True)):
            if check and before != now:
                raise SystemExit(f"{path.name}, cell {number}: stored {before - now}, printed {now - before}")
        print(f"{path.name}: {len(notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
