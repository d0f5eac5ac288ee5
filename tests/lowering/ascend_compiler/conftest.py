"""These tests need Ascend's compiler, which is not made for every Python; where it is, it must have been fetched."""

from __future__ import annotations

import pytest

from lowering.ascend_compiler.packages import offered


@pytest.fixture(autouse=True)
def made_for_here() -> None:
    if not offered():
        pytest.skip("Ascend's compiler is not made for this Python and machine")
