"""Gemma3 at 1B widths: our forward against that of transformers, in one process, on the same weights and tokens.

    python -m tests.bench.bench_gemma3 [--quick] [--threads N] [--layers N] [--dtype bf16] [--dtype f32]

Prints a line a case as bench_qwen3_5 does, decoding at a context of 4,096 tokens among them; then what attention of one
query costs there in a local layer, which reads its window, and in a global one, which reads everything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import funcmodels as fm
import lowering
import params as checkpoints
from lowering import ops
from lowering.cases.case import DECODE_4K
from tests.bench.bench_qwen3_5 import DTYPES, Pair, decode, prefill, product_rate, read_bandwidth, report
from tests.bench.timing import best
from tests.cases import Draw, paged

WINDOW, LONG = 512, 4096


def config(layers: int) -> Gemma3TextConfig:
    """The widths of Gemma3-1B, with a smaller vocabulary so that both models fit in memory."""
    return Gemma3TextConfig(
        vocab_size=32768, hidden_size=1152, intermediate_size=6912, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=WINDOW, max_position_embeddings=32768,
    )  # fmt: skip


def make(layers: int, dtype: torch.dtype) -> Pair:
    """Random weights of transformers' own initialisation."""
    torch.manual_seed(0)
    theirs: Any = Gemma3ForCausalLM(config(layers))
    theirs = theirs.to(dtype).eval()
    model = fm.build(theirs.config.to_dict())
    params = checkpoints.from_checkpoint(dict(theirs.state_dict()), model.param_spec(), model.family.names)
    return Pair(theirs, model, params, lowering.prepare(params))


def attention(dtype: torch.dtype, rounds: int) -> list[float]:
    """Seconds that one query takes over 4,096 keys: in a local layer, in a global one."""
    args, kwargs = paged(DECODE_4K, 4, 1, 256, 256, 128, shuffled=False)(Draw(dtype))

    def over(window: int | None) -> Callable[[], Tensor]:
        return lambda: ops.paged_attention(*args, **kwargs, window=window)

    return best(20 * rounds, over(WINDOW), over(None))


def run(name: str, layers: int, quick: bool) -> None:
    """All lines of one dtype."""
    dtype, rounds = DTYPES[name], 3 if quick else 7
    pair = make(layers, dtype)
    count = sum(weight.numel() for weight in pair.linear_weights())
    bandwidth, rate = read_bandwidth(rounds), product_rate(dtype, rounds)
    machine = f"read {bandwidth / 1e9:.1f} GB/s, products {rate / 1e9:.0f} G/s"
    print(f"{name}: {layers} layers, {count / 1e6:.0f} M in linears; {machine}", flush=True)
    for tokens in (512,) if quick else (512, 2048):
        work = 2 * tokens * (count - pair.linear_weights()[-1].numel())
        report(f"{name} prefill {tokens}", prefill(pair, tokens, dtype, rounds), work / rate, "products")
    for rows, context in ((1, 256), (8, 256), (1, LONG)):
        times = decode(pair, rows, dtype, 10 * rounds, context)
        report(f"{name} decode x{rows} at {context}", times, count * dtype.itemsize / bandwidth, "reading weights")
    local, whole = (1e6 * seconds for seconds in attention(dtype, rounds))
    print(f"{name} attention of one query at {LONG}: local {local:.0f} us, global {whole:.0f} us", flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, prompts of 512 tokens only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=6, help="of which every sixth is global")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with torch.no_grad():
        for name in given.dtype or DTYPES:
            run(name, given.layers, given.quick)


if __name__ == "__main__":
    main()
