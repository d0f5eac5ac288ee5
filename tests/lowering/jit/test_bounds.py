"""What captured calls and ops remember stays bounded, whatever they are called with."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering import ops
from lowering.jit import jitted
from lowering.jit.capture import MOST_PLACES, Home
from tests.sharding.kinds import whole

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")]


def test_the_capture_that_was_used_the_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures that were seen, of failed calls too, go with the captures that they stand for."""
    monkeypatch.setattr(jitted, "MOST_CAPTURES", 3)
    monkeypatch.setattr(jitted, "MOST_NUMBERS", 5)
    step = lowering.jit(lambda x, times: x * times, backend="fx")
    for size in range(1, 9):
        assert torch.equal(step(torch.ones(size), 2), torch.full((size,), 2.0))
        assert torch.equal(step(torch.ones(1), 2), torch.full((1,), 2.0))
    assert len(step._graphs) == 3 and step.captures == 8
    step(torch.ones(8), 2)
    assert step.captures == 8
    reads = lowering.jit(lambda x: x * x.sum().item(), backend="fx")
    for size in range(1, 12):
        with pytest.raises(lowering.CaptureError):
            reads(torch.ones(size))
    assert len(step._numbers) <= 6 and len(reads._numbers) <= 6
    assert len(step._seen) <= jitted.MOST_COMPARED


@torch.no_grad()
def test_pools_that_a_capture_was_called_over() -> None:
    model, params = whole("gemma3")
    step = lowering.jit(model.forward, donate=("state",), backend="fx")
    batch, held = fm.Batch.from_lists([[1]]), []
    for number in range(3 * MOST_PLACES):
        _, state = step(params, model.init_state(1, 8), batch)
        held.append(state)
        assert step.captures == number + 1
    (capture,) = step._graphs.values()
    assert len(capture.pools) == MOST_PLACES
    step(params, held[-1], batch)
    assert step.captures == 3 * MOST_PLACES


def test_homes_of_tensors_go_with_their_captures() -> None:
    before = dict(Home.keepers)
    homes = [Home(torch.ones(3)) for _ in range(5)]
    assert len(Home.keepers) == len(before) + 5 and homes[0].is_free()
    lent = homes[0].tensor.view(3)
    assert not homes[0].is_free()
    del homes, lent
    assert Home.keepers == before


def test_choices_of_calls_with_ever_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lowering.op"], "MOST_CHOICES", 4)  # `lowering.op` is the decorator
    monkeypatch.setattr(ops.rms_norm, "_choices", {})
    monkeypatch.setattr(ops.rms_norm, "dry_results", {})
    for size in range(1, 10):
        given: Any = torch.ones(size, 8), torch.ones(8)
        assert torch.equal(ops.rms_norm(*given, eps=0.0), given[0])
        lowering.lower(ops.rms_norm, *given, target="cpu", eps=0.0)
        assert len(ops.rms_norm._choices) <= 4 and len(ops.rms_norm.dry_results) <= 4
