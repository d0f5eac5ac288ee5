"""Drafts: cheap models that propose the next few tokens of each row, for the model itself to verify."""

from __future__ import annotations

from ..model import Model
from .mtp import MtpDraft


def draft(model: Model, kind: str) -> MtpDraft:
    """What drafts for `model`: `"mtp"` is the multi-token prediction head that came with its checkpoint.

    Raises `ValueError` for another kind, or a model without such a head.
    """
    if kind != "mtp":
        raise ValueError(f"draft: {kind!r} is not a known draft; give 'mtp'")
    if not getattr(model.config, "mtp_num_hidden_layers", 0):
        raise ValueError(
            "draft: this model has no mtp head (mtp_num_hidden_layers is 0, and no mtp tensors were found)"
        )
    return MtpDraft(model)
