"""Quantised weights on this CPU: products, decoding and prompts of small models, and loading a sharded checkpoint.

    python -m tests.bench.bench_quant [--quick] [--rounds N]

The other side is the same model in bfloat16, its weights packed; for products also Torch's own dynamic int8 linear
(`torch.ao.nn.quantized.dynamic`, one scale for the whole of x, float32). Prints times and the quotient of ours over
bfloat16's: above 1 is slower. One process, one thread, its CPU time; loading is timed by the clock, in a process of its
own, whose peak of memory is that of the weights' reading.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.ao.nn.quantized import dynamic
from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

import funcmodels as fm
import lowering
import params as checkpoints
from funcmodels.blocks.linear import Linear
from lowering import ops
from params import tree
from params.files import read_config
from tests.bench.timing import best

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 8192, "hidden_size": 1024,
    "num_hidden_layers": 4, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""The widths of Qwen3.5-0.8B, four of its layers."""
MOE: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
"""The same with experts of Qwen3.5-35B-A3B's inner width, an eighth of them."""
DENSE_SCHEMES = ("W8A8_DYNAMIC", "W8A8_MXFP8")
EXPERT_SCHEMES = (*DENSE_SCHEMES, "W4A8_DYNAMIC", "W4A16_MXFP4")
BESIDE_EXPERTS = {"W4A8_DYNAMIC": {"**": "W8A8_DYNAMIC"}, "W4A16_MXFP4": {}}
"""What the other projections get where a scheme is for experts."""
CONTEXT = 64
"""Tokens that each row holds before decoding."""


def prepared(scheme: str | None, weight: Tensor) -> Any:
    """A weight of a scheme, or in bfloat16, in the layout of its kernel."""
    node = Linear(weight) if scheme is None else checkpoints.quantize(Linear(weight), scheme, keep=())
    return lowering.prepare(tree.to(node, dtype=torch.bfloat16) if scheme is None else node).weight


def products(rounds: int) -> None:
    """A line a shape: bfloat16, int8 packed and as loaded, MX, and Torch's dynamic int8."""
    columns = ("bf16", "int8", "as loaded", "MX", "torch int8", "int8 / bf16", "MX / bf16")
    print(f"{'outputs x inputs, rows, us':28}" + "".join(f"{name:>12}" for name in columns))
    for outputs, inputs in ((1024, 1024), (7168, 1024), (1024, 3584), (4096, 4096)):
        weight = torch.randn(outputs, inputs) / inputs**0.5
        plain, int8, mx = (prepared(scheme, weight) for scheme in (None, *DENSE_SCHEMES))
        loaded = checkpoints.quantize(Linear(weight), "W8A8_DYNAMIC", keep=()).weight
        theirs = torch_int8(weight)
        for rows in (1, 8, 64, 512):
            x = torch.randn(rows, inputs).bfloat16()
            wide = x.float()
            runs = [lambda x=x, w=w: ops.linear(x, w) for w in (plain, int8, loaded, mx)]
            times = best(rounds, *runs, lambda wide=wide, theirs=theirs: theirs(wide))
            cells = "".join(f"{1e6 * seconds:12.0f}" for seconds in times)
            ratios = f"{times[1] / times[0]:12.2f}{times[3] / times[0]:12.2f}"
            print(f"{f'{outputs} x {inputs}, {rows}':28}{cells}{ratios}", flush=True)


