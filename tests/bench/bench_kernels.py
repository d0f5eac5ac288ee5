"""Every kernel against its op's reference, on the cases with a model's real widths.

    python -m tests.bench.bench_kernels [--threads N] [--rounds N] [--dtype bf16] [OP ...]

Prints a line a case: microseconds of the reference, then of each kernel with its ratio to it, or its refusal.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from lowering import OPS
from lowering.kernel import REFERENCE, Kernel
from tests.bench.timing import best
from tests.cases import CASES, Case

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def arguments(case: Case, kernel: Kernel, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
    """The case's arguments in the kernel's layout, or why it refuses them."""
    args, kwargs = case.arguments(dtype)
    if kernel.prepare is not None:
        names = OPS[case.op].signature.parameters
        args = tuple(kernel.prepare(x) if name == "weight" else x for name, x in zip(names, args, strict=False))
    reason = kernel.refuse(*args, **kwargs) if kernel.refuse else None
    return (args, kwargs) if reason is None else reason


def line(case: Case, dtype: torch.dtype, rounds: int) -> str:
    """Times of the reference and of every kernel of this machine on one case."""
    runs, refusals = {}, []
    for kernel in OPS[case.op].serving("cpu"):
        made = arguments(case, kernel, dtype)
        if isinstance(made, str):
            refusals.append(f"{kernel.name}: {made}")
        else:
            runs[kernel.name] = lambda run=kernel.run, made=made: run(*made[0], **made[1])
    times = dict(zip(runs, best(rounds, *runs.values()), strict=True))
    reference = times.pop(REFERENCE)
    shown = "".join(f"  {name} {1e6 * t:10.1f} us {reference / t:6.2f}x" for name, t in times.items())
    return f"reference {1e6 * reference:10.1f} us{shown}{'  ' if refusals else ''}{'; '.join(refusals)}"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", choices=[*OPS, []])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.no_grad():
        chosen = [case for case in CASES if case.bench and case.op in (given.ops or OPS)]
        for case, name in itertools.product(chosen, given.dtype or DTYPES):
            print(f"{case!s:<38} {name:<5} {line(case, DTYPES[name], given.rounds)}", flush=True)


if __name__ == "__main__":
    main()
