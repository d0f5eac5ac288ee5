"""Kimi-K3's text model as float64 loops over its formulas: token after token, head by head, expert by expert.

No library has it as a model, so the oracle is this transcription. It knows checkpoints by the names of their tensors,
and nothing of how the package lays parameters out, keeps state or batches rows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle.qwen3_5 import Pair, Remembered

PREFIX, HEAD = "language_model.model.", "language_model.lm_head.weight"
LATENT_EPS = 1e-6
"""In the norms of latents, whatever the config says: the authors' modelling file makes these with their default."""
SEEDS = range(4)
"""Between them: snapshots after one, two and three layers, ups with and without a cap, experts in one group and two."""


def sizes(seed: int, **changes: Any) -> dict[str, Any]:
    """Random fields of a config, no two sizes equal, in the spelling of the published one."""
    draw = random.Random(f"k3 {seed}")
    kinds = ["kda", "kda", "mla", *draw.choices(("kda", "mla"), k=2)]
    draw.shuffle(kinds)
    heads, linear_heads = draw.sample((2, 3, 4, 5), 2)
    experts = draw.choice((4, 6, 8))
    text = {
        "model_type": "kimi_linear", "vocab_size": draw.randint(50, 99), "hidden_size": draw.choice((18, 22, 30)),
        "num_hidden_layers": len(kinds), "num_attention_heads": heads, "num_key_value_heads": heads,
        "q_lora_rank": draw.choice((13, 20)), "kv_lora_rank": draw.choice((14, 24)),
        "qk_nope_head_dim": draw.choice((9, 12)), "qk_rope_head_dim": draw.choice((3, 4, 10)),
        "v_head_dim": draw.choice((5, 8)), "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [index for index, kind in enumerate(kinds, 1) if kind == "kda"],
            "full_attn_layers": [index for index, kind in enumerate(kinds, 1) if kind == "mla"],
            "num_heads": linear_heads, "head_dim": draw.choice((6, 7)), "short_conv_kernel_size": draw.randint(2, 5),
            "use_full_rank_gate": True, "gate_lower_bound": draw.choice((-5.0, -2.0)),
        },
        "intermediate_size": draw.choice((17, 26)), "moe_intermediate_size": draw.choice((10, 16)),
        "num_experts": experts, "num_experts_per_token": draw.randint(2, experts // 2), "num_shared_experts": 2,
        "num_expert_group": 1 + seed % 2, "topk_group": 1, "moe_renormalize": seed != 3,
        "routed_scaling_factor": (1.0, 2.5)[seed % 2], "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "routed_expert_hidden_size": draw.choice((11, 15)), "latent_moe_use_norm": True,
        "hidden_act": "situ", "activation_situ_beta": (4.0, 1.5)[seed % 2],
        "activation_situ_linear_beta": (25.0, None, 1.25, 25.0)[seed % 4], "attn_res_block_size": 1 + seed % 3,
        "rms_norm_eps": draw.choice((1e-5, 1e-3)), "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    return {"model_type": "kimi_k3", "text_config": text | changes, "vision_config": {"hidden_size": 12}}


def shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the text model, by the names behind the prefix; of A_log more numbers are stored than heads."""
    f = fields["text_config"]
    hidden, linear = f["hidden_size"], f["linear_attn_config"]
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (f["vocab_size"], hidden), "norm.weight": (hidden,)}
    found |= {"output_attn_res_norm.weight": (hidden,), "output_attn_res_proj.weight": (1, hidden)}
    for index in range(f["num_hidden_layers"]):
        attn = _delta_shapes(f) if index + 1 in linear["kda_layers"] else _latent_shapes(f)
        sparse = index >= f["first_k_dense_replace"]
        feed, root = (
            (_sparse_shapes(f), "block_sparse_moe") if sparse else (_dense(hidden, f["intermediate_size"]), "mlp")
        )
        norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
        own: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
        own |= {f"{name}_res_proj.weight": (1, hidden) for name in ("self_attention", "mlp")}
        own |= {f"self_attn.{name}": shape for name, shape in attn.items()}
        own |= {f"{root}.{name}": shape for name, shape in feed.items()}
        found |= {f"layers.{index}.{name}": shape for name, shape in own.items()}
    return found


def _delta_shapes(f: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, linear = f["hidden_size"], f["linear_attn_config"]
    heads, dim, width = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    return {
        **{f"{part}_proj.weight": (heads * dim, hidden) for part in "qkvg"},
        **{f"{part}_conv1d.weight": (heads * dim, 1, width) for part in "qkv"},
        "b_proj.weight": (heads, hidden), "f_a_proj.weight": (dim, hidden), "f_b_proj.weight": (heads * dim, dim),
        "A_log": (heads + 3,), "dt_bias": (heads * dim,), "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, heads * dim),
    }  # fmt: skip


def _latent_shapes(f: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, latent = (f[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    nope, rope, v = f["qk_nope_head_dim"], f["qk_rope_head_dim"], f["v_head_dim"]
    return {
        "q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,), "kv_a_layernorm.weight": (latent,),
        "q_b_proj.weight": (heads * (nope + rope), rank), "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "kv_b_proj.weight": (heads * (nope + v), latent), "g_proj.weight": (heads * v, hidden),
        "o_proj.weight": (hidden, heads * v),
    }  # fmt: skip


def _dense(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    up, down = (inner, hidden), (hidden, inner)
    return {"gate_proj.weight": up, "up_proj.weight": up, "down_proj.weight": down}


def _sparse_shapes(f: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, narrow, inner = f["hidden_size"], f["routed_expert_hidden_size"], f["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "gate.weight": (f["num_experts"], hidden), "gate.e_score_correction_bias": (f["num_experts"],),
        "routed_expert_down_proj.weight": (narrow, hidden), "routed_expert_norm.weight": (narrow,),
        "routed_expert_up_proj.weight": (hidden, narrow),
    }  # fmt: skip
    shared = _dense(hidden, f["num_shared_experts"] * inner)
    found |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    each = {"w1": (inner, narrow), "w2": (narrow, inner), "w3": (inner, narrow)}
    return found | {
        f"experts.{e}.{name}.weight": shape for e in range(f["num_experts"]) for name, shape in each.items()
    }


VISION = {"vision_tower.encoder.blocks.0.wqkv.weight": (36, 12), "mm_projector.proj.0.weight": (12, 12)}


def random_tensors(fields: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights of a whole checkpoint of this config in float32, none of them trivial, a few of its vision tower too."""
    generator = torch.Generator().manual_seed(seed)
    named = {PREFIX + name: shape for name, shape in shapes(fields).items()}
    named |= {HEAD: (fields["text_config"]["vocab_size"], fields["text_config"]["hidden_size"])} | VISION
    return {name: _value(name, torch.randn(shape, generator=generator)) for name, shape in named.items()}


def _value(name: str, noise: Tensor) -> Tensor:
    """A parameter from noise, scaled so that rounding errors do not grow from layer to layer."""
    if noise.ndim == 1:
        return 0.3 * noise + float("norm" in name)
    if "embed" in name or ".gate." in name:
        return noise
    return noise * (2.0 if "_res_proj" in name else 0.7) / noise.shape[-1] ** 0.5


@functools.cache
def pair(seed: int, dtype: torch.dtype = torch.float64) -> Pair:
    """A config with random tensors, and our model with the same values; the same for the same seed."""
    return build(sizes(seed), seed, dtype)


def build(fields: dict[str, Any], seed: int, dtype: torch.dtype = torch.float64) -> Pair:
    """`theirs` is the config and the checkpoint's tensors."""
    model, tensors = fm.build(fields), random_tensors(fields, seed)
    ours = params.from_checkpoint(tensors, model.param_spec(), model.family.names, dtype=dtype)
    # In float64 routers score in it too, as the transcription does.
    return Pair((fields, tensors), model, params.to(ours, dtype=dtype) if dtype == torch.float64 else ours)


def run(one: Pair, ids: Sequence[int], row: Row | None = None) -> Remembered:
    """One row's tokens through the transcription, behind those that `row` has seen."""
    row = row or Row(*one.theirs)
    steps = [row.token(token) for token in ids]
    columns = [[step[at] for step in steps] for at in range(4)]
    logits, hidden = (torch.from_numpy(np.stack(column)) for column in columns[:2])
    layers = [torch.from_numpy(np.stack(column)) for column in zip(*columns[2], strict=True)]
    chosen = [torch.tensor(column) for column in zip(*columns[3], strict=True)]
    return Remembered(logits, hidden, layers, chosen, row.entries(), row)


class Row:
    """One row: what it remembers of its tokens, and what the next one gives."""

    def __init__(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.f = fields["text_config"]
        self.linear = self.f["linear_attn_config"]
        self.w = {name.removeprefix(PREFIX): leaf.double().numpy() for name, leaf in tensors.items()}
        layers, dim = range(self.f["num_hidden_layers"]), self.linear["head_dim"]
        self.projected: list[list[np.ndarray]] = [[] for _ in layers]
        self.delta = [np.zeros((self.linear["num_heads"], dim, dim)) for _ in layers]
        self.latents: list[list[np.ndarray]] = [[] for _ in layers]
        self.shared: list[list[np.ndarray]] = [[] for _ in layers]

    def is_delta(self, layer: int) -> bool:
        return layer + 1 in self.linear["kda_layers"]

    def norm(self, x: np.ndarray, name: str, eps: float | None = None) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + (eps or self.f["rms_norm_eps"])) * self.w[f"{name}.weight"]

    def token(self, token: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[list[int]]]:
        """Logits, final hidden, the value behind each layer, and the experts that each mixture chose."""
        p, bank = self.w["embed_tokens.weight"][token], []
        layers, chosen = [], []
        for layer in range(self.f["num_hidden_layers"]):
            name = f"layers.{layer}"
            u = self.mix(p, bank, f"{name}.self_attention_res")
            layers.append(u)
            if layer % self.f["attn_res_block_size"] == 0:
                bank, p = [*bank, p], np.zeros_like(p)
            u = self.norm(u, f"{name}.input_layernorm")
            p = p + (self.kda(u, layer) if self.is_delta(layer) else self.mla(u, layer))
            v = self.norm(self.mix(p, bank, f"{name}.mlp_res"), f"{name}.post_attention_layernorm")
            if layer < self.f["first_k_dense_replace"]:
                p = p + self.fed(v, f"{name}.mlp", "gate_proj", "up_proj", "down_proj")
            else:
                fed, ids = self.mixture(v, f"{name}.block_sparse_moe")
                p, chosen = p + fed, [*chosen, ids]
        last = self.mix(p, bank, "output_attn_res")
        hidden = self.norm(last, "norm")
        return self.w[HEAD] @ hidden, hidden, [*layers[1:], last], chosen

    def mix(self, p: np.ndarray, bank: list[np.ndarray], name: str) -> np.ndarray:
        """The snapshots and the running sum, weighted by a softmax of one score each."""
        if not bank:
            return p
        rows = [*bank, p]
        scores = np.array([self.w[f"{name}_proj.weight"][0] @ self.norm(row, f"{name}_norm") for row in rows])
        weights = np.exp(scores - scores.max())
        return weights / weights.sum() @ np.stack(rows)

    def kda(self, x: np.ndarray, layer: int) -> np.ndarray:
        name = f"layers.{layer}.self_attn"
        heads, dim = self.linear["num_heads"], self.linear["head_dim"]
        self.projected[layer].append(np.concatenate([self.w[f"{name}.{part}_proj.weight"] @ x for part in "qkv"]))
        q, k, v = self.convolved(layer).reshape(3, heads, dim)
        f = self.w[f"{name}.f_b_proj.weight"] @ (self.w[f"{name}.f_a_proj.weight"] @ x) + self.w[f"{name}.dt_bias"]
        beta, z = sigmoid(self.w[f"{name}.b_proj.weight"] @ x), self.w[f"{name}.g_proj.weight"] @ x
        out = []
        for h in range(heads):
            own = slice(h * dim, (h + 1) * dim)
            decay = self.linear["gate_lower_bound"] * sigmoid(np.exp(self.w[f"{name}.A_log"][h]) * f[own])
            key, query = (u / np.sqrt(u @ u + 1e-6) for u in (k[h], q[h]))
            state = np.exp(decay)[:, None] * self.delta[layer][h]
            state = state + np.outer(key, beta[h] * (v[h] - state.T @ key))
            self.delta[layer][h] = state
            out.append(self.norm(state.T @ (query / np.sqrt(dim)), f"{name}.o_norm") * sigmoid(z[own]))
        return self.w[f"{name}.o_proj.weight"] @ np.concatenate(out)

    def convolved(self, layer: int) -> np.ndarray:
        parts = [self.w[f"layers.{layer}.self_attn.{part}_conv1d.weight"][:, 0] for part in "qkv"]
        taps = np.concatenate(parts)
        seen = self.projected[layer][-taps.shape[1] :]
        y = np.sum([tap * x for tap, x in zip(taps.T[::-1], seen[::-1], strict=False)], 0)
        return y * sigmoid(y)

    def mla(self, x: np.ndarray, layer: int) -> np.ndarray:
        name = f"layers.{layer}.self_attn"
        heads, nope = self.f["num_attention_heads"], self.f["qk_nope_head_dim"]
        latent = self.norm(self.w[f"{name}.q_a_proj.weight"] @ x, f"{name}.q_a_layernorm", LATENT_EPS)
        queries = (self.w[f"{name}.q_b_proj.weight"] @ latent).reshape(heads, -1)
        kv, rank = self.w[f"{name}.kv_a_proj_with_mqa.weight"] @ x, self.f["kv_lora_rank"]
        self.latents[layer].append(self.norm(kv[:rank], f"{name}.kv_a_layernorm", LATENT_EPS))
        self.shared[layer].append(kv[rank:])
        up = self.w[f"{name}.kv_b_proj.weight"].reshape(heads, nope + self.f["v_head_dim"], rank)
        out = []
        for h, q in enumerate(queries):
            both = [up[h] @ c for c in self.latents[layer]]
            scores = [q[:nope] @ kv[:nope] + q[nope:] @ k for kv, k in zip(both, self.shared[layer], strict=True)]
            weights = np.exp((np.array(scores) - max(scores)) / np.sqrt(len(q)))
            out.append(weights / weights.sum() @ np.stack([kv[nope:] for kv in both]))
        gate = sigmoid(self.w[f"{name}.g_proj.weight"] @ x)
        return self.w[f"{name}.o_proj.weight"] @ (np.concatenate(out) * gate)

    def fed(self, x: np.ndarray, name: str, gate: str, up: str, down: str) -> np.ndarray:
        g, u = (self.w[f"{name}.{part}.weight"] @ x for part in (gate, up))
        b, lb = self.f["activation_situ_beta"], self.f["activation_situ_linear_beta"]
        u = u if lb is None else lb * np.tanh(u / lb)
        return self.w[f"{name}.{down}.weight"] @ (b * np.tanh(g / b) * sigmoid(g) * u)

    def mixture(self, x: np.ndarray, name: str) -> tuple[np.ndarray, list[int]]:
        scores = sigmoid(self.w[f"{name}.gate.weight"] @ x)
        ids = self.best(scores + self.w[f"{name}.gate.e_score_correction_bias"])
        weights = scores[ids]
        if self.f["moe_renormalize"]:
            weights = weights / (weights.sum() + 1e-20)
        z = self.w[f"{name}.routed_expert_down_proj.weight"] @ x
        fed = [self.fed(z, f"{name}.experts.{e}", "w1", "w3", "w2") for e in ids]
        routed = weights * self.f["routed_scaling_factor"] @ np.stack(fed)
        routed = self.norm(routed, f"{name}.routed_expert_norm")
        shared = self.fed(x, f"{name}.shared_experts", "gate_proj", "up_proj", "down_proj")
        return self.w[f"{name}.routed_expert_up_proj.weight"] @ routed + shared, ids

    def best(self, scores: np.ndarray) -> list[int]:
        """The chosen experts of the groups whose two best together score highest."""
        groups = np.split(np.arange(len(scores)), self.f["num_expert_group"])
        groups.sort(key=lambda group: -np.sort(scores[group])[-2:].sum())
        open_ = [e for group in groups[: self.f["topk_group"]] for e in group]
        return sorted(open_, key=lambda e: -scores[e])[: self.f["num_experts_per_token"]]

    def entries(self) -> dict[str, Tensor]:
        """What is remembered, as `fm.logical` names it."""
        found: dict[str, np.ndarray] = {}
        past = self.linear["short_conv_kernel_size"] - 1
        for layer in range(self.f["num_hidden_layers"]):
            if self.is_delta(layer):
                width = 3 * self.linear["num_heads"] * self.linear["head_dim"]
                seen = [*np.zeros((past, width)), *self.projected[layer]]
                found[f"layers.{layer}.window"] = np.stack(seen[-past:])
                found[f"layers.{layer}.delta"] = self.delta[layer].transpose(0, 2, 1)
            else:
                found[f"layers.{layer}.latent"] = np.stack(self.latents[layer])
                found[f"layers.{layer}.rope"] = np.stack(self.shared[layer])
        return {name: torch.from_numpy(value.copy()) for name, value in found.items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
