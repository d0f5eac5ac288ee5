"""The one form of reports: on a terminal, in a log, on a page; and `funcmodels lower` with several targets."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import lowering
from funcmodels import cli
from lowering import Sheet, ops
from lowering.dryrun import process, wheel
from lowering.explain.costs import Cost
from lowering.explain.sheet import Roof
from lowering.explain.stages import BETWEEN
from lowering.target import Peaks
from tests import tiny
from tests.lowering.dryrun.test_check import Cells

SHEET = Sheet(
    "a [title] & more",
    ("name", "count", "evidence", "bytes"),
    [("<b>[bold]x[/bold]\nsecond line", "7", "in use", "0.5% / 12%"), ("other_one", "123", "", "3%")],
    numbers=("count",),
    marked=[1],
    notes=["a note that is longer than the table is wide, and stays on one line whatever its width"],
    head=["a line above"],
    reasons=["", "<i>: one reason\nanother"],
    bars=("bytes",),
    badges=("evidence",),
    roofs=[Roof("a machine", Peaks(2e14, 1e12, "a source"), [("all of it", 10**12, 10**9), ("none", 0, 5)])],
)


def test_text() -> None:
    assert SHEET.text().splitlines() == [
        "a [title] & more",
        "a line above",
        "name                            count  evidence  bytes       why",
        "<b>[bold]x[/bold]; second line  7      in use    0.5% / 12%",
        "other_one                       123              3%          (1)",
        "(1) <i>: one reason; another",
        *SHEET.notes,
    ]


def test_on_a_terminal_and_in_a_pipe() -> None:
    """Drawn with the cells as they are, or the plain text."""
    for terminal in (True, False):
        out = io.StringIO()
        SHEET.show(Console(file=out, force_terminal=terminal, width=80, color_system=None))
        assert ("━" in out.getvalue()) == terminal
        for part in (SHEET.title, *SHEET.head, "<b>[bold]x[/bold]", "second line", "(1) <i>: one", *SHEET.notes):
            assert part in out.getvalue()
    assert all(part in SHEET.drawn() for part in (SHEET.title, "[bold]", *SHEET.notes))


def test_page() -> None:
    """Whole, with every cell as it is, what is said of a row on demand, and nothing to load."""
    page = lowering.page("<title> & more", [SHEET, SHEET])
    cells = Cells(page)
    texts = [*SHEET.rows[0][:3], "0.5%12%", *SHEET.rows[1], ""]
    assert cells.tables == [["name", "count", "evidence", "bytes", *texts]] * 2
    assert not cells.loaded and not cells.open and "<h1>&lt;title&gt; &amp; more</h1>" in page
    assert page.count('<tr class="marked">') == 2 and page.count(SHEET.notes[0]) == 2
    assert page.count("<details><summary>why</summary><p>&lt;i&gt;: one reason</p><p>another</p></details>") == 2
    assert re.findall(r"--share: ([\d.]+)%\"", page) == ["0.5", "12", "3"] * 2
    assert cells.classes.count("badge in-use") == 3 and 'data-kinds="torch"' in page


def test_a_roofline_is_an_estimate_from_public_peaks() -> None:
    """The whole does 1000 FLOPs a byte, more than the ridge's 200: bound by FLOPs. What multiplies nothing is shown."""
    page = lowering.page("roofs", [SHEET])
    assert "an estimate from public peaks, nothing measured (a source)" in page
    assert "all of it: 1e+03 FLOPs a byte, at least 5 ms" in page and page.count("<circle") == 2
    assert Peaks(2e14, 1e12, "").seconds(10**12, 10**9) == 5e-3 and Peaks(2e14, 1e12, "").seconds(1, 10**9) == 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"))


def test_two_targets_side_by_side(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is marked, what is alike is told once; the page holds the same tables."""
    flags = ["--target", "ascend950", "--target", "ascend910b", "--tokens", "40", "--cann", "9.0.0"]
    flags += ["--evidence", "stated"]
    assert cli.main(["lower", "--model", str(directory), *flags, "--html", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    assert "page.html" in err
    for part in out.split("prefill"):
        lines = {line.split()[0]: line.split() for line in part.splitlines() if line.strip()}
        for target in ("ascend950:", "ascend910b:"):
            assert re.fullmatch(r"[\d.]+%", lines[target][1]) and "of bytes lie in fused operators" in part
        assert "stated" in lines["swiglu"] or "in" in lines["swiglu"]
        assert "ascend950 (torch_npu 2.13.0, CANN 9.0.0)" in part
        assert lines["gemma_rms_norm"][1:5] == ["*", "3", "triton_gemma_rms_norm", "npu_gemma_rms_norm"]
        assert lines["linear"][2:4] == ["torch", "torch"]
        assert "rows that hold" in part or part is out
        assert "* the targets get different kernels" in part
    tables = Cells((tmp_path / "page.html").read_text()).tables
    assert len(tables) == 2 and all("npu_gemma_rms_norm" in table and "gemma_rms_norm *" in table for table in tables)


def test_the_share_in_fused_operators() -> None:
    """Of what costs anything: a lone product of Torch's is the device's own, and gates made of many are not."""
    x, weight = torch.zeros(4, 64, device="meta"), torch.zeros(32, 64, device="meta")
    with lowering.use(evidence="documented"):  # no kernel of ours
        program = lowering.lower(mixed, x, weight, target="ascend910b")
    costs = program.cost_analysis()
    loose = {row.op: row.loose for row in costs.rows}
    whole = {row.op: row.cost for row in costs.rows}
    assert loose["linear"] == loose["swiglu"] == Cost() != whole["linear"]
    assert loose["delta_gates"] == whole["delta_gates"] != Cost() != loose[BETWEEN] == whole[BETWEEN]
    assert costs.loose == loose["delta_gates"] + loose[BETWEEN] and costs.left()[0][0].op == "delta_gates"
    (line,) = lowering.compared([program]).head
    assert line.startswith("ascend910b: 100% of FLOPs and ") and "no fused operator makes the gates" in line
    assert int(line.split("FLOPs and ")[1].split(".")[0].split("%")[0]) == int(
        100 - 100 * costs.loose.bytes / costs.total.bytes
    )


def mixed(x: Tensor, weight: Tensor) -> Any:
    y = ops.swiglu(ops.linear(x, weight))
    return y + 1, ops.delta_gates(y, y, y[0].float(), y[0].float())


def test_without_the_wheel_the_command_says_how_to_get_it(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And which kernels are chosen can still be asked of `lowering.explain`."""
    monkeypatch.setenv(wheel.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(process, "_child", process._child.__wrapped__)
    assert cli.main(["lower", "--model", str(directory), "--target", "ascend950"]) == 2
    out, err = capsys.readouterr()
    assert not out and "run: python -m lowering fetch-torch-npu" in err and "lowering.explain" in err


def test_shares_add_up() -> None:
    """Of one target; a part that is not zero is not shown as none."""
    from lowering.explain.stages import flops, share

    assert [share(part, 1000) for part in (0, 1, 99, 100, 1000)] == ["0%", "0.1%", "9.9%", "10%", "100%"]
    assert share(0, 0) == "0%"
    assert [flops(count) for count in (0, 999, 1500, 3 * 10**9)] == ["0 FLOP", "999 FLOP", "1.5 KFLOP", "3.0 GFLOP"]
