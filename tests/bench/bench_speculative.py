"""Speculative decoding with the bundled model's MTP head against plain decoding, eager, in one process.

    python -m tests.bench.bench_speculative [--dtype float32] [--new 128]

Prints, for 1 and 8 rows: tokens a second of both and their ratio; tokens a round; what a round costs in decode steps
(the ratio is the quotient of these two); and how often the draft of each position was accepted. Prompts are held-out
text, weights are prepared for both.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import funcmodels as fm
import lowering
from tests import held_out
from tests.bench.timing import best

PROMPT_TOKENS = (48, 96)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--new", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--steps", type=int, default=3, help="drafts a round")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, params = fm.load("bundled", dtype=getattr(torch, args.dtype))
    params = lowering.prepare(params)
    print(f"bundled model, {args.dtype}, {args.threads} threads, {args.new} new tokens, {args.steps} drafts a round")
    for rows in (1, 8):
        report(model, params, rows, args)


def report(model: fm.Model, params: Any, rows: int, args: argparse.Namespace) -> None:
    """One line for `rows` prompts at a time."""
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, rows, *PROMPT_TOKENS, seed=rows)
    setup: dict[str, Any] = {"sampling": fm.Sampling(args.temperature, seed=1), "eos": (), "rows": rows}
    found: dict[str, list[fm.Result]] = {}

    def run(name: str, new: int, **draft: Any) -> None:
        found[name] = fm.generate(model, params, prompts, new, **setup, **draft)

    draft: dict[str, Any] = {"draft": "mtp", "draft_steps": args.steps}
    prefill, plain, drafted_prefill, drafted = best(
        3,
        lambda: run("first", 1),
        lambda: run("plain", args.new),
        lambda: run("first", 1, **draft),
        lambda: run("drafted", args.new, **draft),
    )
    plain, drafted = plain - prefill, drafted - drafted_prefill
    tokens, plain_rounds = rows * (args.new - 1), args.new - 1
    results = found["drafted"]
    rounds = max(result.rounds for result in results)
    counts = [sum(places) for places in zip(*(result.accepted for result in results), strict=True)]
    total = sum(result.rounds for result in results)
    accepted = ", ".join(f"{count / total:.0%}" for count in counts)
    cost = (drafted / rounds) / (plain / plain_rounds)
    speeds = f"plain {tokens / plain:.0f} tokens/s, drafted {tokens / drafted:.0f}, ratio {plain / drafted:.2f}"
    print(
        f"{rows} rows: {speeds}; "
        f"{tokens / total:.2f} tokens a round, a round costs {cost:.2f} steps; accepted by position {accepted}"
    )


if __name__ == "__main__":
    main()
