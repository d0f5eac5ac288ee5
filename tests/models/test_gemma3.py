"""What Gemma3 has of its own: windows, scales, and the text part of a model that sees images.

`test_contract` holds it to its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from funcmodels.models.gemma3 import rounded
from lowering import Policy
from tests.oracle.families import (
    close,
)
from tests.oracle.gemma3 import GLOBAL, LOCAL, Pair, build, pair, run, sizes, tokens
from tests.oracle.states import advance, assert_rows_close, per_row, run_schedule

BOTH_WAYS = pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])


def kernels(references: bool) -> Any:
    """The default choice, or the references alone."""
    return lowering.use(Policy({"paged_attention": "torch", "attention": "torch"} if references else {}))


# Against transformers


def test_the_random_models_are_of_every_kind() -> None:
    configs = [pair(seed).config for seed in range(8)]
    assert {config.tie_word_embeddings for config in configs} == {False, True}
    assert {bool(config.final_logit_softcapping) for config in configs} == {False, True}
    assert {config.attention_bias for config in configs} == {False, True}
    assert {config.rope_factor for config in configs} >= {1.0, 3.0}
    assert len({config.layer_types for config in configs}) >= 4
    assert len({config.num_attention_heads // config.num_key_value_heads for config in configs}) >= 2


def test_a_window_that_is_off_by_one_is_noticed() -> None:
    one = pair(1)
    ids = tokens(one, 20)
    right = run(one, ids[0]).logits
    for window in (one.config.sliding_window - 1, one.config.sliding_window + 1):
        model = replace(one.model, config=replace(one.config, sliding_window=window))
        out, _ = model.forward(one.params, None, fm.Batch.from_lists(ids))
        assert (out.logits - right).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_scale_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    for hidden in (1, 2, 3, 640, 1152, 2560, 3840, 5376, *range(1000, 1100)):
        assert rounded(hidden**0.5, dtype) == torch.tensor(hidden**0.5, dtype=dtype).item()


@pytest.mark.parametrize(
    ("hidden", "dtype", "scale"),
    [(1152, torch.bfloat16, 34.0), (2560, torch.bfloat16, 50.5), (5376, torch.bfloat16, 73.5),
     (1152, torch.float32, 33.9411)],
)  # fmt: skip
def test_embeddings_are_scaled_by_a_number_of_their_dtype(hidden: int, dtype: torch.dtype, scale: float) -> None:
    """With blocks that add nothing the residual stream is the scaled embedding, bit for bit that of transformers."""
    one = build({**sizes(0), "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 2}, 0, dtype)
    silent = one.params
    for layer, part in product(range(4), ("attn.out.weight", "mlp.down.weight")):
        path = f"layers.{layer}.{part}"
        silent = params.put(silent, path, torch.zeros_like(params.at(silent, path)))
    ids = tokens(one, 9)
    out, _ = one.model.forward(silent, None, fm.Batch.from_lists(ids), outputs=("layers.3",))
    assert torch.equal(out.extra["layers.3"], one.theirs.model.embed_tokens(torch.tensor(ids[0])))
    assert torch.equal(out.extra["layers.3"], one.params.embed.weight[ids[0]] * torch.tensor(scale_of(hidden, dtype)))
    assert float(rounded(hidden**0.5, dtype)) == pytest.approx(scale, abs=1e-4)


def scale_of(hidden: int, dtype: torch.dtype) -> float:
    return torch.tensor(math.sqrt(hidden)).to(dtype).item()


def test_a_norm_weight_below_the_last_place_of_one_counts() -> None:
    """1 + 0.003 is 1 in bfloat16; the sum is taken in float32, so that outputs move as those of transformers do."""
    one = build(sizes(0), 0, torch.bfloat16)
    ids = tokens(one, 30)
    logits = {}
    for weight in (0.003, 0.0):
        for name, parameter in one.theirs.named_parameters():
            if "norm" in name:
                parameter.data.fill_(weight)
        given = params.from_checkpoint(one.theirs.state_dict(), one.model.param_spec(), one.model.family.names)
        ours, _ = one.model.forward(given, None, fm.Batch.from_lists(ids), logits=None)
        logits[weight] = ours.hidden.float(), run(one, ids[0]).hidden.float()
    for side in range(2):
        ratio = logits[0.003][side].norm() / logits[0.0][side].norm()
        assert 1.002 < ratio < 1.004


def test_a_state_of_other_heads_is_refused() -> None:
    one = pair(1)
    heads = one.config.num_key_value_heads
    other = build(sizes(1) | {"head_dim": one.config.head_dim * 2}).model.init_state(1, 8)
    with pytest.raises(fm.StateError, match=f"the state has {heads} key/value heads of {one.config.head_dim * 2}, the"):
        advance(one, other, [[1]])


# Any split gives the same


SPLITS = ([23], [20, 3], [2, 21], [5, 5, 5, 5, 3], [4, 4, 4, 4, 4, 3], [9, 1, 1, 1, 1, 10], [1] * 23)


@BOTH_WAYS
@pytest.mark.parametrize("seed", range(4))
def test_chunks_longer_and_shorter_than_a_window(seed: int, references: bool) -> None:
    one = pair(seed)
    ids = tokens(one, 23, seed=seed)
    theirs = run(one, ids[0])
    with kernels(references):
        for split in SPLITS:
            logits, state = run_schedule(one, one.model.init_state(1, 23, page_size=3), ids, [[n] for n in split])
            close(logits[0], theirs.logits)
            close(fm.logical(state, 0), theirs.entries)


# Dropping tokens brings back the keys before a window


@BOTH_WAYS
@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 3), (2, 4), (3, 16)])
def test_every_rollback_around_a_window(seed: int, page_size: int, references: bool) -> None:
    """Of windows to verify that are shorter, as long and longer than the layers' own, 0 to all tokens are kept."""
    one = pair(seed)
    window = one.config.sliding_window
    for past in (window - 1, window, window + 1, 2 * window + 3):
        steps = (1, window - 1, window + 2)[past % 3] or 1
        ids, new, rest = tokens(one, past, steps, 3, seed=past)
        held_rows = [ids] * (steps + 1)
        with kernels(references):
            state = one.model.init_state(steps + 1, 40, page_size=page_size)
            _, state = advance(one, state, held_rows)
            before = [fm.logical(state, row) for row in range(steps + 1)]
            out, pending = advance(one, state, [new] * (steps + 1), keep_steps=True)
            close(per_row(out.logits, [new] * (steps + 1))[0], run(one, ids + new).logits[past:])
            kept = fm.commit(pending, list(range(steps + 1)))
            assert all(torch.equal(fm.logical(state, 0)[name], value) for name, value in before[0].items())
            for row in range(steps + 1):
                close(fm.logical(kept, row), run(one, ids + new[:row]).entries)
            after, _ = advance(one, kept, [rest] * (steps + 1))
        for row, logits in enumerate(per_row(after.logits, [rest] * (steps + 1))):
            close(logits, run(one, ids + new[:row] + rest).logits[past + row :])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 3, 11])
