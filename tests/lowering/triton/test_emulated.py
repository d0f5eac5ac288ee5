"""What is called emulated has run: the smallest case of each op on each machine, and faults of a program stop it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lowering
from lowering import Compiled, LoweringError
from lowering.ascend_compiler.emulator import EmulationError, Unknown
from lowering.op import OPS
from lowering.target import ASCEND, TARGETS
from lowering.triton import emulated as here
from lowering.triton import kernels, launch

pytestmark = pytest.mark.plain  # programs have no axes to check
ANGLES = ("rotary_angles", "mrope_angles", "yarn_angles")
OURS = [op for op in OPS if f"triton_{op}" in OPS[op].kernels]


def test_every_op_is_emulated_on_every_machine() -> None:
    """On record, and here; but for products of Ascend 950, and tables of its sines, whose calls are not known."""
    assert OURS
    for target in ASCEND:
        only_compiled = {op for op in OURS if kernels.evidence(op, TARGETS[target]) != "emulated"}
        assert only_compiled == ({"sparse_attention", *ANGLES} if target == "ascend950" else set())
        assert here.emulated("swiglu", TARGETS[target])
    assert not here.emulated("commit of states", TARGETS["ascend910b"])


def test_a_program_that_is_not_known_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "emulate", _refused)
    here.emulated.cache_clear()
    assert not here.emulated("swiglu", TARGETS["ascend950"])
    here.emulated.cache_clear()


def test_a_kernel_that_is_not_on_record_yet_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one is: what is recorded of it says on which machines it is offered. Asked for, it says that."""
    op, name = OPS["swiglu"], "triton_swiglu"
    monkeypatch.setitem(op.kernels, name, replace(op.kernels[name], targets=()))
    here.emulated.cache_clear()
    assert here.emulated("swiglu", TARGETS["ascend910b"])
    with lowering.use(target="ascend910b", swiglu=name), pytest.raises(LoweringError, match="that it is on record for"):
        op(torch.randn(2, 6))


def _refused(*_: Any) -> None:
    raise Unknown("line 1: the operation none is not known")


READY = "hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>"


@pytest.mark.parametrize(
    ("before", "after", "error", "message"),
    [
        ("@vexp_1d_float(", "@vabs_1d_float(", LoweringError, r"swiglu\[.*\]: the emulated program gives"),
        (READY, READY.replace("PIPE_V", "PIPE_S"), EmulationError, "waits for flag"),
    ],
    ids=["numbers", "flags"],
)
def test_a_faulty_program_is_not_recorded(
    before: str, after: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = here.compile_for

    def faulty(*args: Any) -> Any:
        outcome = compiled(*args)
        assert isinstance(outcome, Compiled) and before in outcome.program
        return replace(outcome, program=outcome.program.replace(before, after))

    monkeypatch.setattr(here, "compile_for", faulty)
    here.emulated.cache_clear()
    with pytest.raises(error, match=message):
        here.emulated("swiglu", TARGETS["ascend910b"])
    assert launch.RUNNER is launch.on_device
