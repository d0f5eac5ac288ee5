"""The one form of reports: on a terminal, in a log, on a page; and `funcmodels lower` with several targets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import lowering
from funcmodels import cli
from lowering import Sheet
from lowering.dryrun import process, wheel
from tests import tiny
from tests.lowering.dryrun.test_check import Cells

SHEET = Sheet(
    "a [title] & more",
    ("name", "count", "why"),
    [("first", "7", "<b>: [bold]x[/bold]\nsecond line"), ("other", "123", "")],
    numbers=("count",),
    marked=[1],
    notes=["a note that is longer than the table is wide, and stays on one line whatever its width"],
)


def test_text() -> None:
    assert SHEET.text().splitlines() == [
        "a [title] & more",
        "name   count  why",
        "first  7      <b>: [bold]x[/bold]; second line",
        "other  123",
        *SHEET.notes,
    ]


def test_on_a_terminal_and_in_a_pipe() -> None:
    """Drawn with the cells as they are, or the plain text."""
    for terminal in (True, False):
        out = io.StringIO()
        SHEET.show(Console(file=out, force_terminal=terminal, width=80, color_system=None))
        assert ("━" in out.getvalue()) == terminal
        for part in (SHEET.title, "<b>: [bold]x[/bold]", "second line", *SHEET.notes):
            assert part in out.getvalue()
    assert all(part in SHEET.drawn() for part in (SHEET.title, "[bold]", *SHEET.notes))


def test_page() -> None:
    """Whole, with every cell as it is, and nothing to load."""
    page = lowering.page("<title> & more", [SHEET, SHEET])
    cells = Cells(page)
    assert cells.tables == [["name", "count", "why", *(cell for row in SHEET.rows for cell in row)]] * 2
    assert not cells.loaded and not cells.open and "<h1>&lt;title&gt; &amp; more</h1>" in page
    assert page.count('<tr class="marked">') == 2 and page.count(SHEET.notes[0]) == 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"))


def test_two_targets_side_by_side(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What differs is marked, what is alike is told once; the page holds the same tables."""
    flags = ["--target", "ascend950", "--target", "ascend910b", "--recurrent-dtype", "bfloat16", "--tokens", "40"]
    assert cli.main(["lower", "--model", str(directory), *flags, "--html", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    assert "page.html" in err
    for part in out.split("prefill"):
        lines = {line.split()[0]: line.split() for line in part.splitlines() if line.strip()}
        assert lines["gemma_rms_norm"][1:5] == ["*", "3", "npu_rms_norm_1p", "npu_gemma_rms_norm"]
        assert lines["linear"][2:4] == ["torch", "torch"]
        assert "rows that hold" in part or part is out
        assert "* the targets get different kernels" in part
    tables = Cells((tmp_path / "page.html").read_text()).tables
    assert len(tables) == 2 and all("npu_gemma_rms_norm" in table and "gemma_rms_norm *" in table for table in tables)


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
