"""Prefill of Kimi delta attention: the delta rule in chunks and token by token, and transformers' on the same work.

    python -m tests.bench.bench_kda [TOKENS ...]

Prints a line for each number of tokens: milliseconds of the chunked kernel, of the reference, and of transformers' rule
in chunks of Torch, all from keys and queries before their norm; then how many times as fast the kernel is as both; and
the same for a whole layer, projections and all. One process, one thread, its CPU time, float32, 8 heads of 128, a
layer of 1,024 channels, gates of the lower-bounded form at any depth from 0 to -5.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearDeltaAttention,
    chunk_kimi_delta_attention,
)

import funcmodels as fm
import lowering
from funcmodels.attention.kimi_delta import KimiDelta, kimi_delta
from funcmodels.state.step import begin
from lowering import ops
from params import from_checkpoint
from params.names.kimi_linear import NAMES
from tests.bench.timing import best
from tests.cases import Draw, RowCounts, delta
from tests.tolerances import assert_close

HEADS, DIM, HIDDEN = 8, 128, 1024
TOKENS = (64, 128, 512, 1024, 2048)


def rule(tokens: int) -> list[float]:
    """Seconds of the kernel, the reference and transformers for the delta rule alone."""
    rows = RowCounts("prompt", (tokens,), (0,))
    args, hints = delta(rows, HEADS, HEADS, DIM, DIM, state=True, keep_steps=False, channels=True)(Draw(torch.float32))
    q, k, v, decay, beta, state, start = args
    q, k, decay = 3 * q, 2 * k, 2.5 * decay

    def ours(name: str) -> tuple[Tensor, Tensor]:
        with lowering.use(gated_delta_rule=name):
            unit = ops.l2_norm(q, scale=DIM**-0.5), ops.l2_norm(k)
            return ops.gated_delta_rule(*unit, v, decay, beta, state, start, **hints)[:2]

    def theirs() -> Any:
        return chunk_kimi_delta_attention(
            *(x[None] for x in (q, k, v)), g=decay[None], beta=beta[None], initial_state=state[:1].mT,
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    out, after = theirs()
    for name in ("torch_chunked_channels", "torch"):
        found, last = ours(name)
        reason = "both round every sum, and transformers' exponents are differences of sums"
        assert_close((found, last[:1]), (out[0], after.mT), length=tokens, looser=5, reason=reason)
    runs = (lambda: ours("torch_chunked_channels"), lambda: ours("torch"), theirs)
    return best(3 if tokens <= 512 else 2, *runs)


def layer(tokens: int) -> list[float]:
    """Seconds of a layer of ours and of transformers'."""
    sizes: dict[str, Any] = {"linear_num_heads": HEADS, "linear_head_dim": DIM, "hidden_size": HIDDEN}
    theirs = KimiLinearDeltaAttention(KimiLinearConfig(**sizes, num_hidden_layers=1), 0).requires_grad_(False)
    draw = Draw(torch.float32)
    for parameter in theirs.parameters():
        parameter.copy_(draw.normal(*parameter.shape) * (0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    named = {f"model.layers.0.self_attn.{name}": x for name, x in theirs.state_dict().items()}
    spec = {"layers": [{"attn": KimiDelta.spec(HIDDEN, HEADS, DIM, 4)}]}
    params = from_checkpoint(named, spec, NAMES)["layers"][0]["attn"]
    step = begin(None, fm.Batch.from_lists([[0] * tokens]), False)
    x = draw.normal(tokens, HIDDEN)

    def ours() -> Tensor:
        return kimi_delta(params, x, None, step, eps=1e-5)[0]

    assert_close(ours(), theirs(x[None])[0], length=HIDDEN, looser=5, reason="three projections and a recurrence")
    return best(3 if tokens <= 512 else 2, ours, lambda: theirs(x[None]))


def line(tokens: int) -> str:
    """Measure one number of tokens."""
    kernel, reference, theirs = (1e3 * seconds for seconds in rule(tokens))
    ours, other = (1e3 * seconds for seconds in layer(tokens))
    return (
        f"{tokens:6}{kernel:10.1f}{reference:11.1f}{theirs:14.1f}{reference / kernel:11.1f}{theirs / kernel:14.1f}"
        f"{ours:14.1f}{other:14.1f}{other / ours:14.1f}"
    )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'':6}{'delta rule, ms':>35}{'times as fast as':>25}{'layer, ms':>28}{'times as fast':>14}")
    print(f"{'tokens':6}{'chunked':>10}{'reference':>11}{'transformers':>14}{'reference':>11}{'transformers':>14}"
          f"{'ours':>14}{'transformers':>14}{'as theirs':>14}")  # fmt: skip
    with torch.no_grad():
        for tokens in map(int, sys.argv[1:] or TOKENS):
            print(line(tokens), flush=True)


if __name__ == "__main__":
    main()
