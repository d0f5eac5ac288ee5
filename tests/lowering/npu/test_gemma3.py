"""Gemma3 lowered for each Ascend target: what is chosen, and that it is as near to float32 as the Torch forward is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params as trees
from lowering import Policy, npu_reference
from lowering.explain.report import Report
from lowering.target import ASCEND, Target, named
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import ROWS, Made, NpuTwins, on
from tests.lowering.npu.lowered import assert_near
from tests.models.test_gemma3_config import PUBLISHED

PAGE = 128
BASE: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 150, "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window_pattern": 3, "query_pre_attn_scalar": 90,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "packed": {**BASE, "head_dim": 128, "sliding_window": 20},
    "padded": {**BASE, "head_dim": 256, "num_key_value_heads": 1, "sliding_window": 130},
}
"""Heads that layout TND takes everywhere, and heads that it takes from CANN 9.0.0 on; windows within a page and longer
than one."""
SCHEDULE = [[300, 20, 0], [0, 121, 3], [1, 1, 1], [4, 4, 4], [1, 1, 1], [9, 0, 140], [1, 0, 1]]
"""New tokens of each row a forward: prompts, a chunk, decoding, windows to verify, idle rows."""
VERIFY, ACCEPTED = 3, [4, 0, 2]


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_reference.load()


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest) -> tuple[fm.Model, Any]:
    """A model with every parameter random, in float32."""
    model = fm.build(CONFIGS[request.param])
    draw = torch.Generator().manual_seed(4)

    def random(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=draw) * leaf.shape[-1] ** -0.5

    return model, trees.tree_map(random, model.init_params())


@torch.no_grad()
def outcome(model: fm.Model, params: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    """Logits of every forward of the schedule, then every logical entry."""
    params = trees.tree_map(lambda value: value.to(dtype), params)
    state = model.init_state(3, 4 * PAGE, dtype, page_size=PAGE)
    draw = torch.Generator().manual_seed(8)
    for at, counts in enumerate(SCHEDULE):
        ids = torch.randint(model.config.vocab_size, (sum(counts),), generator=draw)
        batch = fm.Batch.from_tokens(ids, counts, state)
        out, state = model.forward(params, state, batch, keep_steps=at == VERIFY)
        if at == VERIFY:
            state = fm.commit(state, ACCEPTED)
        yield out.logits.float()
    for row in range(3):
        yield from (value.float() for value in fm.logical(state, row).values())


@pytest.mark.parametrize("target", [*ASCEND, named("ascend910b", cann="8.5.0")], ids=str)
def test_a_lowered_forward_is_as_near_to_float32_as_torch_is(target: str | Target, made: tuple[fm.Model, Any]) -> None:
    exact, plain = list(outcome(*made, torch.float32)), list(outcome(*made, torch.bfloat16))
    with lowering.use(target=target), lowering.record() as report:
        lowered = list(outcome(*made, torch.bfloat16))
    old, wide = isinstance(target, Target), made[0].config.head_dim == 256
    padded = {"npu_fia_bsnd"} if old or target == "ascend950" else set()
    assert chosen(report, "paged_attention") == padded | (set() if old and wide else {"npu_fia_tnd"})
    assert_near(lowered, exact, plain)


@torch.no_grad()
@pytest.mark.parametrize("target", ASCEND)
def test_prepared_weights_change_nothing(target: str) -> None:
    """Those of norms hold one plus the weight where the target wants it; projections keep their biases."""
    model = fm.build({**CONFIGS["packed"], "attention_bias": True})
    draw = torch.Generator().manual_seed(2)
    params = trees.tree_map(lambda leaf: torch.randn(leaf.shape, generator=draw) / 9, model.init_params())
    low = trees.tree_map(lambda leaf: leaf.to(torch.bfloat16), params)
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5, 6]])
    with lowering.use(target=target):
        plain, _ = model.forward(low, None, batch)
        prepared, _ = model.forward(lowering.prepare(low), None, batch)
    assert torch.equal(prepared.logits, plain.logits)


@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
def test_captured_windows_move_on_with_every_replay(
    monkeypatch: pytest.MonkeyPatch, made: tuple[fm.Model, Any]
) -> None:
    """Lengths within a window's pages are computed anew: rows decode past their first page, and a part is dropped."""
    on(Double(), monkeypatch)
    model, params = made
    one = Made(model, trees.tree_map(lambda leaf: leaf.to(torch.bfloat16), params))
    monkeypatch.setattr("tests.lowering.jit.npu_models.made", lambda kind: one)
    twins = NpuTwins("gemma3", 1)
    twins.forward([3, 1, 4])
    twins.forward([140, 90, 0], bucket=256)
    for _ in range(3):
        twins.forward([1] * ROWS)
        twins.verify(4)
        twins.forward([20, 36, 1], bucket=64)
    twins.forward([1] * ROWS)
    twins.check()


