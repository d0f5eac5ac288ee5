"""Imported before all else here: `params` has to be the package beside this one, not a file of the user's."""

from importlib.util import find_spec
from pathlib import Path

BESIDE = Path(__file__).resolve().parent.parent
FOUND = find_spec("params")

if FOUND is None or Path(FOUND.origin or "").resolve().parent.parent != BESIDE:
    raise ImportError(
        f"lowering needs the package 'params' of {BESIDE}, and Python finds {FOUND and FOUND.origin} under "
        "that name; rename that file or folder, or start Python in another directory"
    )
