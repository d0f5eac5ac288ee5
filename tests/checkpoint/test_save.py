"""`fm.save` of what `fm.load` read: transformers finds the same model in both directories, with all beside it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import funcmodels as fm
import params as trees
from tests import tiny
from tests.oracle import wrappers
from tests.oracle.families import close
from tests.oracle.states import refuses

IDS = [4, 9, 33, 20, 2]


def same(first: Any, second: Any) -> None:
    """Two models of transformers have the same values under the same names."""
    state, other = first.state_dict(), second.state_dict()
    assert state.keys() == other.keys()
    assert all(other[name].dtype == value.dtype and other[name].equal(value) for name, value in state.items())


def reread(kind: Any, directory: Path) -> Any:
    """The model that transformers finds, which has to find all of it."""
    model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    for part in (model.config, model.config.get_text_config()):
        part._attn_implementation = part._experts_implementation = "eager"
    return model


def check_logits(model: fm.Model, params: Any, theirs: Any) -> None:
    out, _ = model.forward(params, None, fm.Batch.from_lists([IDS]))
    with torch.no_grad():
        close(out.logits, theirs(input_ids=torch.tensor([IDS])).logits[0])


@pytest.mark.plain
@pytest.mark.parametrize(("outer", "nested", "limit"), [(False, True, 5 * 10**9), (True, False, 30_000)])
@pytest.mark.parametrize("family", wrappers.WRAPPERS)
def test_a_model_that_sees_images(family: str, outer: bool, nested: bool, limit: int, tmp_path: Path) -> None:
    """Its tower goes along, and whether the head is tied is what the wrapper says, whatever its text part does."""
    kind = wrappers.named(family, "ForConditionalGeneration")
    theirs = wrappers.filled(kind, wrappers.wrapper_config(family, outer, nested))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    model, params = fm.load(tmp_path / "theirs", dtype=None)
    assert (params.head is None) == outer
    check_logits(model, params, theirs)
    fm.save(model, params, tmp_path / "ours", max_shard_bytes=limit)
    same(theirs, reread(kind, tmp_path / "ours"))
    tied = trees.read_config(tmp_path / "ours")["text_config"]["tie_word_embeddings"]
    assert tied == outer, "the text-only class would look for a head, or leave one out"


@pytest.mark.plain
@pytest.mark.parametrize("family", wrappers.FAMILIES)
def test_a_text_model(family: str, tmp_path: Path) -> None:
    kind = wrappers.named(family, "ForCausalLM")
    theirs = wrappers.filled(kind, wrappers.text_config(family))
    theirs.save_pretrained(tmp_path / "theirs")
    fm.save(*fm.load(tmp_path / "theirs", dtype=None), tmp_path / "ours")
    same(theirs, reread(kind, tmp_path / "ours"))


@pytest.mark.plain
@pytest.mark.parametrize(
    ("family", "wrapped"),
    [
        ("qwen3_5", False),
        ("gemma3", False),
        ("gemma3", True),
        ("qwen4_exp", False),
        ("qwen4_exp", True),
        ("deepseek_v2", False),
    ],
)
def test_what_a_base_class_saved(family: str, wrapped: bool, tmp_path: Path) -> None:
    """Without a head, and without `model.` before the names: the head is the embedding where the config ties them."""
    tied = {"tie_word_embeddings": True}
    config = wrappers.wrapper_config(family, True, True) if wrapped else wrappers.text_config(family, **tied)
    ending = "TextModel" if family in wrappers.WRAPPERS and not wrapped else "Model"
    wrappers.filled(wrappers.named(family, ending), config).save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    kind = wrappers.named(family, "ForConditionalGeneration" if wrapped else "ForCausalLM")
    theirs = reread(kind, tmp_path / "theirs")
    model, params = fm.load(tmp_path / "theirs", dtype=None)
    check_logits(model, params, theirs)
    fm.save(model, params, tmp_path / "ours")
    same(theirs, reread(kind, tmp_path / "ours"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model that sees images."""
    kind = wrappers.named("qwen3_5", "ForConditionalGeneration")
    directory = tmp_path_factory.mktemp("seeing")
    wrappers.filled(kind, wrappers.wrapper_config("qwen3_5", True, True)).save_pretrained(directory)
    tiny.tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def test_saving_over_the_model_s_own_directory(seeing: Path, tmp_path: Path) -> None:
    """Again and again, and elsewhere afterwards: the tower is found where it was written."""
    home = shutil.copytree(seeing, tmp_path / "home")
    model, params = fm.load(home)
    for factor in (2.0, 4.0):
        params = trees.put(params, "norm.weight", params.norm.weight * factor)
        fm.save(model, params, home)
    fm.save(model, params, tmp_path / "elsewhere")
    before, after = (load_file(path / "model.safetensors") for path in (seeing, tmp_path / "elsewhere"))
    before["model.language_model.norm.weight"] *= 8
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name].equal(value if "visual" in name else value.to(after[name].dtype)), name


