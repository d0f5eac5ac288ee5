"""Imported before all else here: `params` has to be the package beside this one, not a file of the user's.

And where `python -m lowering` imports the package, Ctrl-C ends it in a word.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BESIDE = Path(__file__).resolve().parent.parent
FOUND = find_spec("params")

if FOUND is None or Path(FOUND.origin or "").resolve().parent.parent != BESIDE:
    raise ImportError(
        f"lowering needs the package 'params' of {BESIDE}, and Python finds {FOUND and FOUND.origin} under "
        "that name; rename that file or folder, or start Python in another directory"
    )


def _told(kind: type[BaseException], *error: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, *error)
        return
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)


if sys.argv[:1] == ["-m"] and "lowering" in sys.orig_argv:  # so Python calls a module until it has found it
    sys.excepthook = _told
