"""Make the API reference, pages of HTML from the docstrings of all public names.

    python docs/make_reference.py [DIRECTORY]        # build/reference, unless one is named

It ends with an error where a public name has no docstring, or where pdoc warns.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pdoc
import pdoc.doc
import pdoc.render

import funcmodels
import lowering
import params

ROOT = Path(__file__).resolve().parent.parent
MODULES = (funcmodels, lowering, lowering.ops, params)
DOCUMENTED = (type, FunctionType, classmethod, staticmethod, property, cached_property)


def undocumented(namespace: pdoc.doc.Namespace) -> Iterator[str]:
    """Public functions, classes, methods and properties without a docstring. A class's own tells of its fields."""
    fields = getattr(namespace.obj, "__dataclass_fields__", {})
    for member in namespace.own_members:
        held = inspect.getattr_static(namespace.obj, member.name, None)
        if member.name.startswith("_") or member.name in fields or not isinstance(held, DOCUMENTED):
            continue
        if not member.docstring:
            yield member.fullname
        if isinstance(member, pdoc.doc.Class):
            yield from undocumented(member)


def make(directory: Path) -> None:
    """Write all pages into `directory`."""
    for op in vars(lowering.ops).copy().values():
        if isinstance(op, lowering.Op):  # shown as what it computes
            setattr(lowering.ops, op.name, op.body)
    missing = [name for module in MODULES for name in undocumented(pdoc.doc.Module(module))]
    if missing:
        raise SystemExit(f"public names without a docstring: {', '.join(missing)}")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("funcmodels", "lowering", "params", "![^.]+[.](?!ops$)", output_directory=directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the API reference.")
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "build" / "reference")
    directory = parser.parse_args().directory
    warnings.simplefilter("error")
    # The file of a NamedTuple is not where pdoc looks for the types of its fields.
    warnings.filterwarnings("ignore", message=r".*StoredTensor\.__init__")
    make(directory)
    print(f"the reference begins at {directory / 'index.html'}")


if __name__ == "__main__":
    main()
