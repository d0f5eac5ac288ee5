"""How the Ascend kernels call their operators: optional arguments by keyword, nothing beyond what features.py lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowering
from lowering import OPS, Policy, npu_reference
from lowering.npu import (
    attention,
    delta,
    features,
    hyper_connection,
    mla,
    mlp,
    moe,
    norm,
    quant_experts,
    quant_linear,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from tests.cases import CASES

from .agreement import MACHINES, arguments, refusal, served

MODULES = (
    attention, delta, hyper_connection, mla, mlp, moe, norm, quant_experts, quant_linear, rotary, sampling, short_conv,
    sparse,
)  # fmt: skip


class Recorder:
    """Stands for operators and notes each call: name, number of positional arguments, names of the others."""

    def __init__(self, operators: Any = features.npu, prefix: str = "") -> None:
        self.operators, self.prefix = operators, prefix
        self.calls: set[tuple[str, int, frozenset[str]]] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.add((self.prefix + name, len(args), frozenset(kwargs)))
            return getattr(self.operators, name)(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def calls() -> set[tuple[str, int, frozenset[str]]]:
    """Every way in which some kernel calls some operator, over all small cases and targets, and in preparation."""
    npu_reference.load()
    recorder, library = Recorder(), Recorder(features.atb, "atb.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "atb", library)
        for module in MODULES:
            patch.setattr(module, "npu", recorder)
        for case in [case for case in CASES if not case.bench]:
            for target in MACHINES:
                for kernel in served(case.op, target):
                    args, kwargs = arguments(case, torch.bfloat16)
                    if refusal(kernel, case, target, torch.bfloat16) is None:
                        with lowering.use(Policy({case.op: kernel.name}), target=target):
                            OPS[case.op](*args, **kwargs)
        assert OPS["experts"].kernels["npu_grouped_experts"].prepare(torch.zeros(3, 32, 16, dtype=torch.bfloat16))  # type: ignore[misc]
    return recorder.calls | library.calls


def test_required_arguments_are_positional_and_optional_ones_are_named(calls: set[Any]) -> None:
    """By the schema of every recorded version, whose orders and defaults differ."""
    for version, schemas in features.recorded().items():
        for name, positional, named in calls:
            if name not in schemas:
                assert (version, name) == ("2.8.0.post5", "npu_chunk_gated_delta_rule")
                continue
            if (version, name) == ("2.8.0.post5", "npu_fused_causal_conv1d"):
                continue  # without max_query_len, for which the kernel is refused there
            arguments = torch._C.parse_schema(schemas[name]).arguments
            required = [argument.name for argument in arguments if not argument.has_default_value()]
            assert positional == len(required), (version, name)
            assert named <= {argument.name for argument in arguments} - set(required), (version, name)


def test_the_listed_arguments_are_those_that_are_passed(calls: set[Any]) -> None:
    """Each operator's list in features.py, no less and no more."""
    passed: dict[str, set[str]] = {}
    for name, positional, named in calls:
        arguments = torch._C.parse_schema(features.recorded()["2.13.0"][name]).arguments
        passed.setdefault(name, set()).update([argument.name for argument in arguments[:positional]], named)
    assert passed == {name: set(arguments) for name, arguments in features.ARGUMENTS.items()}


def test_defaults_that_mislead_are_never_relied_on(calls: set[Any]) -> None:
    """Scale 1, as many key heads as query heads, layouts BSH and NZ, running sums instead of counts."""
    always = {
        "npu_fused_infer_attention_score_v2": {
            "softmax_scale", "num_query_heads", "num_key_value_heads", "input_layout", "sparse_mode",
        },
        "atb.npu_ring_mla": {"qk_scale", "mask_type", "input_layout", "calc_type", "kernel_type"},
        "npu_kv_rmsnorm_rope_cache_v2": {"epsilon", "cache_mode", "is_output_kv"},
        "npu_lightning_indexer": {"layout_query", "layout_key", "sparse_count", "sparse_mode"},
        "npu_scatter_pa_kv_cache": {"cache_mode"},
        "npu_grouped_matmul": {"group_list", "group_list_type", "group_type", "split_item"},
        "npu_apply_rotary_pos_emb": {"layout", "rotary_mode"},
        "npu_moe_init_routing_v2": {"expert_tokens_num_type", "expert_tokens_num_flag", "row_idx_type"},
        "npu_recurrent_gated_delta_rule_functional": {"scale", "beta", "actual_seq_lengths", "ssm_state_indices"},
        "npu_chunk_gated_delta_rule": {"scale", "beta", "g", "actual_seq_lengths", "initial_state"},
    }  # fmt: skip
    for name, _, named in calls:
        # A schema may give an argument of this list no default: then it is positional, and passed in any case.
        arguments = torch._C.parse_schema(features.recorded()["2.13.0"][name]).arguments
        optional = {argument.name for argument in arguments if argument.has_default_value()}
        assert always.get(name, set()) & optional <= named, name
