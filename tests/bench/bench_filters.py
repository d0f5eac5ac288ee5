"""Our filters against transformers' warpers, on the logits of a large vocabulary, eager, in one process.

    python -m tests.bench.bench_filters [--rows 32] [--vocab 248320]

Prints, for each setting, milliseconds of transformers' warpers alone, of a draw with them (softmax and `multinomial`
too), of our whole draw, which filters and draws in one, and the ratios of the first two to it. Logits are normal:
`spread` 6 is peaked as a model's are, 2 leaves tens of thousands of tokens in the nucleus.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
from transformers import TopPLogitsWarper as TopP

import funcmodels as fm
from tests.bench.timing import best

SETTINGS = {
    "top-k 20, top-p 0.95": fm.Sampling(0.8, 20, 0.95),
    "top-k 20, top-p 0.95, min-p 0.02": fm.Sampling(0.8, 20, 0.95, 0.02),
    "top-p 0.95": fm.Sampling(0.8, 0, 0.95),
    "min-p 0.02": fm.Sampling(0.8, 0, 1.0, 0.02),
    "top-k 50": fm.Sampling(0.8, 50),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.rows} x {args.vocab} logits, {args.threads} threads")
    for spread in (6.0, 2.0):
        logits = torch.randn(args.rows, args.vocab, generator=torch.Generator().manual_seed(0)) * spread
        for name, given in SETTINGS.items():
            report(f"spread {spread:.0f}, {name}", logits, given, args.repeats)


def report(title: str, logits: Tensor, given: fm.Sampling, repeats: int) -> None:
    """One line."""
    rows, warp = fm.RowSampling.of([given] * len(logits)), warpers(given)
    none: Any = torch.empty(0, dtype=torch.int64)
    index = torch.arange(len(logits))

    def warped() -> Tensor:
        return warp(none, logits)

    def drawn() -> Tensor:
        return warped().softmax(-1).multinomial(1)

    seconds = best(repeats, warped, drawn, lambda: fm.sample(logits, rows, index, index))
    filters, draw, ours = (1e3 * each for each in seconds)
    print(
        f"{title}: transformers' warpers {filters:.0f} ms, with a draw {draw:.0f} ms; our draw {ours:.0f} ms; "
        f"ratios {filters / ours:.1f} and {draw / ours:.1f}",
        flush=True,
    )


def warpers(given: fm.Sampling) -> LogitsProcessorList:
    """Those that transformers makes of these settings, in its order."""
    made: list[object] = [TemperatureLogitsWarper(given.temperature)]
    made += [TopKLogitsWarper(given.top_k)] if given.top_k else []
    made += [TopP(given.top_p)] if given.top_p < 1 else []
    made += [MinPLogitsWarper(given.min_p)] if given.min_p else []
    return LogitsProcessorList(made)


if __name__ == "__main__":
    main()
