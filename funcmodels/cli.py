"""The command line: `funcmodels generate | inspect | lower`, also as `python -m funcmodels`.

Results go to standard output, remarks and figures to standard error. Exit codes: 0, 1 when `inspect` finds a
checkpoint that would not load, 2 for a mistake in what was asked, 130 after Ctrl-C. Nothing here imports Torch, so that
`--help` and a wrong option answer at once; `commands` does the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__

DTYPES = ("bfloat16", "float16", "float32")
TARGETS = ("cpu", "cuda", "ascend910b", "ascend910_93", "ascend950")
"""Named in `--help`; a test holds them against `lowering.TARGETS`."""
EVIDENCE = ("documented", "in use", "stated")
"""Likewise, against those of `lowering.Policy`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. `argv` defaults to the process's arguments."""
    args = _parser().parse_args(argv)
    try:
        from .commands import run

        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone; without this, the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="funcmodels", description="Language models as pure functions.")
    parser.add_argument("--version", action="version", version=f"funcmodels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="continue a prompt and show which kernels ran"))
    _add_inspect(commands.add_parser("inspect", help="what a checkpoint holds and where each tensor goes"))
    _add_lower(commands.add_parser("lower", help="which kernels a model would get on a target, without weights"))
    for command in commands.choices.values():
        command.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", help="directory, hub id, or 'bundled' (default)")
    parser.add_argument(
        "--prompt", help="text to continue, - for standard input (default: a piece of Python, for the bundled model)"
    )
    parser.add_argument(
        "--draft",
        help="'mtp', 'none', 'dspark' (the bundled model's) or a directory (default: mtp if there is such a head)",
    )
    parser.add_argument(
        "--draft-steps", type=int, metavar="N", help="drafts a round (default 3; all of a block draft's)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default with --prompt; without one, 0.7)")
    parser.add_argument("--top-k", type=int, default=0, help="0 (default) is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 (default) is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 (default) is off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 (default) is off")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="0 (default) is off")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="0 (default) is off")
    parser.add_argument(
        "--logit-bias", type=_logit_bias, action="append", default=[], metavar="ID=X", help="add X to a token's logit"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: as stored)")
    parser.add_argument(
        "--recurrent-dtype", choices=DTYPES, help="of delta-rule states (default: as the target's kernels take them)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="share the model among N ranks, which torchrun has started"
    )
    parser.add_argument(
        "--whole-experts", action="store_true", help="with --tp: ranks share out experts, not slices of each"
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="capture rounds first, with one of lowering.jit: inductor, fx (default: none)"
    )


def _logit_bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a token's id and a number, as 7=-1.5, found {text!r}") from None


def _scheme(text: str) -> tuple[str, str]:
    pattern, _, word = text.rpartition("=")
    return pattern or "**", word


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory, hub id, or 'bundled'")


def _add_lower(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", help="directory, hub id, or 'bundled' (default)")
    parser.add_argument(
        "--target", required=True, action="append", metavar="NAME", help=f"{', '.join(TARGETS)}; twice to compare"
    )
    parser.add_argument(
        "--cann", metavar="VERSION", help="CANN of Ascend targets, as 9.0.0 (default: see docs/ascend.md)"
    )
    parser.add_argument(
        "--evidence", choices=EVIDENCE, help="the least that must speak for a fused operator (default: 'in use')"
    )
    parser.add_argument("--rows", type=int, default=1, help="rows of both batches (default 1)")
    parser.add_argument("--tokens", type=int, default=128, help="a row: prefilled, then held in decoding (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the parameters (default bfloat16)")
    parser.add_argument(
        "--recurrent-dtype", choices=DTYPES, help="of delta-rule states (default: as the target's kernels take them)"
    )
    parser.add_argument(
        "--quantize",
        type=_scheme,
        action="append",
        default=[],
        metavar="[PATTERN=]SCHEME",
        help="as if projections were W8A8_DYNAMIC, ...; with a pattern of leaf paths, those alone (first match counts)",
    )
    parser.add_argument("--html", metavar="FILE", help="write the tables as a page too")
