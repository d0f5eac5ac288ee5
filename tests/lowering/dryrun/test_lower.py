"""`lowering.lower`: what it writes down, what it costs, and the process that traces for Ascend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from lowering import OPS, LoweringError, Policy, ops
from lowering.dryrun import process, versions
from lowering.npu.features import recorded
from lowering.target import ASCEND, named
from params import TensorSpec, leaves
from tests.cases import Draw, RowCounts, delta, paged
from tests.lowering.dryrun import programs
from tests.tiny import SIZES

BF16 = torch.bfloat16
SMALL = {**SIZES, "model_type": "qwen3_5_text"}
MOE = {
    **SIZES, "model_type": "qwen3_5_moe_text", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
A3B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 262_144, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
"""The published sizes of the 35B-A3B mixture of experts."""


def half(model: fm.Model) -> Any:
    """The specs of a bfloat16 model."""
    return model.param_spec(BF16)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("target", ["cpu", "cuda", *ASCEND])
def test_text_and_counts(target: str) -> None:
    """One line a signature with its count, the operators of the target below it, and those between ops."""
    low = lowering.lower(programs.norm_twice, meta(3, 64), TensorSpec((64,), dtype=BF16), target=target)
    text = low.as_text()
    assert text.startswith(f"lowered to {target}, traced through torch")
    assert "2 x (x=bf16[3,64], weight=bf16[64], eps=1e-05) -> bf16[3,64]" in text
    assert "1 x aten.add(bf16[3,64], bf16[3,1]) -> bf16[3,64]" in text
    fused = "npu.npu_rms_norm(bf16[3,64], bf16[64], epsilon=1e-05) -> (bf16[3,64], f32[3,1])"
    assert (fused in text) == (target in ASCEND) and ("aten.rsqrt" in text) == (target not in ASCEND)
    assert [(row.op, row.count) for row in low.explain().rows] == [("rms_norm", 2)]
    assert low.argument_bytes == {"x": 3 * 64 * 2, "weight": 64 * 2}


def test_costs_of_a_product_and_a_look_up() -> None:
    """Against counts by hand: a table is not read whole, a product reads its inputs and writes its output once."""
    x, weight, table, ids = meta(5, 24), meta(7, 24), meta(1000, 24), meta(5, dtype=torch.int64)
    for target in ("cpu", "ascend910b"):
        costs = lowering.lower(programs.project, x, weight, table, ids, target=target).cost_analysis()
        rows = {row.op: row.cost for row in costs.rows}
        assert (rows["linear"].flops, rows["linear"].bytes) == (2 * 5 * 7 * 24, 2 * (5 * 24 + 7 * 24 + 5 * 7))
        assert (rows["embedding"].flops, rows["embedding"].bytes) == (0, 2 * 5 * 24 * 2 + 5 * 8)
        assert (rows["between ops"].flops, rows["between ops"].bytes) == (0, 3 * 5 * 24 * 2)
        assert costs.total.bytes == sum(cost.bytes for cost in rows.values())


def test_costs_of_paged_attention() -> None:
    """A causal mask leaves out the products with later keys; of the pages, what the rows hold is read."""
    rows = RowCounts("two", counts=(200, 17), past=(3, 150))
    args, kwargs = paged(rows, 4, 2, 128, 128, 128, shuffled=True)(Draw(BF16))
    (call,) = lowering.lower(ops.paged_attention, *args, **kwargs, target="ascend910b").calls
    (fused,) = [operator for operator in call.operators if "npu_fused_infer" in operator.name]
    pairs = sum(sum(past + at + 1 for at in range(count)) for past, count in zip(rows.past, rows.counts, strict=True))
    assert fused.cost.flops == 2 * pairs * 4 * (128 + 128)
    held = 2 * (203 + 167) * 2 * 128 * 2
    assert 0 <= fused.cost.bytes - held - 2 * 217 * 4 * 128 * 2 < 2048 * 2048 + 100


def test_costs_of_grouped_experts() -> None:
    """Products with as many experts as a token chose; of the weights, no more experts than there are rows."""
    x, weights, ids = meta(3, 64), meta(3, 2), meta(3, 2, dtype=torch.int64)
    args = (x, weights, ids, meta(50, 2 * 32, 64), meta(50, 64, 32))
    (call,) = lowering.lower(ops.experts, *args, target="ascend910b").calls
    assert call.kernel == "npu_grouped_experts"
    grouped = [operator.cost for operator in call.operators if operator.name == "npu.npu_grouped_matmul"]
    assert [cost.flops for cost in grouped] == [2 * 6 * 64 * 64, 2 * 6 * 32 * 64]
    lists = 50 * 8
    assert [cost.bytes - lists for cost in grouped] == [
        2 * (6 * 64 + 6 * 64 * 64 + 6 * 64), 2 * (6 * 32 + 6 * 32 * 64 + 6 * 64)
    ]  # fmt: skip


def test_costs_of_the_delta_rule() -> None:
    """Three products of a state's size for each token and value head."""
    rows = RowCounts("decode", counts=(1, 1, 1), past=(0, 0, 0))
    args, kwargs = delta(rows, 2, 6, 128, 128, state=True, keep_steps=False, recurrent=BF16)(Draw(BF16))
    (call,) = lowering.lower(ops.gated_delta_rule, *args, **kwargs, target="ascend910b").calls
    assert call.kernel == "npu_recurrent_gated_delta_rule"
    assert call.cost.flops == 3 * 2 * 3 * 6 * 128 * 128


