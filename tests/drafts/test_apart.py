"""A draft without its model: the parameters that it reads, a state of its own, and what the model would have made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import funcmodels as fm
import params
from tests.checkpoints import CONFIGS, written
from tests.oracle.states import refuses

WITH_HEADS = ("qwen3_5", "flash_next")
IDS, LAST = [[5, 6, 7], [8, 9]], [3, 4]


def with_head(family: str, path: Path) -> Path:
    model = fm.build(CONFIGS[family]() | {"mtp_num_hidden_layers": 1})
    return fm.save(model, model.init_params(seed=1), path)


def first_proposal(draft: Any, tree: Any, state: fm.State, out: fm.Output) -> tuple[fm.Proposal, fm.State]:
    batch = fm.Batch.from_lists(IDS, state)
    state, carry = draft.extend(tree, state, out, batch, fm.next_tokens(batch, torch.tensor(LAST)))
    return draft.propose(tree, state, carry, steps=2)


@pytest.mark.parametrize("family", [*WITH_HEADS, "dflash", "gated"])
def test_it_proposes_what_it_proposes_beside_its_model(family: str, tmp_path: Path) -> None:
    block = family not in WITH_HEADS
    directory = written("qwen3_5") if block else with_head(family, tmp_path / "whole")
    kind: Any = written(family) if block else "mtp"
    model, whole = fm.load(directory, dtype=torch.float32)
    beside = fm.draft(model, kind, dtype=torch.float32) if block else fm.draft(model, "mtp")
    alone, own = fm.load_draft(directory, kind, dtype=torch.float32)
    state = model.init_state(2, 24, page_size=4)
    out, _ = model.forward(whole, state, fm.Batch.from_lists(IDS, state), outputs=beside.outputs)
    right, after = first_proposal(beside, whole, beside.init_state(state), out)
    made, own_after = first_proposal(
        alone, own, alone.own_state(2, 24, page_size=4), fm.Output.of(out.hidden, out.extra)
    )
    assert made == right
    for row in (0, 1):
        found, expected = fm.logical(own_after, row), fm.logical(after, row)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert {path.partition(".")[0] for path, _ in params.items(own)} <= {"embed", "head", "mtp"}
    with refuses(ValueError, "params have no layers, as those that load_draft gives"):
        model.forward(own, None, fm.Batch.from_lists(IDS))


@pytest.mark.parametrize("family", WITH_HEADS)
def test_a_directory_with_the_head_alone(family: str, tmp_path: Path) -> None:
    """Of a large model nobody has to keep more; and a head that lacks a tensor, or has one more, is refused."""
    directory = with_head(family, tmp_path / "whole")
    _, right = fm.load_draft(directory, dtype=None)
    kept = {
        name: value
        for name, value in load_file(directory / "model.safetensors").items()
        if not name.startswith("model.") or "embed_tokens" in name
    }
    small = tmp_path / "head"
    small.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config))
    save_file(kept, small / "model.safetensors")
    assert fm.load_draft(small, dtype=None)[1] == right
    save_file(kept | {"mtp.other.weight": torch.zeros(2)}, small / "model.safetensors")
    with pytest.raises(fm.CheckpointError, match=r"unexpected.*\n.*mtp\.other\.weight"):
        fm.load_draft(small)
    last = max(name for name in kept if name.startswith("mtp.layers"))
    save_file({name: value for name, value in kept.items() if name != last}, small / "model.safetensors")
    with pytest.raises(fm.CheckpointError, match="missing"):
        fm.load_draft(small)


def test_a_quantised_head(tmp_path: Path) -> None:
    model = fm.build(CONFIGS["qwen3_5"]())
    tree = params.quantize(model.init_params(seed=1), "W8A8_DYNAMIC")
    directory = fm.save(model, tree, tmp_path / "quantised")
    whole = fm.load(directory, dtype=torch.float32)[1]
    assert fm.load_draft(directory, dtype=torch.float32)[1].mtp == whole.mtp


def test_a_head_learns_alone(tmp_path: Path) -> None:
    """Its gradients are those that it has beside its model."""
    model, whole = fm.load(written("qwen3_5"), dtype=torch.float32)
    alone, own = fm.load_draft(written("qwen3_5"), dtype=torch.float32)
    batch, hidden = fm.Batch.from_lists(IDS), torch.randn(5, model.config.hidden_size)

    def loss(tree: Any) -> torch.Tensor:
        return alone.forward(tree, None, batch, hidden)[0].logits.square().mean()

    found, right = torch.func.grad(loss)(own), torch.func.grad(loss)(whole)
    for path, value in params.items(found.mtp):
        torch.testing.assert_close(value, params.at(right.mtp, path))


@pytest.mark.plain
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 9), torch.float32), ((4, 12), torch.float32), ((5, 12), torch.float64), ((5,), torch.float32)],
)
def test_hidden_states_that_the_head_does_not_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    alone, own = fm.load_draft(written("qwen3_5"), dtype=torch.float32)
    width = alone.model.config.hidden_size
    assert width == 12
    message = f"draft: hidden states are {list(shape)} of {dtype}, this head reads [5, {width}] of torch.float32"
    batch, hidden = fm.Batch.from_lists(IDS), torch.zeros(shape, dtype=dtype)
    with refuses(ValueError, message):
        alone.forward(own, None, batch, hidden)
    if shape[0] == 5:
        with refuses(ValueError, message):
            state = alone.own_state(2, 24)
            alone.extend(own, state, fm.Output.of(hidden), batch, fm.next_tokens(batch, torch.tensor(LAST)))


def test_checkpoints_without_a_draft(tmp_path: Path) -> None:
    with refuses(ValueError, "have no mtp head"):
        fm.load_draft(written("gemma3"))
    directory = shutil.copytree(written("qwen3_5_moe"), tmp_path / "plain")
    with refuses(ValueError, "its checkpoint holds no mtp tensors"):
        fm.load_draft(directory)
    with refuses(fm.CheckpointError, "is empty"):
        fm.load_draft("")
