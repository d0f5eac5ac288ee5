"""Running an Ascend kernel through the operators' CPU references, and comparing it with its op's reference."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import lowering
from lowering import OPS, Policy
from lowering.kernel import Kernel
from lowering.ops import DeltaStates
from lowering.target import ASCEND, Target, named
from params import tree
from tests.cases import Arguments, Case, live
from tests.tolerances import assert_close

WRITTEN = {"write_pages": 2, "write_latents": 1, "latent_norm_rope_write": 1}
"""How many arguments, the first ones, an op writes to."""


MACHINES = [named(target) for target in ASCEND]
OLDER = [named(target, cann=cann) for cann in ("8.5.0", "9.0.0") for target in ("ascend910b", "ascend950")]
"""The same with other CANNs, whose limits differ; 910_93 has those of 910B."""


def served(op: str, target: Target) -> list[Kernel]:
    """The kernels of fused operators that are built for the target, whatever evidence is wanted."""
    return [
        kernel
        for kernel in OPS[op].serving(target)
        if kernel.operators and kernel.available and kernel.available(target, "stated") is None
    ]


def refusal(kernel: Kernel, case: Case, target: Target, dtype: torch.dtype) -> str | None:
    """Why the kernel's own limits on the target do not allow the case; None when they do."""
    args, kwargs = arguments(case, dtype)
    with lowering.use(target=target):
        return kernel.refuse(*args, **kwargs) if kernel.refuse else None


@lru_cache(maxsize=4)
def _made(case: Case, dtype: torch.dtype) -> Arguments:
    return case.arguments(dtype)


def arguments(case: Case, dtype: torch.dtype) -> Arguments:
    """Those of the case, copied from what was drawn last time: drawing takes longer than most kernels."""
    return copy.deepcopy(_made(case, dtype))


@lru_cache(maxsize=4)
def _expected(case: Case, dtype: torch.dtype) -> Any:
    args, kwargs = arguments(case, dtype)
    return compared(case, OPS[case.op].body(*args, **kwargs))


def check(case: Case, kernel: str, target: str | Target, dtype: torch.dtype, tokens: int | None = None) -> None:
    """`AssertionError` unless the kernel gives what the reference gives, and leaves its arguments alone.

    Where most tokens are padding `tokens` is the number of the others: both ways must give zeros behind them, which
    are then left out, for a bound goes by the mean square.
    """
    op = OPS[case.op]
    args, kwargs = arguments(case, dtype)
    given = copy.deepcopy(args)
    with lowering.use(Policy({case.op: kernel}), target=target):
        actual = compared(case, op(*args, **kwargs))
    expected = _expected(case, dtype)
    if tokens is not None:
        actual, expected = without_padding(actual, tokens), without_padding(expected, tokens)
    assert_close(actual, expected, length=case.length)
    for index in range(WRITTEN.get(case.op, 0), len(args)):
        for before, after in zip(tree.leaves(given[index]), tree.leaves(args[index]), strict=True):
            if isinstance(before, Tensor):
                flat = (x.flatten().clone(memory_format=torch.contiguous_format) for x in (before, after))
                bits = [x.view(torch.uint8) for x in flat]
                assert torch.equal(*bits), f"argument {index} was written"


def without_padding(result: Any, tokens: int) -> Any:
    """The result with its output, alone or first, cut to the tokens that are not padding."""
    out, *rest = result if isinstance(result, tuple) else (result,)
    assert not out[tokens:].any(), "padding tokens got something else than zeros"
    return out[:tokens], *rest


def compared(case: Case, result: Any) -> Any:
    """What both ways of running an op must agree in: a trail is compared by the states that it leads to."""
    if case.op != "gated_delta_rule" or result[2] is None:
        return live(case.op, result)
    out, state, trail = result
    rows, steps = (trail.after if isinstance(trail, DeltaStates) else trail.keys).shape[:2]
    counts = [torch.full((rows,), count, dtype=torch.int32) for count in range(steps + 1)]
    counts.append(torch.arange(rows, dtype=torch.int32) % (steps + 1))
    return out, state[:-1], [trail.at(accepted)[:-1] for accepted in counts]
