"""Qwen3.5's multi-token prediction head twice: float64 loops over its formulas, and decoder layers of transformers.

The head is described in few places, and a wrong one only lowers acceptance; so both are written from the formulas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle import qwen3_5
from tests.oracle.qwen3_5 import Pair
from tests.oracle.states import advance


@dataclass(frozen=True)
class MtpPair(Pair):
    """A model with a head. `head` is that of transformers, `tensors` all weights by their checkpoint names."""

    head: Any
    tensors: dict[str, Tensor]


def sizes(kind: str, seed: int) -> dict[str, Any]:
    """Random config fields of which the head uses no two equal ones; odd seeds tie the embedding."""
    for draw in itertools.count(1000 * seed + seed % 2, 2):
        fields = qwen3_5.sizes(kind, draw)
        rotary = round(fields["head_dim"] * fields["rope_parameters"]["partial_rotary_factor"])
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        inner = ("intermediate_size", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
        used = [rotary, *(fields[name] for name in (*names, *inner) if name in fields)]
        routed = kind == "dense" or 1 < fields["num_experts_per_tok"] < fields["num_experts"]
        if len(set(used)) == len(used) and fields["num_key_value_heads"] > 1 and rotary > 2 and routed:
            return fields
    raise AssertionError


@functools.cache
def pair(kind: str, seed: int = 0, layers: int = 1) -> MtpPair:
    """A random model of four layers with a head of `layers` layers, the same for the same arguments."""
    return build(kind, sizes(kind, seed), seed, layers)


@functools.cache
def small(kind: str, seed: int = 0) -> MtpPair:
    """As `pair`, with two layers, one of each kind."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return build(kind, sizes(kind, seed) | layers, seed, 1)


def build(kind: str, fields: dict[str, Any], seed: int, layers: int) -> MtpPair:
    """A model of these config fields and its head, with every parameter random."""
    trunk = qwen3_5.build(kind, fields, seed)
    head = Assembled(kind, trunk.theirs.config, layers).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * noise if noise.ndim == 1 else noise / noise.shape[-1] ** 0.5
    tensors = trunk.theirs.state_dict() | {f"mtp.{name}": leaf for name, leaf in head.state_dict().items()}
    model = fm.build({**trunk.model.config_json, "mtp_num_hidden_layers": layers})
    tree = params.from_checkpoint(tensors, model.param_spec(), model.family.names)
    return MtpPair(trunk.theirs, model, tree, head, tensors)


def begun(one: MtpPair, prompts: list[list[int]], **kwargs: Any) -> tuple[fm.State, fm.State, fm.Carry]:
    """Both states and the carry of rows whose prompts are in; token 1 follows each."""
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(len(prompts), 60, page_size=4, **kwargs)
    out, after = advance(one, state, prompts)
    batch = fm.Batch.from_lists(prompts)
    following = fm.next_tokens(batch, torch.ones(len(prompts), dtype=torch.int64))
    return after, *head.extend(one.params, head.init_state(state), out, batch, following)


class Assembled(torch.nn.Module):
    """The head from transformers' own layers; its parameters have the names of the checkpoint, after `mtp.`."""

    def __init__(self, kind: str, trunk: Any, layers: int) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
        from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

        super().__init__()
        module, name = {"dense": (dense, "Qwen3_5"), "moe": (moe, "Qwen3_5Moe")}[kind]
        kinds = {"layer_types": ["full_attention"] * layers, "num_hidden_layers": layers}
        self.config = type(trunk)(**{**trunk.to_dict(), **kinds})
        self.config._attn_implementation = self.config._experts_implementation = "eager"
        norm = functools.partial(getattr(module, f"{name}RMSNorm"), trunk.hidden_size, eps=trunk.rms_norm_eps)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.fc = torch.nn.Linear(2 * trunk.hidden_size, trunk.hidden_size, bias=False)
        layer = getattr(module, f"{name}DecoderLayer")
        self.layers = torch.nn.ModuleList(layer(self.config, index) for index in range(layers))
        self.rotary = getattr(module, f"{name}TextRotaryEmbedding")(config=self.config)

    def forward(self, embedded: Tensor, hidden: Tensor, cache: Any = None) -> Tensor:
        """One row [tokens, hidden], on top of `cache`: the hidden after the head's norm."""
        from transformers.masking_utils import create_causal_mask

        past = 0 if cache is None else cache.get_seq_length()
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))[None]
        positions = past + torch.arange(x.shape[1])[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, cache=cache, position_ids=positions
        )
        turns = self.rotary(x, positions.expand(3, 1, -1))
        for layer in self.layers:
            x = layer(x, position_embeddings=turns, attention_mask=mask, position_ids=positions, cache=cache)
        return self.norm(x)[0]