def test_drafts_of_random_tokens_change_nothing(seed: int, steps: int) -> None:
    """Rounds of drafts drawn from random laws: greedy tokens and entries are those of one token after another."""
    one, rows, new = pair(seed), 3, 24
    prompts = tokens(one, 2, 8, 19, seed=seed)
    truth = [greedy(one, prompt, new + steps + 1) for prompt in prompts]
    noise = torch.Generator().manual_seed(seed)
    state = one.model.init_state(rows, 100, page_size=4)
    out, state = advance(one, state, prompts)
    texts = [[int(part[-1].argmax())] for part in per_row(out.logits, prompts)]
    taken: set[int] = set()
    while min(map(len, texts)) < new:
        root = torch.tensor([text[-1] for text in texts])
        laws = torch.randn(rows, steps, one.config.vocab_size, generator=noise)
        for row, text in enumerate(texts):  # some drafts are right, so that every count is met
            right = truth[row][len(text) : len(text) + steps]
            laws[row, torch.arange(len(right)), right] += float(torch.rand((), generator=noise) * 12)
        drafts = torch.distributions.Categorical(logits=laws).probs.flatten(0, 1).multinomial(1, generator=noise)
        proposal = fm.Proposal(root, drafts.view(rows, steps), state.lengths, laws)
        verified, pending = one.model.forward(one.params, state, proposal.batch(state), keep_steps=True)
        verdict = fm.verify(verified, proposal, fm.Sampling())
        state = fm.commit(pending, verdict.accepted)
        taken |= set(verdict.accepted.tolist())
        for text, more in zip(texts, verdict.tokens.tolist(), strict=True):
            text += [token for token in more if token >= 0]
    assert taken >= {1, min(steps + 1, 2)}
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text[:new] == truth[row][:new]
        close(fm.logical(state, row), run(one, prompt + text[:-1]).entries)


@torch.no_grad()
def greedy(one: Pair, prompt: list[int], new: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt])
    made = one.theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return made[0, len(prompt) :].tolist()


# Traced, captured, lowered


