"""Run every notebook of this folder in a kernel of its own.

    python docs/run_notebooks.py             # and store what the cells print
    python docs/run_notebooks.py --check     # only see that every cell runs

A cell that is meant to fail carries the tag `raises-exception`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
SECONDS = 300


def main() -> None:
    """Run them in the order of their names; the first cell that fails ends it."""
    parser = argparse.ArgumentParser(description="Run every notebook of this folder.")
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    check = parser.parse_args().check
    for path in sorted(DOCS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": DOCS}}).execute()
        if not check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells ran")


if __name__ == "__main__":
    main()
