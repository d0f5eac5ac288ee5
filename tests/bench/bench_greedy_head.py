"""The greedy head of a block draft on ranks: each compares its own tokens, against logits that all gather.

    python -m tests.bench.bench_greedy_head [--ranks 2] [--dtype bfloat16] [--hidden 1024]

Starts the ranks on this machine, connected by gloo, with one thread each. Prints, for 1, 8 and 32 rows: milliseconds
of a proposal of 7 tokens (one product with the head, then for each token one with the Markov head of rank 256, the
choice, and the first rank's word on it), gathered and not, and their ratio; FLOPs and bytes of each rank; and that both
chose the same tokens. Then, on one device, what the op costs beside `argmax` of a product.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import funcmodels as fm
import lowering
from lowering import Policy, ops
from lowering.explain.stages import flops
from lowering.ops.greedy import own_logits
from params.sharding import Vocabulary
from params.shards import VocabularyWeight
from params.tree import size
from tests.bench.timing import best
from tests.sharding.launch import launch

VOCAB, RANK, DRAFTS, ROWS, REPEATS = 163_840, 256, 7, (1, 8, 32), 15
GATHERED = Policy({"greedy_token": "torch", "greedy_markov_token": "torch"})


def main() -> None:
    """Start the ranks and print what the first says; or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    if "RANK" in os.environ:
        one_rank(getattr(torch, args.dtype), args.hidden)
        return
    given = ["-m", "tests.bench.bench_greedy_head", "--dtype", args.dtype, "--hidden", str(args.hidden)]
    for code, said in launch(args.ranks, given, limit=1200):
        print(said, end="")
        assert code == 0


@torch.no_grad()
def one_rank(dtype: torch.dtype, hidden: int) -> None:
    """Make the rank's weights, and measure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = fm.ranks_of(init_device_mesh("cpu", (dist.get_world_size(),)))
    draw = torch.Generator().manual_seed(0)
    head, w1, w2 = (torch.randn(VOCAB, width, generator=draw).to(dtype) / width**0.5 for width in (hidden, RANK, RANK))
    cut = Vocabulary().cut(head.shape, ranks)
    held = VocabularyWeight(head[cut.ranges[0].start :][: cut.length], ranks.rank * cut.length, VOCAB, ranks.size,
                            ranks.group)  # fmt: skip
    said = print if ranks.rank == 0 else lambda *line, **how: None
    said(f"{ranks.size} ranks, {dtype}, vocabulary {VOCAB}, hidden {hidden}, Markov rank {RANK}, {DRAFTS} drafts")
    for rows in ROWS:
        x, root = torch.randn(rows * DRAFTS, hidden, generator=draw).to(dtype), torch.arange(rows)
        said(report((x, root, held, w1, w2)), flush=True)
    if ranks.rank == 0:
        for rows in ROWS:
            print(alone(torch.randn(rows, hidden, generator=draw).to(dtype), head), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def propose(x: Tensor, root: Tensor, head: VocabularyWeight, w1: Tensor, w2: Tensor) -> Tensor:
    """The greedy tokens of a block, each corrected by the one before."""
    base = own_logits(x, head).unflatten(0, (-1, DRAFTS))
    tokens = [root]
    for place in range(DRAFTS):
        found = ops.embedding(tokens[-1], w1)
        token = ops.greedy_markov_token(base[:, place], found, w2, head)
        tokens.append(ops.from_first(token, group=head.group))
    return torch.stack(tokens[1:], 1)


def report(given: tuple[Any, ...]) -> str:
    """One line for a number of rows."""

    def gathered() -> Tensor:
        with lowering.use(GATHERED):
            return propose(*given)

    assert torch.equal(gathered(), propose(*given)), "the two chose other tokens"
    (full, mine), rows = waited(gathered, lambda: propose(*given)), given[1].shape[0]
    costs = [lowering.lower(propose, *given, policy=policy).cost_analysis().total for policy in (GATHERED, Policy())]
    shown = [f"{flops(cost.flops)} and {size(cost.bytes)}" for cost in costs]
    return (
        f"{rows} rows: gathered {1e3 * full:.2f} ms, own tokens {1e3 * mine:.2f} ms, {full / mine:.2f} times as fast; "
        f"a rank's FLOPs and bytes: {shown[0]}, {shown[1]}"
    )


def waited(*functions: Callable[[], object]) -> list[float]:
    """Seconds of the fastest run of each, begun together by all ranks: the clock runs while one waits for another."""
    times = [float("inf")] * len(functions)
    for _ in range(REPEATS):
        for index, function in enumerate(functions):
            dist.barrier()
            start = time.perf_counter()
            function()
            times[index] = min(times[index], time.perf_counter() - start)
    return times


def alone(x: Tensor, head: Tensor) -> str:
    """One device: the op beside what it stands for."""
    seconds = best(REPEATS, lambda: ops.linear(x, head).argmax(-1), lambda: ops.greedy_token(x, head))
    return (
        f"one device, {x.shape[0]} rows: argmax of a product {1e3 * seconds[0]:.3f} ms, the op {1e3 * seconds[1]:.3f}"
    )


if __name__ == "__main__":
    main()
