"""The command line: what it prints where, its exit codes, and its errors."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import funcmodels as fm
from funcmodels import cli, commands
from funcmodels.checkpoint import loading
from lowering.policy import EVIDENCE
from lowering.target import EVERY
from tests import tiny


class Run(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """`run("generate", "--model", ...)` in this process."""

    def call(*argv: object) -> Run:
        code = cli.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call


def test_generate_prints_the_text_and_reports_beside_it(run: Callable[..., Run], directory: Path) -> None:
    flags = [
        "--max-new-tokens",
        "12",
        "--temperature",
        "1.5",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--min-p",
        "0.001",
        "--seed",
        "3",
    ]
    found = run("generate", "--model", directory, "--prompt", "def f(", *flags)
    sampling = fm.Sampling(1.5, 50, 0.9, 0.001, 3)
    result = fm.generate(*fm.load(directory, dtype=None), ["def f("], 12, sampling=sampling)[0]
    assert (found.code, found.out) == (0, f"{result.text}\n")
    assert f"prefill: {result.prompt_tokens} tokens in " in found.err
    assert "decode: 11 tokens in " in found.err and "tokens/s" in found.err
    assert "gated_delta_rule" in found.err and "paged_attention" in found.err
    assert "no --prompt given" not in found.err


def test_generate_takes_penalties_and_biases(run: Callable[..., Run], directory: Path) -> None:
    flags = ["--repetition-penalty", 1.4, "--presence-penalty", 0.5, "--frequency-penalty", -0.2]
    flags += ["--logit-bias", "7=2.5", "--logit-bias", "9=-inf"]
    found = run("generate", "--model", directory, "--prompt", "def f(", "--max-new-tokens", 12, *flags)
    given: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.2}
    sampling = fm.Sampling(**given, logit_bias=((7, 2.5), (9, -math.inf)))
    loaded = fm.load(directory, dtype=None)
    assert found.out == f"{fm.generate(*loaded, ['def f('], 12, sampling=sampling)[0].text}\n"
    assert found.out != f"{fm.generate(*loaded, ['def f('], 12)[0].text}\n"


def test_generate_without_a_prompt_says_what_it_continues(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BUNDLED", directory)
    found = run("generate", "--max-new-tokens", 1)
    assert found.code == 0
    assert "no --prompt given" in found.err and commands.PROMPT in found.err
    assert "decode: 0 tokens" in found.err
    asked = ["generate", "--temperature", commands.DEMO_TEMPERATURE, "--max-new-tokens", 1, "--model", directory]
    assert found.out == run(*asked, "--prompt", commands.PROMPT).out
    monkeypatch.setattr("sys.stdin", io.StringIO(commands.PROMPT))
    assert found.out == run(*asked, "--prompt", "-").out


def test_generate_loads_in_the_dtype_asked_for(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []

    def generate(model: Any, params: Any, *rest: Any, **options: Any) -> list[fm.Result]:
        seen.append(params.embed.weight.dtype)
        return fm.generate(model, params, *rest, **options)

    monkeypatch.setattr(commands, "generate", generate)
    for flags in ([], ["--dtype", "bfloat16"]):
        assert run("generate", "--model", directory, "--prompt", "x", "--max-new-tokens", 1, *flags).code == 0
    assert seen == [torch.float32, torch.bfloat16]


def test_generate_captures_and_sets_the_dtype_of_states(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []

    def generate(*args: Any, **options: Any) -> list[fm.Result]:
        seen.append((options["backend"], options["recurrent_dtype"]))
        return fm.generate(*args, **options)

    monkeypatch.setattr(commands, "generate", generate)
    asked = ["generate", "--model", directory, "--prompt", "def f(", "--max-new-tokens", 5]
    plain, captured = run(*asked), run(*asked, "--backend", "fx")
    assert captured.out == plain.out and "captured" not in plain.err
    assert re.search(r"first rounds, captured: \d+\.\d+ s\ndecode: 3 tokens in ", captured.err)
    assert run(*asked, "--recurrent-dtype", "bfloat16").code == 0
    assert seen == [(None, None), ("fx", None), (None, torch.bfloat16)]


def test_generate_says_what_the_checkpoint_asks_for_instead(
    run: Callable[..., Run], directory: Path, tmp_path: Path
) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "generation_config.json"
    flags = ["generate", "--model", tmp_path, "--prompt", "x", "--max-new-tokens", 1]
    assert "note:" not in run(*flags).err, "a file that asks for nothing"
    path.unlink()
    path.write_text(json.dumps(asked))
    note = "note: generation_config.json asks for --temperature 0.6 --top-k 20, which was not used"
    assert note in run(*flags).err and note in run(*flags, "--top-k", 20).err
    assert "note:" not in run(*flags, "--temperature", 0.6, "--top-k", 20, "--seed", 3).err
    assert "note: --top-k 5 --seed 3 had no effect" in run(*flags, "--top-k", 5, "--seed", 3).err
    path.write_text(json.dumps(asked | {"top_k": -3}))
    found = run(*flags)
    assert found.code == 0 and re.search("note: .* not used: generation_config.json: .*top_k must be", found.err)


def test_generate_fails_where_no_token_can_be_chosen(run: Callable[..., Run], directory: Path) -> None:
    flags = [word for token in range(tiny.VOCAB) for word in ("--logit-bias", f"{token}=-inf")]
    found = run("generate", "--model", directory, "--prompt", "x", *flags)
    assert (found.code, found.out) == (2, "\n")
    assert "the largest logit after 0 new tokens is NaN or infinite" in found.err


MISTAKES = [
    (["--temperature", -1], "temperature must be 0"), (["--temperature", 1e-46], "temperature must be 0"),
    (["--top-p", 0], "top_p must be"),
    (["--draft", "mtp"], "this model has no mtp head"), (["--max-new-tokens", 0], "max_new_tokens must be at least 1"),
    (["--max-new-tokens", 500], "do not fit in the 128 positions"), (["--prompt", ""], "prompt 0 is empty"),
    (["--device", "cuda:9999"], "device 'cuda:9999' cannot be used here"), (["--device", "x"], "device 'x' cannot"),
    (["--model", "nowhere"], "no directory nowhere"), (["--prompt", "a\udc80"], "character 1 is '.*as from bytes that"),
    (["--device", "meta"], "device 'meta' holds shapes without values"),
    (["--repetition-penalty", 0], "repetition_penalty must be a positive number"),
    (["--logit-bias", "99999=1"], "logit_bias has token ids outside the vocabulary"),
    (["--backend", "graph"], "backend='graph' is not known; there are: inductor, fx"),
    (["--backend", "cuda"], "backend 'cuda' captures tensors on cuda, these lie on cpu"),
    (["--device", "gpu"], "device 'gpu' cannot .* does not know it; give 'cpu', 'cuda', 'cuda:1' or 'npu'$"),
    (["--device", "vulkan"], "device 'vulkan' cannot be used here: .{1,160}$"),
    (["--device", "cuda\0"], "cannot be used here: Torch does not know it"),
    (["--tp", 0], "--tp must be at least 1, found 0"), (["--whole-experts"], "--whole-experts .* give --tp N too"),
    (["--tp", 2, "--prompt", "-"], "which ranks cannot share"),
    (["--draft", "none", "--draft-steps", 2], "--draft-steps 2 is of no use without a draft"),
    (["--draft-steps", 2], "--draft-steps 2 is of no use without a draft"),
    (["--draft", ""], "the name of a checkpoint is empty"), (["--model", ""], "the name of a checkpoint is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_mistakes_are_one_message_and_exit_code_2(
    flags: list[object], message: str, run: Callable[..., Run], directory: Path
) -> None:
    found = run("generate", "--model", directory, "--prompt", "x", *flags)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("funcmodels generate: ") and re.search(message, found.err)
    assert "Traceback" not in found.err
    with pytest.raises(commands.ERRORS, match=message):
        cli.main([str(word) for word in ("generate", "--model", directory, "--prompt", "x", *flags, "--traceback")])


def test_a_mistake_is_told_without_the_default_prompt(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "BUNDLED", directory)
    for flags in (["--max-new-tokens", 0], ["--draft", "mtp"], ["--device", "x"]):
        found = run("generate", *flags)
        assert found.code == 2 and found.err.count("\n") == 1 and found.err.startswith("funcmodels generate: ")


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_an_npu_needs_its_extra(device: str, run: Callable[..., Run], directory: Path) -> None:
    found = run("generate", "--model", directory, "--prompt", "x", "--device", device)
    assert found.code == 2 and 'CANN and pip install "funcmodels[npu]"' in found.err


@pytest.mark.parametrize("command", ["inspect {}", "generate --model {}", "lower --target cpu --model {}"])
def test_a_config_without_a_known_architecture(
    command: str, run: Callable[..., Run], directory: Path, tmp_path: Path
) -> None:
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": ["qwen3_5_text"]}))
    found = run(*command.format(tmp_path).split())
    assert found.code == 2 and "model_type ['qwen3_5_text'] is not a known architecture" in found.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "required: COMMAND"),
        ("generate --top-k x", "invalid int value: 'x'"),
        ("lower", "required: --target"),
        ("nonsense", "invalid choice: 'nonsense'"),
        ("generate --dtype int8", "invalid choice: 'int8'"),
        ("generate --logit-bias foo", "expected a token's id and a number, as 7=-1.5, found 'foo'"),
        ("generate --logit-bias 7=", "found '7='"),
    ],
)
def test_wrong_arguments_are_exit_code_2(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv.split())
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "usage: funcmodels" in said and message in said


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"funcmodels {fm.__version__}\n")
    assert metadata.version("funcmodels") == fm.__version__


@pytest.mark.parametrize("asked", [("funcmodels", "inspect", "bundled"), ("lowering", "check")])
def test_ctrl_c_while_torch_is_loaded(asked: tuple[str, ...], tmp_path: Path) -> None:
    """A module in the place of Torch is interrupted as it would be."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", *asked]
    path = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), root))}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_help_names_every_target() -> None:
    assert cli.TARGETS == EVERY and cli.EVIDENCE == EVIDENCE


