"""Checkpoints of Qwen3.8-Flash-Next: transformers' and ours, tables in shards, on the host and in their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import funcmodels as fm
import lowering
import params
from params import CheckpointError, MappedRows
from tests.oracle.qwen3_8_flash_next import build, pair, sizes, small, tokens
from tests.oracle.qwen3_8_flash_next_mtp import pair as with_head
from tests.oracle.states import advance, refuses

SEED = 5
"""Three layers with n-grams of up to four tokens."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers writes, tables in five shards of which the last is short."""
    directory = tmp_path_factory.mktemp("flash")
    build(sizes(SEED) | {"split_ngram_parts": 5}, SEED).theirs.save_pretrained(directory)
    return directory


def changed(saved: Path, directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy with other tensors."""
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((saved / "config.json").read_text())
    return directory


def layers_of(tree: Any) -> list[int]:
    return [index for index, layer in enumerate(tree.layers) if layer.ngrams is not None]


def test_what_transformers_saves_loads(saved: Path) -> None:
    model, tree = fm.load(saved, dtype=None)
    one = build(sizes(SEED) | {"split_ngram_parts": 5}, SEED)
    assert tree == one.params
    counts = {len(model.param_spec().layers[layer].ngrams.table.parts) for layer in layers_of(tree)}
    assert counts == {5}
    names = load_file(saved / "model.safetensors").keys()
    assert sum("ngram_embedding.shard_" in name for name in names) == 15
    ids = tokens(one, 20)
    out, _ = model.forward(tree, None, fm.Batch.from_lists(ids))
    right, _ = one.model.forward(one.params, None, fm.Batch.from_lists(ids))
    assert torch.equal(out.logits, right.logits)


@torch.no_grad()
def test_what_we_save_transformers_loads(saved: Path, tmp_path: Path) -> None:
    """Without a word about missing or unexpected tensors; and files are the same again."""
    from transformers import Qwen4ExpForCausalLM

    model, tree = fm.load(saved, dtype=None)
    params.save(tree, tmp_path, model.param_spec(), model.family.names, dict(model.config_json))
    loaded: Any = Qwen4ExpForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, said = loaded
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    right = pair(SEED).theirs.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, right[name]), name
    again, same = fm.load(tmp_path, dtype=None)
    assert same == tree and again.config == model.config


def test_a_nested_checkpoint_with_head_and_vision(tmp_path: Path) -> None:
    """As published: names of the wrapper, what nothing reads beside them, and the count of draft layers left out."""
    one = with_head(SEED)
    spec, names = one.model.param_spec(), one.model.family.names
    config = {name: value for name, value in one.model.config_json.items() if name != "mtp_num_hidden_layers"}
    params.save(one.params, tmp_path, spec, names, {"model_type": "qwen4_exp", "text_config": config})
    tensors = load_file(tmp_path / "model.safetensors")
    assert "mtp.fc_embedding.weight" in tensors and "model.language_model.embed_tokens.weight" in tensors
    table = "model.language_model.layers.0.ple.ple_embedding"
    extra = {
        "model.visual.pos_embed.weight": torch.zeros(2, 3), f"{table}.hashstats_seen": torch.zeros(3),
        f"{table}.ngram_embedding.hashstats_hits": torch.zeros(1), f"{table}.token_lookup": torch.zeros(4),
        f"{table}.ngram_embedding.weight_scale": torch.ones(1),
    }  # fmt: skip
    save_file(tensors | extra, tmp_path / "model.safetensors")
    model, tree = fm.load(tmp_path, dtype=None)
    assert tree == one.params and model.config == one.config
    found = params.inspect(tmp_path, spec, names)
    assert found.ok and len(found.ignored) == 4
    assert sum(row.note == "fixed by the config" for row in found.rows) == 10
    (shard,) = [row for row in found.rows if row.name == f"{table}.ngram_embedding.shard_0.weight"]
    assert shard.leaf == "layers.0.ngrams.table" and shard.part.startswith("rows 0:")


def test_a_table_in_one_piece_loads_too(saved: Path, tmp_path: Path) -> None:
    def join(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("shard_0.weight")]:
            root = name.removesuffix("shard_0.weight")
            tensors[f"{root}weight"] = torch.cat([tensors.pop(f"{root}shard_{part}.weight") for part in range(5)])

    _, tree = fm.load(changed(saved, tmp_path, join), dtype=None)
    assert tree == fm.load(saved, dtype=None)[1]


# Where a table lies


@pytest.mark.parametrize("tables", ["host", "file"])
def test_tables_left_behind_give_the_same_model(saved: Path, tables: Any) -> None:
    model, tree = fm.load(saved, dtype=None)
    _, apart = fm.load(saved, dtype=None, tables=tables)
    for layer in layers_of(tree):
        table = apart.layers[layer].ngrams.table
        assert isinstance(table, MappedRows) == (tables == "file")
        assert table.shape == tree.layers[layer].ngrams.table.shape and table.dtype == torch.float32
    batch = fm.Batch.from_lists(tokens(pair(SEED), 20, 3))
    state, other = (model.init_state(2, 32, page_size=4) for _ in range(2))
    out, state = model.forward(tree, state, batch)
    found, other = model.forward(apart, other, batch)
    assert torch.equal(found.logits, out.logits)
    assert fm.logical(other, 0).keys() == fm.logical(state, 0).keys()


def test_a_mapped_table_takes_no_memory_and_reads_its_files(saved: Path, tmp_path: Path) -> None:
    """Rows come from the bytes on disk: a file that is changed under the table changes them."""
    directory = changed(saved, tmp_path, lambda tensors: None)
    model, tree = fm.load(directory, tables="file")
    layer = layers_of(tree)[0]
    table = tree.layers[layer].ngrams.table
    assert table.dtype == torch.float32 and tree.embed.weight.dtype == torch.bfloat16
    ids = torch.tensor([[0, table.shape[0] - 1], [1, 0]])
    before = table.rows(ids)
    whole = fm.load(directory, dtype=None)[1].layers[layer].ngrams.table
    assert torch.equal(before, whole[ids])
    name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_0.weight"
    place = params.tensor_names(directory)[name]
    with place.file.open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(torch.full((4,), 7.0).numpy().tobytes()[: 4 * table.shape[1]])
    assert (table.rows(ids)[0, 0] == 7.0).sum() == min(4, table.shape[1])
    out, _ = model.forward(tree, None, fm.Batch.from_lists([[1, 2, 3]]))
    assert out.logits.dtype == torch.bfloat16


def test_mapped_tables_are_saved_again(saved: Path, tmp_path: Path) -> None:
    model, tree = fm.load(saved, dtype=None, tables="file")
    params.save(tree, tmp_path, model.param_spec(), model.family.names, dict(model.config_json))
    assert fm.load(tmp_path, dtype=None)[1] == fm.load(saved, dtype=None)[1]


@torch.no_grad()
def test_a_captured_step_reads_other_rows_of_mapped_tables(tmp_path: Path) -> None:
    one = small(SEED)
    params.save(one.params, tmp_path, one.model.param_spec(), one.model.family.names, dict(one.model.config_json))
    model, tree = fm.load(tmp_path, dtype=None, tables="file")
    step = lowering.jit(model.forward, donate=("state",), backend="fx")
    state, other = (model.init_state(2, 32, page_size=4, pages=20) for _ in range(2))
    for ids in ([[1], [4]], [[5], [7]], [[3], [9]]):
        out, state = step(tree, state, fm.Batch.from_lists(ids, state))
        right, other = advance(one, other, ids)
        assert torch.allclose(out.logits, right.logits, atol=1e-4)
    assert step.captures == 1


def test_an_unknown_place_for_tables(saved: Path) -> None:
    wrong: Any = "disk"
    with refuses(ValueError, "tables='disk': give 'device', 'host' or 'file'"):
        fm.load(saved, tables=wrong)


# What does not fit the config


def hash_of(layer: int, part: str) -> str:
    return f"model.layers.{layer}.ple.ple_embedding.{part}"


@pytest.mark.parametrize("part", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_another_hash_is_refused(saved: Path, tmp_path: Path, part: str) -> None:
    layer = layers_of(pair(SEED).params)[1]

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[hash_of(layer, part)][1] += 2

    with pytest.raises(CheckpointError, match=rf"layers\.{layer}\..*{part} holds \[.*\], the config gives \["):
        fm.load(changed(saved, tmp_path, spoil))


def test_another_number_of_heads_is_refused(saved: Path, tmp_path: Path) -> None:
    layer = layers_of(pair(SEED).params)[0]

    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors[hash_of(layer, "layer_multipliers")] = tensors[hash_of(layer, "layer_multipliers")][:2].clone()

    with pytest.raises(CheckpointError, match=r"layer_multipliers is int64\[2\], expected 4 numbers"):
        fm.load(changed(saved, tmp_path, shorten))


def test_a_checkpoint_without_its_hash_loads(saved: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "multipliers" in name or "ngram_heads" in name]:
            del tensors[name]

    assert fm.load(changed(saved, tmp_path, drop), dtype=None)[1] == fm.load(saved, dtype=None)[1]


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([2.0])], ids=["scalar", "vector"])
def test_a_scaled_table_is_refused(saved: Path, tmp_path: Path, scale: Tensor) -> None:
    name = hash_of(layers_of(pair(SEED).params)[0], "ngram_embedding.weight_scale")
    with pytest.raises(CheckpointError, match=r"weight_scale holds \[.*\], the config gives \[1.0\].*does not apply"):
        fm.load(changed(saved, tmp_path, lambda tensors: tensors.update({name: scale})))


def test_a_table_of_other_rows_is_refused(saved: Path, tmp_path: Path) -> None:
    """Offsets and sizes that reach past the table cannot be loaded: the config's rows are the only ones."""
    name = hash_of(layers_of(pair(SEED).params)[0], "ngram_embedding.shard_4.weight")

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    with pytest.raises(CheckpointError, match=r"shard_4\.weight is float32\[.*expected \["):
        fm.load(changed(saved, tmp_path, cut))


def test_tables_that_cannot_be_mapped(tmp_path: Path) -> None:
    """Parts of two dtypes have no rows of one: they are read to memory, not mapped."""
    directory = tmp_path / "mixed"
    directory.mkdir()
    build(sizes(SEED) | {"split_ngram_parts": 5}, SEED).theirs.save_pretrained(directory)

    def halve(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("shard_2.weight"))
        tensors[name] = tensors[name].half()

    mixed = changed(directory, tmp_path, halve)
    with pytest.raises(CheckpointError, match="load the table to memory instead"):
        fm.load(mixed, tables="file")
    fm.load(mixed, tables="host")
    assert json.loads((mixed / "config.json").read_text())["split_ngram_parts"] == 5
