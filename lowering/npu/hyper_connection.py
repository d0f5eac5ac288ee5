"""Hyper-connections on Ascend: streams take a sublayer's output back through npu_mhc_post; the rest stays in Torch.

npu_mhc_post adds an output to streams that a doubly stochastic matrix, h_res, has mixed. With the identity as that
matrix streams stay as they are: `hyper_inject`, weights in float32 among them. Released CANN demands the matrix (its
development branch does not on Ascend 950), and its few numbers a token are little beside the streams. What else stands
in the place of a residual stream is here too, and n-gram embeddings.
"""

from __future__ import annotations

import torch

from ..ops.attention_residual import attention_residual
from ..ops.hyper_connection import hyper_inject, hyper_mix
from ..ops.ngram import ngram_gate, ngram_rows, table_rows
from ..target import ASCEND
from .features import npu
from .kernel import HALVES, empty, fused, machine, wrong_dtype

POST = "npu_mhc_post"
STREAMS = (4, 6, 8)
"""Counts of streams that the operator's documentation names."""
_OLDER = ("ascend910b", "ascend910_93")


def _refuse_inject(x, y, weights) -> str | None:
    older = machine(x).name in _OLDER
    if x.shape[1] not in (STREAMS[:1] if older else STREAMS):
        return f"takes {'4' if older else '4, 6 or 8'} streams; this call has {x.shape[1]}"
    if older and (x.shape[2] % 128 or x.shape[2] >= 100_000):
        return f"takes widths in multiples of 128 below 100000; this call has {x.shape[2]}"
    return wrong_dtype(HALVES, x=x, y=y) or wrong_dtype((torch.float32,), weights=weights) or empty(x=x)


@fused(hyper_inject, POST, POST, refuse=_refuse_inject)
def _injected(x, y, weights):
    # Streams begin as views of one embedding; the documentation takes views, but says nothing of steps of zero.
    as_they_are = torch.eye(x.shape[1], device=x.device).repeat(x.shape[0], 1, 1)
    return npu.npu_mhc_post(x.contiguous(), as_they_are, y.contiguous(), weights.contiguous())


hyper_mix.without(_OLDER, "npu_mhc_pre runs on Ascend 950 alone")
hyper_mix.without(
    ("ascend950",), "npu_mhc_pre mixes streams by a matrix made of one projection; ours are gated channel by channel"
)
attention_residual.without(ASCEND, "no fused operator weighs rows by scores of their own norms")
ngram_rows.without(ASCEND, "no fused operator hashes tokens with 64-bit multipliers")
table_rows.without(ASCEND, "a look-up is one gather of the device; no fused operator replaces it")
ngram_gate.without(ASCEND, "no fused operator takes the signed root of a score")
