"""The host code's checks: each refuses what it says, alone, in the versions and on the machines that it is of."""

from __future__ import annotations

import re

import pytest

from lowering.npu import host_checks
from lowering.npu.evidence import OPERATORS
from lowering.target import ASCEND, named
from tests.lowering.npu.host_checks import (
    attention,
    cache,
    delta,
    hyper_connection,
    mla,
    mlp,
    moe,
    norm,
    quant,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from tests.lowering.npu.host_checks.calls import Bad, completed

FAMILIES = (attention, cache, delta, hyper_connection, mla, mlp, moe, norm, quant, rotary, sampling, short_conv, sparse)
GOOD = {operator: arguments for family in FAMILIES for operator, arguments in family.GOOD.items()}
BAD = [(operator, bad) for family in FAMILIES for operator, bads in family.BAD.items() for bad in bads]
CANN = ("8.5.0", "9.0.0", "9.1.0", "master")


@pytest.mark.parametrize("operator", GOOD)
def test_a_legal_call_is_taken_wherever_the_operator_is_built(operator: str) -> None:
    """In every CANN from the first that has it for the target."""
    for target, first in OPERATORS[operator].stated.items():
        machines = (named(target, cann=cann) for cann in CANN)
        for machine in (one for one in machines if one.has_cann(first)):
            assert host_checks.refused(operator, completed(operator, GOOD[operator]), machine) is None


@pytest.mark.parametrize(("operator", "bad"), BAD, ids=lambda value: getattr(value, "takes", value))
def test_a_bad_call_is_refused_by_one_check_alone(operator: str, bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what it takes and where that was read; without it the call passes."""
    machine = named(bad.target, cann=bad.cann)
    arguments = completed(operator, {**GOOD[operator], **bad.changes})
    said = host_checks.refused(operator, arguments, machine)
    assert said is not None and bad.takes in said and re.search(r"\((op-plugin|ops-transformer|ops-nn) .+\)$", said)
    rest = tuple(check for check in host_checks.CHECKS[operator] if bad.takes not in check.takes)
    monkeypatch.setitem(host_checks.CHECKS, operator, rest)
    assert host_checks.refused(operator, arguments, machine) is None


def test_every_check_has_a_bad_call() -> None:
    """And every operator that has checks a legal one."""
    assert host_checks.CHECKS.keys() == GOOD.keys()
    for operator, checks in host_checks.CHECKS.items():
        for check in checks:
            assert any(name == operator and bad.takes in check.takes for name, bad in BAD), (operator, check.takes)
            assert set(check.targets) <= set(ASCEND)
