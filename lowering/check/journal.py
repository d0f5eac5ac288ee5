"""The device check in a process of its own, and the journal that both keep: a kernel may hang or kill its process.

The journal has one JSON object a line: the machine, what is begun, what came of it. Whoever ends, and however, leaves
it whole up to there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import LoweringError
from ..target import Target
from . import probe
from .comparison import Fault, Outcome
from .device import Checked, Trial, environment
from .programs import ModelPhase

LOST = 3
"""Exit code of a process whose device no longer answers: another one goes on."""
PATIENCE = 10
"""Processes that may end one after the other without a kernel that holds in between."""


@dataclass(frozen=True)
class Journal:
    """A file that two processes write to, one after the other."""

    path: Path

    def add(self, **entry: Any) -> None:
        """Write one entry. It begins a line, since whoever wrote before may not have ended one."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(entry)}\n")

    def read(self) -> tuple[Checked | None, Outcome | None]:
        """What was found, None before the machine is known; and what was begun and has no outcome."""
        head: dict[str, Any] = {}
        outcomes: list[Outcome] = []
        begun: Outcome | None = None
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a line that nobody could end
                entry = json.loads(line)
                if "outcome" in entry:
                    outcomes.append(_outcome(entry["outcome"]))
                    begun = None
                elif "begun" in entry:
                    begun = _outcome(entry["begun"])
                else:
                    head = entry
        return (Checked(outcomes=tuple(outcomes), **head) if head else None), begun


def _outcome(entry: dict[str, Any]) -> Outcome:
    given: dict[str, Any] = entry | {"operators": tuple(entry.get("operators", ()))}
    return Outcome(**given)


def work(
    journal: Journal, device: torch.device, target: Target, trials: Sequence[Trial | ModelPhase], probing: bool = False
) -> int:
    """Run what the journal has no outcome of; the exit code. Stops when the process that started this one is gone.

    A probe leaves out what would show no operator that it has not seen.
    """
    parent = os.getppid()
    found, _ = journal.read()
    here = environment(device, target)
    if found is None:
        models = sum(isinstance(trial, ModelPhase) for trial in trials)
        journal.add(environment=here, planned=len(trials), models=models)
    elif _lasting(found.environment) != _lasting(here) or found.planned != len(trials):
        raise LoweringError(f"{journal.path} is of another machine, version or choice of ops; leave out --resume")
    outcomes = list(found.outcomes) if found else []
    done = {replace(x, **_UNKNOWN) for x in outcomes}
    for trial in trials:
        if trial.blank in done or (isinstance(trial, Trial) and probing and not probe.needed(trial, outcomes)):
            continue
        if os.getppid() != parent:
            return LOST
        journal.add(begun=asdict(trial.blank))
        with probe.Called() if probing else nullcontext() as called:
            outcome = trial.tried(device, target)
        outcome = replace(outcome, operators=tuple(called.names if called else ()))
        outcomes.append(outcome)
        journal.add(outcome=asdict(outcome))
        if outcome.failed and not _answers(device):
            return LOST
    return 0


_UNKNOWN: dict[str, Any] = dict.fromkeys(("error", "bound", "seconds", "refused", "failed")) | {"operators": ()}


def _lasting(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "time"}


def _answers(device: torch.device) -> bool:
    """Whether a device still computes after an error: some have to be left by the process first."""
    with Fault() as fault:
        torch.ones(2, device=device).add_(1).cpu()
    return fault.words is None


def supervise(command: Sequence[str], journal: Journal, timeout: float, tell: Callable[[Checked], None]) -> int | None:
    """Run `command`, a process that does `work`, until the journal is full; its last exit code, None if it hung.

    What was begun when it ended, or gave nothing for `timeout` seconds, has failed. Gives up after `PATIENCE` processes
    without anything that holds.
    """
    in_vain, held = 0, 0
    while True:
        code = _watched(command, journal, timeout, tell)
        found, begun = journal.read()
        if found is None or (begun is None and code != LOST):
            return code
        if begun is not None:
            journal.add(outcome=asdict(replace(begun, failed=_ending(code, timeout))))
        now = sum(outcome.ok for outcome in found.outcomes)
        in_vain, held = (0 if now > held else in_vain + 1), now
        if in_vain >= PATIENCE:
            return code


def _ending(code: int | None, timeout: float) -> str:
    if code is None:
        return f"no result after {timeout:g} seconds; its process was ended"
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _watched(command: Sequence[str], journal: Journal, timeout: float, tell: Callable[[Checked], None]) -> int | None:
    """Run the process to its end; the exit code, None where it wrote nothing for too long and was ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # What a device's libraries print is no part of the report. Ctrl-C is for this process, which ends the other.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    try:
        return _followed(process, journal, timeout, tell)
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(30)


def _followed(
    process: subprocess.Popen[bytes], journal: Journal, timeout: float, tell: Callable[[Checked], None]
) -> int | None:
    size, since = 0, time.monotonic()
    while time.monotonic() - since < timeout:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
        if journal.path.stat().st_size != size:
            size, since = journal.path.stat().st_size, time.monotonic()
            found, _ = journal.read()
            if found is not None:
                tell(found)
    return None