@pytest.mark.parametrize("change", ["replaced", "gone", "shorter"])
def test_a_directory_that_changed_since(change: str, seeing: Path, tmp_path: Path) -> None:
    """What would go along is no longer what the model was loaded with: said before anything is written."""
    home = shutil.copytree(seeing, tmp_path / "home")
    model, params = fm.load(home)
    weights = home / "model.safetensors"
    if change == "gone":
        weights.unlink()
    elif change == "shorter":
        os.truncate(weights, 1000)
    else:
        save_file({name: value + 1 for name, value in load_file(weights).items()}, home / "new")
        (home / "new").replace(weights)
    with refuses(fm.CheckpointError, "model.safetensors changed or went away since the model was loaded"):
        fm.save(model, params, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_no_tower_at_hand(seeing: Path, tmp_path: Path) -> None:
    """A wrapper's config without the directory of its tower: what is saved says that it is a text model."""
    from transformers import AutoModelForCausalLM

    model = fm.build(seeing)
    params = model.init_params(seed=4)
    fm.save(model, params, tmp_path)
    config = trees.read_config(tmp_path)
    assert config["model_type"] == "qwen3_5_text" and not {"text_config", "vision_config"} & config.keys()
    theirs = reread(AutoModelForCausalLM, tmp_path)
    assert type(theirs).__name__ == "Qwen3_5ForCausalLM"
    check_logits(model, params, theirs)
    again, loaded = fm.load(tmp_path, dtype=None)
    assert again.config == model.config and trees.equal(loaded, params)


def test_a_tower_beside_quantised_weights(seeing: Path, tmp_path: Path) -> None:
    """The description names its tensors too, by the words of the one that they came with."""
    model, params = fm.load(seeing, dtype=None)
    small = trees.quantize(params, "W8A8_DYNAMIC")
    fm.save(model, small, tmp_path / "quantised")
    path, tower = tmp_path / "quantised" / "quant_model_description.json", "model.visual.pos_embed.weight"
    words = json.loads(path.read_text())
    assert words[tower] == "FLOAT" and words.keys() >= trees.tensor_names(tmp_path / "quantised").keys()
    path.write_text(json.dumps(words | {tower: "W8A8_DYNAMIC"}))
    model, small = fm.load(tmp_path / "quantised", dtype=None)
    fm.save(model, trees.dequantize(small, torch.float32), tmp_path / "float")
    assert json.loads((tmp_path / "float" / path.name).read_text())[tower] == "W8A8_DYNAMIC"
    assert trees.equal(fm.load(tmp_path / "float", dtype=None)[1], trees.dequantize(small, torch.float32))


COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "LICENSE",
    "tokenization_kimi.py", "additional_chat_templates/tools.jinja",
)  # fmt: skip
LEFT = (
    ".gitattributes", "README.md", "pytorch_model.bin", "optimizer.pt", "model-q4.gguf", "adapter_config.json",
    "pytorch_model.bin.index.json", "quant_model_description_w8a8.json",
)  # fmt: skip


def test_the_files_beside(tmp_path: Path) -> None:
    """All but what goes with the weights; no link out of the directory is followed, and none is passed over unsaid."""
    source = tiny.write(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    for name in {*COPIED, *LEFT} - {"tokenizer.json", "generation_config.json"}:
        (source / name).write_text(json.dumps({"file": name}))
    (source / "merges.txt").rename(source / "tokenizer.bpe")
    (source / "merges.txt").symlink_to("tokenizer.bpe")
    (source / "onnx").mkdir()
    os.mkfifo(source / "pipe.json")
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    model, params = fm.load(source, dtype=None)
    with pytest.warns(UserWarning, match=rf"not copied from {source}, as links out of it or .*: notes.txt$"):
        fm.save(model, params, tmp_path / "ours")
    ours = tmp_path / "ours"
    saved = {str(path.relative_to(ours)): path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    assert saved.keys() == {*COPIED, "tokenizer.bpe", "config.json", "model.safetensors"}
    assert all(saved[name] == (source / name).read_bytes() for name in COPIED)
    assert not (ours / "merges.txt").is_symlink()


def test_files_of_the_hub_s_cache(tmp_path: Path) -> None:
    """There a directory is one of links to its repository's blobs."""
    blobs, home = tmp_path / "models--o--n" / "blobs", tmp_path / "models--o--n" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    tiny.write(home)
    for file in list(home.iterdir()):
        file.rename(blobs / file.stem)
        file.symlink_to(Path("..", "..", "blobs", file.stem))
    saved = fm.save(*fm.load(home), tmp_path / "ours")
    assert {path.name for path in saved.iterdir()} == {path.name for path in home.iterdir()}
