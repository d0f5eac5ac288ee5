"""Language models as pure functions: `forward(params, state, batch) -> (output, state)`."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .public import *  # noqa: F403 (what it offers is in its __all__)


def _check_found(*names: str) -> None:
    """`ImportError` where a file of the user's hides a package that lies beside this one."""
    beside = Path(__file__).resolve().parent.parent
    for name in names:
        spec = find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is None or Path(origin).resolve().parent.parent != beside:
            raise ImportError(
                f"funcmodels needs the package {name!r} of {beside}, and Python finds {origin or 'none'} under that "
                "name; rename that file or folder, or start Python in another directory"
            )


def __getattr__(name: str) -> Any:
    """A module of this package, or a public name, all of which are then loaded: `--help` does not wait for Torch."""
    if find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    public = importlib.import_module(".public", __name__)
    names = {shown: getattr(public, shown) for shown in public.__all__}
    globals().update(names, __all__=public.__all__)
    if name not in names and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*globals(), *importlib.import_module(".public", __name__).__all__]


_check_found("params", "lowering")
if "torch" not in sys.modules:
    # Threads of OpenMP, which reads this when Torch is loaded, wait for each other in a loop by default. Beside a busy
    # process the one that waits then keeps a core from the one that works: small models take 20 to 80 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if os.environ.get("FUNCMODELS_SHAPE_CHECKS", "0") not in ("", "0"):
    importlib.import_module(".public", __name__).enable_shape_checks()
