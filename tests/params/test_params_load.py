"""Loading checkpoints that transformers wrote, and refusing those that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params
from params.names.qwen3_5 import NAMES
from params.names.rules import Merged, Names, Plain


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read by the library."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a directory's weights by one file."""
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")


def expected_leaves(state: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Merged leaves of every layer, assembled from a transformers state dict by hand."""
    found = {"embed.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    for index, kind in enumerate(config.layer_types):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        if kind == "full_attention":
            rows = [state[f"{theirs}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
            found[f"{ours}.attn.qkv.weight"] = torch.cat(rows)
            found[f"{ours}.attn.out.weight"] = state[f"{theirs}.self_attn.o_proj.weight"]
        else:
            rows = [state[f"{theirs}.linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
            found[f"{ours}.attn.in_proj.weight"] = torch.cat(rows)
            found[f"{ours}.attn.out.weight"] = state[f"{theirs}.linear_attn.out_proj.weight"]
            found[f"{ours}.attn.conv"] = state[f"{theirs}.linear_attn.conv1d.weight"][:, 0]
            found[f"{ours}.attn.a_log"] = state[f"{theirs}.linear_attn.A_log"]
        if hasattr(config, "num_experts"):
            found[f"{ours}.mlp.experts.gate_up"] = state[f"{theirs}.mlp.experts.gate_up_proj"]
            found[f"{ours}.mlp.experts.down"] = state[f"{theirs}.mlp.experts.down_proj"]
            found[f"{ours}.mlp.shared_gate.weight"] = state[f"{theirs}.mlp.shared_expert_gate.weight"]
        else:
            rows = [state[f"{theirs}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
            found[f"{ours}.mlp.gate_up.weight"] = torch.cat(rows)
    return found


def test_what_transformers_saves_loads(model: Any, saved: Path, spec_of: Any) -> None:
    """Every merged leaf has the members' rows in order, every other tensor its own values."""
    spec = spec_of(model.config)
    tree = params.load(saved, spec, NAMES, dtype=None)
    for path, value in expected_leaves(model.state_dict(), model.config).items():
        assert torch.equal(params.at(tree, path), value), path
    state = params.to_checkpoint(tree, spec, NAMES)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_shards_load_like_one_file(model: Any, saved: Path, spec_of: Any, tmp_path: Path) -> None:
    """The transformers library' shards and index give the same tree, and files the index does not name are not read."""
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "shards" / "consolidated.safetensors").write_bytes(b"not weights")
    spec = spec_of(model.config)
    assert params.load(tmp_path / "shards", spec, NAMES) == params.load(saved, spec, NAMES)


def test_files_without_index_load_together(saved: Path, model: Any, spec_of: Any) -> None:
    """Two files with different tensors and no index are one checkpoint."""
    tensors, spec = weights(saved), spec_of(model.config)
    whole = params.load(saved, spec, NAMES)
    (saved / "model.safetensors").unlink()
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, saved / f"part{number}.safetensors")
    assert params.load(saved, spec, NAMES) == whole


