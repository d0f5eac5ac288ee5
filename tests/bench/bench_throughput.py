"""Throughput of a batch of prompts, as a server has it: `fm.Engine` against transformers' `generate`, in one process.

    python -m tests.bench.bench_throughput [--new 512] [--modes sampled greedy] [--backends eager inductor]

The bundled model continues held-out prompts of unequal lengths, `--new` tokens each; sampled means temperature 0.8,
top-k 20, top-p 0.95 on both sides. transformers gets the batch padded on the left. Prints tokens a second (CPU time of
the one thread that all of it runs on), what that is of transformers', and tokens a round of drafting. Captured runs are
captured before they are timed, which takes minutes with Inductor and is said apart.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import funcmodels as fm
import lowering
from tests import held_out

PROMPT_TOKENS = (48, 96)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
BUNDLED = Path(fm.__file__).parent / "bundled"

logging.set_verbosity_error()


def theirs(model: Any, prompts: list[list[int]], new: int, sampled: bool) -> float:
    """Tokens a second of transformers."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(0)
    sampling = {"do_sample": True, **SAMPLED} if sampled else {"do_sample": False}
    start = time.thread_time()
    found = model.generate(ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **sampling)
    return (found.shape[1] - width) * len(prompts) / (time.thread_time() - start)


def ours(engine: fm.Engine, prompts: list[list[int]], new: int, sampled: bool) -> list[float]:
    """Seconds of capturing, tokens a second after it, tokens a round."""
    sampling = fm.Sampling(**SAMPLED, seed=1) if sampled else fm.Sampling()
    requests = [fm.Request(tuple(prompt), new, sampling) for prompt in prompts]
    start = time.perf_counter()
    if engine.backend is not None:
        # As many rounds as show every program; a run that is left like this returns all it holds.
        for _ in itertools.islice(engine.serve(requests), 4 * len(prompts)):
            pass
    captured, begun = time.perf_counter() - start, time.thread_time()
    results = [event.result for event in engine.serve(requests) if event.result is not None]
    seconds = time.thread_time() - begun
    tokens = sum(len(result.tokens) for result in results)
    return [captured, tokens / seconds, (tokens - len(results)) / sum(result.rounds for result in results)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=512, help="new tokens a prompt")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--modes", nargs="+", default=["sampled", "greedy"], choices=("sampled", "greedy"))
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"], choices=("eager", "fx", "inductor"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, params = fm.load("bundled", dtype=torch.float32)
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, args.requests, *PROMPT_TOKENS, seed=1)
    reference = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    prepared = lowering.prepare(params)
    print(f"bundled model, float32, one thread, {args.requests} requests, {args.new} new tokens each")
    for mode in args.modes:
        sampled = mode == "sampled"
        base = theirs(reference, prompts, args.new, sampled)
        print(f"{mode}\n  {'transformers':<22}{base:8.0f} tokens/s", flush=True)
        for backend, draft in itertools.product(args.backends, (None, "mtp")):
            weights = prepared if backend == "eager" else params
            compiled = None if backend == "eager" else backend
            engine = fm.Engine(model, weights, draft, compiled, rows=args.requests)
            captured, speed, each = ours(engine, prompts, args.new, sampled)
            name = f"{backend}{', drafted' if draft else ''}"
            first = f"; captured in {captured:.0f} s" if compiled else ""
            print(f"  {name:<22}{speed:8.0f} tokens/s {speed / base:6.2f}x; {each:.2f} a round{first}", flush=True)


if __name__ == "__main__":
    main()
