"""A config may ask for anything: what the files do not hold is refused before work or memory follows the number."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import funcmodels as fm
import params
from funcmodels.drafts.block_config import BlockConfig
from funcmodels.drafts.block_config import read_config as read_block_config
from tests.checkpoints import CONFIGS, DRAFTS, REFUSALS, bounded, written
from tests.oracle.states import refuses

pytestmark = pytest.mark.plain


def changed(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A config with a field changed wherever it stands."""
    found = {key: changed(inner, name, value) if isinstance(inner, dict) else inner for key, inner in config.items()}
    return found | ({name: value} if name in found else {})


def integers(config: dict[str, Any]) -> set[str]:
    """The names of all integers in a config."""
    inner = [integers(value) for value in config.values() if isinstance(value, dict)]
    return {name for name, value in config.items() if type(value) is int}.union(*inner)


@pytest.mark.parametrize("name", [*CONFIGS, *DRAFTS])
def test_no_integer_makes_work(name: str, tmp_path: Path) -> None:
    """Each in its turn, held against the files; those that no tensor's shape hangs on load."""
    directory = shutil.copytree(written(name), tmp_path / name)
    config = json.loads((directory / "config.json").read_text())
    for field in sorted(integers(config)):
        (directory / "config.json").write_text(json.dumps(changed(config, field, 2**14)))
        with bounded(1, 300):
            loaded_or_refused(name, directory)


@pytest.mark.parametrize("name", [*CONFIGS, *DRAFTS])
def test_every_field_may_hold_anything(name: str, tmp_path: Path) -> None:
    """Those too that the config leaves to their defaults."""
    directory = shutil.copytree(written(name), tmp_path / name)
    config = json.loads((directory / "config.json").read_text())
    for field in dataclasses.fields(BlockConfig if name in DRAFTS else fm.build(config).config):
        for value in (-1, 0, True, "x", [], {}, [None], 1e308):
            (directory / "config.json").write_text(json.dumps(config | {field.name: value}))
            with bounded(1, 100):
                loaded_or_refused(name, directory)


def loaded_or_refused(name: str, directory: Path) -> None:
    try:
        fm.draft(fm.build(CONFIGS["qwen3_5"]()), directory) if name in DRAFTS else fm.load(directory)
    except REFUSALS:
        return


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layers", [1000, 10_000, 10**9])
def test_layers_that_the_files_do_not_have(family: str, layers: int, tmp_path: Path) -> None:
    """Of every kind that follows from the number, where no list of kinds bounds it."""
    directory = shutil.copytree(written(family), tmp_path / family)
    config = json.loads((directory / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "ple_layer_ids"):
        config = changed(config, name, None)
    config = changed(changed(config, "num_hidden_layers", layers), "kda_layers", list(range(1, min(layers, 1000) + 1)))
    (directory / "config.json").write_text(json.dumps(changed(config, "full_attn_layers", [])))
    with bounded(1, 300), refuses(fm.ConfigError, "num_hidden_layers"):
        fm.load(directory)


def test_experts_one_by_one_that_the_files_do_not_have(tmp_path: Path) -> None:
    """Neither listed nor made: the files' own tensors bound what is looked for."""
    model = fm.build(CONFIGS["deepseek_v2"]() | {"n_routed_experts": 2**14})
    headers = params.tensor_names(written("deepseek_v2"))
    apart = {
        name.replace("experts.gate_up_proj", f"experts.{expert}.{part}_proj.weight"): stored
        for name, stored in headers.items()
        for expert in range(6)
        for part in ("gate", "up")
    }
    with (
        bounded(1, 300),
        refuses(params.CheckpointError, f"far more tensors than the {len(apart)} that the files have"),
    ):
        params.load(tmp_path, model.param_spec(), model.family.names, tensors=apart)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngram_vocab_size_base": 2**63}, "ngram_vocab_size_base must be at most 1073741824"),
        ({"heads_per_ngram": 10**6, "ple_embed_dim": 10**6}, "heads_per_ngram must be at most 512"),
        ({"heads_per_ngram": 512, "ngram_size": 64, "ple_embed_dim": 512 * 63}, "hash heads are 32256, more than 512"),
        ({"split_ngram_parts": 10**9}, "split_ngram_parts must be at most 16384"),
        ({"hidden_size": 2**40, "vocab_size": 2**40}, "more numbers than any computer addresses"),
        ({"vocab_size": 10**400}, "vocab_size is an integer of 1329 bits, more than 128"),
        ({"head_dim": 10**400}, "head_dim is an integer of 1329 bits, more than 128"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be a finite number"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor must be a finite number"),
    ],
)
def test_numbers_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    """Refused where there are no files to hold them against."""
    config = CONFIGS["flash_next"]()
    config["rope_parameters"] = {**config["rope_parameters"], **changes}
    with bounded(1, 300), refuses(fm.ConfigError, message):
        fm.build({**config, **changes}).param_spec()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("found", [[1], "x", 3, True, ["text_config"]])
def test_a_text_model_that_is_no_section(family: str, found: Any) -> None:
    with refuses(fm.ConfigError, f"text_config must be a section of fields, found {found!r}"):
        fm.build({**CONFIGS[family](), "text_config": found})


@pytest.mark.parametrize("value", ["x\n" * 200_000, {"x" * 500: [["y" * 400_000]]}], ids=["text", "section"])
@pytest.mark.parametrize("family", [*CONFIGS, "gated"])
def test_no_message_repeats_a_book(family: str, value: Any) -> None:
    """Whichever field holds it."""
    block = family == "gated"
    config = json.loads((written("gated") / "config.json").read_text()) if block else CONFIGS[family]()
    inner = config.get("text_config", config)
    texts = []
    for name in [*inner, "rope_scaling", "hidden_act", "quantization_config", "model_type"]:
        changes = {**inner, name: value}
        try:
            if block:
                read_block_config(changes, 4)
            else:
                fm.build(changes if inner is config else {**config, "text_config": changes})
        except fm.ConfigError as error:
            texts.append(str(error))
    assert len(texts) > len(inner) // 2 and max(map(len, texts)) < 5000