@pytest.mark.parametrize("config", [SMALL, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("target", ASCEND)
def test_the_real_operators_take_every_call(target: str, config: dict[str, Any]) -> None:
    """Prefill, ragged chunk, decode and verify: the kernels that explain names, with nothing traced by a reference."""
    model = fm.build(config)
    batches = (([[1] * 9] * 2, False), ([[1] * 12, [2], []], False), ([[3]] * 3, False), ([[4] * 4] * 2, True))
    for lists, keep in batches:
        state = model.init_state(len(lists), 64, dtype=BF16, recurrent_dtype=BF16, device="meta")
        args = (half(model), state, fm.Batch.from_lists(lists))
        low = lowering.lower(model.forward, *args, target=target, keep_steps=keep)
        assert low.explain().rows == lowering.explain(model.forward, *args, target=target, keep_steps=keep).rows
        assert {row.op for row in low.explain().rows} == {call.op for call in low.calls}
        assert not any(call.by_reference for call in low.calls)
        called = {operator.name for call in low.calls for operator in call.operators if "npu_" in operator.name}
        kernels = [OPS[row.op].kernels[row.kernel] for row in low.explain().rows]
        needed = {f"npu.{name}" for kernel in kernels for name in kernel.operators}
        # A kernel names the operator that prepares its weights too.
        assert called <= needed <= called | {"npu.npu_format_cast"}


def test_published_sizes_lower_without_weights() -> None:
    """35 billion parameters, in a process of less than 2 GB."""
    model = fm.build(A3B)
    state = model.init_state(2, 256, dtype=BF16, recurrent_dtype=BF16, device="meta")
    spec = half(model)
    low = lowering.lower(model.forward, spec, state, fm.Batch.from_lists([[0] * 128] * 2), target="ascend910b")
    assert low.argument_bytes["params"] == sum(leaf.numel * leaf.dtype.itemsize for leaf in leaves(spec)) > 34e9 * 2
    assert low.cost_analysis().argument_bytes["state"] > 0
    status = Path(f"/proc/{process._child().process.pid}/status").read_text()
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) < 2e6
    kernels = {row.op: row.kernel for row in low.explain().rows}
    assert kernels["experts"] == "npu_grouped_experts" and kernels["gated_delta_rule"] == "npu_chunk_gated_delta_rule"


def test_policy_and_unknown_names() -> None:
    args = (meta(3, 64), meta(64))
    with lowering.use(rms_norm="torch"):
        low = lowering.lower(programs.norm_twice, *args, target="ascend950")
    assert [row.kernel for row in low.explain().rows] == ["torch"] and "npu." not in low.as_text()
    assert low.explain().rows == lowering.lower(
        programs.norm_twice, *args, target="ascend950", policy=Policy({"rms_norm": "torch"})
    ).explain().rows  # fmt: skip
    with pytest.raises(LoweringError, match="no kernel 'fast'"):
        lowering.lower(programs.norm_twice, *args, target="ascend950", policy=Policy({"rms_norm": "fast"}))
    with pytest.raises(LoweringError, match="did you mean 'ascend950'"):
        lowering.lower(programs.norm_twice, *args, target="ascend95")
    asked = Policy({"gemma_rms_norm": "npu_gemma_rms_norm"})
    with pytest.raises(LoweringError, match=r"'npu_gemma_rms_norm' was asked for by name on target ascend950\n.*9.2.0"):
        lowering.lower(ops.gemma_rms_norm, *args, eps=1e-6, target="ascend950", policy=asked)


def test_errors_of_operators_come_back() -> None:
    """As the operator raised them, with the other process's traceback; that process goes on."""
    with pytest.raises(RuntimeError, match="eps") as error:
        lowering.lower(programs.wrong_argument, meta(3, 8), target="ascend910b")
    assert "programs.py" in str(error.value.__cause__)
    with pytest.raises((RuntimeError, IndexError)):
        lowering.lower(programs.wrong_shape, meta(3, 8), target="ascend910b")
    with pytest.raises(KeyError, match="lost"):
        lowering.lower(programs.raises, meta(3), message="lost", target="ascend910b")
    with pytest.raises(LoweringError, match="trouble in paradise"):
        lowering.lower(programs.raises_unsendable, meta(3), target="ascend910b")
    assert lowering.lower(programs.norm_twice, meta(3, 8), meta(8), target="ascend910b").calls


def test_a_process_that_dies_is_replaced() -> None:
    """Its last words are in the error."""
    with pytest.raises(LoweringError, match=r"(?s)ended with code -6.*programs\.py.*in dies"):
        lowering.lower(programs.dies, meta(3), target="ascend910b")
    assert lowering.lower(programs.norm_twice, meta(3, 8), meta(8), target="ascend910b").calls


def test_other_versions_are_asked() -> None:
    """By their recorded schemas, for each call as its kernel made it."""
    args = (meta(4, 2, 128), meta(4, 2, 128), meta(1, 2, 128, 128), meta(1, dtype=torch.int32))
    low = lowering.lower(programs.only_in_new_versions, *args, target="ascend910b")
    assert [operator.name for operator in low.between if "npu_" in operator.name] == ["npu.npu_chunk_gated_delta_rule"]
    (problem,) = low.problems
    assert re.fullmatch(r"between ops: npu\.npu_chunk_gated_delta_rule: torch_npu 2\.8\.\S+ has no \S+", problem)
    assert problem in low.as_text() and problem in repr(low)


def test_a_target_of_another_version_has_its_operators() -> None:
    """Though the wheel that traces has more: the choice is that of the version asked for."""
    rows = RowCounts("long", counts=(20,), past=(0,))
    args, kwargs = delta(rows, 2, 4, 128, 128, state=True, keep_steps=False, recurrent=BF16)(Draw(BF16))
    for version, kernel in (("2.8.0", "torch_chunked"), ("2.10.0", "npu_chunk_gated_delta_rule")):
        target = named("ascend910b", torch_npu=version)
        low = lowering.lower(ops.gated_delta_rule, *args, **kwargs, target=target)
        assert [call.kernel for call in low.calls] == [kernel]
        assert low.explain().rows == lowering.explain(ops.gated_delta_rule, *args, **kwargs, target=target).rows


SCHEMA = (
    "f(Tensor x, Tensor? w, int k=1, *, float eps=1e-6, int[]? sizes=None, str mode='a', bool flag=False) -> Tensor"
)
X = torch.zeros(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((X, None), {}, None),
        ((X, X, 3), {"eps": 2, "sizes": [1, 2], "mode": "b", "flag": True}, None),
        ((X,), {"w": None, "sizes": None}, None),
        ((X, X, 3, 1e-6), {}, "takes 3 positional arguments, 4 are given"),
        ((X, X), {"x": X}, "gets x by position and by name"),
        ((X, X), {"epsilon": 1e-6, "dim": 1}, "has no argument dim, epsilon"),
        ((X,), {}, "needs argument w"),
        ((X, X), {"mode": 1}, "takes str for mode, which is given as int"),
        ((X, X), {"sizes": [1.5]}, r"takes .*int.* for sizes, which is given as list"),
        ((X, X), {"k": True}, "takes int for k, which is given as bool"),
        (([X], X), {}, "takes Tensor for x, which is given as list"),
    ],
)
def test_a_schema_and_a_call(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str | None) -> None:
    found = versions.mismatch(torch._C.parse_schema(SCHEMA), args, kwargs)
    assert found is reason is None or re.fullmatch(str(reason), str(found))


