"""The short convolution of Ascend 950."""

from __future__ import annotations

import torch

from .check import ASCEND_950, OT, HostCheck, enter

FOLDER = "attention/fused_causal_conv1d/op_host"
HALVES = (torch.float16, torch.bfloat16)

enter(
    "npu_fused_causal_conv1d",
    HostCheck(
        "max_query_len where x has two axes: the longest row's tokens",
        lambda c: c.x.ndim == 3 or c.max_query_len >= 1,
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_tiling.cpp, entry function",
        targets=ASCEND_950,
        since="9.1.0.pre",
    ),
    HostCheck(
        "three taps",
        lambda c: c.weight.shape[0] == 3,
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_tiling.cpp",
        targets=ASCEND_950,
        since="9.1.0-beta.1",
    ),
    HostCheck(
        "channels in multiples of 16, from 64 for rows of up to 8 tokens and from 16 for longer ones, up to 16384",
        lambda c: c.x.shape[-1] % 16 == 0 and (64 if c.max_query_len <= 8 else 16) <= c.x.shape[-1] <= 16384,
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_cut_bh_tiling_arch35.cpp and its BSH twin",
        targets=ASCEND_950,
        since="9.1.0-beta.1",
    ),
    HostCheck(
        "1 to 256 rows, int32 starts of rows + 1 and int32 slots of rows",
        lambda c: (
            c.query_start_loc is not None
            and c.query_start_loc.dtype == torch.int32
            and 2 <= len(c.query_start_loc) <= 257
            and c.cache_indices is not None
            and c.cache_indices.dtype == torch.int32
            and len(c.cache_indices) == len(c.query_start_loc) - 1
        ),
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_tiling.cpp",
        targets=ASCEND_950,
        since="9.1.0-beta.1",
    ),
    HostCheck(
        "windows of taps - 1 entries or more, at least as many as rows",
        lambda c: (
            c.conv_states.ndim == 3
            and c.conv_states.shape[1] >= c.weight.shape[0] - 1
            and c.conv_states.shape[0] >= len(c.cache_indices)
        ),
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_cut_bh_tiling_arch35.cpp and its BSH twin",
        targets=ASCEND_950,
        since="9.1.0-beta.1",
    ),
    HostCheck(
        "x, weight and windows of one dtype, float16 or bfloat16",
        lambda c: c.x.dtype in HALVES and {c.weight.dtype, c.conv_states.dtype} == {c.x.dtype},
        f"{OT} v9.1.0.pre {FOLDER}/fused_causal_conv1d_tiling.cpp",
        targets=ASCEND_950,
        since="9.1.0-beta.1",
    ),
)
