"""The probe: one small call of every operator that this machine may have, to turn what is stated into what was seen.

Calls are those that kernels make for the cases of their ops, each held against the op's reference; a case is run only
while one of its kernel's operators has not been seen. `lowering.detect` reads what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from ..cache import Probed
from ..explain.sheet import Sheet
from ..npu.evidence import OPERATORS, SEEN
from ..op import find
from ..target import Target
from .comparison import Outcome
from .device import Trial, planned

FAILED = "failed here"
NOT_TRIED = "not tried"


class Called(TorchFunctionMode):
    """Writes down the operators of torch_npu that are called inside and return, by their names in `features`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            func = func.overloadpacket
        if isinstance(func, OpOverloadPacket):
            space, _, name = func._qualified_op_name.partition("::")
            self.names |= dict.fromkeys({"npu": [name], "atb": [f"atb.{name}"]}.get(space, []))
        return out


def trials(device: torch.device, target: Target) -> list[Trial]:
    """Calls by which every operator of the target's kernels may be tried: small ones, bfloat16 first."""
    found = [x for x in planned(device, target) if x.kernel.operators and not x.case.bench]
    return sorted(found, key=lambda trial: trial.dtype != torch.bfloat16)


def needed(trial: Trial, outcomes: Sequence[Outcome]) -> bool:
    """Whether the trial may show an operator that was not seen yet."""
    return not set(trial.kernel.operators) <= seen(outcomes)


def seen(outcomes: Sequence[Outcome]) -> set[str]:
    """Operators that ran in a call that holds."""
    return {name for outcome in outcomes if outcome.ok for name in outcome.operators}


def result(outcomes: Sequence[Outcome]) -> Probed:
    """What the outcomes say of operators. Of a call that raised, those that did not return have failed."""
    found = seen(outcomes)
    failed: dict[str, str] = {}
    for outcome in (outcome for outcome in outcomes if not outcome.ok):
        called, every = set(outcome.operators), set(find(outcome.op).kernel_named(outcome.kernel).operators)
        words = outcome.failed or f"error {outcome.error:.2g}, bound {outcome.bound:.2g}"
        for name in (every - called if outcome.failed else called) - found:
            failed.setdefault(name, f"{outcome.op}, {outcome.kernel}, {outcome.case}, {outcome.dtype}: {words}")
    return Probed(frozenset(found), tuple(sorted(failed.items())))


def sheet(found: Probed, target: Target) -> Sheet:
    """One row an operator: what speaks for it on the target, and what became of it here."""
    failed = dict(found.failed)
    here = {name: SEEN if name in found.seen else FAILED if name in failed else NOT_TRIED for name in OPERATORS}
    rows = [(name, row.of(target) or "nothing", here[name]) for name, row in sorted(OPERATORS.items())]
    marked = [at for at, row in enumerate(rows) if row[-1] == FAILED]
    said = [failed.get(row[0], "") for row in rows]
    notes = [f"{len(found.seen)} of {len(rows)} operators were seen to work, {len(failed)} failed"]
    columns = ("operator", "evidence", "here")
    look = {"badges": columns[1:], "marked": marked, "reasons": said}
    return Sheet(f"probe of {target.described}", columns, rows, notes=notes, **look)
