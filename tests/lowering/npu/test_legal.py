"""No call that the host code refuses, of any family, on any machine with any CANN: at published sizes, without values.

Kernels run through the operators' references on tensors without values, so that documentation and host code are both
asked, of the target and its CANN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering import npu_reference
from lowering.target import ASCEND, Target, named
from tests.lowering.npu.published import FAMILIES, PHASES

CANN = ("8.5.0", "9.0.0", "9.1.0")


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """The namespace `npu`, on the CPU."""
    npu_reference.load()


@cache
def made(name: str) -> tuple[fm.Model, Any]:
    """A family and its parameters as shapes."""
    model = fm.build(FAMILIES[name])
    return model, model.param_spec(torch.bfloat16)


def explained(name: str, phase: str, target: Target) -> lowering.Report:
    """The kernels of one forward, each of which has run."""
    (model, spec), (counts, held, keep_steps) = made(name), PHASES[phase]
    state = model.init_state(len(counts), 2048, torch.bfloat16, torch.bfloat16, "meta")
    state = replace(state, ledger=state.ledger.at([held] * len(counts)))
    batch = fm.Batch.from_lists([[0] * count for count in counts], state)
    return lowering.explain(model.forward, spec, state, batch, keep_steps=keep_steps, target=target)


@pytest.mark.plain
@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_is_legal(name: str, target: str) -> None:
    """Whatever evidence is wanted; and the calls are there: every machine runs something fused in every phase."""
    for cann, evidence in (*((cann, "stated") for cann in CANN), (CANN[-1], "in use")):
        with lowering.use(evidence=evidence):
            for phase in PHASES:
                report = explained(name, phase, named(target, cann=cann))
                assert any(row.evidence for row in report.rows), (cann, phase)
