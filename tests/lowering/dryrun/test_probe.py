"""The probe: which operators were seen to run, what is kept of it, and what that changes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowering
from lowering import LoweringError, cache, cases, detect, npu_reference, ops
from lowering import __main__ as commands
from lowering.check import journal, probe
from lowering.check.comparison import Outcome
from lowering.npu import evidence
from lowering.target import TARGETS, named
from tests.cases import CASES

CPU, A5 = torch.device("cpu"), TARGETS["ascend950"]
SWIGLU = ("npu_swiglu",)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))


def outcome(kernel: str, op: str = "linear", **found: Any) -> Outcome:
    return Outcome(op, kernel, "case", "bfloat16", **found)


def test_what_outcomes_say_of_operators() -> None:
    """Seen in any call that holds; failed where a call raised before it returned, or gave wrong values."""
    called = "npu_quantize", "npu_quant_matmul"
    found = probe.result(
        [
            outcome("npu_quant_matmul", failed="no", operators=("npu_dynamic_quant",)),
            outcome("npu_quant_matmul_static", error=2.0, bound=1.0, operators=called),
            outcome("npu_quant_matmul_static", error=0.5, bound=1.0, operators=("npu_quant_matmul",)),
            outcome("npu_rms_norm", "rms_norm", refused="takes another"),
        ]
    )
    assert found.seen == {"npu_quant_matmul"}
    assert dict(found.failed) == {
        "npu_format_cast": "linear, npu_quant_matmul, case, bfloat16: no",
        "npu_quantize": "linear, npu_quant_matmul_static, case, bfloat16: error 2, bound 1",
    }
    rows = {row[0]: row[1:] for row in probe.sheet(found, A5).rows}
    assert rows["npu_quantize"] == ("stated", "failed here") and rows["npu_swiglu"] == ("in use", "not tried")
    assert rows["npu_quant_matmul"] == ("in use", "seen here") and rows.keys() == evidence.OPERATORS.keys()


def test_a_probe_tries_until_each_operator_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the references; what a call before has shown is left out, and what fails is kept with its words."""
    npu_reference.load()
    few = [case for case in CASES if case.op in ("geglu", "swiglu", "write_pages") and not case.bench]
    monkeypatch.setattr(cases, "CASES", few)
    broken = npu_reference.registration.OPERATORS["npu_geglu"]
    monkeypatch.setitem(npu_reference.registration.OPERATORS, "npu_geglu", SimpleNamespace(shapes=broken.shapes, run=1))
    book = journal.Journal(tmp_path / "x.jsonl")
    book.path.touch()
    trials = probe.trials(CPU, TARGETS["ascend910b"])
    assert journal.work(book, CPU, TARGETS["ascend910b"], trials, probing=True) == 0
    found, begun = book.read()
    assert found is not None and begun is None and len(found.outcomes) < len(trials) == found.planned
    tried = [x.op for x in found.outcomes]
    assert tried.count("swiglu") == 1 and tried.count("geglu") == sum(trial.case.op == "geglu" for trial in trials)
    result = probe.result(found.outcomes)
    assert result.seen == {"npu_swiglu", "npu_scatter_pa_kv_cache"}
    assert [name for name, _ in result.failed] == ["npu_geglu"] and "not callable" in result.failed[0][1]


def test_what_is_kept_is_read_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SoC and versions, into the target of the device."""
    utils = SimpleNamespace(get_cann_version=lambda: "9.1.0")
    npu = SimpleNamespace(get_device_name=lambda _: "Ascend950PR_9589", utils=utils)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu, __version__="2.13.0"))
    device = torch.device("privateuseone", 0)
    detect.ascend.cache_clear()
    assert not detect.ascend(device).seen
    result = cache.Probed(frozenset(SWIGLU), (("npu_geglu", "no"),))
    assert cache.keep(result, "Ascend950PR_9589", "2.13.0", "9.1.0").is_file()
    detect.ascend.cache_clear()
    found = detect.ascend(device)
    assert (found.seen, found.failed) == (result.seen, result.failed)
    utils.get_cann_version = lambda: "9.0.0"
    detect.ascend.cache_clear()
    assert not detect.ascend(device).seen and not named("ascend950").seen
    detect.ascend.cache_clear()


def test_what_was_seen_is_chosen_and_what_failed_is_not() -> None:
    """Whatever else speaks for it; `explain` says which."""
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    for evidenced, seen, failed, kernel in (
        ("in use", (), (), "triton_geglu"),
        ("in use", ("npu_geglu",), (), "npu_geglu"),
        ("stated", (), (), "npu_geglu"),
        ("stated", (), (("npu_geglu", "raised: no"),), "triton_geglu"),
    ):
        target = lowering.Target(**vars(A5) | {"seen": frozenset(seen), "failed": failed})
        with lowering.use(target=target, evidence=evidenced):
            report = lowering.explain(ops.geglu, x)
        (row,) = report.rows
        speaks = "seen here" if seen else "stated" if kernel == "npu_geglu" else "emulated"
        assert row.kernel == kernel and row.evidence == speaks
        assert ("npu_geglu failed in this machine's probe: raised: no" in row.reasons()) == bool(failed)


def test_the_command_keeps_what_a_device_showed_and_nothing_of_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"target": "ascend950", "device": "npu:0", "CANN": "9.1.0", "torch_npu": "2.13.0"}

    def supervised(command: list[str], book: journal.Journal, *_: Any) -> int:
        assert "--probe" in command
        book.add(environment=where, planned=9)
        book.add(outcome=vars(outcome("npu_swiglu", "swiglu", error=0.0, bound=1.0, operators=SWIGLU)))
        return 0

    monkeypatch.setattr(commands, "supervise", supervised)
    asked = ["check", "--probe", "--output", str(tmp_path / "x")]
    assert commands.main(asked) == 0 and "a rehearsal: nothing is kept" in capsys.readouterr().err
    where["SoC"] = "Ascend950PR_9589"
    assert commands.main(asked) == 0
    out, err = capsys.readouterr()
    assert "npu_swiglu" in out and "1 of " in out and "kept in" in err and (tmp_path / "x.html").is_file()
    assert cache.probed("Ascend950PR_9589", "2.13.0", "9.1.0") == cache.Probed(frozenset(SWIGLU))
    assert commands.main(["check", "--worker", "--cann", "9.1.0", "--output", str(tmp_path / "y")]) == 2
    assert "--cann 9.1.0 is for --target NAME" in capsys.readouterr().err
    assert commands.main(["check", "--worker", "--probe", "--device", "cpu", "--output", str(tmp_path / "y")]) == 2
    assert "--probe tries operators of Ascend; target is cpu" in capsys.readouterr().err
    with pytest.raises(LoweringError, match="is no version of CANN"):
        named("ascend950", cann="new")
