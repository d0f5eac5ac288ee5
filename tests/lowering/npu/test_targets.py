"""Ascend targets: found from the names that drivers give, named with versions, and what each is known to have."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowering
from lowering import OPS, TARGETS, LoweringError, Policy, detect, ops
from lowering.detect import of_device
from lowering.npu import features
from lowering.npu.evidence import OPERATORS
from lowering.policy import EVIDENCE
from lowering.target import ASCEND, named, release
from tests.cases import CASES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("soc", "target"),
    [
        ("Ascend910B1", "ascend910b"), ("Ascend910B4-1", "ascend910b"), ("Ascend910_9391", "ascend910_93"),
        ("Ascend910_9362", "ascend910_93"), ("Ascend950PR_9589", "ascend950"), ("Ascend910_9599", "ascend950"),
        ("Ascend310P3", "ascend310p"),
    ],
)  # fmt: skip
def test_a_soc_name_has_one_target(soc: str, target: str) -> None:
    """No two patterns meet."""
    assert detect.of_soc(soc) is TARGETS[target]
    assert [t.name for t in TARGETS.values() if t.soc and re.match(t.soc, soc)] == [target]


def test_an_unknown_soc_is_an_error_that_lists_the_known() -> None:
    """The first Ascend 910 among them: it is none of the three."""
    for soc in ("Ascend910A", "Ascend910ProB", "Ascend310"):
        with pytest.raises(LoweringError, match=f"no target covers the SoC '{soc}'; known are ascend910b"):
            detect.of_soc(soc)


def machine(monkeypatch: pytest.MonkeyPatch, soc: str | Exception, version: str = "2.10.0", cann: str = "9.0") -> None:
    """A machine whose driver gives this SoC name, or fails."""

    def name(_: Any) -> str:
        if isinstance(soc, Exception):
            raise soc
        return soc

    npu = SimpleNamespace(get_device_name=name, utils=SimpleNamespace(get_cann_version=lambda: cann))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu, __version__=version))
    detect.ascend.cache_clear()


def test_a_device_is_detected_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """SoC, torch_npu and CANN."""
    npu = torch.device("privateuseone", 0)
    machine(monkeypatch, "Ascend910_9391", "2.10.0.post6")
    found = detect.ascend(npu)
    assert (found.name, found.torch_npu, found.cann) == ("ascend910_93", "2.10.0.post6", "9.0")
    machine(monkeypatch, "Ascend950PR_9589", cann="")
    assert (detect.ascend(npu).name, detect.ascend(npu).cann) == ("ascend950", None)
    machine(monkeypatch, "Ascend310P3")
    with pytest.raises(LoweringError, match="'ascend310p' is refused: no operator has been checked"):
        detect.ascend(npu)
    machine(monkeypatch, RuntimeError("function aclrtGetSocName not found"))
    with pytest.raises(
        LoweringError, match=r"does not say what it is \(function aclrtGetSocName not found\); name the"
    ):
        detect.ascend(npu)
    detect.ascend.cache_clear()


@dataclass(frozen=True)
class Elsewhere:
    """What a device of type npu says of itself; one cannot be made without torch_npu."""

    type: str = "npu"


@pytest.mark.plain
def test_tensors_on_an_npu_ask_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """`of_device` goes by the device's type alone."""
    machine(monkeypatch, "Ascend910B2")
    there: Any = Elsewhere()
    assert of_device(there).name == "ascend910b"
    detect.ascend.cache_clear()
    monkeypatch.delitem(sys.modules, "torch_npu")
    with pytest.raises(LoweringError, match="torch_npu is not loaded; import it, or name a target"):
        of_device(there)


def test_a_named_target_takes_a_version() -> None:
    """On machines that have torch_npu; others say so."""
    old = named("ascend950", torch_npu="2.10.0")
    assert old.torch_npu == "2.10.0" and old.name == "ascend950" and TARGETS["ascend950"].torch_npu == "2.13.0"
    with pytest.raises(LoweringError, match=r"target 'cpu' has no torch_npu, found torch_npu='2.10.0'; leave it out"):
        named("cpu", torch_npu="2.10.0")
    with pytest.raises(LoweringError, match="'ascend310p' is refused"):
        named("ascend310p", torch_npu="2.10.0")
    with lowering.use(target=old), lowering.record() as report:
        ops.embedding(torch.tensor([1]), torch.zeros(3, 4))
    assert report.rows[0].target.name == "ascend950"


