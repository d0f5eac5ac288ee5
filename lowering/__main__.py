"""The command line of `lowering`: `python -m lowering check` and `python -m lowering fetch-torch-npu`.

`check` runs every kernel on the device that is here, prints a table and writes a page and a JSON file for a bug report.
Exit codes: 0, 1 when a kernel fails, 2 for a mistake in what was asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from . import target as targets
from .cases import Case
from .check import check_device
from .dryrun import fetch
from .dryrun.stubs import stubs
from .errors import LoweringError
from .html import page


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `argv` defaults to the process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m lowering", description="Kernels of this machine, checked.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands.add_parser("check", help="run every kernel against its reference on this machine"))
    fetching = commands.add_parser("fetch-torch-npu", help="get the torch_npu wheel that Ascend dry runs load")
    fetching.set_defaults(run=_fetch)
    fetching.add_argument("--version", help="default: the newest that fits the installed torch")
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (LoweringError, OSError) as error:
        print(f"python -m lowering {args.command}: {error}", file=sys.stderr)
        return 2


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_check)
    parser.add_argument("--device", help="default: this machine's accelerator, or cpu")
    parser.add_argument(
        "--target", help="with --device cpu: rehearse the check of an Ascend through CPU references of its operators"
    )
    parser.add_argument("--output", default="lowering-check", metavar="STEM", help="of STEM.html and STEM.json")


def _fetch(args: argparse.Namespace) -> int:
    wheel = fetch(args.version)
    print(f"unpacked into {wheel}, with stand-ins for the CANN libraries in {stubs(wheel)}")
    return 0


def _check(args: argparse.Namespace) -> int:
    device = _device(args.device)
    target = targets.of_device(device) if args.target is None else _rehearsed(args.target, device)
    console = Console()

    def progress(cases: Sequence[Case]) -> Iterable[Case]:
        return track(cases, "checking", console=Console(stderr=True), transient=True)

    found = check_device(device, target, progress if console.is_terminal else iter)
    found.sheet().show(console)
    stem = Path(args.output)
    json, html = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html")
    json.write_text(found.json(), encoding="utf-8")
    sheets = [found.sheet(), found.environment_sheet(), found.details()]
    html.write_text(page("lowering check", sheets), encoding="utf-8")
    print(f"\nfor a bug report: {html}, {json}", file=sys.stderr)
    return 0 if found.ok else 1


def _device(name: str | None) -> torch.device:
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise LoweringError(f"device {name!r} cannot be used here: {error}") from error


def _rehearsed(name: str, device: torch.device) -> targets.Target:
    target = targets.named(name)
    if device.type != "cpu":
        raise LoweringError(f"--target {name} is for --device cpu; on {device} the target is that of the device")
    if target.device == "npu":
        from . import npu_reference

        npu_reference.load()
    return target


if __name__ == "__main__":
    sys.exit(main())
