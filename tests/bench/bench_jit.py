"""Decoding through `lowering.jit` against our plain forward and transformers, eager, in one process on one thread.

    python -m tests.bench.bench_jit [--model bundled] [--rows 4] [--steps 50]

Prints the milliseconds of a step of each side, and how many times as fast as transformers and as our plain forward the
captured ones are. `tiny` has eight layers of width 64 and random weights; both sides compute the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

import funcmodels as fm
import lowering
import params as checkpoints
from tests.bench.timing import best
from tests.tiny import SIZES

PROMPT = 32
"""Tokens that each row holds before decoding is timed."""

logging.set_verbosity_error()


def models(name: str) -> tuple[Any, fm.Model, Any]:
    """transformers' model, ours, and our parameters with the same values."""
    fields: dict[str, Any] = SIZES | {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
    if name == "bundled":
        fields = {**fm.load("bundled")[0].config_json, "mtp_num_hidden_layers": 0}
    torch.manual_seed(0)
    theirs: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()
    model = fm.build(theirs.config.to_dict())
    return theirs, model, checkpoints.from_checkpoint(dict(theirs.state_dict()), model.param_spec(), model.family.names)


class Ours:
    """Our decoding with one way to run a forward."""

    def __init__(self, forward: Callable[..., Any], model: fm.Model, params: Any, ids: torch.Tensor, room: int) -> None:
        self.forward, self.params = forward, params
        rows = ids.shape[0]
        state = model.init_state(rows, PROMPT + room, page_size=32)
        batch = fm.Batch.from_tokens(ids.flatten(), [PROMPT] * rows, state)
        _, self.state = model.forward(params, state, batch, logits="last")
        self.token = ids[:, -1]

    def step(self) -> None:
        """One token a row."""
        batch = fm.Batch.from_tokens(self.token, [1] * self.token.shape[0], self.state)
        out, self.state = self.forward(self.params, self.state, batch, logits="last")
        self.token = out.logits.argmax(-1)


class Theirs:
    """The decoding of transformers."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.token = model, ids[:, -1:]
        self.cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache

    def step(self) -> None:
        """One token a row."""
        out = self.model(input_ids=self.token, cache=self.cache, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)


def repeated(step: Callable[[], None], count: int) -> Callable[[], None]:
    """`count` steps."""

    def run() -> None:
        for _ in range(count):
            step()

    return run


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=("tiny", "bundled"))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    theirs, model, params = models(args.model)
    rounds = 4
    ids = torch.randint(0, model.config.vocab_size, (args.rows, PROMPT))
    forwards = {"plain": model.forward} | {
        backend: lowering.jit(model.forward, donate=("state",), backend=backend) for backend in ("fx", "inductor")
    }
    sides: dict[str, Any] = {"transformers": Theirs(theirs, ids)}
    for name, forward in forwards.items():
        sides[name] = Ours(forward, model, params, ids, rounds * args.steps + 1)
        start = time.perf_counter()
        sides[name].step()
        print(f"{name}: first step {time.perf_counter() - start:.1f} s", flush=True)
    times = best(rounds, *(repeated(side.step, args.steps) for side in sides.values()))
    found = {name: 1e3 * seconds / args.steps for name, seconds in zip(sides, times, strict=True)}
    print(f"{args.model} decode, {args.rows} rows, one thread, float32")
    for name, each in found.items():
        ratios = f"{found['transformers'] / each:5.2f}x transformers, {found['plain'] / each:5.2f}x plain"
        print(f"  {name:<13}{each:8.3f} ms a step   {ratios}")


if __name__ == "__main__":
    main()
