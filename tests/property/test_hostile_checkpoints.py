"""Whatever is wrong with a directory: it loads and the model works, or one of our errors says why, soon and in bounds.

The cases are the same in every run, so that chance decides on no landing; `--sweep` draws many others, and
`FUNCMODELS_FUZZ_SEED=...` gives their seed, as a failure prints it.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import funcmodels as fm
from tests.checkpoints import CONFIGS, DRAFTS, QUANTISED, REFUSALS, bounded, written
from tests.property.mutations import mutate

CASES, MANY = 19, 2000
SECONDS, MEGABYTES = 3, 1000


def outcome(name: str, directory: Path) -> str:
    """What becomes of a directory: a working model, or a refusal's text."""
    try:
        if name in DRAFTS:
            model, params = fm.load(written("qwen3_5"), dtype=torch.float32)
            draft = fm.draft(model, directory, dtype=torch.float32)
        else:
            model, params = fm.load(directory, dtype=torch.float32)
    except REFUSALS as error:
        text = str(error)
        assert 10 < len(text) < 500_000 and max(map(len, text.split("\n"))) <= 2000
        return text
    if name in DRAFTS:
        assert len(fm.generate(model, params, [[1, 2, 3]], 4, draft=draft)[0].tokens) == 4
    ids = [token % model.config.vocab_size for token in (1, 40, 2, 3)]
    state = model.init_state(1, 8)
    for part in (ids, ids[:1]):
        out, state = model.forward(params, state, fm.Batch.from_lists([part], state))
        assert out.logits.isfinite().all()
    plain, _ = model.forward(params, None, fm.Batch.from_lists([ids]))
    assert plain.logits.isfinite().all()
    return "works"


@pytest.mark.plain
@pytest.mark.parametrize("name", [*CONFIGS, *QUANTISED, *DRAFTS])
def test_changed_at_random(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    sweep = pytestconfig.getoption("--sweep")
    seed = os.environ.get("FUNCMODELS_FUZZ_SEED", secrets.token_hex(4) if sweep else "0")
    assert outcome(name, written(name)) == "works"
    for case in range(MANY if sweep else CASES):
        draw = random.Random(f"{seed} {name} {case}")
        directory = shutil.copytree(written(name), tmp_path / "changed", copy_function=os.link)
        what = [mutate(directory, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        print(f"FUNCMODELS_FUZZ_SEED={seed}, case {case} of {name}: {what}")  # the last line is of the one that fails
        with bounded(SECONDS, MEGABYTES), warnings.catch_warnings():
            outcome(name, directory)
        shutil.rmtree(directory)
