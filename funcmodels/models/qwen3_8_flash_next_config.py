"""The config of Qwen3.8-Flash-Next: the fields that shape the text model, and what follows from them.

Source: `Qwen4ExpTextConfig` of transformers 5.24. Mirrors of the checkpoint call the same fields
`qwen3_8_flash_next[_text]`. Of a text's token all three rotary positions are equal, so `mrope_section` is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

INDEXED, LINEAR = "indexed_attention", "linear_attention"
"""Kinds of layer. Published configs call the first `full_attention`."""


@dataclass(frozen=True)
class FlashNextConfig:
    """Fields of the checkpoint's config.json under their own names.

    `ple_layer_ids` count layers from 1. `eos_token_id` is the first of a list: the one that n-grams stop at.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    layer_types: tuple[str, ...]
    rope_theta: float
    partial_rotary_factor: float
    ple_embed_dim: int
    indexer_kv_heads: int = 1
    hc_count: int = 4
    hc_lowrank: int = 320
    ple_layer_ids: tuple[int, ...] = ()
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 512
    seed: int = 1234
    output_gate_type: str = "silu"
    eos_token_id: int = -1
    linear_conv_kernel_dim: int = 4
    mtp_num_hidden_layers: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate, of query, key and index heads alike."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def gate(self) -> Literal["silu", "sigmoid"]:
        """Activation of the delta nets' output gate."""
        return cast(Literal["silu", "sigmoid"], self.output_gate_type)

    @property
    def delta_sizes(self) -> dict[str, int]:
        """Sizes of a delta net."""
        return {
            "k_heads": self.linear_num_key_heads,
            "v_heads": self.linear_num_value_heads,
            "k_dim": self.linear_key_head_dim,
            "v_dim": self.linear_value_head_dim,
            "width": self.linear_conv_kernel_dim,
        }

    @property
    def ngram_sizes(self) -> dict[str, int]:
        """Sizes that all n-gram embeddings have, and what their hashes are made of."""
        return {
            "dim": self.ple_embed_dim,
            "width": self.ple_conv_kernel_size,
            "heads": self.heads_per_ngram,
            "order": self.ngram_size,
            "base": self.ngram_vocab_size_base,
            "seed": self.seed,
            "end": self.eos_token_id,
            "divisor": self.make_ngram_vocab_size_divisible_by,
            "shards": self.split_ngram_parts,
            "vocab": self.vocab_size,
        }

    def ple_index(self, layer: int) -> int | None:
        """Which of the layers with an n-gram embedding `layer` is, counted from 0; None for one without."""
        return self.ple_layer_ids.index(layer + 1) if layer + 1 in self.ple_layer_ids else None