def torch_int8(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Torch's own linear with int8 weights and activations quantised at each call."""
    made: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = torch.nn.Parameter(weight)
    made.qconfig = per_channel_dynamic_qconfig
    return dynamic.Linear.from_float(made)


def models(rounds: int, settings: dict[str, Any], schemes: Sequence[str]) -> None:
    """A line a scheme: decoding of 1 and 8 rows, eager and captured, and a prompt of 256 tokens."""
    model = fm.build(settings)
    trees = {"bf16": model.init_params(seed=0, dtype=torch.bfloat16)}
    for scheme in schemes:
        words = {"**.experts.*": scheme} | BESIDE_EXPERTS.get(scheme, {"**": scheme})
        trees[scheme] = checkpoints.quantize(trees["bf16"], words)
    trees = {name: lowering.prepare(made) for name, made in trees.items()}
    columns = ("decode 1", "decode 8", "captured 1", "prompt 256")
    print(f"\n{settings['model_type'] + ', ms':28}" + "".join(f"{name:>12}{'/ bf16':>8}" for name in columns))
    sides = [
        [
            decoding(model, made, 1, captured=False), decoding(model, made, 8, captured=False),
            decoding(model, made, 1, captured=True), prompt(model, made),
        ]
        for made in trees.values()
    ]  # fmt: skip
    times = [best(rounds, *runs) for runs in zip(*sides, strict=True)]
    for at, name in enumerate(trees):
        cells = "".join(f"{1e3 * column[at]:12.2f}{column[at] / column[0]:8.2f}" for column in times)
        print(f"{name:28}{cells}", flush=True)


def decoding(model: fm.Model, params: Any, rows: int, *, captured: bool) -> Callable[[], None]:
    """A step that appends one token a row."""
    state = model.init_state(rows, 1024, dtype=torch.bfloat16)
    batch = fm.Batch.from_tokens(torch.randint(0, 8192, (rows * CONTEXT,)), [CONTEXT] * rows, state)
    held = [model.forward(params, state, batch, logits="last")[1]]
    forward = lowering.jit(model.forward, donate=("state",)) if captured else model.forward

    def step() -> None:
        batch = fm.Batch.from_tokens(torch.ones(rows, dtype=torch.int64), [1] * rows, held[0])
        held[0] = forward(params, held[0], batch, logits="last")[1]

    step()
    return step


def prompt(model: fm.Model, params: Any) -> Callable[[], object]:
    """256 tokens from an empty state."""
    ids = torch.randint(0, 8192, (256,))

    def run() -> object:
        state = model.init_state(1, 256, dtype=torch.bfloat16)
        return model.forward(params, state, fm.Batch.from_tokens(ids, [256], state), logits="last")

    return run


def loading() -> None:
    """Save the dense model in shards of 32 MB, in bfloat16 and int8, and load each in a process of its own."""
    model = fm.build(CONFIG)
    params = model.init_params(seed=0, dtype=torch.bfloat16)
    print(f"\n{'loading':28}{'seconds':>12}{'tree, MB':>12}{'peak, MB':>12}{'files':>8}")
    for name in ("bf16", "W8A8_DYNAMIC"):
        made = params if name == "bf16" else checkpoints.quantize(params, name)
        with tempfile.TemporaryDirectory() as where:
            checkpoints.save(made, where, model.param_spec(), model.family.names, CONFIG, max_shard_bytes=32 * 10**6)
            files = len(list(Path(where).glob("*.safetensors")))
            out = subprocess.run(
                [sys.executable, "-m", "tests.bench.bench_quant", "--load", where], check=True, capture_output=True,
                text=True,
            ).stdout  # fmt: skip
        print(f"{name:28}{out.strip()}{files:8}", flush=True)


def load_alone(where: str) -> None:
    """Seconds, bytes of the tree, and by how much loading raised the peak of memory."""
    model = fm.build(read_config(Path(where)))
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    start = time.perf_counter()
    loaded = checkpoints.load(where, model.param_spec(), model.family.names, dtype=torch.bfloat16)
    seconds = time.perf_counter() - start
    print(f"{seconds:12.2f}{tree.num_bytes(loaded) / 1e6:12.1f}{_resident('VmHWM') - before:12.1f}")


def _resident(what: str) -> float:
    """Megabytes of this process in memory: now (VmRSS), or at most since its references were cleared (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[what].split()[0]) * 1024 / 1e6


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="products only")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--load", help="a checkpoint to load and measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if given.load:
            load_alone(given.load)
            return
        products(given.rounds)
        if not given.quick:
            models(given.rounds, CONFIG, DENSE_SCHEMES)
            models(given.rounds, MOE, EXPERT_SCHEMES)
            loading()


if __name__ == "__main__":
    main()
