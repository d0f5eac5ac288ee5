"""Draw the picture of README: the page of `funcmodels lower` for a Qwen3.5 of published widths, as a browser shows it.

    python -m docs.draw_report        # writes docs/lowering-report.png

It takes chromium and the torch_npu wheel, so it is run by hand.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from funcmodels import cli
from tests.lowering.npu.published import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "lowering-report.png"
WIDTH, HEIGHT = 700, 1040
NAME = "Qwen3.5-35B-A3B"


def main() -> None:
    """Lower, write the page, and take its picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium on PATH, which draws the page")
    with tempfile.TemporaryDirectory() as scratch:
        model, page = Path(scratch) / NAME, Path(scratch) / "page.html"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(FAMILIES[NAME]), encoding="utf-8")
        flags = ["--target", "ascend910_93", "--tokens", "2048", "--html", str(page)]
        if cli.main(["lower", "--model", str(model), *flags]):
            raise SystemExit("the model was not lowered")
        page.write_text(page.read_text(encoding="utf-8").replace(f"{scratch}/", ""), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run([browser, *flags, f"--screenshot={PICTURE}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