def chosen(report: Report, op: str) -> set[str]:
    return {row.kernel for row in report.rows if row.op == op}


NORMS = ("gemma_rms_norm", "add_gemma_rms_norm")


@pytest.mark.parametrize("target", ASCEND)
def test_one_policy_turns_the_native_norm_on_everywhere(target: str, made: tuple[fm.Model, Any]) -> None:
    """Of Gemma3 and Qwen3.5, fused with a sum or not; without it every norm is an operator's, or one kernel of ours."""
    model, params = made
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5, 6]])
    low = trees.tree_map(lambda leaf: leaf.to(torch.bfloat16), params)
    for prefer, kernels in (({}, True), ({"gemma_rms_norm": "torch"}, False)):
        with lowering.use(Policy(prefer), target=target), lowering.record() as report, torch.no_grad():
            model.forward(low, None, batch)
        for op in NORMS:
            (name,) = chosen(report, op)
            assert name.startswith(("npu_", "triton_")) == kernels and (kernels or name == "torch")
    found = {row.op: row.reasons() for row in report.rows if row.op in NORMS}
    assert found == {
        "gemma_rms_norm": "asked for by name", "add_gemma_rms_norm": "asked for by name, of gemma_rms_norm",
    }  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("lists", [[[1], [2], [3]], [[1] * 700, [2] * 30, []], [[1] * 4, [2] * 4, [3] * 4]], ids=len)
@pytest.mark.parametrize("size", PUBLISHED)
@pytest.mark.parametrize("target", ASCEND)
def test_published_sizes_are_fused(target: str, size: str, lists: list[list[int]]) -> None:
    """Without weights; each op that Torch runs has its reason."""
    model = fm.build({**PUBLISHED[size], "model_type": "gemma3_text"})
    state = model.init_state(3, 4096, torch.bfloat16, device="meta")
    batch = fm.Batch.from_lists(lists)
    report = lowering.explain(model.forward, model.param_spec(torch.bfloat16), state, batch, target=target)
    kernels = {kernel.name for op in lowering.OPS.values() for kernel in op.serving(target) if kernel.operators}
    fused = {row.op for row in report.rows if row.kernel in kernels}
    # On Ascend 950 casts and copies would stand around the operators, and kernels of ours come first.
    by_target = {"gemma_rms_norm", "add_gemma_rms_norm", "rotary"}
    assert fused >= {"paged_attention"} | (by_target if target != "ascend950" else set())
    assert fused >= ({"geglu"} if target == "ascend910b" else set())
    others = {row.op for row in report.rows} - fused
    assert others <= {"embedding", "linear", "rotary_angles", "geglu", "write_pages"} | by_target
    layouts = chosen(report, "paged_attention")
    one = max(map(len, lists)) == 1
    # Packed, but on Ascend 950 for a window of one query a row.
    assert layouts == {"npu_fia_tnd"} | ({"npu_fia_bsnd"} if one and target == "ascend950" else set())
    if target != "ascend910b":
        (row,) = (row for row in report.rows if row.op == "geglu")
        assert f"npu_geglu is stated by CANN, not documented or in use for {target}" in row.refused["npu_geglu"]
