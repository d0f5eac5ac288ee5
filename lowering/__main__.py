"""The command line of `lowering`: `python -m lowering check`, and what fetches the packages that dry runs need.

`check` runs every kernel on the device that is here, prints a table and writes a page and a JSON file for a bug report.
It runs them in a process of its own and starts another where a kernel hangs or kills it. Every outcome is written to a
journal (STEM.jsonl) as it comes; after Ctrl-C or a lost machine, `--resume` goes on from there.

Exit codes: 0 when every kernel was run and holds, 1 when one fails or was not run, 2 for a mistake in what was asked,
130 after Ctrl-C, with a report of what was run.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from . import detect
from . import target as targets
from .ascend_compiler import packages
from .cache import keep
from .check import probe
from .check.device import Checked, planned
from .check.journal import Journal, supervise, work
from .check.programs import KERNELS, PROGRAMS
from .dryrun.stubs import stubs
from .dryrun.wheel import fetch
from .errors import LoweringError
from .explain.html import page
from .triton import catalogue

TOLD = 30.0
"""Seconds between lines of progress where nobody looks at a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `argv` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m lowering", description="Kernels of this machine, checked.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands.add_parser("check", help="run every kernel against its reference on this machine"))
    fetching = commands.add_parser("fetch-torch-npu", help="get the torch_npu wheel that Ascend dry runs load")
    fetching.set_defaults(run=_fetch)
    fetching.add_argument("--version", help="default: the newest that fits the installed torch")
    compiler = commands.add_parser("fetch-ascend-compiler", help="get the compiler that Triton kernels are shown to")
    compiler.set_defaults(run=_fetch_compiler)
    compiling = commands.add_parser("compile-kernels", help="show our Triton kernels to Ascend's compiler")
    compiling.set_defaults(run=_compile_kernels)
    compiling.add_argument(
        "--target", action="append", choices=targets.ASCEND, help="default: all; several for several"
    )
    compiling.add_argument("--record", action="store_true", help="write down what reports say of them, if all is good")
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (LoweringError, OSError, ImportError) as error:
        print(f"python -m lowering {args.command}: {error}", file=sys.stderr)
        return 2


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_check)
    parser.add_argument("--device", help="default: this machine's accelerator, or cpu")
    parser.add_argument(
        "--target", help="with --device cpu: rehearse the check of an Ascend through CPU references of its operators"
    )
    parser.add_argument("--cann", metavar="VERSION", help="with --target: the CANN whose host code checks each call")
    parser.add_argument("--only", action="append", default=[], metavar="OP", help="an op; several times for several")
    parser.add_argument("--output", default="lowering-check", metavar="STEM", help="of STEM.html, .json and .jsonl")
    parser.add_argument(
        "--probe", action="store_true", help="one small call an operator instead, kept so that kernels are chosen by it"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the journal of STEM.jsonl")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="after which a kernel hangs (default 600)"
    )
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help="one that registers kernels"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def _fetch(args: argparse.Namespace) -> int:
    wheel = fetch(args.version)
    print(f"unpacked into {wheel}, with stand-ins for the CANN libraries in {stubs(wheel)}")
    return 0


def _fetch_compiler(_: argparse.Namespace) -> int:
    found = packages.fetch()
    print(f"unpacked into {found.triton}, {found.bisheng} and {found.numpy}")
    return 0


def _compile_kernels(args: argparse.Namespace) -> int:
    if args.record and args.target:
        raise LoweringError("--record writes down every target; leave out --target")
    found = catalogue.compiled([targets.named(name) for name in args.target or targets.ASCEND])
    catalogue.sheet(found).show(Console())
    good = all(one.good for one in found)
    if args.record and good:
        catalogue.record(found)
    return 0 if good else 1


def _check(args: argparse.Namespace) -> int:
    stem = Path(args.output)
    journal = Journal(stem.with_name(f"{stem.name}.jsonl"))
    if args.worker:
        return _work(args, journal)
    journal.path.open("a" if args.resume else "w", encoding="utf-8").close()
    command = [sys.executable, "-X", "faulthandler", "-m", "lowering", "check", "--worker", f"--output={stem}"]
    named = [(name, [getattr(args, name)]) for name in ("device", "target", "cann")]
    named += [("only", args.only), ("import", args.modules)]
    command += [f"--{option}={value}" for option, values in named for value in values if value is not None]
    command += ["--probe"] * args.probe
    told = _Told()
    try:
        code = supervise(command, journal, args.timeout, told)
    except KeyboardInterrupt:
        code = 130
    found, _ = journal.read()
    if found is None:
        return code or 1  # the process has said why
    told.end(found)
    if args.probe:
        return _keep(found, args, stem) or code or 0
    _report(found, stem)
    if len(found.outcomes) < found.planned:
        print("not finished; the same command with --resume goes on", file=sys.stderr)
    return code if code in (2, 130) else 0 if found.ok else 1


