"""Decoding with CUDA graphs: equal to plain calls, and how fast against transformers and the memory's bandwidth.

    python -m tests.bench.bench_cuda [--rows 4] [--steps 100] [--layers 24] [--hidden 2048]

A Qwen3.5 of this size with random weights in bfloat16. A step reads every weight once, so the time that the memory
takes to read them, at the bandwidth that a copy reaches, is a floor; the table gives each side as a share of it. Ends
with a sentence and status 1 where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

import funcmodels as fm
import lowering
import params as checkpoints
from params import tree
from tests.lowering.jit.twins import plain_kernels
from tests.tiny import SIZES

PROMPT = 32
COPIED = 2**30
"""Bytes of the tensor whose copy measures the bandwidth."""

logging.set_verbosity_error()


def seconds(step: Callable[[], object], count: int, rounds: int = 3) -> float:
    """Of one step: the fastest round of `count`, by the device's own clock."""
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / count)
    return min(found)


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * COPIED / seconds(lambda: target.copy_(source), 20)


def models(layers: int, hidden: int) -> tuple[Any, fm.Model, Any]:
    """transformers' model, ours, and our parameters with the same values, on the GPU."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 128}
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": 2, "linear_num_value_heads": hidden // 128}
    linear = {"linear_num_key_heads": hidden // 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    rope = {"rope_parameters": {**SIZES["rope_parameters"], "mrope_section": [11, 11, 10]}}
    torch.manual_seed(0)
    fields: dict[str, Any] = SIZES | sizes | heads | linear | rope | {"vocab_size": 32000}
    theirs: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    theirs = theirs.to("cuda", torch.bfloat16).eval()
    model = fm.build(theirs.config.to_dict())
    weights = dict(theirs.state_dict())
    return theirs, model, checkpoints.from_checkpoint(weights, model.param_spec(), model.family.names)


def check(model: fm.Model, params: Any, ids: torch.Tensor) -> None:
    """Say whether a prompt, tokens and a window that is partly dropped are the same, captured and called."""
    rows = ids.shape[0]
    step = lowering.jit(model.forward, donate=("state",))
    commit = lowering.jit(fm.commit, donate=("state",))
    mine, right = (_begun(model, params, rows, 8) for _ in range(2))
    worst = 0.0
    for count in (8, 1, 1, 4, 1):
        kwargs: dict[str, Any] = {"keep_steps": count == 4}
        batch = fm.Batch.from_tokens(ids[:, :count].flatten(), [count] * rows, mine)
        out, mine = step(params, mine, batch, **kwargs)
        with plain_kernels(batch):
            expected, right = model.forward(params, right, batch, **kwargs)
        worst = max(worst, float((out.logits - expected.logits).abs().max()))
        if count == 4:
            mine, right = commit(mine, [2] * rows), fm.commit(right, [2] * rows)
    print(f"captured against plain: largest difference of logits {worst:g} ({step.captures} captures)")
    if worst > 0.1:
        sys.exit("bench_cuda: captured and plain calls differ; the times below would mean nothing")


def _begun(model: fm.Model, params: Any, rows: int, room: int) -> fm.State:
    weight = params.embed.weight
    return model.init_state(rows, PROMPT + room, weight.dtype, torch.float32, weight.device, page_size=32)


def ours(forward: Callable[..., Any], model: fm.Model, params: Any, ids: torch.Tensor, room: int) -> Callable[[], None]:
    """One step of our decoding, with one way to run a forward."""
    rows = ids.shape[0]
    state = _begun(model, params, rows, room)
    out, state = model.forward(
        params, state, fm.Batch.from_tokens(ids.flatten(), [PROMPT] * rows, state), logits="last"
    )
    token = out.logits.argmax(-1)

    def step() -> None:
        nonlocal state, token
        out, state = forward(params, state, fm.Batch.from_tokens(token, [1] * rows, state), logits="last")
        token = out.logits.argmax(-1)

    return step


def transformers(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """One step of the decoding of transformers."""
    cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache
    token = ids[:, -1:]

    def step() -> None:
        nonlocal token
        token = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return step


@torch.no_grad()
def main() -> None:
    """Check, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_cuda: Torch sees no CUDA GPU here, so nothing was captured, checked or measured")
    theirs, model, params = models(args.layers, args.hidden)
    ids = torch.randint(0, model.config.vocab_size, (args.rows, PROMPT), device="cuda")
    check(model, params, ids)
    room = 4 * args.steps + 8
    graphs = lowering.jit(model.forward, donate=("state",))
    sides = {
        "transformers": transformers(theirs, ids),
        "plain": ours(model.forward, model, params, ids, room),
        "graphs": ours(graphs, model, params, ids, room),
    }
    weights = tree.num_bytes(params)
    floor = weights / bandwidth()
    print(f"{args.rows} rows, {tree.size(weights)} of weights, read in {1e3 * floor:.3f} ms")
    for name, step in sides.items():
        for _ in range(3):
            step()
        each = seconds(step, args.steps)
        rate = f"{args.rows / each:8.0f} tokens a second, {floor / each:4.0%} of the bandwidth"
        print(f"  {name:<13}{1e3 * each:8.3f} ms a step, {rate}")


if __name__ == "__main__":
    main()
