"""The filter of a law over tokens."""

from __future__ import annotations

from .check import ONN, HostCheck, enter

FOLDER = "index/apply_top_k_top_p op_api"

enter(
    "npu_top_k_top_p",
    HostCheck("logits of two axes", lambda c: c.logits.ndim == 2, f"{ONN} e5c3fa93 {FOLDER}"),
    HostCheck("p or k", lambda c: c.p is not None or c.k is not None, f"{ONN} e5c3fa93 {FOLDER}"),
    HostCheck(
        "one p and one k a row",
        lambda c: all(x is None or x.shape == c.logits.shape[:1] for x in (c.p, c.k)),
        f"{ONN} e5c3fa93 {FOLDER}",
    ),
)
