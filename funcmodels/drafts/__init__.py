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
    if default_draft(model) == "none":
        raise ValueError(
            "draft: this model has no mtp head (its checkpoint holds no mtp tensors); load one that has, or give 'none'"
        )
    return MtpDraft(model)


def default_draft(model: Model) -> str:
    """What drafts for `model` if nobody says: `"mtp"` where it has such a head, else `"none"`."""
    return "mtp" if model.family.mtp is not None and model.config.mtp_num_hidden_layers else "none"