@pytest.mark.parametrize(
    ("error", "code", "says"), [(KeyboardInterrupt, 130, "interrupted"), (MemoryError("x"), 2, "x")]
)
def test_interruption_and_full_memory(
    error: BaseException,
    code: int,
    says: str,
    run: Callable[..., Run],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(commands, "generate", fail)
    found = run("generate", "--model", directory, "--prompt", "x")
    assert found.code == code and says in found.err and "Traceback" not in found.err


def test_faults_of_ours_keep_their_traceback(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "generate", lambda *_, **__: {}["missing"])
    with pytest.raises(KeyError):
        run("generate", "--model", directory, "--prompt", "x")


def test_inspect_shows_config_and_places(run: Callable[..., Run], directory: Path) -> None:
    found = run("inspect", directory)
    assert (found.code, found.err) == (0, "")
    assert "hidden_size = 32" in found.out
    assert "model.layers.3.self_attn.q_proj.weight" in found.out and "layers.3.attn.qkv.weight rows 0:128" in found.out
    parameters = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert f"{parameters:,} parameters" in found.out


def test_inspect_of_what_would_not_load(run: Callable[..., Run], directory: Path, tmp_path: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.strange"] = tensors.pop("model.norm.weight")
    tensors["model.visual.patch"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    found = run("inspect", tmp_path)
    assert found.code == 1
    assert "missing: model.norm.weight" in found.out and "unexpected: model.strange" in found.out
    assert "ignored: vision tower" in found.out and "1 ignored" in found.out
    assert run("inspect", tmp_path / "nowhere").code == 2


def test_tables_are_drawn_on_a_terminal(
    run: Callable[..., Run], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run("inspect", directory), run("lower", "--model", directory, "--target", "cpu")
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = run("inspect", directory), run("lower", "--model", directory, "--target", "cpu")
    for before, after in zip(plain, drawn, strict=True):
        assert before.code == after.code == 0
        assert "━" in after.out and "━" not in before.out


@pytest.mark.parametrize("target", ["ascend950", "cuda", "cpu"])
def test_lower_explains_decode_and_prefill(target: str, run: Callable[..., Run], directory: Path) -> None:
    found = run("lower", "--model", directory, "--target", target, "--rows", 3, "--tokens", 40)
    assert (found.code, found.err) == (0, "")
    decode, prefill = found.out.split("prefill, 3 x 40 tokens")
    assert decode.strip().startswith(f"decode, 3 x 1 tokens, bfloat16, {target}")
    for part in (decode, prefill):
        calls = {line.split()[0]: line.split()[1] for line in part.splitlines()[2:] if line}
        assert calls["paged_attention"] == "1" and calls["gated_delta_rule"] == "3"


def test_lower_needs_no_weights(run: Callable[..., Run], directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    wide = {"hidden_size": 4096, "vocab_size": 200_000, "intermediate_size": 20_000}
    (tmp_path / "config.json").write_text(json.dumps({**config, **wide}))
    assert run("lower", "--model", tmp_path, "--target", "ascend910b").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--target ascend95", "did you mean 'ascend950'"),
        ("--target cpu --cann 9.0.0", "target 'cpu' has no cann, found cann='9.0.0'"),
        ("--target ascend950 --cann nine", "cann='nine' is no version of CANN"),
        ("--target cpu --rows 0", "rows must be at least 1"),
        ("--target cpu --tokens 0", "--tokens must be at least 1"),
        ("--target cpu --html missing/page.html", "--html missing/page.html: no folder missing"),
        ("--target cpu --html .", "--html .: . is a folder"),
        ("--target cpu --quantize W8A8 --quantize W8A8_DYNAMIC", "--quantize names a pattern twice: **, **"),
    ],
)
def test_lower_names_mistakes(flags: str, message: str, run: Callable[..., Run], directory: Path) -> None:
    found = run("lower", "--model", directory, *flags.split())
    assert found.code == 2 and message in found.err


def test_as_a_module_in_its_own_process(directory: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "funcmodels"]
    asked = [*command, "generate", "--model", str(directory), "--prompt", "def f(", "--max-new-tokens", "5"]
    root = Path(__file__).parents[1]
    given = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    given["OMP_DISPLAY_ENV"] = "true"
    done = subprocess.run(asked, capture_output=True, cwd=root, env=given, timeout=120, check=False)
    result = fm.generate(*fm.load(directory, dtype=None), ["def f("], 5)[0]
    assert (done.returncode, done.stdout.decode()) == (0, f"{result.text}\n")
    assert b"kernels" in done.stderr and b"Traceback" not in done.stderr
    assert re.search(rb"OMP_WAIT_POLICY ?= ?'PASSIVE'", done.stderr), "beside a busy process, threads that spin starve"


def test_a_reader_that_leaves_early_is_no_error(directory: Path) -> None:
    command = [sys.executable, "-m", "funcmodels", "lower", "--model", str(directory), "--target", "cpu"]
    root, pipe = Path(__file__).parents[1], subprocess.PIPE
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, cwd=root, env=buffered, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 141