def _work(args: argparse.Namespace, journal: Journal) -> int:
    """What the process that `_check` starts does."""
    for name in args.modules:
        importlib.import_module(name)
    device = _device(args.device)
    if args.cann is not None and args.target is None:
        raise LoweringError(f"--cann {args.cann} is for --target NAME; the CANN of a device is that of the device")
    target = detect.of_device(device) if args.target is None else _rehearsed(args.target, args.cann, device)
    target = replace(target, failed=())  # what failed once is tried again
    if args.probe and target.device != "npu":
        raise LoweringError(f"--probe tries operators of Ascend; target is {target}, whose kernels call Torch's own")
    if args.probe:
        return work(journal, device, target, probe.trials(device, target), probing=True)
    models = {program.model for program in PROGRAMS}
    kernels = planned(device, target, [name for name in args.only if name not in models])
    wanted = [program for program in PROGRAMS if not args.only or program.model in args.only]
    return work(journal, device, target, [*(kernels if set(args.only) - models or not args.only else []), *wanted])


def _keep(found: Checked, args: argparse.Namespace, stem: Path) -> int:
    """Show what a probe found and keep it for `detect`, unless it was a rehearsal; 1 where an operator failed."""
    result = probe.result(found.outcomes)
    target = targets.named(found.environment["target"], cann=found.environment.get("CANN"))
    shown = probe.sheet(result, target)
    shown.show(Console())
    html = stem.with_name(f"{stem.name}.html")
    html.write_text(page("lowering check --probe", [shown, found.environment_sheet()]), encoding="utf-8")
    if "SoC" not in found.environment:
        print(f"a rehearsal: nothing is kept but {html}", file=sys.stderr)
    else:
        versions = found.environment["torch_npu"], found.environment.get("CANN", "unknown")
        print(f"kept in {keep(result, found.environment['SoC'], *versions)}; see {html}", file=sys.stderr)
    return 1 if result.failed else 0


def _report(found: Checked, stem: Path) -> None:
    found.sheet().show(Console())
    json, html = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html")
    json.write_text(found.json(), encoding="utf-8")
    sheets = [found.sheet(), found.environment_sheet(), found.details()]
    html.write_text(page("lowering check", sheets), encoding="utf-8")
    print(f"\nto send back, or for a bug report: {html} and {json}", file=sys.stderr)
    if not any(outcome.kernel == KERNELS for outcome in found.outcomes):
        print("no model was run; --import funcmodels.testing.programs brings small ones", file=sys.stderr)


class _Told:
    """Progress on standard error: one line that changes on a terminal, one line now and then elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.last = time.monotonic()
        self.failed = 0

    def __call__(self, found: Checked) -> None:
        """Say what has failed since the last time, and how far it is."""
        failed = [outcome for outcome in found.outcomes if not outcome.ok]
        for outcome in failed[self.failed :]:
            words = outcome.failed or f"error {outcome.error:.2g}, bound {outcome.bound:.2g}"
            print(f"{outcome.op}: {outcome.kernel}: {outcome.case}, {outcome.dtype}: {words}", file=sys.stderr)
        self.failed = len(failed)
        left = f"about {_minutes(found)} min left"
        how_far = f"{len(found.outcomes)} of {found.planned} checked, {len(failed)} failed, {left}"
        if self.terminal:
            print(f"\r\033[K{how_far}", end="\r", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last >= TOLD:
            self.last = time.monotonic()
            print(how_far, file=sys.stderr, flush=True)

    def end(self, found: Checked) -> None:
        """Say the rest."""
        self.last = 0.0
        self(found)
        print(file=sys.stderr)


EACH, A_MODEL = 0.06, 5.0
"""Seconds that a kernel on a case, and a model in a phase, take: most of it for the exact values, on one processor."""


def _minutes(found: Checked) -> int:
    """An estimate from counts, models being run last; a captured graph or a slow driver may take longer."""
    left = found.planned - len(found.outcomes)
    models = min(left, found.models)
    return math.ceil((EACH * (left - models) + A_MODEL * models) / 60)


def _device(name: str | None) -> torch.device:
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise LoweringError(f"device {name!r} cannot be used here: {error}") from error


def _rehearsed(name: str, cann: str | None, device: torch.device) -> targets.Target:
    target = targets.named(name, cann=cann)
    if device.type != "cpu":
        raise LoweringError(f"--target {name} is for --device cpu; on {device} the target is that of the device")
    if target.device == "npu":
        from . import npu_reference

        npu_reference.load()
    return target


if __name__ == "__main__":
    sys.exit(main())
