"""The filter's reference against a loop over tokens in float64, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, call, refused

NAME = "npu_top_k_top_p"


def valid(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    draw = Draw(dtype, seed=3)
    return {
        "logits": 4 * draw.normal(4, 60), "p": torch.tensor([0.9, 0.3, 1.0, 0.6], dtype=dtype),
        "k": torch.tensor([60, 5, 1, 20], dtype=torch.int32),
    }  # fmt: skip


@pytest.mark.parametrize("left_out", [None, "p", "k"])
def test_what_stays(left_out: str | None) -> None:
    """The k largest; of their mass, the fewest of the largest that reach p."""
    given: dict[str, Any] = {name: None if name == left_out else x for name, x in valid().items()}
    found = call(NAME, given)
    for row, logits in enumerate(given["logits"].double()):
        k = 60 if given["k"] is None else int(given["k"][row])
        p = 1.0 if given["p"] is None else float(given["p"][row])
        order = logits.argsort(descending=True)[:k]
        mass, stays = logits[order].softmax(0), []
        for place, token in enumerate(order.tolist()):
            if place == 0 or mass[:place].sum() < p:
                stays.append(token)
        assert set(found[row].isfinite().nonzero()[:, 0].tolist()) == set(stays)
        assert torch.equal(found[row][stays], given["logits"][row][stays])
    assert_like(NAME, given)


def test_equal_logits_at_the_threshold_part() -> None:
    """Which is why it runs only where it is asked for by name."""
    found = call(NAME, {"logits": torch.tensor([[1.0, 1.0, 1.0, 0.0]]), "p": torch.tensor([0.4]), "k": None})
    assert found.isfinite().sum() == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"p": None, "k": None}, "both left out"),
        ({"k": torch.tensor([60, 5, 0, 20], dtype=torch.int32)}, "values from 0 to 60; expected 1 to 60"),
        ({"k": torch.tensor([60, 5, 1, 20])}, "k is torch.int64"),
        ({"p": torch.ones(4).half()}, "p is torch.float16"),
        ({"p": torch.ones(3)}, "one a row"),
        ({"logits": torch.zeros(4, 60, dtype=torch.float64)}, "logits is torch.float64"),
    ],
)
def test_limits(changes: dict[str, Any], words: str) -> None:
    refused(NAME, valid() | changes, words)
