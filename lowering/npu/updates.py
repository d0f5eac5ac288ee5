"""Which operators a captured graph of an Ascend can be given new host lists for, and under which keys.

Any other operator keeps the lists it was captured with. The keys are names of arguments; an update whose key an
operator does not consume, or that was not passed at capture, is dropped without a word.
"""

from __future__ import annotations

UPDATED: dict[str, tuple[str, ...]] = {
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""Operators of torch_npu's handler registry that kernels may call with host lists, and the keys of these.

Its other entries (attention for training, the paged attention of another library) take lengths by position, or by
tensor; a kernel that calls one adds it here."""
