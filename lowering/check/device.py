"""The device check: every kernel against its op's reference, on the device that is here."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from params.tree import tree_map

from .. import cases, detect
from .. import target as targets
from ..cases.case import Case
from ..explain.sheet import Sheet
from ..kernel import Kernel
from ..op import find
from ..target import Target
from ..use import use
from .comparison import Expected, Fault, Outcome, duration, laid_out, number, outcome_of


@dataclass(frozen=True)
class Checked:
    """The outcomes so far, the machine they were found on, and how many there will be, the last of `models`."""

    environment: dict[str, str]
    outcomes: tuple[Outcome, ...]
    planned: int
    models: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything was run, nothing failed and every bound was kept."""
        return len(self.outcomes) == self.planned and all(outcome.ok for outcome in self.outcomes)

    def sheet(self) -> Sheet:
        """One row a kernel."""
        groups: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault((outcome.op, outcome.kernel), []).append(outcome)
        rows = [_summary(op, kernel, found) for (op, kernel), found in groups.items()]
        marked = [index for index, found in enumerate(groups.values()) if not all(outcome.ok for outcome in found)]
        device, target = self.environment["device"], targets.named(self.environment["target"])
        through = "" if device.startswith(target.device) else ", through CPU references of its operators"
        title = f"kernels of {target} on {device}{through}"
        broken = sum(not outcome.ok for outcome in self.outcomes)
        count, refused = len(self.outcomes), sum(outcome.refused is not None for outcome in self.outcomes)
        notes = [f"{broken} of {count} cases failed" if broken else f"all {count} cases hold, {refused} by a refusal"]
        notes += [f"NOT FINISHED: {self.planned - count} of {self.planned} were not run"] * (count < self.planned)
        columns = ("op", "kernel", "evidence", "ran", "refused", "largest error", "bound there", "fastest", "slowest")
        shown, said = [row[:-1] for row in rows], [row[-1] for row in rows]
        look = {"numbers": columns[3:], "marked": marked, "badges": ("evidence",)}
        return Sheet(title, columns, shown, notes=notes, reasons=said, **look)

    def details(self) -> Sheet:
        """One row a case, those that failed first."""
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.ok)
        rows = [
            (x.op, x.kernel, x.case, x.dtype, number(x.error), number(x.bound), duration(x.seconds)) for x in ordered
        ]
        marked = [index for index, outcome in enumerate(ordered) if not outcome.ok]
        columns = ("op", "kernel", "case", "dtype", "largest error", "bound", "time")
        said = [x.failed or x.refused or "" for x in ordered]
        return Sheet("every case", columns, rows, numbers=columns[4:], marked=marked, reasons=said)

    def environment_sheet(self) -> Sheet:
        """What it ran on."""
        return Sheet("environment", ("what", "value"), list(self.environment.items()))

    def json(self) -> str:
        """Everything, for programs."""
        outcomes = [asdict(x) for x in self.outcomes]
        return json.dumps({"environment": self.environment, "planned": self.planned, "outcomes": outcomes}, indent=1)

    def __repr__(self) -> str:
        return self.sheet().drawn()


@dataclass(frozen=True)
class Trial:
    """One kernel to run on one case in one dtype, and what speaks for it on the target."""

    case: Case
    dtype: torch.dtype
    kernel: Kernel
    evidence: str

    @property
    def blank(self) -> Outcome:
        """The outcome of the trial, yet to be filled in."""
        dtype = str(self.dtype).removeprefix("torch.")
        return Outcome(self.case.op, self.kernel.name, self.case.name, dtype, self.evidence)

    def tried(self, device: torch.device, target: Target) -> Outcome:
        """The outcome on a device, whatever is raised."""
        with use(target=target), torch.no_grad():
            with Fault() as fault:
                expected = _expected(self.case, self.dtype)
            if fault.words is not None:
                return replace(self.blank, failed=f"the case or the reference: {fault.words}")
            with Fault() as fault:
                args, kwargs = self.case.arguments(self.dtype)
                args, kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs))
                args = laid_out(find(self.case.op), self.kernel, args)
                return outcome_of(self.kernel, target, args, kwargs, expected, self.blank)
            return replace(self.blank, failed=fault.words)


def planned(device: torch.device, target: Target, only: Collection[str] = ()) -> list[Trial]:
    """Every kernel of `target` on every case, or on those of the ops `only`; `LoweringError` for an unknown op."""
    dtypes = (torch.float32, torch.bfloat16) + (() if device.type == "cpu" else (torch.float16,))
    names = {find(name).name for name in only}
    return [
        Trial(case, dtype, kernel, kernel.evidence(target) if kernel.evidence else "")
        for case in cases.CASES
        for dtype in dtypes
        for kernel in find(case.op).serving(target)
        if not names or case.op in names
    ]


@functools.lru_cache(maxsize=1)
def _expected(case: Case, dtype: torch.dtype) -> Expected:
    """Kernels of one case follow each other."""
    return Expected.of(find(case.op), *case.arguments(dtype), case.length)


def _summary(op: str, kernel: str, found: Sequence[Outcome]) -> tuple[str, ...]:
    ran = [x for x in found if x.error is not None]
    refused = [x.refused for x in found if x.refused]
    nearest = max(ran, key=lambda x: (x.error or 0) / (x.bound or 1), default=None)
    times = [x.seconds for x in ran if x.seconds is not None]
    remarks = [f"{x.case}, {x.dtype}: {x.failed}" for x in found if x.failed]
    remarks += [f"{x.case}, {x.dtype}: over the bound" for x in ran if not x.ok]
    # A sentence says which sizes a kernel was refused for, so that of one case stands for the others.
    remarks += [f"refused, for one: {refused[0]}"] if refused else []
    error, most = (None, None) if nearest is None else (nearest.error, nearest.bound)
    spans = (duration(min(times, default=None)), duration(max(times, default=None)))
    counts = str(len(ran)), str(len(refused))
    return op, kernel, found[0].evidence, *counts, number(error), number(most), *spans, "\n".join(remarks)


def environment(device: torch.device, target: Target) -> dict[str, str]:
    """What a report says about the machine."""
    found = {
        "device": str(device),
        "target": target.name,
        "machine": target.title,
        **target.versions,
        "SoC": detect.soc_of(device) if device.type == "npu" else "",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor(),
        "threads": str(torch.get_num_threads()),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    return {name: value for name, value in found.items() if value}
