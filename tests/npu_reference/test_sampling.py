"""Top-k and top-p filters against sets built row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowering.npu_reference import OPERATORS, OperatorError
from tests.cases import Draw

TOP = OPERATORS["npu_top_k_top_p"]


def filtered(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    like = TOP.shapes(logits=logits, p=p, k=k)
    out = TOP.run(logits=logits, p=p, k=k)
    assert (like.shape, like.dtype) == (out.shape, out.dtype)
    return out


def kept(row: list[float], p: float, k: int) -> set[int]:
    """Ids by rising logit: those not below the k-th largest, then all but those whose probabilities add to 1 - p."""
    least = sorted(row)[-k]
    ids = sorted((i for i in range(len(row)) if row[i] >= least), key=lambda i: (row[i], i))
    weights = torch.tensor([row[i] for i in ids]).double().softmax(0).cumsum(0)
    return {i for i, total in zip(ids[:-1], weights, strict=False) if total > 1 - p} | {ids[-1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_filter(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=1)
    logits = draw.normal(6, 41)
    # Away from sums of probabilities that a rounding could tip.
    p, k = torch.tensor([0.31, 0.97, 0.0, 1.0, 0.62, 0.8], dtype=dtype), torch.tensor([3, 41, 7, 5, 1, 12]).int()
    out = filtered(logits, p, k)
    for row in range(6):
        ids = kept(logits[row].tolist(), float(p[row]), int(k[row]))
        assert set(out[row].isfinite().nonzero().flatten().tolist()) == ids
        assert torch.equal(out[row][list(ids)], logits[row][list(ids)])
    assert filtered(logits, k=k).isfinite().sum(1).tolist() == [
        int((row >= row.sort().values[-n]).sum()) for row, n in zip(logits, k.tolist(), strict=True)
    ]


def test_ties_stay() -> None:
    assert filtered(torch.zeros(1, 8), k=torch.tensor([3]).int()).isfinite().all()


def test_a_sum_of_just_one_minus_p_is_dropped() -> None:
    assert filtered(torch.zeros(1, 4), p=torch.tensor([0.5])).isfinite().sum() == 2


def test_limits() -> None:
    logits, p, k = torch.zeros(2, 5), torch.ones(2), torch.tensor([1, 2]).int()
    wrong: dict[str, dict[str, Any]] = {
        "both missing": {"logits": logits, "p": None, "k": None},
        "dtypes differ": {"logits": logits, "p": p.half(), "k": k},
        "k is torch.int64": {"logits": logits, "p": p, "k": k.long()},
        "p is": {"logits": logits, "p": p[:1], "k": k},
        "largest logits to keep": {"logits": logits, "p": p, "k": k + 4},
        r"outside \[0, 1\]": {"logits": logits, "p": p * 2, "k": k},
        "1-dimensional": {"logits": logits[0], "p": p, "k": k},
        "float64": {"logits": logits.double(), "p": None, "k": k},
    }
    for words, arguments in wrong.items():
        with pytest.raises(OperatorError, match=words):
            filtered(**arguments)
