"""Prefill on cached prefixes under latent attention: the kernels of `mla_prefix_attention`, and transformers.

    python -m tests.bench.bench_mla [SHAPE ...]

Prints a line a shape: milliseconds of two passes, of one row at a time, of the absorbed form, and of the attention of
transformers' DeepSeek-V2 on the same work; then the kernel that the rule of order chooses, and its time over the better
of the first two. One process, one thread, its CPU time, float32, the widths of V2-Lite, scattered pages of 128 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from lowering import ops
from tests.bench.timing import best
from tests.cases import Draw, RowCounts, latent_rows
from tests.tolerances import assert_close

MIXED = (101, 870, 876, 874, 869, 864, 904, 863, 837, 768)
KERNELS = ("torch_two_pass", "torch_concat", "torch_absorbed_rows")


@dataclass(frozen=True)
class Shape:
    """New tokens and cached prefix of each row, and the number of heads."""

    name: str
    new: tuple[int, ...]
    past: tuple[int, ...]
    heads: int = 4


def equal(rows: int, new: int, past: int, heads: int = 4) -> Shape:
    """A shape of equal rows."""
    tail = "" if heads == 4 else f", {heads} heads"
    return Shape(f"{rows} x {new} x {past}{tail}", (new,) * rows, (past,) * rows, heads)


SHAPES = (
    *(equal(rows, 100, 768) for rows in (1, 2, 4, 8, 16, 32, 64, 128)),
    *(equal(rows, 256, 2048) for rows in (1, 4, 16, 32)),
    *(equal(rows, 1024, 8192) for rows in (1, 4, 8)),
    equal(16, 100, 768, heads=16),
    Shape("32 x 100 x 768/0", (100,) * 32, (768, 0) * 16),
    Shape("mixed", MIXED, (768, *(0,) * 9)),
)


def by_transformers(shape: Shape, args: tuple[Any, ...], hints: dict[str, Any]) -> Callable[[], Tensor]:
    """Expansion and attention of transformers' module over rows padded to one length, as its model calls them."""
    q, _, pools, up, rows = args
    lengths, table = rows.paged
    module = DeepseekV2Attention(DeepseekV2Config(num_attention_heads=shape.heads, hidden_size=64), 0)
    module.kv_b_proj.weight = torch.nn.Parameter(up, requires_grad=False)
    longest, most = int(lengths.max()), max(shape.new)
    at, held = torch.arange(longest), lengths[:, None, None]
    query_at = held - torch.tensor(shape.new)[:, None, None] + torch.arange(most)[:, None]
    mask = ((at <= query_at) & (at < held))[:, None]
    latents, shared = (
        torch.where((at < lengths[:, None])[:, None, :, None], pages.gather(table)[:, None, :longest], 0)
        for pages in (pools.latent, pools.rope)
    )
    queries = torch.cat((q.nope, q.rope), -1).split(shape.new)
    padded = torch.nn.utils.rnn.pad_sequence(list(queries), batch_first=True).transpose(1, 2)

    def run() -> Tensor:
        k, v = module.expand_kv(latents, shared)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, padded, k, v, mask, scaling=hints["scale"])[0]

    return run


def line(shape: Shape) -> str:
    """Measure one shape, every kernel and transformers in turn."""
    args, hints = latent_rows(RowCounts(shape.name, shape.new, shape.past), shape.heads, 128, 64, 128, 512, 128)(
        Draw(torch.float32)
    )
    kernels = [ops.mla_prefix_attention.kernels[name].run for name in KERNELS]
    runs = [*(lambda run=run: run(*args, **hints) for run in kernels), by_transformers(shape, args, hints)]
    theirs = torch.cat([row[:count] for row, count in zip(runs[-1](), shape.new, strict=True)])
    for run in runs[:-1]:
        assert_close(run(), theirs, length=max(map(sum, zip(shape.new, shape.past, strict=True))))
    work = shape.heads * sum(new * (new + past) for new, past in zip(shape.new, shape.past, strict=True))
    times = best(2 if work > 2**24 else 5, *runs)
    chosen = ops.mla_prefix_attention.explain(*args, **hints).kernel.name
    ratio = times[KERNELS.index(chosen)] / min(times[:2])
    cells = "".join(f"{1e3 * seconds:{width}.1f}" for seconds, width in zip(times, (10, 10, 10, 14), strict=True))
    return f"{shape.name:24}{cells}   {chosen:20}{ratio:5.2f}"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    heads = f"{'two-pass':>10}{'concat':>10}{'absorbed':>10}{'transformers':>14}"
    print(f"{'rows x new x cached, ms':24}{heads}   {'chosen':20}its time / the better of the first two")
    with torch.no_grad():
        for shape in SHAPES:
            if not wanted or shape.name in wanted:
                print(line(shape), flush=True)


if __name__ == "__main__":
    main()
