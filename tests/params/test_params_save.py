"""Saving: transformers and `load` read what is written, and nothing else is overwritten."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import params
from params import files, saving
from params.names.qwen3_5 import NAMES

IDS = torch.arange(11)[None] * 7 % 96


def same_model(model: Any, directory: Path) -> None:
    """The transformers library loads the directory completely, with the same parameters and the same logits."""
    loaded, report = type(model).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(loaded.float()(IDS).logits, copy.deepcopy(model).float()(IDS).logits)


def save_model(model: Any, spec: Any, path: Path, **options: Any) -> Path:
    """Write a transformers model with our `save`."""
    tree = params.from_checkpoint(model.state_dict(), spec, NAMES)
    return params.save(tree, path, spec, NAMES, model.config.to_dict(), **options)


@pytest.mark.parametrize("limit", [5 * 10**9, 40_000])
def test_transformers_loads_what_is_saved(model: Any, spec_of: Any, tmp_path: Path, limit: int) -> None:
    """One file or many: the same state dict, the same logits, and our `load` gives the tree back."""
    spec = spec_of(model.config)
    directory = save_model(model, spec, tmp_path / "new" / "here", max_shard_bytes=limit)
    count = len(list(directory.glob("*.safetensors")))
    assert (count == 1) == (limit > 40_000) == (not (directory / files.INDEX).exists())
    same_model(model, directory)
    again = params.load(directory, spec, NAMES, dtype=None)
    assert again == params.from_checkpoint(model.state_dict(), spec, NAMES)


def test_files_are_as_readable_as_their_neighbours(model: Any, spec_of: Any, tmp_path: Path) -> None:
    """The umask decides, for the weights as for config.json."""
    directory = save_model(model, spec_of(model.config), tmp_path)
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1


def test_shards_are_full_but_not_too_full(model: Any, spec_of: Any, tmp_path: Path) -> None:
    """No shard is above the limit unless it holds one tensor; the index counts all bytes."""
    directory = save_model(model, spec_of(model.config), tmp_path, max_shard_bytes=20_000)
    found = params.tensor_names(directory)
    shards: dict[str, list[int]] = {}
    for stored in found.values():
        shards.setdefault(stored.file.name, []).append(stored.nbytes)
    assert all(sum(sizes) <= 20_000 or len(sizes) == 1 for sizes in shards.values())
    index = json.loads((directory / files.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(stored.nbytes for stored in found.values())
    assert index["weight_map"] == {name: stored.file.name for name, stored in found.items()}


def test_bfloat16_and_tied(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """The config names the dtype that was saved, and no file of other weights; a tied head is not written."""
    model = oracle("dense", dtype=torch.bfloat16, tie_word_embeddings=True)
    model.config.dtype, model.config.transformers_weights = torch.float32, "elsewhere.safetensors"
    directory = save_model(model, spec_of(model.config), tmp_path)
    assert params.read_config(directory)["dtype"] == "bfloat16"
    assert "lm_head.weight" not in params.tensor_names(directory)
    same_model(model, directory)


@pytest.mark.parametrize("tied", [False, True])
def test_a_nested_config_gets_the_wrapper_names(wrapper: Any, spec_of: Any, tmp_path: Path, tied: bool) -> None:
    """Beside a multimodal config the text part is found by the text-only class and by the automatic one."""
    from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

    config = wrapper(tied)
    spec = spec_of(config.text_config)
    tree = params.init(spec, seed=5, dtype=torch.bfloat16)
    params.save(tree, tmp_path, spec, NAMES, config.to_dict())
    assert "model.language_model.norm.weight" in params.tensor_names(tmp_path)
    assert params.load(tmp_path, spec, NAMES) == tree
    kinds: tuple[Any, ...] = (Qwen3_5ForCausalLM, AutoModelForCausalLM)
    for kind in kinds:
        loaded, report = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        state = loaded.state_dict()
        for name, value in params.to_checkpoint(tree, spec, NAMES).items():
            assert torch.equal(state[name], value.bfloat16()), name


def test_a_draft_head_is_kept(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """`mtp.*` goes back under its names, and transformers passes over it."""
    model = oracle("moe")
    spec = spec_of(model.config, mtp=True)
    tree = params.init(spec, seed=1)
    params.save(tree, tmp_path, spec, NAMES, model.config.to_dict())
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"} < set(params.tensor_names(tmp_path))
    assert params.load(tmp_path, spec, NAMES, dtype=None) == tree
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded.state_dict()["model.norm.weight"], tree.norm.weight)


def test_gradients_compare_by_name(model: Any, spec_of: Any) -> None:
    """`to_checkpoint` of any tree of values splits it like transformers' parameters, as views that carry gradients."""
    spec = spec_of(model.config)
    tree = params.tree_map(lambda leaf: leaf.requires_grad_(), params.init(spec, seed=0))
    state = params.to_checkpoint(tree, spec, NAMES)
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    torch.stack([(index + 1) * value.sum() for index, value in enumerate(state.values())]).sum().backward()
    gradients = params.to_checkpoint(params.tree_map(lambda leaf: leaf.grad, tree), spec, NAMES)
    for index, value in enumerate(gradients.values()):
        assert torch.equal(value, torch.full_like(value, index + 1))