class Transcription:
    """The head's formulas in float64, one row, one token after the other. Holds the keys and values so far."""

    def __init__(self, one: MtpPair) -> None:
        self.config = one.config
        self.w = {name: leaf.double().numpy() for name, leaf in one.tensors.items()}
        self.keys: list[list[np.ndarray]] = [[] for _ in range(one.config.mtp_num_hidden_layers)]
        self.values: list[list[np.ndarray]] = [[] for _ in self.keys]

    def run(self, tokens: Sequence[int], hidden: Tensor) -> np.ndarray:
        """The head's hidden [tokens, hidden] at the places whose next tokens are given."""
        return np.stack([self.step(token, h) for token, h in zip(tokens, hidden.double().numpy(), strict=True)])

    def step(self, token: int, hidden: np.ndarray) -> np.ndarray:
        """norm(layers(fc [norm(embedding of the next token), norm(hidden)]))."""
        e = self.norm(self.w["model.embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding")
        h = self.norm(hidden, "mtp.pre_fc_norm_hidden")
        x = self.w["mtp.fc.weight"] @ np.concatenate([e, h])
        for index in range(len(self.keys)):
            x = self.layer(x, index)
        return self.norm(x, "mtp.norm")

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self.w["lm_head.weight"].T

    def chain(self, token: int, hidden: np.ndarray, steps: int) -> list[int]:
        """The drafts after `token`, whose own step gave `hidden`: the head's hidden goes back in with each draft."""
        drafts = [int(self.logits(hidden).argmax())]
        while len(drafts) < steps:
            hidden = self.step(drafts[-1], hidden)
            drafts.append(int(self.logits(hidden).argmax()))
        return drafts

    def entries(self) -> dict[str, Tensor]:
        """As `fm.logical` gives them."""
        found = {}
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            found |= {f"layers.{index}.k": np.stack(keys), f"layers.{index}.v": np.stack(values)}
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config.rms_norm_eps) * (1 + self.w[f"{name}.weight"])

    def layer(self, x: np.ndarray, index: int) -> np.ndarray:
        name = f"mtp.layers.{index}"
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), index)
        x_in = self.norm(x, f"{name}.post_attention_layernorm")
        return x + (self.mixture if self.config.num_experts else self.mlp)(x_in, f"{name}.mlp")

    def attention(self, x: np.ndarray, index: int) -> np.ndarray:
        name, dim, place = f"mtp.layers.{index}.self_attn", self.config.head_dim, len(self.keys[index])
        query, key, value = (self.w[f"{name}.{part}_proj.weight"] @ x for part in "qkv")
        turned = [self.turn(self.norm(head, f"{name}.k_norm"), place) for head in key.reshape(-1, dim)]
        self.keys[index].append(np.stack(turned))
        self.values[index].append(value.reshape(-1, dim))
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head, both in enumerate(query.reshape(-1, 2 * dim)):
            q, gate = self.turn(self.norm(both[:dim], f"{name}.q_norm"), place), both[dim:]
            scores = np.array([q @ k[head // group] / dim**0.5 for k in self.keys[index]])
            weights = np.exp(scores - scores.max())
            mixed = sum(weight * v[head // group] for weight, v in zip(weights, self.values[index], strict=True))
            heads.append(mixed / weights.sum() / (1 + np.exp(-gate)))
        return self.w[f"{name}.o_proj.weight"] @ np.concatenate(heads)

    def turn(self, x: np.ndarray, place: int) -> np.ndarray:
        """Channels i and i + half turn by place / theta^(i / half); those past the rotary ones stay."""
        half = self.config.rotary_dim // 2
        y = x.copy()
        for i in range(half):
            angle = place * self.config.rope_theta ** (-i / half)
            y[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            y[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return y

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (self.w[f"{name}.{part}_proj.weight"] @ x for part in ("gate", "up"))
        return self.w[f"{name}.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def mixture(self, x: np.ndarray, name: str) -> np.ndarray:
        """The likeliest experts, weighted by their shares of what they have together; and a gated one for all."""
        p = np.exp(self.w[f"{name}.gate.weight"] @ x)
        chosen = np.argsort(-p)[: self.config.num_experts_per_tok]
        shared_gate = 1 / (1 + np.exp(-self.w[f"{name}.shared_expert_gate.weight"] @ x))
        y = shared_gate * self.mlp(x, f"{name}.shared_expert")
        for expert in chosen:
            gate, up = np.split(self.w[f"{name}.experts.gate_up_proj"][expert] @ x, 2)
            y = y + p[expert] / p[chosen].sum() * (
                self.w[f"{name}.experts.down_proj"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            )
        return y
