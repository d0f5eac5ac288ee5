"""A captured speculative round against a captured decoding step: the bundled model, greedy, on held-out prompts.

    python -m tests.bench.bench_round [--backend fx] [--rows 8] [--rounds 30]

Prints the milliseconds of both, tokens a round, and the speed of drafting: tokens a round over what a round costs in
steps. The first call of each compiles, for minutes with Inductor.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import funcmodels as fm
import lowering
from tests import held_out
from tests.bench.timing import best

PROMPT = 48
STEPS = 3


class Decoding:
    """Plain decoding, one token a row and step."""

    def __init__(self, model: fm.Model, params: Any, prompts: list[list[int]], room: int, backend: str) -> None:
        self.params = params
        self.state = model.init_state(len(prompts), PROMPT + room, page_size=32)
        batch = fm.Batch.from_lists(prompts, self.state)
        out, self.state = model.forward(params, self.state, batch, logits="last")
        self.token = out.logits.argmax(-1)
        self.forward = lowering.jit(model.forward, donate=("state",), backend=backend)

    def step(self) -> None:
        """One token a row."""
        batch = fm.Batch.from_tokens(self.token, [1] * self.token.shape[0], self.state)
        out, self.state = self.forward(self.params, self.state, batch, logits="last")
        self.token = out.logits.argmax(-1)


class Drafting:
    """Rounds of drafting, each one captured call."""

    def __init__(self, model: fm.Model, params: Any, prompts: list[list[int]], room: int, backend: str) -> None:
        rows = len(prompts)
        draft = fm.draft(model, "mtp")
        state = model.init_state(rows, PROMPT + room, page_size=32)
        drafted = draft.init_state(state)
        batch = fm.Batch.from_lists(prompts, state)
        out, state = model.forward(params, state, batch)
        last = out.logits[batch.query_start[1:].long() - 1].argmax(-1)
        drafted, carry = draft.extend(params, drafted, out, batch, fm.next_tokens(batch, last))
        self.now: tuple[Any, ...] = (state, drafted, carry)
        self.fixed = (fm.RowSampling.of([fm.Sampling()] * rows), torch.arange(rows), torch.full((rows,), STEPS + 1))
        self.run = lowering.jit(fm.Round(model, draft).run, donate=("state", "drafted"), backend=backend)
        self.params, self.accepted = params, []

    def step(self) -> None:
        """One round."""
        verdict, *now = self.run(self.params, *self.now, *self.fixed)
        self.now = tuple(now)
        self.accepted.append(float(verdict.accepted.float().mean()))


@torch.no_grad()
def main() -> None:
    """Print both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "fx"))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, params = fm.load("bundled", dtype=torch.float32)
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, args.rows, PROMPT, PROMPT, seed=args.rows)
    repeats = 3
    room = (repeats * args.rounds + 2) * (STEPS + 1)
    given: Any = (model, params, prompts, room, args.backend)
    decoding, drafting = Decoding(*given), Drafting(*given)
    for side in (decoding, drafting):
        start = time.perf_counter()
        side.step()
        print(f"{type(side).__name__}: first call {time.perf_counter() - start:.0f} s", flush=True)
    runs = [lambda side=side: [side.step() for _ in range(args.rounds)] for side in (decoding, drafting)]
    step, round_ = (1e3 * seconds / args.rounds for seconds in best(repeats, *runs))
    tokens = sum(drafting.accepted) / len(drafting.accepted)
    print(f"bundled model, {args.rows} rows, one thread, float32, captured with {args.backend}")
    print(f"  step {step:.2f} ms, round {round_:.2f} ms: {round_ / step:.2f} steps; {tokens:.2f} tokens a round")
    print(f"  drafting is {tokens * step / round_:.2f} times as fast as plain decoding")


if __name__ == "__main__":
    main()