@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_captured_steps_equal_plain_ones() -> None:
    """Prompts, decoding past several windows, and windows to verify, of which a part counts."""
    one = pair(2)
    step = lowering.jit(one.model.forward, donate=("state",), buckets=(4, 16), backend="fx")
    commit = lowering.jit(fm.commit, donate=("state",), backend="fx")
    plain, captured = (one.model.init_state(2, 60, page_size=3) for _ in range(2))
    new = iter(tokens(one, *[1] * 60, seed=3))
    calls = [([7, 2], None), *[([1, 1], None)] * 12, ([3, 3], [1, 3]), ([1, 1], None), ([3, 3], [0, 2]), ([1, 1], None)]
    with torch.no_grad():
        for counts, accepted in calls:
            lists = [[next(new)[0] for _ in range(count)] for count in counts]
            right, plain = advance(one, plain, lists, keep_steps=accepted is not None)
            batch = fm.Batch.from_lists(lists, captured)
            out, captured = step(one.params, captured, batch, keep_steps=accepted is not None)
            close(out.logits, right.logits)
            if accepted is not None:
                plain, captured = fm.commit(plain, accepted), commit(captured, accepted)
    assert_rows_close(captured, plain)
    assert step.captures == 3


def test_tracing_reads_nothing_and_a_window_reads_its_pages_alone() -> None:
    """On the meta device reading a value raises; the kernel of window layers is the one that gathers few pages."""
    one = pair(1)
    tree = params.to(one.params, device="meta")
    state = one.model.init_state(2, 64, page_size=4, device="meta")
    for new, keep_steps in (([[1, 2, 3], []], False), ([[4], [5]], False), ([[6], [7, 8]], True)):
        batch = fm.Batch.from_lists(new, state)
        with lowering.record() as report:
            out, state = one.model.forward(tree, state, batch, logits="last", keep_steps=keep_steps)
        assert out.logits.shape == (2, one.config.vocab_size) and out.logits.device.type == "meta"
        chosen = {row.kernel: row.count for row in report.rows if row.op == "paged_attention"}
        assert chosen == {"torch_window": one.config.layer_types.count(LOCAL),
                          "torch": one.config.layer_types.count(GLOBAL)}  # fmt: skip
    assert fm.commit(state, [1, 2]).ledger.lengths == (5, 3)


# Checkpoints


@pytest.fixture(scope="module")
def seeing() -> Any:
    """A model of transformers that also sees images."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"}  # fmt: skip
    text = {**sizes(1), "vocab_size": 64, "final_logit_softcapping": None}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=63)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: Any = Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 6
    return model


def test_the_text_part_of_a_model_that_sees_images(seeing: Any, tmp_path: Path) -> None:
    """Loads without the vision tower, and saves under the names that transformers gives the text part."""
    from transformers import Gemma3ForConditionalGeneration

    seeing.save_pretrained(tmp_path / "theirs")
    model, loaded = fm.load(tmp_path / "theirs", dtype=torch.float32)
    assert model.config.hidden_size == sizes(1)["hidden_size"]
    ids = [list(range(3, 25)), [9, 9, 1]]
    out, _ = model.forward(loaded, None, fm.Batch.from_lists(ids))
    for logits, row in zip(per_row(out.logits, ids), ids, strict=True):
        given = {"input_ids": torch.tensor([row]), "token_type_ids": torch.zeros(1, len(row), dtype=torch.long)}
        close(logits, seeing(**given).logits[0].detach())
    params.save(loaded, tmp_path / "ours", model.param_spec(), model.family.names, dict(model.config_json))
    read: Any = Gemma3ForConditionalGeneration.from_pretrained
    again, report = read(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    seen = "vision_tower", "multi_modal_projector"
    assert all(name.removeprefix("model.").startswith(seen) for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    text, right = again.model.language_model.state_dict(), seeing.model.language_model.state_dict()
    assert all(torch.equal(text[name], value) for name, value in right.items())


def test_every_wrapper_of_names_is_read(seeing: Any) -> None:
    """Those of this transformers in memory and on disk, and those of older ones."""
    state = {name: value for name, value in seeing.state_dict().items() if name != "lm_head.weight"}
    model = fm.build(seeing.config.to_dict())
    spellings: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision"),
        lambda name: name.replace("model.language_model.", "language_model.").replace("model.multi", "multi"),
    ]
    trees = [
        params.from_checkpoint({spell(k): v for k, v in state.items()}, model.param_spec(), model.family.names)
        for spell in spellings
    ]
    assert params.equal(trees[0], trees[1]) and params.equal(trees[0], trees[2])
    assert torch.equal(trees[0].embed.weight, seeing.model.language_model.embed_tokens.weight)
