"""Output shapes and dtypes of the references against the shape functions of the real torch_npu, loaded without CANN."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import lowering
from lowering import LoweringError
from lowering.dryrun.stubs import stubs
from lowering.dryrun.wheel import fetched
from tests.lowering.npu_reference import real_shapes
from tests.lowering.npu_reference.calls import call
from tests.lowering.npu_reference.real_shapes import Hollow
from tests.lowering.npu_reference.test_attention import (
    FIA,
    HEADS,
    MASK,
    Paged,
    packed,
    packed_latent,
    paged_latent,
)
from tests.lowering.npu_reference.test_cache import NORM_ROPE, SCATTER, normed
from tests.lowering.npu_reference.test_cache import valid as scatter
from tests.lowering.npu_reference.test_delta import CHUNK, RECURRENT, chunked, recurrent
from tests.lowering.npu_reference.test_hyper_connection import POST
from tests.lowering.npu_reference.test_hyper_connection import valid as injected
from tests.lowering.npu_reference.test_mla import BY_HEAD, UPDATE, by_head, parts
from tests.lowering.npu_reference.test_moe import (
    GATING,
    GROUPED,
    MATMUL,
    ROUTING,
    UNPERMUTE,
    grouped,
    matmul,
    routing,
    unpermute,
)
from tests.lowering.npu_reference.test_norms import NORMS
from tests.lowering.npu_reference.test_norms import valid as norm
from tests.lowering.npu_reference.test_quant import (
    BLOCKS,
    DYNAMIC,
    STATIC,
    SWIGLU,
    blocks,
    static,
)
from tests.lowering.npu_reference.test_quant_matmul import (
    FUSED,
    float4,
    fused,
    fused_int8,
    grouped_blocks,
    int4,
    product,
)
from tests.lowering.npu_reference.test_quant_matmul import MATMUL as PRODUCT
from tests.lowering.npu_reference.test_quant_matmul import blocks as block_product
from tests.lowering.npu_reference.test_quant_matmul import grouped as grouped_int8
from tests.lowering.npu_reference.test_rotary import (
    APPLY,
    INTERLEAVE,
    MUL,
    valid_apply,
    valid_interleave,
    valid_mul,
)
from tests.lowering.npu_reference.test_short_conv import CONV
from tests.lowering.npu_reference.test_short_conv import valid as conv
from tests.lowering.npu_reference.test_sparse import INDEXER
from tests.lowering.npu_reference.test_sparse import valid as indexed


def padded() -> dict[str, Any]:
    query = torch.zeros(2, 3, HEADS, 48, dtype=torch.bfloat16)
    return Paged([9, 12], 48).arguments(
        [9, 12], query=query, input_layout="BSND", atten_mask=MASK, sparse_mode=3, actual_seq_qlen=[2, 3]
    )


CALLS: list[tuple[str, dict[str, Any]]] = [
    *((name, norm(name)) for name in NORMS),
    *((name, norm(name, torch.float32, 2, 7, dim=(4, 16))) for name in NORMS),
    ("npu_swiglu", {"input": torch.zeros(3, 10, 14), "dim": 1}),
    ("npu_geglu", {"input": torch.zeros(3, 10, 14), "dim": 1, "approximate": 1, "activate_left": True}),
    (MUL, valid_mul()),
    (APPLY, valid_apply()),
    (APPLY, valid_apply(torch.float16, "BSND")),
    (FIA, packed([3, 2], [130, 7])[0]),
    (FIA, packed([3, 2], [130, 7], return_softmax_lse=False)[0]),
    (FIA, padded()),
    (FIA, packed_latent([4, 2], [4, 9])),
    (FIA, packed_latent([4, 2], [4, 9], return_softmax_lse=False)),
    (FIA, paged_latent(3, [128, 9])[0]),
    (FIA, paged_latent(3, [128, 9], tiles=True)[0]),
    (FIA, paged_latent(3, [128, 9])[0] | {"input_layout": "BSND_NBSD"}),
    (UPDATE, parts()),
    (BY_HEAD, by_head()),
    (INTERLEAVE, valid_interleave()),
    (NORM_ROPE, normed()),
    (NORM_ROPE, normed("PA_NZ", steps=1)),
    (SCATTER, scatter()),
    (SCATTER, scatter(nz=True)),
    (RECURRENT, recurrent([3, 2], [2, 2, 2, 0, 0])),
    (CHUNK, chunked([9, 4])),
    (CONV, conv()),
    (POST, injected()),
    (POST, injected(torch.float16, 2, 3, streams=8)),
    (GROUPED, grouped()),
    (GROUPED, grouped(torch.bfloat16, out_flag=True)),
    (GATING, {"x": torch.randn(5, 7), "k": 3, "renorm": 1}),
    (GATING, {"x": torch.randn(5, 7), "k": 3, "renorm": 0, "output_softmax": True}),
    (ROUTING, routing(active_expert_range=[2, 5])),
    (MATMUL, matmul(turned=True)),
    (UNPERMUTE, unpermute()),
    (INDEXER, indexed()),
    (INDEXER, indexed(packed=True)),
    (ROUTING, routing(quant_mode=1)),
    (STATIC, static()),
    (DYNAMIC, {"input": torch.zeros(3, 2, 40).half()}),
    (SWIGLU, {"x": torch.zeros(5, 44).bfloat16(), "quant_mode": 1, "activate_left": True}),
    (PRODUCT, product()),
    (PRODUCT, product(torch.float16, pertoken_scale=None, bias=torch.zeros(10).int())),
    (MATMUL, grouped_int8()),
    (MATMUL, grouped_int8(torch.float16)),
    (MATMUL, int4()),
    *((BLOCKS, blocks(torch.zeros(5, width))) for width in (32, 40, 96, 4304)),
    *((PRODUCT, block_product(width)) for width in (32, 40, 64, 96, 4304)),
    (MATMUL, grouped_blocks()),
    (MATMUL, float4()),
    (FUSED, fused()),
    (FUSED, fused_int8()),
]


def target(name: str, arguments: dict[str, Any]) -> str:
    """One that the call is documented for: 950, for some operators and for scales of blocks."""
    blocked = arguments.get("scale_dtype") is not None or "antiquant_scale" in arguments
    return "ascend950" if blocked or name in (CONV, POST, BLOCKS, FUSED) else "ascend910b"


def unpacked() -> Path:
    try:
        return fetched()
    except LoweringError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def real() -> list[Any]:
    """Outputs of every call in `CALLS`, from one process that loads torch_npu."""
    wheel = unpacked()
    hollow = [(name, pytree.tree_map(Hollow.of, arguments)) for name, arguments in CALLS]
    environment = os.environ | {"LD_LIBRARY_PATH": str(stubs(wheel)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, real_shapes.__file__, str(wheel)]
    done = subprocess.run(command, input=pickle.dumps(hollow), env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CALLS)), ids=[f"{at} {name}" for at, (name, _) in enumerate(CALLS)])
def test_outputs_have_the_real_shapes(real: list[Any], index: int) -> None:
    name, arguments = CALLS[index]
    with lowering.use(target=target(name, arguments)):
        ours = pytree.tree_map(Hollow.of, call(name, arguments))
    assert pytree.tree_map(shape, ours) == pytree.tree_map(shape, real[index])


def shape(x: Any) -> Any:
    """What must be equal: strides may differ."""
    return (x.shape, x.dtype) if isinstance(x, Hollow) else x
