"""Qwen3.8-Flash-Next's draft head as float64 loops over its formulas; transformers has no such head.

e = fc_embedding(norm(embedding of the next token)),   g = norm(streams), one mean of squares over all of them
X = e + fc_hidden(g) stream by stream;   X <- layer(X);   logits = head(mix of X);   the next step takes X
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle import qwen3_8_flash_next as flash
from tests.oracle.qwen3_5 import Pair


@dataclass(frozen=True)
class MtpPair(Pair):
    """A model with a head; `tensors` are all weights by their checkpoint names."""

    tensors: dict[str, Tensor]


@functools.cache
def pair(seed: int = 0) -> MtpPair:
    """A random model of four layers with a head."""
    return build(flash.pair(seed), seed)


@functools.cache
def small(seed: int = 0) -> MtpPair:
    """As `pair`, with two layers, one of each kind."""
    return build(flash.small(seed), seed)


@functools.cache
def of_few_words(seed: int = 0) -> MtpPair:
    """As `small`, over so few tokens that a random head is often right."""
    kinds = ["linear_attention", "indexed_attention"]
    fields = flash.sizes(seed) | {"num_hidden_layers": 2, "layer_types": kinds, "ple_layer_ids": [1]}
    return build(flash.build(fields | {"vocab_size": 6}, seed), seed)


def build(trunk: Pair, seed: int) -> MtpPair:
    """The model with a random head."""
    config = {**trunk.model.config_json, "mtp_num_hidden_layers": 1}
    model = fm.build(config)
    plain = params.to_checkpoint(trunk.params, trunk.model.param_spec(), trunk.model.family.names)
    names = params.to_checkpoint(params.init(model.param_spec(), seed), model.param_spec(), model.family.names)
    generator = torch.Generator().manual_seed(seed + 1)
    head = {
        name: flash.value(name, torch.randn(leaf.shape, generator=generator))
        for name, leaf in names.items()
        if name.startswith("mtp.")
    }
    tree = params.from_checkpoint(plain | head, model.param_spec(), model.family.names)
    return MtpPair(trunk.theirs, model, tree, plain | head)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Transcription:
    """The head's formulas in float64, one row, one token after the other. Holds what it has seen of the row."""

    def __init__(self, one: MtpPair) -> None:
        self.config = one.config
        self.w = {name: leaf.double().numpy() for name, leaf in one.tensors.items()}
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.raw: list[np.ndarray] = []
        self.blocks: list[np.ndarray] = []
        self.left_out = 0

    def run(self, tokens: Sequence[int], hidden: Tensor) -> np.ndarray:
        """The head's streams [tokens, streams * hidden] at the places whose next tokens are given."""
        return np.stack([self.step(token, h) for token, h in zip(tokens, hidden.double().numpy(), strict=True)])

    def step(self, token: int, hidden: np.ndarray) -> np.ndarray:
        e = self.w["mtp.fc_embedding.weight"] @ self.norm(
            self.w["model.embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding"
        )
        g = self.norm(hidden, "mtp.pre_fc_norm_hidden").reshape(self.config.hc_count, -1)
        x = np.concatenate([e + self.w["mtp.fc_hidden.weight"] @ stream for stream in g])
        name = "mtp.layers.0"
        read, back = self.connection(x, f"{name}.attn_hyper_connection")
        x = x + np.outer(back, self.attention(read, f"{name}.self_attn")).ravel()
        read, back = self.connection(x, f"{name}.mlp_hyper_connection")
        return x + np.outer(back, self.mixture(read, f"{name}.mlp")).ravel()

    def logits(self, streams: np.ndarray) -> np.ndarray:
        """[... streams * hidden] to [... vocab]."""
        head = self.w["model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"]
        flat = streams.reshape(-1, streams.shape[-1])
        read = np.stack([self.connection(x, "mtp.hyper_connection_mixer")[0] for x in flat])
        return (read @ head.T).reshape(*streams.shape[:-1], -1)

    def chain(self, streams: np.ndarray, steps: int) -> list[int]:
        """The drafts after the token whose own step gave `streams`, which go back in with each draft."""
        drafts = [int(self.logits(streams).argmax())]
        while len(drafts) < steps:
            streams = self.step(drafts[-1], streams)
            drafts.append(int(self.logits(streams).argmax()))
        return drafts

    def entries(self) -> dict[str, Tensor]:
        """As `fm.logical` gives them."""
        found = {"k": self.keys, "v": self.values, "raw": self.raw, "index": self.blocks}
        empty = np.zeros((0, self.config.indexer_head_dim))
        return {
            f"layers.0.{name}": torch.from_numpy(np.stack(parts) if parts else empty) for name, parts in found.items()
        }

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config.rms_norm_eps) * (1 + self.w[f"{name}.weight"])

    def connection(self, x: np.ndarray, name: str) -> tuple[np.ndarray, Any]:
        """The mean of the gated streams, and the weights that write back (None where there are none)."""
        count = self.config.hc_count
        streams = x.reshape(count, -1)
        unit = streams / np.sqrt((streams * streams).mean(1, keepdims=True) + self.config.rms_norm_eps)
        n = unit.ravel() * (1 + self.w[f"{name}.hc_norm.weight"])
        low = self.w[f"{name}.input_mix_weight_down.weight"] @ n / count
        gates = sigmoid(self.w[f"{name}.input_mix_weight_up.weight"] @ (low * sigmoid(low)))
        inject = self.w.get(f"{name}.block_inject_weight.weight")
        return (gates * n).reshape(count, -1).mean(0), None if inject is None else 2 * sigmoid(inject @ n / count)

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        dim, place = self.config.head_dim, len(self.keys)
        query, key, value = (self.w[f"{name}.{part}_proj.weight"] @ x for part in "qkv")
        self.keys.append(np.stack([self.turn(self.norm(k, f"{name}.k_norm"), place) for k in key.reshape(-1, dim)]))
        self.values.append(value.reshape(-1, dim))
        seen = self.select(x, f"{name}.indexer", place)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head, both in enumerate(query.reshape(-1, 2 * dim)):
            q = self.turn(self.norm(both[:dim], f"{name}.q_norm"), place)
            scores = np.array([q @ self.keys[at][head // group] / dim**0.5 for at in seen])
            weights = np.exp(scores - scores.max())
            mixed = sum(weight * self.values[at][head // group] for weight, at in zip(weights, seen, strict=True))
            heads.append(mixed / weights.sum() * sigmoid(both[dim:]))
        return self.w[f"{name}.o_proj.weight"] @ np.concatenate(heads)

    def select(self, x: np.ndarray, name: str, place: int) -> list[int]:
        """Places of the tokens of the best blocks, and of the unfinished one."""
        dim, ratio = self.config.indexer_head_dim, self.config.indexer_compress_ratio
        *queries, raw = (self.w[f"{name}.index_qk_proj.weight"] @ x).reshape(-1, dim)
        self.raw.append(raw)
        whole = (place + 1) // ratio
        if whole > len(self.blocks):
            first = (whole - 1) * ratio
            self.blocks.append(self.turn(self.norm(np.mean(self.raw[first:], 0), f"{name}.k_layernorm"), first))
        queries = [self.turn(self.norm(q, f"{name}.q_layernorm"), place) for q in queries]
        scores = [-sum(max(q @ key, 0) for q in queries) for key in self.blocks]
        best = np.argsort(np.array(scores), kind="stable")[: self.config.indexer_budget // ratio]
        self.left_out += len(scores) - len(best)
        return [int(block) * ratio + at for block in best for at in range(ratio)] + list(
            range(whole * ratio, place + 1)
        )

    def turn(self, x: np.ndarray, place: int) -> np.ndarray:
        """Channels i and i + half turn by place / theta^(i / half); those past the rotary ones stay."""
        half = self.config.rotary_dim // 2
        y = x.copy()
        for i in range(half):
            angle = place * self.config.rope_theta ** (-i / half)
            y[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            y[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return y

    def mixture(self, x: np.ndarray, name: str) -> np.ndarray:
        """The likeliest experts, weighted by their shares of what they have together; and a gated one for all."""
        p = np.exp(self.w[f"{name}.gate.weight"] @ x)
        chosen = np.argsort(-p)[: self.config.num_experts_per_tok]
        shared = [self.w[f"{name}.shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")]
        y = sigmoid(self.w[f"{name}.shared_expert_gate.weight"] @ x) * glu(x, *shared)
        for expert in chosen:
            gate, up = np.split(self.w[f"{name}.experts.gate_up_proj"][expert], 2)
            y = y + p[expert] / p[chosen].sum() * glu(x, gate, up, self.w[f"{name}.experts.down_proj"][expert])
        return y


def glu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return down @ (gate @ x * sigmoid(gate @ x) * (up @ x))
