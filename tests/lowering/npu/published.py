"""The families at their published sizes, cut to the layers that differ: widths, heads and experts are the real ones."""

from __future__ import annotations

from typing import Any

from tests.lowering.npu.test_kernels_published import MOE, SIZES
from tests.models.test_deepseek_v2_config import LITE
from tests.models.test_gemma3_config import PUBLISHED as GEMMA3
from tests.models.test_kimi_k3_config import TEXT as KIMI_K3
from tests.models.test_kimi_linear_config import PUBLISHED as KIMI_LINEAR
from tests.models.test_qwen3_8_flash_next_config import PUBLISHED as FLASH_NEXT

DELTA_THEN_LATENT = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}


def _kimi(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"num_hidden_layers": 5, "linear_attn_config": config["linear_attn_config"] | DELTA_THEN_LATENT}


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "Qwen3.5-35B-A3B": SIZES | MOE,
    "Qwen3.8-Flash-Next": FLASH_NEXT["text_config"] | {
        "num_hidden_layers": 4, "layer_types": FLASH_NEXT["text_config"]["layer_types"][:4],
    },
    "DeepSeek-V2-Lite": LITE | {"num_hidden_layers": 2},
    "Kimi-Linear-48B-A3B": _kimi(KIMI_LINEAR),
    "Kimi-K3": _kimi(KIMI_K3),
    "Gemma3-4B": GEMMA3["4b"] | {"model_type": "gemma3_text", "num_hidden_layers": 6},
    "Gemma3-27B": GEMMA3["27b"] | {"model_type": "gemma3_text", "num_hidden_layers": 6},
}  # fmt: skip
"""Configs by the name of a checkpoint."""

PHASES: dict[str, tuple[list[int], int, bool]] = {
    "padded": ([5, 0, 2], 126, False),
    "prefill": ([40, 17, 1], 0, False),
    "chunk": ([30, 0, 9], 100, False),
    "decode": ([1, 1, 1], 513, False),
    "verify 4": ([4, 4, 4], 513, True),
    "verify 16": ([16, 16, 16], 513, True),
}
"""New tokens of each row, tokens that rows hold, and whether steps are kept. The first is padded, as captures are."""
