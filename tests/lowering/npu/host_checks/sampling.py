"""Calls of the filter's operator."""

from __future__ import annotations

from .calls import Bad, ints, meta

GOOD = {"npu_top_k_top_p": {"logits": meta(3, 90), "p": meta(3), "k": ints(3)}}
BAD = {
    "npu_top_k_top_p": [
        Bad("logits of two axes", {"logits": meta(3, 90, 1)}),
        Bad("p or k", {"p": None, "k": None}),
        Bad("one p and one k a row", {"k": ints(4)}),
    ]
}