def test_a_round_trip_in_memory(model: Any, spec_of: Any) -> None:
    """`from_checkpoint` undoes `to_checkpoint`, copies, and drops gradients."""
    spec = spec_of(model.config)
    tree = params.init(spec, seed=2)
    state = params.to_checkpoint(tree, spec, NAMES)
    back = params.from_checkpoint({name: value.requires_grad_() for name, value in state.items()}, spec, NAMES)
    assert back == tree and not back.embed.weight.requires_grad
    assert back.embed.weight.data_ptr() != tree.embed.weight.data_ptr()


def test_a_tree_that_does_not_fit(model: Any, spec_of: Any, tmp_path: Path) -> None:
    """All wrong leaves are listed, and nothing is written."""
    spec = spec_of(model.config)
    tree = params.init(spec)
    tree = params.put(tree, "norm.weight", torch.zeros(31))
    tree = params.put(tree, "embed.weight", None)
    tree = params.put(tree, "mtp", {"fc": torch.zeros(1)})
    with pytest.raises(params.CheckpointError) as caught:
        params.save(tree, tmp_path / "x", spec, NAMES, model.config.to_dict())
    assert str(caught.value).splitlines()[1:] == [
        "  embed.weight is missing, expected [96,32]",
        "  norm.weight is f32[31], expected [32]",
        "  mtp.fc is not in the spec",
    ]
    assert not (tmp_path / "x").exists()


