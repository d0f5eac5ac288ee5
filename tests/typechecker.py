"""The hooked run: whether this is one, and its type checker.

That is beartype, taking an int where a float is asked for, as Python's typing does. Kernels repeat their op's signature
without its annotations; `check_kernels` puts the op's checks on them.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

HOOKED = os.environ.get("FUNCMODELS_HOOK") == "1"

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_kernels() -> None:
    """Check every kernel's arguments and results by the annotations of its op."""
    from lowering import OPS

    for op in OPS.values():
        plain = inspect.unwrap(op.body)
        for name, kernel in op.kernels.items():
            if kernel.run is not op.body:
                op.kernels[name] = replace(kernel, run=_checked_as(plain, kernel.run))


def _checked_as(annotated: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    functools.update_wrapper(checked, annotated)
    vars(checked)["__signature__"] = inspect.signature(annotated, eval_str=True)
    made = jaxtyped(checked, typechecker=check)
    # It comes from where the kernel does: that is what a dry run's process is asked for.
    made.__module__, made.__qualname__ = run.__module__, getattr(run, "__qualname__", type(run).__name__)
    return made
