"""Decoding through `lowering.jit` against our plain forward and transformers, in one process on one thread.

    python -m tests.bench.bench_jit [--model bundled] [--rows 4] [--steps 50]

transformers runs eager with its default cache, and compiled whole (`fullgraph=True`) with its static cache of just the
length needed. Prints the milliseconds of a step of each side once all is compiled, and how many times as fast as both
forms of transformers and as our plain forward each is. `tiny` has eight layers of width 64 and random weights; all
sides compute the same, and their tokens are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, StaticCache
from transformers.utils import logging

import funcmodels as fm
import lowering
import params as checkpoints
from tests.bench.timing import best
from tests.tiny import SIZES

PROMPT = 32
"""Tokens that each row holds before decoding is timed."""

WARM_UP = 3
"""Steps in which everything is compiled: the second one of a static cache may differ from the first."""

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
    """The decoding of transformers, eager, or compiled with a static cache of `room` more tokens."""

    def __init__(self, model: Any, ids: torch.Tensor, room: int | None = None) -> None:
        self.token = ids[:, -1:]
        cache = None if room is None else StaticCache(config=model.config, max_cache_len=PROMPT + room)
        self.cache = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).cache
        self.forward = model.forward if room is None else torch.compile(model.forward, fullgraph=True, dynamic=False)

    def step(self) -> None:
        """One token a row."""
        out = self.forward(input_ids=self.token, cache=self.cache, use_cache=True)
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
    room = rounds * args.steps + WARM_UP
    sides: dict[str, Any] = {"transformers": Theirs(theirs, ids), "compiled": Theirs(theirs, ids, room)}
    sides |= {name: Ours(forward, model, params, ids, room) for name, forward in forwards.items()}
    for name, side in sides.items():
        start = time.perf_counter()
        repeated(side.step, WARM_UP)()
        print(f"{name}: first {WARM_UP} steps {time.perf_counter() - start:.1f} s", flush=True)
    times = best(rounds, *(repeated(side.step, args.steps) for side in sides.values()))
    found = {name: 1e3 * seconds / args.steps for name, seconds in zip(sides, times, strict=True)}
    print(f"{args.model} decode, {args.rows} rows, one thread, float32")
    for name, each in found.items():
        ratios = ", ".join(f"{found[other] / each:5.2f}x {other}" for other in ("transformers", "compiled", "plain"))
        print(f"  {name:<13}{each:8.3f} ms a step   {ratios}")
    last = sides["transformers"].token.flatten().tolist()
    print("last tokens:", {name: side.token.flatten().tolist() == last for name, side in sides.items()})


if __name__ == "__main__":
    main()