def test_stacked_and_single_experts_are_one(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """The transformers library writes one tensor an expert; the stacked ones of its state dict load to the same."""
    model = oracle("moe")
    model.save_pretrained(tmp_path / "each")
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in params.tensor_names(tmp_path / "each")
    (tmp_path / "stacked").mkdir()
    rewrite(tmp_path / "stacked", model.state_dict())
    spec = spec_of(model.config)
    each, stacked = (params.load(tmp_path / name, spec, NAMES, dtype=None) for name in ("each", "stacked"))
    assert each == stacked


@pytest.mark.parametrize("change", ["missing", "transposed", "both"])
def test_every_expert_counts(oracle: Any, spec_of: Any, tmp_path: Path, change: str) -> None:
    """The last expert of the last layer is checked like the first; two layouts at once are refused."""
    model = oracle("moe")
    model.save_pretrained(tmp_path)
    tensors, name = weights(tmp_path), "model.layers.3.mlp.experts.5.down_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "transposed":
        tensors[name] = tensors[name].T.contiguous()
    else:
        stacked = "model.layers.3.mlp.experts.down_proj"
        tensors[stacked] = model.state_dict()[stacked]
    rewrite(tmp_path, tensors)
    kind = {"missing": "missing", "transposed": "misshapen", "both": "unexpected"}[change]
    with pytest.raises(params.CheckpointError, match=rf"{kind} \(\d+\):\n(  .*\n)*  {name}"):
        params.load(tmp_path, spec_of(model.config), NAMES)


@pytest.mark.parametrize(
    ("outer", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_wrapped_names_load(model: Any, saved: Path, spec_of: Any, outer: str, head: str) -> None:
    """The names of multimodal wrappers mean the same tensors."""
    spec = spec_of(model.config)
    plain = params.load(saved, spec, NAMES)
    changed = {
        outer + name.removeprefix("model.") if name.startswith("model.") else name.replace("lm_head.", head): tensor
        for name, tensor in weights(saved).items()
    }
    rewrite(saved, changed)
    assert params.load(saved, spec, NAMES) == plain


def test_two_spellings_of_one_tensor_are_refused(saved: Path, model: Any, spec_of: Any) -> None:
    """A wrapped name beside the plain one is a duplicate, equal or not."""
    tensors = weights(saved)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    rewrite(saved, tensors)
    with pytest.raises(params.CheckpointError, match=r"duplicate \(1\):\n  model\.[a-z_.]*norm\.weight means the same"):
        params.load(saved, spec_of(model.config), NAMES)


@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_checkpoint_loads_its_text_part(wrapper: Any, spec_of: Any, tmp_path: Path, tied: bool) -> None:
    """The vision tower of a real wrapper class is passed over; the rest equals what the text-only class loads."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

    config = wrapper(tied)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    spec = spec_of(config.text_config)
    tree = params.load(tmp_path, spec, NAMES, dtype=None)
    state = Qwen3_5ForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = params.to_checkpoint(tree, spec, NAMES)
    assert state.keys() - ours.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(state[name], value) for name, value in ours.items())


def with_draft_head(tensors: dict[str, torch.Tensor], hidden: int = 32) -> dict[str, torch.Tensor]:
    """A checkpoint with an `mtp` part made of copies of its full-attention layer."""
    source = "model.layers.3."
    draft = {name.replace(source, "mtp.layers.0."): tensor for name, tensor in tensors.items() if source in name}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draft[f"mtp.{name}.weight"] = torch.randn(hidden)
    return {**tensors, **draft, "mtp.fc.weight": torch.randn(hidden, 2 * hidden)}


def test_draft_head_is_loaded_when_the_spec_has_one(model: Any, saved: Path, spec_of: Any) -> None:
    """With an mtp subtree its tensors are loaded, without one they are passed over, and half of one is refused."""
    tensors = with_draft_head(weights(saved))
    rewrite(saved, tensors)
    with_head, without = spec_of(model.config, mtp=True), spec_of(model.config)
    tree = params.load(saved, with_head, NAMES, dtype=None)
    assert torch.equal(tree.mtp.fc.weight, tensors["mtp.fc.weight"])
    assert torch.equal(tree.mtp.hidden_norm.weight, tensors["mtp.pre_fc_norm_hidden.weight"])
    assert params.equal(tree.mtp.layers[0], tree.layers[3])
    assert params.load(saved, without, NAMES).mtp is None
    tensors["mtp.fc.bias"] = torch.zeros(32)
    rewrite(saved, tensors)
    with pytest.raises(params.CheckpointError, match=r"unexpected \(1\):\n  mtp.fc.bias"):
        params.load(saved, with_head, NAMES)


@pytest.mark.parametrize(
    "name", ["model.visual.blocks.0.norm1.weight", "visual.pos_embed", "model.rotary_emb.inv_freq"]
)
def test_known_extras_are_passed_over(saved: Path, model: Any, spec_of: Any, name: str) -> None:
    """Vision towers and rotary buffers do not hinder."""
    tensors = weights(saved)
    rewrite(saved, {**tensors, name: torch.zeros(3)})
    assert params.load(saved, spec_of(model.config), NAMES, dtype=None).norm.weight.equal(tensors["model.norm.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.visual.weight",
        "my.visual.x",
        "visually.x",
        "model.mtp.fc.weight",
        "model.layers.4.mlp.down_proj.weight",
    ],
)
def test_patterns_are_anchored(saved: Path, model: Any, spec_of: Any, name: str) -> None:
    """A name that merely contains a pattern is unexpected."""
    rewrite(saved, {**weights(saved), name: torch.zeros(3)})
    with pytest.raises(params.CheckpointError, match=rf"unexpected \(1\):\n  {name}, float32\[3\]"):
        params.load(saved, spec_of(model.config), NAMES)


def test_tied_head(oracle: Any, spec_of: Any, tmp_path: Path) -> None:
    """Of a tied head and the embedding either may be absent, or both the same bit for bit; another one is refused."""
    model = oracle("dense", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors, spec = weights(tmp_path), spec_of(model.config)
    assert "lm_head.weight" not in tensors and spec.head is None
    tree = params.load(tmp_path, spec, NAMES, dtype=None)
    assert tree.head is None and torch.equal(tree.embed.weight, model.state_dict()["lm_head.weight"])
    embedding = tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, {**tensors, "lm_head.weight": embedding})
    assert params.load(tmp_path, spec, NAMES, dtype=None) == tree
    alone = {name: tensor for name, tensor in tensors.items() if tensor is not embedding} | {
        "lm_head.weight": embedding
    }
    rewrite(tmp_path, alone)
    assert params.load(tmp_path, spec, NAMES, dtype=None) == tree == params.from_checkpoint(alone, spec, NAMES)
    assert torch.equal(type(model).from_pretrained(tmp_path).get_input_embeddings().weight, embedding)
    assert {row.leaf for row in params.inspect(tmp_path, spec, NAMES).rows if row.name == "lm_head.weight"} == {
        "embed.weight"
    }
    other = embedding.clone()
    other.view(torch.int32)[-1, -1] ^= 1
    for head in (other, embedding.bfloat16(), embedding[:-1]):
        rewrite(tmp_path, {**tensors, "lm_head.weight": head})
        with pytest.raises(params.CheckpointError, match=r"lm_head.weight"):
            params.load(tmp_path, spec, NAMES, dtype=None)
        with pytest.raises(params.CheckpointError, match=r"lm_head.weight"):
            params.from_checkpoint({**tensors, "lm_head.weight": head}, spec, NAMES)


def test_an_untied_head_must_be_there(saved: Path, model: Any, spec_of: Any) -> None:
    """Nothing stands in for a head that the config says is separate."""
    tensors = weights(saved)
    del tensors["lm_head.weight"]
    rewrite(saved, tensors)
    with pytest.raises(
        params.CheckpointError, match=r"missing \(1\):\n  lm_head.weight, for head.weight; where it is .* set tie_w"
    ):
        params.load(saved, spec_of(model.config), NAMES)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_dtypes(oracle: Any, spec_of: Any, tmp_path: Path, stored: torch.dtype, dtype: torch.dtype | None) -> None:
    """Leaves follow `dtype`, pinned ones their spec, and the values are PyTorch's conversion of the stored ones."""
    model = oracle("dense", dtype=stored, num_hidden_layers=1, layer_types=["linear_attention"])
    model.save_pretrained(tmp_path)
    tree = params.load(tmp_path, spec_of(model.config), NAMES, dtype=dtype)
    state = model.state_dict()
    assert torch.equal(tree.layers[0].attn.a_log, state["model.layers.0.linear_attn.A_log"].float())
    assert tree.layers[0].attn.norm.weight.dtype == (dtype or stored)
    assert torch.equal(tree.embed.weight, state["model.embed_tokens.weight"].to(dtype or stored))


PAIR = Names("pair", {"merged": Merged(("a", "b")), "count": Plain("n"), "scale": Plain("s")})
PAIR_SPEC: Any = {
    "merged": params.TensorSpec((3, 2), parts=(1, 2)),
    "count": params.TensorSpec((1,), dtype=torch.int64),
    "scale": params.TensorSpec((1,)),
}
PAIR_STATE = {"a": torch.ones(1, 2), "b": torch.zeros(2, 2), "n": torch.tensor([7]), "s": torch.tensor(0.5)}


def test_small_tree_with_an_integer_and_a_scalar(tmp_path: Path) -> None:
    """Integers are kept, a scalar is one element, dictionaries are trees too."""
    rewrite(tmp_path, PAIR_STATE)
    tree = params.load(tmp_path, PAIR_SPEC, PAIR)
    assert tree["count"].tolist() == [7] and tree["count"].dtype == torch.int64
    assert tree["scale"].shape == (1,) and tree["scale"].item() == 0.5 and tree["scale"].dtype == torch.bfloat16
    assert tree["merged"].tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({"a": torch.ones(1, 2, dtype=torch.int32)}, torch.float32, "a is int32, expected floating point for merged"),
        ({"a": torch.ones(1, 2, dtype=torch.uint8)}, None, "a is uint8, expected floating point for merged"),
        ({"a": torch.ones(1, 2).to(torch.float8_e4m3fn)}, torch.float32, "a is float8_e4m3fn, expected floating point"),
        ({"n": torch.tensor([7.0])}, torch.float32, "n is float32, expected int64 for count"),
        ({"n": torch.tensor([7], dtype=torch.int32)}, torch.float32, "n is int32, expected int64 for count"),
        ({"b": torch.zeros(2, 2).bfloat16()}, None, "b is bfloat16, the parts before it are float32"),
        ({}, torch.int8, "parameters cannot have dtype torch.int8"),
    ],
)
def test_wrong_dtypes(change: dict[str, torch.Tensor], dtype: torch.dtype | None, message: str) -> None:
    """Only floating point is converted, and only to floating point."""
    with pytest.raises(params.CheckpointError, match=message):
        params.from_checkpoint({**PAIR_STATE, **change}, PAIR_SPEC, PAIR, dtype=dtype)


def test_one_error_lists_everything(saved: Path, model: Any, spec_of: Any) -> None:
    """All kinds of misfit stand in one message, in the checkpoint's names, missing ones with the nearest."""
    tensors = weights(saved)
    tensors["model.layers.3.self_attn.query_norm.weight"] = tensors.pop("model.layers.3.self_attn.q_norm.weight")
    tensors["model.norm.weight"] = torch.zeros(31)
    tensors["model.layers.0.linear_attn.A_log"] = torch.zeros(4, dtype=torch.int64)
    rewrite(saved, tensors)
    with pytest.raises(params.CheckpointError) as caught:
        params.load(saved, spec_of(model.config), NAMES)
    total = len(tensors) + 1
    assert str(caught.value).splitlines() == [
        f"{saved}: 4 of {total} tensors do not fit",
        "missing (1):",
        "  model.layers.3.self_attn.q_norm.weight, for layers.3.attn.q_norm.weight; "
        "the nearest name is model.layers.3.self_attn.query_norm.weight",
        "unexpected (1):",
        "  model.layers.3.self_attn.query_norm.weight, float32[16]",
        "misshapen (1):",
        "  model.norm.weight is float32[31], expected [32] for norm.weight",
        "wrong dtype (1):",
        "  model.layers.0.linear_attn.A_log is int64, expected floating point for layers.0.attn.a_log",
    ]


def test_a_long_message_is_cut(oracle: Any, spec_of: Any) -> None:
    """Hundreds of misfits make one message of bounded length that says how many it leaves out."""
    small, large = oracle("dense"), oracle("dense", num_hidden_layers=40)
    with pytest.raises(params.CheckpointError) as caught:
        params.from_checkpoint(small.state_dict(), spec_of(large.config), NAMES)
    lines = str(caught.value).splitlines()
    missing = len(large.state_dict()) - len(small.state_dict())
    assert missing > 400 and lines[1] == f"missing ({missing}):"
    assert len(lines) == 203 and lines[-1] == f"  and {missing - 200} more"


def test_the_result_is_its_own(saved: Path, model: Any, spec_of: Any) -> None:
    """Two loads are equal, carry no gradients, and do not change with the files."""
    spec = spec_of(model.config)
    first, second = (params.load(saved, spec, NAMES, dtype=None) for _ in range(2))
    assert first == second and not any(leaf.requires_grad for _, leaf in params.items(first))
    with (saved / "model.safetensors").open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(stream.tell() // 2)
        stream.write(bytes(stream.tell()))
    assert first == second


def test_a_file_cut_short_after_its_header_was_read(saved: Path, model: Any, spec_of: Any) -> None:
    """Earlier headers can be passed in; a file that has shrunk since is an error, not a crash."""
    headers = params.tensor_names(saved)
    spec = spec_of(model.config)
    assert params.load(saved, spec, NAMES, tensors=headers) == params.load(saved, spec, NAMES)
    os.truncate(saved / "model.safetensors", (saved / "model.safetensors").stat().st_size - 8)
    with pytest.raises(params.CheckpointError, match="became shorter"):
        params.load(saved, spec, NAMES, tensors=headers)
    (saved / "model.safetensors").unlink()
    with pytest.raises(params.CheckpointError, match="is not a file, or a link to nothing"):
        params.load(saved, spec, NAMES, tensors=headers)


def test_progress_on_a_terminal_only(
    saved: Path, model: Any, spec_of: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to a pipe; a terminal sees bytes."""
    spec = spec_of(model.config)
    params.load(saved, spec, NAMES)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    params.load(saved, spec, NAMES, progress=False)
    assert capsys.readouterr() == ("", "")
    params.load(saved, spec, NAMES)
    out, err = capsys.readouterr()
    assert out == "" and "loading" in err and "kB" in err


MEMORY = """
import re, sys
import torch
import params
from params.names.rules import Names, Plain, Merged
names = Names("big", {"merged": Merged(("a", "b", "c")), "plain": Plain("d")})
spec = {"merged": params.TensorSpec((6144, 4096), parts=(4096, 1024, 1024)), "plain": params.TensorSpec((6000, 4096))}
small = {"merged": params.TensorSpec((3, 2), parts=(1, 1, 1)), "plain": params.TensorSpec((1, 2))}
params.load(sys.argv[1] + "/small", small, names)
def resident(word):
    return int(re.search(word + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
for dtype in (torch.float32, torch.bfloat16):
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    tree = params.load(sys.argv[1] + "/big", spec, names, dtype=dtype)
    print(resident("VmHWM") - before, params.num_bytes(tree))
    del tree
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not report peaks")
def test_peak_memory_is_the_result(tmp_path: Path) -> None:
    """Resident memory during a load stays within 5 % of the tensors kept, merged and converted ones included."""
    for name, width, rows in (("small", 2, (1, 1, 1, 1)), ("big", 4096, (4096, 1024, 1024, 6000))):
        (tmp_path / name).mkdir()
        tensors = {letter: torch.ones(count, width) for letter, count in zip("abcd", rows, strict=True)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(params.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    measured = [[int(word) for word in line.split()] for line in out.splitlines()]
    assert [kept for _, kept in measured] == [12144 * 4096 * 4, 12144 * 4096 * 2]
    assert all(kept <= peak <= 1.05 * kept for peak, kept in measured), measured
