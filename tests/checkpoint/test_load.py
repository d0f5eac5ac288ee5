"""`fm.load`: what comes back, and the draft head that is there or is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import funcmodels as fm
import params as trees
from funcmodels.checkpoint import loading
from funcmodels.checkpoint.text import Tokenizer
from tests import tiny
from tests.oracle.states import refuses

SMALL = fm.build(loading.BUNDLED)


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny.oracle(seed=1)


@pytest.fixture(scope="module")
def directory(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"), reference, [0, 3])


def test_logits_are_those_of_transformers(reference: Any, directory: Path) -> None:
    model, params = fm.load(directory, dtype=torch.float32)
    ids = [4, 90, 33, 200, 2]
    ours, _ = model.forward(params, None, fm.Batch.from_lists([ids]))
    with torch.no_grad():
        theirs = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours.logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "found"), [(torch.bfloat16, torch.bfloat16), (None, torch.float32)])
def test_dtype_is_the_one_asked_for(dtype: torch.dtype | None, found: torch.dtype, directory: Path) -> None:
    _, params = fm.load(str(directory), dtype=dtype)
    assert params.embed.weight.dtype == found
    assert params.layers[0].attn.a_log.dtype == torch.float32
    assert fm.load(directory)[1].embed.weight.dtype == torch.bfloat16


def test_the_model_knows_its_tokenizer_and_ends(directory: Path) -> None:
    model, _ = fm.load(directory)
    assert model.tokenizer is not None
    assert (model.tokenizer.eos, model.tokenizer.bos) == ((0, 3), None)
    text = "def größe():\n\treturn 語"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    assert model.tokenizer.decode(model.tokenizer.encode(f"a{tiny.END}b")) == "ab"
    assert fm.build(directory).tokenizer is None


ASKED: dict[str, tuple[dict[str, Any], fm.Sampling]] = {
    "all": (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05},
        fm.Sampling(0.6, 20, 0.95, 0.05, repetition_penalty=1.05),
    ),
    "some": ({"do_sample": True, "top_k": 0, "top_p": 0.9, "temperature": None}, fm.Sampling(1.0, top_p=0.9)),
    "greedy": ({"do_sample": False, "top_k": 9, "repetition_penalty": 1.2}, fm.Sampling(repetition_penalty=1.2)),
    "not said": ({"temperature": 0.6, "top_p": 0.9}, fm.Sampling()),
    "neutral": ({"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "max_new_tokens": 9}, fm.Sampling()),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_the_sampling_that_a_checkpoint_asks_for(name: str, directory: Path, tmp_path: Path) -> None:
    given, expected = ASKED[name]
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    model = replace(fm.build(directory), tokenizer=Tokenizer.of(tmp_path, {}))
    assert fm.Sampling.of(model) == expected
    theirs = GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.get_generation_mode() == "sample") == (expected.temperature > 0)
    assert fm.Sampling.of(fm.build(directory)) == fm.Sampling()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": 0.6, "top_p": 1.5}', "top_p must be above 0 and at most 1"),
        ('{"do_sample": true, "temperature": 1e39}', "temperature must be .*, found 1e.39"),
        pytest.param('{"temperature": "hot"}', "temperature must be .*, found 'hot'", marks=pytest.mark.plain),
        pytest.param('{"top_k": 20.5}', "top_k must be .*, found 20.5", marks=pytest.mark.plain),
        ('{"repetition_penalty": NaN}', "repetition_penalty must be .*, found nan"),
        ('{"do_sample": "yes"}', "do_sample is 'yes'"),
        ('{"num_beams": 4, "no_repeat_ngram_size": 3}', "Sampling has no no_repeat_ngram_size=3, num_beams=4"),
    ],
)
def test_sampling_that_cannot_be_used_is_said_when_it_is_asked_for(
    content: str, message: str, reference: Any, tmp_path: Path
) -> None:
    tiny.write(tmp_path, reference)
    (tmp_path / "generation_config.json").write_text(content)
    model, _ = fm.load(tmp_path)
    with pytest.raises(fm.ConfigError, match=f"generation_config.json: .*{message}"):
        fm.Sampling.of(model)


def test_padding_and_truncation_in_the_file_are_left_aside(directory: Path, tmp_path: Path) -> None:
    tokens = tiny.tokenizer()
    tokens.enable_truncation(3)
    tokens.enable_padding(length=50)
    tokens.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "bos_token_id": 6}))
    found = Tokenizer.of(tmp_path, {"text_config": {"eos_token_id": 5}, "bos_token_id": 6})
    assert found.encode("a longer text") == tiny.tokenizer().encode("a longer text").ids
    assert (found.eos, found.bos) == ((5,), 6)


def test_text_that_is_not_unicode(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"character 2 is '\\udcff', as from bytes that are not UTF-8"):
        Tokenizer.of(directory, {}).encode("ab\udcffc")


@pytest.mark.parametrize("content", ["{", "{}", "[]", ""])
def test_a_broken_tokenizer_names_its_file(content: str, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(fm.CheckpointError, match=r"tokenizer.json cannot be read: .*; download it again"):
        Tokenizer.of(tmp_path, {}).encode("x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("generation_config.json", "[]", "holds a list, expected an object"),
        ("generation_config.json", '{"a": ' + "[" * 100_000, "generation_config.json is nested too deeply"),
        ("generation_config.json", " " * 2**25, "bytes, more than"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be an integer or a list"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id must be an integer .*, found True"),
        ("generation_config.json", '{"bos_token_id": [false]}', "bos_token_id must be an integer or a list"),
    ],
)
def test_a_broken_generation_config(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(fm.ConfigError, match=message):
        Tokenizer.of(tmp_path, {})


def saved(directory: Path, stored: int, said: int | None, nested: bool = False) -> Path:
    """A checkpoint with `stored` draft-head layers whose config says `said`."""
    config = {**tiny.SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "dtype": "float32"}
    model = fm.build({**config, "mtp_num_hidden_layers": stored})
    told = config if said is None else {**config, "mtp_num_hidden_layers": said}
    if nested:
        told = {"model_type": "qwen3_5", "text_config": told}
    trees.save(model.init_params(), directory, model.param_spec(), model.family.names, told)
    return directory


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("stored", "said", "layers"), [(1, 1, 1), (1, None, 1), (2, 0, 2), (0, 1, 0), (0, None, 0)])
def test_a_draft_head_is_loaded_where_its_tensors_are(
    stored: int, said: int | None, layers: int, nested: bool, tmp_path: Path
) -> None:
    model, params = fm.load(saved(tmp_path, stored, said, nested))
    assert model.config.mtp_num_hidden_layers == layers
    assert (len(params.mtp.layers) if params.mtp else 0) == layers
    assert fm.build(model.config_json).config == model.config


def test_half_a_draft_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(fm.CheckpointError, match=r"mtp\.layers\.1"):
        fm.load(saved(tmp_path, stored=1, said=2))


def test_the_bundled_model_is_missed_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "BUNDLED", tmp_path)
    with pytest.raises(fm.CheckpointError, match="no bundled model; give a checkpoint directory"):
        fm.load("bundled")


def test_bundled_stands_for_the_directory_in_the_package(
    monkeypatch: pytest.MonkeyPatch, directory: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "BUNDLED", directory)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    assert fm.load("bundled")[0].config.vocab_size == tiny.VOCAB


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"path_or_hub_id": "nowhere"}, fm.CheckpointError, "no directory nowhere"),
        ({"path_or_hub_id": "a" * 5000}, fm.CheckpointError, "no directory a.*is not a hub id"),
        ({"path_or_hub_id": "a/" * 5000}, fm.CheckpointError, "no directory a.*is not a hub id"),
        ({"path_or_hub_id": None}, TypeError, "a checkpoint is a directory or a hub id .*, found None"),
        ({"dtype": torch.int8}, fm.CheckpointError, "cannot have dtype"),
        ({"dtype": torch.float8_e5m2}, fm.CheckpointError, "cannot have dtype"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype such as torch.bfloat16, found 'float32'"),
    ],
)
@pytest.mark.plain
def test_mistakes(given: dict[str, Any], kind: type[Exception], message: str, directory: Path) -> None:
    with pytest.raises(kind, match=message) as caught:
        fm.load(**{"path_or_hub_id": directory, **given})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("call", "given", "kind", "message"),
    [
        (SMALL.init_params, {"dtype": "float32"}, TypeError, "dtype must be a torch.dtype"),
        (SMALL.init_params, {"dtype": torch.int32}, fm.CheckpointError, "cannot have dtype torch.int32"),
        (partial(loading.without_weights, "bundled"), {"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype"),
        (partial(fm.draft, SMALL, "dspark"), {"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype"),
        (partial(fm.draft, SMALL), {"kind": "a" * 5000}, ValueError, "is not a known draft"),
        (fm.build, {"config": 3}, TypeError, "build: expected a config dictionary, or where one lies, found 3"),
        (fm.build, {"config": "a" * 5000}, fm.CheckpointError, "has no config.json"),
        (fm.build, {"config": ""}, fm.CheckpointError, "the path of a config is empty"),
        (fm.build, {"config": "a\0b"}, fm.CheckpointError, "the path of a config has a NUL character"),
        (fm.load, {"path_or_hub_id": "a\0b"}, fm.CheckpointError, "the name of a checkpoint has a NUL character"),
        (partial(fm.draft, SMALL), {"kind": "a/\0"}, fm.CheckpointError, "the name of a checkpoint has a NUL"),
        (partial(fm.draft, SMALL), {"kind": None}, TypeError, "the name of a checkpoint must be a path, found None"),
        (partial(fm.save, SMALL, None), {"path": "a\0b"}, fm.CheckpointError, "the directory to save to has a NUL"),
        (partial(fm.save, SMALL, None), {"path": 3}, TypeError, "the directory to save to must be a path, found 3"),
        (SMALL.init_params, {"seed": "a"}, TypeError, "seed must be an integer, found 'a'"),
        (trees.tensor_names, {"directory": "a" * 5000}, fm.CheckpointError, "is no directory"),
        (partial(fm.Batch.from_lists, [[1]]), {"device": "gpu"}, ValueError, "device 'gpu' cannot be used here"),
        (partial(fm.Batch.from_lists, [[1]]), {"device": 1.5}, TypeError, "device must be a name"),
    ],
)
@pytest.mark.plain
def test_mistakes_elsewhere(
    call: Callable[..., Any], given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(**given)


def test_a_mesh_that_is_none(directory: Path) -> None:
    with refuses(TypeError, "mesh='dp': give a DeviceMesh of one axis"):
        fm.load(directory, mesh="dp")  # type: ignore[arg-type]


def test_a_config_file_can_be_named(directory: Path) -> None:
    assert fm.build(directory / "config.json").config == fm.build(directory).config


def test_what_is_saved_takes_and_gives_text(directory: Path, tmp_path: Path) -> None:
    model, params = fm.load(directory, dtype=torch.float32)
    saved = fm.save(model, params, tmp_path / "saved", max_shard_bytes=50_000)
    again, loaded = fm.load(saved, dtype=None)
    assert len(list(saved.glob("*.safetensors"))) > 1 and trees.equal(loaded, params)
    assert model.tokenizer is not None and again.tokenizer is not None
    assert again.tokenizer.encode("def f(x):") == model.tokenizer.encode("def f(x):")
    assert again.tokenizer.eos == (0, 3)
    fm.save(again, loaded, saved, max_shard_bytes=50_000)  # over itself
    assert fm.load(saved)[0].tokenizer == again.tokenizer


def test_weights_without_a_tokenizer_are_saved_too(tmp_path: Path) -> None:
    model = fm.build(tiny.oracle().config.to_dict())
    saved = fm.save(model, model.init_params(seed=3), tmp_path)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert trees.equal(fm.load(saved, dtype=None)[1], model.init_params(seed=3))


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_links_at_the_tokenizers_names_are_replaced(directory: Path, tmp_path: Path, link: Any) -> None:
    """Not written through: what they lead to, another's file or the source itself, stays as it is."""
    model, params = fm.load(directory)
    (tmp_path / "other").write_text("precious")
    saved, source = tmp_path / "saved", (directory / "tokenizer.json").read_bytes()
    saved.mkdir()
    for target in (tmp_path / "other", directory / "tokenizer.json"):
        (saved / "tokenizer.json").unlink(missing_ok=True)
        link(saved / "tokenizer.json", target)
        fm.save(model, params, saved)
        assert (saved / "tokenizer.json").read_bytes() == source and not (saved / "tokenizer.json").is_symlink()
        assert not (saved / "tokenizer.json").samefile(target)
    assert (tmp_path / "other").read_text() == "precious"


def test_a_tokenizer_that_is_gone(directory: Path, tmp_path: Path) -> None:
    """Said before anything is written."""
    copied = shutil.copytree(directory, tmp_path / "copied")
    model, params = fm.load(copied)
    copied.rename(tmp_path / "elsewhere")
    with refuses(fm.CheckpointError, f"{copied}, which the tokenizer came from, is gone"):
        fm.save(model, params, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_ranks_part_is_not_saved(directory: Path, tmp_path: Path) -> None:
    whole, params = fm.load(directory)
    with refuses(fm.ConfigError, "rank 1 of 2"):
        fm.save(whole.sharded(trees.Ranks(1, 2, "tp")), params, tmp_path / "part")
    assert not (tmp_path / "part").exists()
