"""Hyper-connections and n-gram embeddings: why they stay in Torch on Ascend."""

from __future__ import annotations

from ..ops.hyper_connection import hyper_inject, hyper_mix
from ..ops.ngram import ngram_gate, ngram_rows, table_rows
from ..target import ASCEND

_OLDER = ("ascend910b", "ascend910_93")

hyper_mix.without(_OLDER, "npu_mhc_pre runs on Ascend 950 alone")
hyper_inject.without(_OLDER, "npu_mhc_post runs on Ascend 950 alone")
hyper_mix.without(
    ("ascend950",), "npu_mhc_pre mixes streams by a matrix made of one projection; ours are gated channel by channel"
)
hyper_inject.without(
    ("ascend950",), "npu_mhc_post does this without h_res, from torch_npu 2.13 on alone; no kernel calls it so far"
)
ngram_rows.without(ASCEND, "no fused operator hashes tokens with 64-bit multipliers")
table_rows.without(ASCEND, "a look-up is one gather of the device; no fused operator replaces it")
ngram_gate.without(ASCEND, "no fused operator takes the signed root of a score")