def test_ascend_targets_are_told_apart() -> None:
    """By SoC and on-chip memory; each knows the torch_npu it is taken to have."""
    assert ASCEND == ("ascend910b", "ascend910_93", "ascend950")
    assert [TARGETS[name].unified_buffer for name in ASCEND] == [192 * 1024, 192 * 1024, 248 * 1024]
    assert all(TARGETS[name].soc and TARGETS[name].torch_npu in features.recorded() for name in ASCEND)


def test_evidence_covers_every_operator_and_every_kernel() -> None:
    """A kernel serves a target only if somebody says something for each of its operators there."""
    assert features.ARGUMENTS.keys() == OPERATORS.keys()
    for name, row in OPERATORS.items():
        # The repositories whose tables were read do not hold the cast of layouts.
        told = set[str]() if name == "npu_format_cast" else {*row.documented, *row.in_use}
        assert told <= row.stated.keys() <= set(ASCEND) and (told or not row.stated), name
        assert bool(row.in_use) == bool(row.engines) and all(map(release, row.stated.values())), name
    for op in OPS.values():
        for kernel in op.kernels.values():
            for operator in kernel.operators:
                assert set(kernel.targets) <= set(OPERATORS[operator].targets), (kernel.name, operator)


@pytest.mark.parametrize("wanted", EVIDENCE)
def test_a_kernel_is_chosen_on_950_by_evidence_that_is_wanted(wanted: str) -> None:
    """Or stronger, for each operator, in every case."""
    chosen = set()
    for case, dtype in product(CASES, (torch.float32, torch.bfloat16)):
        args, kwargs = case.arguments(dtype)
        with lowering.use(Policy(evidence=wanted)):
            chosen |= {*OPS[case.op].explain(*args, target="ascend950", **kwargs).kernel.operators}
    found = {OPERATORS[name].of(TARGETS["ascend950"]) for name in chosen}
    assert found == set(EVIDENCE[: EVIDENCE.index(wanted) + 1])


def test_recorded_schemas_have_what_we_pass() -> None:
    """In every recorded version, but for an operator and an argument that the oldest does not have."""
    absent = {
        (version, operator)
        for version in features.recorded()
        for operator in features.ARGUMENTS
        if features.missing((operator,), named("ascend910b", torch_npu=version))
    }
    assert absent == {
        ("2.8.0.post5", "npu_chunk_gated_delta_rule"),
        ("2.8.0.post5", "npu_fused_causal_conv1d"),
    }


def test_schemas_are_recorded_from_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators we call, oldest version first; a dump that lacks one, or holds a damaged schema, is refused."""
    known = features.recorded()
    other, library = {"npu_other": "npu_other(Tensor x) -> Tensor"}, "atb."
    plain = {v: {k: x for k, x in known[v].items() if not k.startswith(library)} | other for v in reversed(known)}
    atb = {v: {k[4:]: x for k, x in known[v].items() if k.startswith(library)} | other for v in known}
    dump: dict[str, Any] = {"torch_npu": plain, "atb": atb}
    monkeypatch.setattr(features, "RECORDED", tmp_path / "schemas.json")
    made = runpy.run_path(str(ROOT / "docs" / "record_npu_schemas.py"))
    (tmp_path / "dump.json").write_text(json.dumps(dump))
    made["main"](str(tmp_path / "dump.json"))
    written = json.loads((tmp_path / "schemas.json").read_text())
    assert written == known and list(written) == list(known)
    with pytest.raises(ValueError, match=r"no version in the dump has atb\.npu_ring_mla, npu_add_rms_norm, "):
        made["kept"]({"2.13.0": {}})
    dump["torch_npu"]["2.13.0"]["npu_swiglu"] = "npu_swiglu(Tensor input"
    (tmp_path / "dump.json").write_text(json.dumps(dump))
    with pytest.raises(RuntimeError):
        made["main"](str(tmp_path / "dump.json"))
