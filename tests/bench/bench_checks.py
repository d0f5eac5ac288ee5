"""What the host's checks of states and batches cost a decoding step: stale rows, what a batch says of itself, its ids.

    python -m tests.bench.bench_checks [--backend fx]

Prints a line a number of rows: microseconds of a bundled model's step, eager and captured, of the checks alone, and
their share. The checks are called by themselves, on the step's own state and batch, in the same run.
"""

from __future__ import annotations

import argparse
import time
import timeit
from typing import Any

import torch

import funcmodels as fm
from funcmodels.state.batch import check_ids, check_layout
from funcmodels.state.state import State, check_fresh
from tests import held_out
from tests.bench.bench_round import PROMPT, Decoding
from tests.bench.timing import best

STEPS = 20


def checks(state: State, batch: fm.Batch, vocab: int) -> float:
    """Microseconds of all that a forward checks on the host, and notes of its writing."""

    def run() -> None:
        check_layout(batch)
        check_ids(batch, vocab)
        check_fresh(state)
        state.ledger.grow(batch.most, batch.counted, False).claim(state.ledger)

    return 1e6 * min(timeit.repeat(run, timer=time.thread_time, number=1000, repeat=5)) / 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fx")
    backend = parser.parse_args().backend
    torch.set_num_threads(1)
    model, params = fm.load("bundled", dtype=torch.float32)
    assert model.tokenizer is not None
    with torch.no_grad():
        for rows in (1, 8, 64):
            prompts = held_out.prompts(model.tokenizer, rows, PROMPT, PROMPT)
            captured = Decoding(model, params, prompts, 12 * STEPS, backend)
            eager: Any = Decoding(model, params, prompts, 12 * STEPS, backend)
            eager.forward = model.forward
            captured.step()
            many = [lambda one=one: [one.step() for _ in range(STEPS)] for one in (eager, captured)]
            plain, replayed = (1e6 * seconds / STEPS for seconds in best(5, *many))
            batch = fm.Batch.from_tokens(eager.token, [1] * rows, eager.state)
            alone = checks(eager.state, batch, model.config.vocab_size)
            print(
                f"{rows:2} rows: step {plain:8.0f} us eager, {replayed:8.0f} captured ({backend}); "
                f"checks {alone:5.1f} us: {alone / plain:.2%} and {alone / replayed:.2%}"
            )


if __name__ == "__main__":
    main()
