"""The command line: `funcmodels generate | inspect | lower`, also as `python -m funcmodels`.

Results go to standard output, remarks and figures to standard error. Exit codes: 0, 1 when `inspect` finds a
checkpoint that would not load, 2 for a mistake in what was asked, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import lowering
import params as checkpoints
from lowering import LoweringError, Report

from .batch import Batch
from .drafts import default_draft
from .errors import StateError
from .generate import generate
from .loading import directory_of, load, open_checkpoint
from .model import build
from .sampling import Sampling
from .serving import Event, Result

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without line ends."""'
"""Ends without a newline: the bundled model's tokens join one with the indentation that follows it."""
ERRORS = (ValueError, LoweringError, StateError, OSError, MemoryError, ArithmeticError)
"""What a user can mend: bad input, checkpoint, target or device. Everything else is a fault and shows a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `argv` defaults to the process's arguments."""
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; without this, the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ERRORS as error:
        if args.traceback:
            raise
        print(f"funcmodels {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="funcmodels", description="Language models as pure functions.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="continue a prompt and show which kernels ran"))
    _add_inspect(commands.add_parser("inspect", help="what a checkpoint holds and where each tensor goes"))
    _add_lower(commands.add_parser("lower", help="which kernels a model would get on a target, without weights"))
    for command in commands.choices.values():
        command.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("--model", default="bundled", help="directory, hub id, or 'bundled' (default)")
    parser.add_argument("--prompt", help="text to continue (default: a piece of Python, for the bundled model)")
    parser.add_argument("--draft", help="'mtp' or 'none' (default: mtp if the checkpoint has such a head)")
    parser.add_argument("--draft-steps", type=int, default=3, metavar="N", help="drafts a round (default 3)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 (default) is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 (default) is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 (default) is off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: as stored)")
    parser.add_argument("--device", default="cpu")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect)
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory, hub id, or 'bundled'")


def _add_lower(parser: argparse.ArgumentParser) -> None:
    targets = [name for name, target in lowering.TARGETS.items() if target.refused is None]
    parser.set_defaults(run=_lower)
    parser.add_argument("--model", default="bundled", help="directory, hub id, or 'bundled' (default)")
    parser.add_argument("--target", required=True, help=", ".join(targets))
    parser.add_argument("--rows", type=int, default=1, help="rows of both batches (default 1)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a row of the prefill batch (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the parameters (default bfloat16)")


def _generate(args: argparse.Namespace) -> int:
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    _check_device(args.device)
    prompt = PROMPT if args.prompt is None else args.prompt
    model, params = load(args.model, dtype=DTYPES.get(args.dtype), device=args.device)
    params = lowering.prepare(params)
    clock = [time.perf_counter()]

    def show(event: Event) -> None:
        clock.append(time.perf_counter())
        if len(clock) == 2 and args.prompt is None:
            print(f"no --prompt given; continuing this piece of Python:\n\n{prompt}", file=sys.stderr, flush=True)
        print(event.text, end="", flush=True)

    options = {"draft": args.draft or default_draft(model), "draft_steps": args.draft_steps, "sampling": sampling}
    with lowering.record() as report:
        result = generate(model, params, [prompt], args.max_new_tokens, stream=show, **options)[0]
    print(flush=True)
    figures = (
        _speed("prefill", result.prompt_tokens, clock[1] - clock[0]),
        _speed("decode", len(result.tokens) - 1, clock[-1] - clock[1]),
        *_acceptance(options["draft"], result),
    )
    print("", *figures, sep="\n", file=sys.stderr)
    _print_report("kernels", report, Console(stderr=True))
    return 0


def _speed(phase: str, tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""
    return f"{phase}: {tokens} tokens in {seconds:.2f} s{rate}"


def _acceptance(draft: str, result: Result) -> list[str]:
    """How many tokens a round of speculation gave, and how often the draft of each place was taken."""
    if not (result.accepted and result.rounds):
        return []
    places = ", ".join(f"{count / result.rounds:.0%}" for count in result.accepted)
    each = (len(result.tokens) - 1) / result.rounds
    return [f"draft {draft}: {each:.2f} tokens a round in {result.rounds} rounds; accepted by position: {places}"]


def _check_device(device: str) -> None:
    if device.split(":")[0] == "meta":
        raise ValueError(f"device {device!r} holds shapes without values, so nothing can run; give another")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"device {device!r} cannot be used here: {error}; "
            'an Ascend NPU needs CANN and pip install "funcmodels[npu]"'
        ) from error


def _inspect(args: argparse.Namespace) -> int:
    directory, _, model = open_checkpoint(args.directory)
    spec = model.param_spec()
    found = checkpoints.inspect(directory, spec, model.family.names)
    count = sum(leaf.numel for leaf in checkpoints.leaves(spec))
    print(f"{type(model.config).__name__}: {count:,} parameters")
    for name, value in asdict(model.config).items():
        print(f"  {name} = {value}")
    print()
    console = Console()
    if console.is_terminal:
        title = str(found).split("\n", 1)[0]
        _print_table(title, ("tensor", "type", "file", "leaf", "part", "note"), found.rows, console)
        print("\n".join(found.problems))
    else:
        print(found)
    return 0 if found.ok else 1


def _lower(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, found {args.tokens}")
    dtype = DTYPES[args.dtype]
    model = build(directory_of(args.model))
    spec = checkpoints.map(lambda leaf: replace(leaf, dtype=leaf.dtype or dtype), model.param_spec())
    for phase, tokens in (("decode", 1), ("prefill", args.tokens)):
        state = model.init_state(args.rows, tokens, dtype=dtype)
        batch = Batch.from_lists([[0] * tokens] * args.rows, state)
        report = lowering.explain(model.forward, spec, state, batch, target=args.target)
        title = f"{phase}, {args.rows} x {tokens} tokens, {args.dtype}, {args.target}"
        _print_report(title, report, Console())
    return 0


def _print_report(title: str, report: Report, console: Console) -> None:
    rows = [
        (row.op, str(row.count), row.kernel, "; ".join(f"{name}: {reason}" for name, reason in row.refused.items()))
        for row in sorted(report.rows, key=lambda row: row.op)
    ]
    _print_table(title, ("op", "calls", "kernel", "refused before it"), rows, console)


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    """A drawn table on a terminal, aligned words elsewhere."""
    if console.is_terminal:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    text = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    print("\n".join(["", title, *text]), file=console.file)
