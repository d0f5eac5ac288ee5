"""Every Ascend kernel, on every small case it takes, through the schemas and shape functions of the real torch_npu."""

from __future__ import annotations

import pytest
import torch

import lowering
from lowering import OPS, Policy
from lowering.npu.features import missing
from lowering.target import ASCEND, named
from tests.cases import CASES
from tests.lowering.npu.agreement import refusal, served

OLDER = ("2.8.0.post5", "2.10.0.post6", "2.14.0")


@pytest.mark.parametrize("target", ASCEND)
def test_the_real_operators_take_every_call_of_every_kernel(target: str) -> None:
    """And so do the recorded schemas of the other versions, but for operators that a version is known to lack."""
    checked, refused = set(), set()
    for case in (case for case in CASES if not case.bench):
        args, kwargs = case.arguments(torch.bfloat16)
        for kernel in served(case.op, named(target)):
            if refusal(kernel, case, named(target), torch.bfloat16):
                continue
            policy = Policy({case.op: kernel.name})
            found = lowering.lower(OPS[case.op], *args, target=target, policy=policy, **kwargs)
            assert [row.kernel for row in found.report.rows] == [kernel.name]
            called = {operator.name for call in found.calls for operator in call.operators}
            assert any(name.startswith(("npu.", "atb.")) for name in called), f"{kernel.name} called {called}"
            checked.add(kernel.name)
            refused |= {(kernel, problem) for problem in found.problems}
    assert len(checked) >= 10
    for kernel, problem in refused:
        (version,) = [version for version in OLDER if f"torch_npu {version} " in problem]
        assert missing(kernel.operators, named(target, torch_npu=version)), problem
