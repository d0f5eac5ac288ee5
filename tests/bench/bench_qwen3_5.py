"""Qwen3.5 at 0.8B widths: our forward against that of transformers, in one process, on the same weights and tokens.

    python -m tests.bench.bench_qwen3_5 [--quick] [--threads N] [--dtype bf16] [--dtype f32]

Prints a line a case: the best time of each side over interleaved rounds, their ratio, and beside them what the machine
allows: the linears of the same forward alone, and the time to read all weights once at the measured bandwidth (for
decoding) or to do its products at the measured matrix-product rate (for prompts).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

import funcmodels as fm
import lowering
import params as checkpoints
from params import tree
from tests.bench.timing import best

logging.set_verbosity_error()

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
CONTEXT = 256
"""Tokens that each row holds before decoding is timed, if no other number is asked for."""


def config(layers: int) -> Qwen3_5TextConfig:
    """The widths of Qwen3.5-0.8B, with a smaller vocabulary so that both models fit in memory."""
    return Qwen3_5TextConfig(
        vocab_size=32768, hidden_size=1024, num_hidden_layers=layers, intermediate_size=3584, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=32768,
    )  # fmt: skip


@dataclass
class Pair:
    """Both models on the same weights; ours also prepared for decoding."""

    theirs: Any
    model: fm.Model
    params: Any
    prepared: Any

    @staticmethod
    def make(layers: int, dtype: torch.dtype) -> Pair:
        """Random weights of transformers' own initialisation."""
        torch.manual_seed(0)
        theirs: Any = Qwen3_5ForCausalLM(config(layers))
        theirs = theirs.to(dtype).eval()
        model = fm.build(theirs.config.to_dict())
        params = checkpoints.from_checkpoint(dict(theirs.state_dict()), model.param_spec(), model.family.names)
        return Pair(theirs, model, params, lowering.prepare(params))

    def linear_weights(self) -> list[Tensor]:
        """Every projection that a token passes, the head among them."""
        weights = [
            leaf
            for path, leaf in tree.items(self.params)
            if leaf.ndim == 2 and "embed" not in path and "conv" not in path
        ]
        return weights if self.params.head is not None else [*weights, self.params.embed.weight]


def read_bandwidth(rounds: int) -> float:
    """Bytes a second of a plain read of a tensor that no cache holds."""
    x = torch.ones(64 * 2**20)
    return x.numel() * x.element_size() / best(rounds, x.sum)[0]


def product_rate(dtype: torch.dtype, rounds: int) -> float:
    """Operations a second of a square matrix product."""
    x = torch.ones(1024, 1024, dtype=dtype)
    return 2 * 1024**3 / best(3 * rounds, lambda: x @ x)[0]


def linears(pair: Pair, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """The projections of one forward, and nothing else; the head sees each row's last token."""
    *weights, head = [(weight, torch.randn(tokens, weight.shape[1], dtype=dtype)) for weight in pair.linear_weights()]
    weights.append((head[0], head[1][:8]))

    def run() -> None:
        for weight, x in weights:
            F.linear(x, weight)

    return run


def prefill(pair: Pair, tokens: int, dtype: torch.dtype, rounds: int) -> list[float]:
    """Times of one prompt from an empty state: ours plain, ours prepared, theirs, the linears alone."""
    ids = torch.randint(0, 32768, (1, tokens))

    def ours(params: Any) -> Callable[[], object]:
        def run() -> object:
            state = pair.model.init_state(1, tokens, dtype=dtype)
            return pair.model.forward(params, state, fm.Batch.from_tokens(ids[0], [tokens], state), logits="last")

        return run

    def theirs() -> object:
        return pair.theirs(input_ids=ids, use_cache=True, logits_to_keep=1)

    return best(rounds, ours(pair.params), ours(pair.prepared), theirs, linears(pair, tokens, dtype))


class Decoding:
    """One side's decoding: its cache, and a step that appends one token a row."""

    def __init__(self, pair: Pair, params: Any, rows: int, dtype: torch.dtype, room: int, context: int) -> None:
        self.pair, self.params = pair, params
        ids = torch.randint(0, 32768, (rows, context))
        self.token = ids[:, -1:].clone()
        if params is None:
            self.state = pair.theirs(input_ids=ids, use_cache=True, logits_to_keep=1).cache
            return
        state = pair.model.init_state(rows, context + room, dtype=dtype)
        batch = fm.Batch.from_tokens(ids.flatten(), [context] * rows, state)
        self.state = pair.model.forward(params, state, batch, logits="last")[1]

    def theirs(self) -> None:
        """A step of transformers."""
        out = self.pair.theirs(input_ids=self.token, cache=self.state, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)

    def ours(self) -> None:
        """A step of ours."""
        batch = fm.Batch.from_tokens(self.token.flatten(), [1] * self.token.shape[0], self.state)
        out, self.state = self.pair.model.forward(self.params, self.state, batch, logits="last")
        self.token = out.logits.argmax(-1)


def decode(pair: Pair, rows: int, dtype: torch.dtype, rounds: int, context: int = CONTEXT) -> list[float]:
    """Times of one step on top of `context` tokens a row: ours plain, ours prepared, theirs, the linears alone."""
    room = rounds + 1
    sides = [Decoding(pair, params, rows, dtype, room, context) for params in (pair.params, pair.prepared, None)]
    return best(rounds, sides[0].ours, sides[1].ours, sides[2].theirs, linears(pair, rows, dtype))


def report(name: str, times: list[float], limit: float, limited_by: str) -> None:
    """One line."""
    plain, prepared, theirs, alone = (1e3 * t for t in times)
    print(
        f"{name:<22} ours {plain:9.2f} ms  prepared {prepared:9.2f} ms  transformers {theirs:9.2f} ms  "
        f"ratio {theirs / plain:5.2f}x  prepared {theirs / prepared:5.2f}x | linears alone {alone:8.2f} ms, "
        f"{limited_by} {1e3 * limit:8.2f} ms",
        flush=True,
    )


def run(name: str, layers: int, quick: bool) -> None:
    """All lines of one dtype."""
    dtype, rounds = DTYPES[name], 3 if quick else 7
    pair = Pair.make(layers, dtype)
    count = sum(weight.numel() for weight in pair.linear_weights())
    bandwidth, rate = read_bandwidth(rounds), product_rate(dtype, rounds)
    machine = f"read {bandwidth / 1e9:.1f} GB/s, products {rate / 1e9:.0f} G/s"
    print(f"{name}: {layers} layers, {count / 1e6:.0f} M in linears; {machine}", flush=True)
    for tokens in (512,) if quick else (512, 4096):
        work = 2 * tokens * (count - pair.linear_weights()[-1].numel())
        report(f"{name} prefill {tokens}", prefill(pair, tokens, dtype, rounds), work / rate, "products")
    for rows in (1, 8):
        times = decode(pair, rows, dtype, 10 * rounds)
        report(f"{name} decode x{rows}", times, count * dtype.itemsize / bandwidth, "reading weights")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, prompts of 512 tokens only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.no_grad():
        for name in given.dtype or DTYPES:
            run(name, given.layers, given.quick)


if __name__ == "__main__":
    main()
