"""Each rule of the audit: a kernel that breaks it and no other, and ones that only look as if they did."""

from __future__ import annotations

import pytest

from lowering import Compiled, Finding, TritonSource, audit, compile_for
from lowering.target import ASCEND
from tests.lowering.ascend_compiler.test_compile import PROBES, SIGNATURE, line_of

POOL = {"x": "*fp32", "slots": "*i32", "y": "*fp32", "width": "i32"}


def findings(name: str, tile: int, target: str = "ascend910b", signature: dict[str, str] = SIGNATURE) -> list[Finding]:
    found = compile_for(TritonSource(PROBES, name), signature, {"TILE": tile}, target)
    assert isinstance(found, Compiled), str(found)
    return list(audit(found, pools=("x",)))


@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize(
    ("name", "rule", "line"),
    [
        ("bound_on_the_left", "whole tile read", "a whole tile"),
        ("shifted_after", "whole tile read", "a whole tile"),
        ("all_but_one", "read-modify-write", "written back"),
        ("scanned", "scalar loop", None),
        ("divided", "scalar loop", None),
    ],
)
def test_what_a_rule_finds(name: str, rule: str, line: str | None, target: str) -> None:
    (found,) = [finding for finding in findings(name, 1024, target) if finding.rule != "32-bit address"]
    at = PROBES.read_text().splitlines().index(f"def {name}(x, y, n, TILE: tl.constexpr):")
    assert found.rule == rule and (line is None or at < (found.line or 0) <= at + 5)
    assert line is None or PROBES.read_text().splitlines()[(found.line or 0) - 1].endswith(f"# {line}")


@pytest.mark.parametrize("target", ASCEND)
def test_an_address_in_32_bits(target: str) -> None:
    """A slot times its width; of arguments alone that may be so large."""
    (found,) = findings("narrow", 1024, target, POOL)
    assert found.rule == "32-bit address" and "an offset into x is" in found.words and found.line == line_of("32 bits")
    assert str(found).startswith(f"32-bit address at line {found.line}: an offset")
    assert not findings("wide", 1024, target, POOL)
    compiled = compile_for(TritonSource(PROBES, "narrow"), POOL, {"TILE": 1024}, target)
    assert isinstance(compiled, Compiled) and not audit(compiled)


@pytest.mark.parametrize(
    ("tile", "target", "dropped"),
    [
        (16384, "ascend910b", False),
        (32768, "ascend910b", True),
        (32768, "ascend910_93", True),
        (32768, "ascend950", False),
    ],
)
def test_second_buffers_that_are_left_out(tile: int, target: str, dropped: bool) -> None:
    """On 950 triton-ascend asks for none."""
    assert [finding.rule for finding in findings("good", tile, target)] == ["dropped double buffering"] * dropped


@pytest.mark.parametrize("target", ASCEND)
@pytest.mark.parametrize("name", ["good", "shifted_before", "chosen"])
def test_what_is_meant_is_no_finding(name: str, target: str) -> None:
    """Ranges, of any start; and a select of what was read without a mask."""
    assert not [finding for finding in findings(name, 1024, target) if finding.rule != "32-bit address"]
