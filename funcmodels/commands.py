"""What the commands of `cli` do."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lowering
import params as checkpoints
from lowering import CaptureError, LoweringError, Report, Sheet
from lowering.detect import device_named
from lowering.target import named

from .checkpoint.loading import load, open_checkpoint, without_weights
from .checkpoint.parallel import ranks_of, started
from .drafts.named import default_draft
from .errors import StateError
from .model import Model
from .sampling.settings import Sampling
from .serving.engine import generate
from .serving.requests import Event, Result
from .state.batch import Batch
from .state.state import State

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file, without line ends."""'
"""Ends without a newline: the bundled model's tokens join one with the indentation that follows it."""
DEMO_TEMPERATURE = 0.7
"""That of a run without a prompt: greedy, so small a model soon repeats itself, which flatters its draft too."""
ERRORS = (
    ValueError,
    LoweringError,
    CaptureError,
    StateError,
    OSError,
    MemoryError,
    ArithmeticError,
    torch.OutOfMemoryError,
    torch.distributed.DistError,
)
"""What a user can mend: bad input, checkpoint, target or device. Everything else is a fault and shows a traceback."""


def run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; the exit code."""
    try:
        return COMMANDS[args.command](args)
    except BrokenPipeError:
        raise
    except ERRORS as error:
        if args.traceback:
            raise
        print(f"funcmodels {args.command}: {error}", file=sys.stderr)
        return 2


def _generate(args: argparse.Namespace) -> int:
    _check_together(args)
    if args.temperature is None:
        args.temperature = DEMO_TEMPERATURE if args.prompt is None else 0.0
    sampling = Sampling(
        args.temperature,
        args.top_k,
        args.top_p,
        args.min_p,
        args.seed,
        args.repetition_penalty,
        args.presence_penalty,
        args.frequency_penalty,
        tuple(args.logit_bias),
    )
    _check_device(args.device)
    if args.tp == 1:
        return _continue(args, sampling, args.device, None)
    with started(args.tp, args.device) as (mesh, device):
        ranks = ranks_of(mesh, whole_experts=args.whole_experts)
        with nullcontext() if ranks.rank == 0 else _silence():
            return _continue(args, sampling, device, ranks)


def _check_together(args: argparse.Namespace) -> None:
    """`ValueError` for options of which one would be ignored beside the others."""
    if args.tp < 1:
        raise ValueError(f"--tp must be at least 1, found {args.tp}")
    if args.whole_experts and args.tp == 1:
        raise ValueError("--whole-experts says how ranks share experts; give --tp N too, or leave it out")
    if args.prompt == "-" and args.tp > 1:
        raise ValueError("--prompt - reads standard input, which ranks cannot share; give the text")
    if args.draft == "none" and args.draft_steps is not None:
        raise ValueError(f"--draft-steps {args.draft_steps} is of no use without a draft; name one with --draft")


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


@contextmanager
def _silence() -> Iterator[None]:
    """For ranks after the first: all of them find the same tokens."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _continue(args: argparse.Namespace, sampling: Sampling, device: str, ranks: checkpoints.Ranks | None) -> int:
    """Continue the prompt, and show what ran."""
    prompt = PROMPT if args.prompt is None else sys.stdin.read() if args.prompt == "-" else args.prompt
    model, params = load(args.model, dtype=_dtype(args.dtype), device=device, mesh=ranks)
    args.draft = default_draft(model) if args.draft is None else args.draft
    _check_together(args)
    if args.backend is None:
        params = lowering.prepare(params)  # for kernels that a compiler does better than
    clock = [(time.perf_counter(), 0)]

    def show(event: Event) -> None:
        clock.append((time.perf_counter(), len(event.tokens)))
        if len(clock) == 2 and args.prompt is None:
            what = f"no --prompt given (- reads standard input); at temperature {sampling.temperature:g} goes on:"
            print(f"{what}\n\n{prompt}", file=sys.stderr, flush=True)
        print(event.text, end="", flush=True)

    options: dict[str, Any] = {"draft": args.draft, "draft_steps": args.draft_steps}
    options |= {"recurrent_dtype": _dtype(args.recurrent_dtype), "backend": args.backend, "sampling": sampling}
    with lowering.record() as report:
        result = generate(model, params, [prompt], args.max_new_tokens, stream=show, **options)[0]
    print(flush=True)
    figures = *_speeds(result, clock, args.backend is not None), *_acceptance(options["draft"], result)
    print("", *figures, *_advice(model, sampling), sep="\n", file=sys.stderr)
    _print_report("kernels", report, Console(stderr=True))
    if result.finish_reason == "no_choice":
        raise FloatingPointError(
            f"the largest logit after {len(result.tokens)} new tokens is NaN or infinite; check the parameters and "
            "their dtype, and whether biases and penalties leave any token"
        )
    return 0


def _speeds(result: Result, clock: Sequence[tuple[float, int]], captured: bool) -> list[str]:
    """How long prefill and decoding took, by the times and tokens of the events. The first round of each captures."""
    first = min(1 + captured, len(clock) - 1)
    decoded = _speed("decode", sum(count for _, count in clock[first + 1 :]), clock[-1][0] - clock[first][0])
    if captured:
        return [f"first rounds, captured: {clock[first][0] - clock[0][0]:.2f} s", decoded]
    return [_speed("prefill", result.prompt_tokens, clock[1][0] - clock[0][0]), decoded]


