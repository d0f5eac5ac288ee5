"""`lower`: a function and its arguments, lowered to a target and not run: what it would call there, at what cost.

Named as in JAX: `lower(fn, *args, target=...)` gives a `Lowered` with `.as_text()`, `.explain()` and
`.cost_analysis()`. Arguments may be abstract, so a model lowers on a machine that could not hold its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dryrun.traced import traced
from .explain.stages import Lowered
from .jit.jitted import Jitted, jit
from .policy import MODE, Policy
from .target import Target
from .use import use


def lower(
    function: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    policy: Policy | None = None,
    **kwargs: Any,
) -> Lowered:
    """Lower `function(*args, **kwargs)` to `target` without running it.

    Arguments may be real tensors, tensors on device "meta" and `TensorSpec` leaves; only shapes and dtypes are read.
    For an Ascend target the program is traced in a process of its own, through the operators of the real torch_npu
    (`python -m lowering fetch-torch-npu` gets it once); the function must then be importable there. `target` defaults
    to that of the tensors.

    Raises `LoweringError` for a target, policy, kernel or torch_npu that is not there, for an operator call that its
    own shape function refuses, and what the function itself raises.
    """
    chosen = policy or MODE.get().policy

    def capture() -> Jitted:
        with use(chosen):
            return jit(function).ahead(*args, **kwargs)

    return traced(function, args, kwargs, target, chosen, capture)