def test_recorded_versions_agree_with_the_wheel() -> None:
    """A call that the wheel takes is not refused by the wheel's own recorded schema."""
    low = lowering.lower(programs.norm_twice, meta(3, 8), meta(8), target="ascend910b")
    loaded = low.through.removeprefix("torch_npu ")
    assert loaded in recorded() and not low.problems
    assert versions.problems("npu::npu_rms_norm", (X,), {"gamma": X}, loaded="none") == ()
    wrong = versions.problems("npu::npu_rms_norm", (X, X), {"eps": 1e-6}, loaded="none")
    assert [version for version, _ in wrong] == list(recorded())


def test_an_operator_without_recorded_schemas() -> None:
    """That of someone's own kernel: traced by the wheel, and said not to be checked further."""
    low = lowering.lower(programs.unrecorded, meta(3, 8), target="ascend950")
    assert len(low.between) == 1
    others = low.through.replace(" ", " other than ")
    reason = "cannot be checked: no schema of npu_silu is recorded"
    assert low.problems == (f"between ops: npu.npu_silu: {others} {reason}",)


def nested() -> Callable[..., Any]:
    def inner(x: Tensor) -> Tensor:
        return x

    return inner


def in_main(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function", [lambda x: x, nested(), in_main], ids=["lambda", "nested", "main"])
def test_a_function_that_cannot_be_sent(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_main, "__module__", "__main__")
    with pytest.raises(LoweringError, match=r"cannot be sent.*give a function from the top level of a module"):
        lowering.lower(function, meta(3), target="ascend950")


@pytest.fixture
def local_kernel() -> Iterator[str]:
    """A kernel that only this process has."""
    ops.swiglu.kernel("mine", targets=("ascend950",))(lambda gate_up, caps=None: gate_up)
    yield "mine"
    ops.swiglu.remove("mine")


def test_a_kernel_that_cannot_be_imported(local_kernel: str) -> None:
    """Only where its op is called and its target asked for, and the kernel may be chosen."""
    told = r"swiglu: kernel mine \(.*<lambda>\) is known to this process alone.*put it at the top level of a module"
    with pytest.raises(LoweringError, match=told):
        lowering.lower(ops.swiglu, meta(3, 8), target="ascend950")
    with lowering.use(swiglu="mine"), pytest.raises(LoweringError, match=told):  # and not that there is no such kernel
        lowering.lower(ops.swiglu, meta(3, 8), target="ascend950")
    assert lowering.lower(ops.swiglu, meta(3, 8), target="ascend910b").calls
    assert lowering.lower(programs.norm_twice, meta(3, 8), meta(8), target="ascend950").calls
    ops.swiglu.kernel("mine", targets=("ascend950",), only_by_name=True, replace=True)(
        lambda gate_up, caps=None: gate_up
    )
    assert lowering.lower(ops.swiglu, meta(3, 8), target="ascend950").calls