def _speed(phase: str, tokens: int, seconds: float) -> str:
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""
    return f"{phase}: {tokens} tokens in {seconds:.2f} s{rate}"


def _acceptance(draft: str, result: Result) -> list[str]:
    """How many tokens a round of speculation gave, and how often the draft of each place was taken."""
    if not (result.accepted and result.rounds):
        return []
    places, each = ", ".join(f"{share:.0%}" for share in result.acceptance), f"{result.tokens_per_round:.2f}"
    return [f"draft {draft}: {each} tokens a round in {result.rounds} rounds; accepted by position: {places}"]


def _advice(model: Model, used: Sampling) -> list[str]:
    """Notes where settings had no effect, and where the checkpoint asks for others than were used."""
    return [*_idle(used), *_asked(model, used)]


def _idle(used: Sampling) -> list[str]:
    """A note where a greedy run was given what only draws read."""
    default, drawing = Sampling(), ("top_k", "top_p", "min_p", "seed")
    given = {name: getattr(used, name) for name in drawing if getattr(used, name) != getattr(default, name)}
    if used.temperature or not given:
        return []
    flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in given.items())
    return [f"note: {flags} had no effect, since temperature 0 takes the largest logit; give --temperature"]


def _asked(model: Model, used: Sampling) -> list[str]:
    """A note where the checkpoint asks for other settings than were used."""
    try:
        asked = Sampling.of(model)
    except ValueError as error:
        return [f"note: sampling as the checkpoint asks for it was not used: {error}"]
    flags = {
        "--" + field.name.replace("_", "-"): (getattr(asked, field.name), getattr(used, field.name))
        for field in fields(Sampling)
        if getattr(asked, field.name) != field.default
    }
    if all(wanted == given for wanted, given in flags.values()):
        return []
    asking = " ".join(f"{flag} {wanted:g}" for flag, (wanted, _) in flags.items())
    return [f"note: generation_config.json asks for {asking}, which was not used; give these to use it"]


def _check_device(device: str) -> None:
    if device_named(device).type == "meta":
        raise ValueError(f"device {device!r} holds shapes without values, so nothing can run; give another")


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
        Sheet(title, ("tensor", "type", "file", "leaf", "part", "note"), found.rows).show(console)
        print("\n".join(found.problems))
    else:
        print(found)
    return 0 if found.ok else 1


def _lower(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, found {args.tokens}")
    schemes = dict(args.quantize)
    if len(schemes) < len(args.quantize):
        raise ValueError(f"--quantize names a pattern twice: {', '.join(pattern for pattern, _ in args.quantize)}")
    if args.html is not None:
        _check_page(Path(args.html))
    model, params = without_weights(args.model, _dtype(args.dtype) or torch.bfloat16, schemes)
    if args.tokens > model.config.max_position_embeddings:
        raise ValueError(f"--tokens {args.tokens}: the model takes {model.config.max_position_embeddings} at most")
    machines = [named(name, cann=args.cann) for name in dict.fromkeys(args.target)]
    names = ", ".join(map(str, machines))
    sheets = []
    for phase, tokens, held in (("decode", 1, args.tokens), ("prefill", args.tokens, 0)):
        lowered = [_lowered(model, params, args, machine, tokens, held) for machine in machines]
        title = f"{phase}, {args.rows} x {tokens} tokens, {args.dtype}, {names}, rows that hold {held}"
        sheets.append(lowering.compared(lowered, title))
        sheets[-1].show(Console())
    if args.html is not None:
        Path(args.html).write_text(lowering.page(f"{args.model} lowered to {names}", sheets), encoding="utf-8")
        print(f"\nwritten to {args.html}", file=sys.stderr)
    return 0


def _lowered(
    model: Model, params: Any, args: argparse.Namespace, target: lowering.Target, tokens: int, held: int
) -> lowering.Lowered:
    """A forward of `tokens` in each row beside `held` ones, with a state as `init_state` makes it on the target."""
    dtypes: dict[str, Any] = {"dtype": _dtype(args.dtype), "recurrent_dtype": _dtype(args.recurrent_dtype)}
    with lowering.use(target=target, evidence=args.evidence):
        state = _holding(held, model.init_state(args.rows, held + tokens, **dtypes, device="meta"))
        batch = Batch.from_lists([[0] * tokens] * args.rows, state)
        return lowering.lower(model.forward, params, state, batch)


def _check_page(path: Path) -> None:
    """`ValueError` for a file that could not be written when the work is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--html {path}: {f'{path} is a folder' if path.is_dir() else f'no folder {path.parent}'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--html {path}: may not be written; name another file")


def _holding(tokens: int, state: State) -> State:
    """A state without values, as it would be when each row holds `tokens`."""
    return replace(state, ledger=state.ledger.at([tokens] * state.rows))


def _print_report(title: str, report: Report, console: Console) -> None:
    replace(report.sheet(), title=title).show(console)


COMMANDS = {"generate": _generate, "inspect": _inspect, "lower": _lower}