def test_configs_that_contradict_the_tree(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """A tied tree beside an untied config, and a config that is not JSON, are refused before anything is written."""
    config = oracle("dense", tie_word_embeddings=True).config
    spec = spec_of(config)
    tree = params.init(spec)
    for wrong, message in (
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"x": {1}}, "not plain JSON"),
    ):
        with pytest.raises(params.ConfigError, match=message):
            params.save(tree, tmp_path, spec, NAMES, {**config.to_dict(), **wrong})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "other", ["pytorch_model.bin", "model-00001-of-00002.safetensors", files.INDEX, "quant_model_weights.safetensors"]
)
def test_other_weights_are_not_joined(model: Any, spec_of: Any, tmp_path: Path, other: str) -> None:
    """Weights that would be read together with the new ones are neither mixed with nor removed."""
    (tmp_path / other).write_bytes(b"precious")
    (tmp_path / "optimizer.pt").write_bytes(b"not weights")
    with pytest.raises(params.CheckpointError, match=rf"other weights \({other}\)"):
        save_model(model, spec_of(model.config), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {other, "optimizer.pt"}


def test_the_same_files_are_replaced(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Saving again replaces a checkpoint, keeps everything else, and follows no link."""
    first, second = oracle("dense", seed=1), oracle("dense", seed=2)
    spec = spec_of(first.config)
    directory = save_model(first, spec, tmp_path / "d")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").rename(tmp_path / "blob")
    (directory / "model.safetensors").symlink_to(tmp_path / "blob")
    before = (tmp_path / "blob").read_bytes()
    save_model(second, spec, directory)
    same_model(second, directory)
    assert (tmp_path / "blob").read_bytes() == before
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_failed_save_changes_nothing(
    oracle: Any, spec_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When writing fails half way the old checkpoint is whole and no temporary file is left."""
    first, second = oracle("dense", seed=1), oracle("dense", seed=2)
    spec = spec_of(first.config)
    directory = save_model(first, spec, tmp_path, max_shard_bytes=60_000)
    listing = sorted(path.name for path in directory.iterdir())
    written = []

    def full(values: Any, path: Path, **_: Any) -> None:
        if written:
            raise OSError("no space left")
        written.append(path.write_bytes(b"half"))

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(params.CheckpointError, match="no space left"):
        save_model(second, spec, directory, max_shard_bytes=60_000)
    assert sorted(path.name for path in directory.iterdir()) == listing
    same_model(first, directory)


def test_saving_over_a_file(model: Any, spec_of: Any, tmp_path: Path) -> None:
    """A path that is a file is refused."""
    (tmp_path / "x").write_text("")
    with pytest.raises(params.CheckpointError, match="is a file"):
        save_model(model, spec_of(model.config), tmp_path / "x")


def test_what_cannot_be_a_file_is_refused_first(model: Any, spec_of: Any, tmp_path: Path) -> None:
    """Nothing is written where one of the names is a directory, the parent a file, or a tensor without values."""
    spec = spec_of(model.config)
    (tmp_path / "x").write_text("")
    for name in ("config.json", "vocab.txt"):
        (tmp_path / "taken" / name).mkdir(parents=True)
        with pytest.raises(params.CheckpointError, match=f"{name} would be files and are directories there"):
            save_model(model, spec, tmp_path / "taken", beside={"vocab.txt": tmp_path / "x"})
        assert [path.name for path in (tmp_path / "taken").iterdir()] == [name]
        (tmp_path / "taken" / name).rmdir()
    with pytest.raises(params.CheckpointError, match=r"cannot be written: .*Not a directory"):
        save_model(model, spec, tmp_path / "x" / "y")
    empty = params.init(spec, device="meta")
    with pytest.raises(
        params.CheckpointError, match=r"meta device have no values to save: model\.embed_tokens\.weight"
    ):
        params.save(empty, tmp_path / "meta", spec, NAMES, model.config.to_dict())
    assert not (tmp_path / "meta").exists()


@pytest.mark.plain
@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("a\0b", params.CheckpointError, "has a NUL character"),
        ("", params.CheckpointError, "is empty; give a path"),
        ("a\ud800", params.CheckpointError, "has characters that no file name may"),
        (None, TypeError, "must be a path"),
        (b"a", TypeError, "must be a path, found b'a'"),
        (3, TypeError, "must be a path, found 3"),
    ],
)
def test_what_is_no_path_is_refused_before_any_work(path: Any, error: type[Exception], message: str) -> None:
    nothing: Any = None
    with pytest.raises(error, match=f"the directory to save to {message}"):
        params.save(nothing, path, nothing, nothing, {})
    for call in params.tensor_names, params.read_config:
        with pytest.raises(error, match=f"the directory of a checkpoint {message}"):
            call(path)


@pytest.mark.plain
@pytest.mark.parametrize("limit", [0, -1, 0.5, True, float("nan"), "5GB", None])
def test_limits_that_are_no_number_of_bytes(limit: Any, tmp_path: Path) -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="max_shard_bytes must be a number of bytes, at least 1, found"):
        params.save(nothing, tmp_path, nothing, nothing, {}, max_shard_bytes=limit)


def test_a_leaf_in_another_memory_order(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Leaves that are not contiguous are saved by value."""
    model = oracle("moe")
    spec = spec_of(model.config)
    tree = params.from_checkpoint(model.state_dict(), spec, NAMES)
    turned = params.tree_map(lambda leaf: leaf.mT.contiguous().mT if leaf.ndim > 1 else leaf, tree)
    assert not turned.layers[0].mlp.experts.gate_up.is_contiguous()
    params.save(turned, tmp_path, spec, NAMES, model.config.to_dict())
    same_model(model, tmp_path)


def test_leaves_that_share_memory(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Two leaves that are one tensor are written twice."""
    model = oracle("dense")
    spec = spec_of(model.config)
    tree = params.init(spec)
    tree = params.put(tree, "layers.0.post_norm", tree.layers[0].input_norm)
    params.save(tree, tmp_path, spec, NAMES, model.config.to_dict())
    assert params.load(tmp_path, spec, NAMES, dtype=None) == tree
