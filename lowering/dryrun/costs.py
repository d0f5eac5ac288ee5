"""What `npu` operators cost where that is not the whole of their tensors, and the FLOPs of those that multiply."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ..explain.costs import ATEN, Arguments, Formulas, tensor_bytes


def _rows(a: Arguments) -> Iterator[tuple[int, int]]:
    """Queries and keys of each row of a fused attention call."""
    query, keys = a["actual_seq_qlen"], a["actual_seq_kvlen"]
    if a["input_layout"].startswith(("TND", "NTD")):
        query = [after - before for before, after in pairwise([0, *query])]
        if a["block_table"] is None:
            keys = [after - before for before, after in pairwise([0, *keys])]
    axes = {"BNSD": 2, "BSND": 1, "BSH": 1}
    at = axes.get(a["input_layout"].split("_")[0], 1)
    batch = a["query"].shape[0]
    query = [a["query"].shape[at]] * batch if query is None else query
    keys = [a["key"].shape[at]] * batch if keys is None else keys
    return zip(query, keys, strict=True)


def _attention_flops(a: Arguments, out: Any) -> int:
    """Scores and weighted values of the pairs that the mask keeps."""
    pairs = sum(_kept(a, q, k) for q, k in _rows(a))
    dim = a["query"].shape[-1] if a["input_layout"] != "BSH" else a["query"].shape[-1] // a["num_query_heads"]
    v_dim = out[0].shape[-1] if a["input_layout"] != "BSH" else out[0].shape[-1] // a["num_query_heads"]
    dim += 0 if a.get("query_rope") is None else a["query_rope"].shape[-1]
    return 2 * pairs * a["num_query_heads"] * (dim + v_dim)


def _kept(a: Arguments, queries: int, keys: int) -> int:
    """Pairs of a row that its mask keeps. What a mask tensor of modes 0 and 1 keeps is not known: all of them."""
    if a["sparse_mode"] in (0, 1):
        return queries * keys
    band = a["sparse_mode"] == 4
    first = 0 if a["sparse_mode"] == 2 else keys - queries
    before, after = (a["pre_tokens"], a["next_tokens"]) if band else (keys + queries, 0)
    at = range(first, first + queries)
    return sum(max(0, min(keys, place + after + 1) - max(0, place - before)) for place in at)


def _attention_bytes(a: Arguments, out: Any) -> int:
    """Of pages, those tokens that a row holds."""
    if a["block_table"] is None:
        return tensor_bytes((dict(a), out))
    tokens = a["key"].shape[0] * a["block_size"]
    held = sum(keys for _, keys in _rows(a))
    # With rope keys apart the pages hold latents, keys and values at once, which are read once.
    rope = a.get("key_rope")
    pools = tensor_bytes((a["key"], a["value"] if rope is None else rope))
    rest = {**a, "key": None, "value": None, "key_rope": None}
    return tensor_bytes((rest, out)) + pools * held // tokens


def _grouped_flops(a: Arguments, out: Any) -> int:
    return sum(2 * math.prod(x.shape) * y.shape[-1] for x, y in zip(a["x"], out, strict=True))


def _grouped_bytes(a: Arguments, out: Any) -> int:
    """Of the experts' weights, as many as there are rows at most."""
    rows, experts = a["x"][0].shape[0], a["weight"][0].shape[0]
    weights = tensor_bytes(a["weight"])
    return tensor_bytes((dict(a), out)) - weights + weights * min(rows, experts) // experts


def _quantized_flops(a: Arguments, out: Any) -> int:
    """Each product of integers, or of float8, is one operation, as its sum is."""
    return 2 * math.prod(a["x1"].shape) * out.shape[-1]


def _swiglu_flops(a: Arguments, out: Any) -> int:
    """The product alone: twice as many outputs as the SwiGLU leaves."""
    return 2 * math.prod(a["x"].shape) * 2 * out[0].shape[-1]


def _swiglu_bytes(a: Arguments, out: Any) -> int:
    return _grouped_bytes({**a, "x": [a["x"]]}, out)


def _delta_flops(a: Arguments, out: Any) -> int:
    """Prediction, correction and read-out of every token and value head: three products of the state's size."""
    tokens, heads, v_dim = a["value"].shape
    return 6 * tokens * heads * v_dim * a["key"].shape[-1]


def _scattered(a: Arguments, out: Any) -> int:
    return 2 * tensor_bytes((a["key"], a["value"])) + tensor_bytes(a["slot_mapping"])


def _normed_and_cached(a: Arguments, out: Any) -> int:
    """The caches are written at the tokens' slots only."""
    return tensor_bytes(({**a, "k_cache": None, "ckv_cache": None}, out)) + tensor_bytes(out)


def _indexer_flops(a: Arguments, out: Any) -> int:
    """Scores of all keys that the pages of a request have room for: how many it has is known on the device alone."""
    return 2 * math.prod(a["query"].shape) * a["block_table"].shape[1] * a["key"].shape[1]


_DELTA = (
    "npu::npu_recurrent_gated_delta_rule",
    "npu::npu_recurrent_gated_delta_rule_functional",
    "npu::npu_chunk_gated_delta_rule",
)

NPU = Formulas(
    flops={
        **ATEN.flops,
        "npu::npu_fused_infer_attention_score_v2": _attention_flops,
        "npu::npu_grouped_matmul": _grouped_flops,
        "npu::npu_grouped_matmul_swiglu_quant_v2": _swiglu_flops,
        "npu::npu_lightning_indexer": _indexer_flops,
        "npu::npu_quant_matmul": _quantized_flops,
        **dict.fromkeys(_DELTA, _delta_flops),
    },
    bytes={
        **ATEN.bytes,
        "npu::npu_fused_infer_attention_score_v2": _attention_bytes,
        "npu::npu_grouped_matmul": _grouped_bytes,
        "npu::npu_grouped_matmul_swiglu_quant_v2": _swiglu_bytes,
        "npu::npu_scatter_pa_kv_cache": _scattered,
        "npu::npu_kv_rmsnorm_rope_cache_v2": _normed_and_cached,
    },
)
