"""Block drafts, DFlash and DSpark, as float64 loops over their formulas: token by token, head by head.

No library has them as a model, so the oracle is this transcription. It knows checkpoints by the names of their tensors,
and nothing of how the package lays parameters out, keeps state or batches rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcmodels as fm
from funcmodels.drafts.block_config import DSPARK
from funcmodels.drafts.named import BlockParams, DFlashDraft, DSparkDraft, read_config, with_context
from params import from_checkpoint
from params.names.block_drafts import NAMES
from tests.oracle.qwen3_5 import Pair

VARIANTS = ("dflash", "plain", "vanilla", "gated", "rnn", "shifted", "gemma", "narrow")
"""DFlash; DSpark without a Markov head, with each kind, with rows that stand at their own places; with norms of 1 + w;
and with fewer tokens than the model."""


def config_of(one: Pair, variant: str, seed: int) -> dict[str, Any]:
    """Random fields of a config of this variant, for a model, no two sizes equal."""
    draw = random.Random(f"{variant} {seed}")
    kv_heads, shared = draw.choice([(1, 2), (2, 2), (2, 3), (1, 3)])
    layers = draw.choice([1, 2, 3])
    vocab = one.config.vocab_size
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if variant == "dflash" else draw.choice(DSPARK)],
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": one.config.hidden_size,
        "intermediate_size": draw.randint(9, 21), "num_hidden_layers": layers, "num_attention_heads": kv_heads * shared,
        "num_key_value_heads": kv_heads, "head_dim": draw.choice([4, 6, 10]), "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([1e4, 500.0])},
        "num_target_layers": one.config.num_hidden_layers,
    }  # fmt: skip
    own: dict[str, Any] = {
        "block_size": draw.randint(3, 7), "mask_token_id": draw.randrange(vocab),
        "target_layer_ids": sorted(draw.sample(range(one.config.num_hidden_layers), draw.randint(1, 2))),
    }  # fmt: skip
    if variant not in ("dflash", "plain"):
        kind = variant if variant in ("gated", "rnn") else "vanilla"
        own |= {"markov_rank": draw.randint(3, 8), "markov_head_type": kind}
    if variant in ("shifted", "plain"):
        own["sample_from_anchor"] = False
    if variant == "gemma":
        fields["use_gemma_norm"] = True
    if variant == "narrow":
        fields["draft_vocab_size"] = vocab - 7
    if draw.random() < 0.5:
        kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        fields |= {"layer_types": kinds, "sliding_window": draw.randint(2, 9)}
        fields |= {"is_causal": draw.choice([None, True, False])}
    section = draw.choice(["", "dflash_config", "dspark_config"])
    return fields | ({section: own} if section else own)


def random_tensors(fields: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights of a checkpoint with this config, by name, none of them trivial."""
    flat = flattened(fields)
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, d, rank = (
        flat["hidden_size"],
        flat["intermediate_size"],
        flat["head_dim"],
        flat.get("markov_rank", 0),
    )
    q, kv, vocab = flat["num_attention_heads"] * d, flat["num_key_value_heads"] * d, flat["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(flat["target_layer_ids"]) * hidden), "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(flat["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank)}
        shapes |= {"markov_head.markov_w2.weight": (flat.get("draft_vocab_size") or vocab, rank)}
        kind = flat["markov_head_type"]
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if kind == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * rank, hidden + 2 * rank)}
            shapes |= {"markov_head.joint_proj.bias": (3 * rank,)}
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        flat_norm = 0.0 if flat.get("use_gemma_norm") else 1.0
        found[name] = flat_norm + 0.3 * noise if "norm" in name else noise / shape[-1] ** 0.5
        if "markov_w" in name:
            found[name] = noise
    if flat.get("draft_vocab_size"):
        chosen = torch.randperm(vocab, generator=generator)[: flat["draft_vocab_size"]]
        found["d2t"] = chosen - torch.arange(len(chosen))
    return found


def flattened(fields: dict[str, Any]) -> dict[str, Any]:
    """All fields at the top."""
    return {**fields, **fields.get("dflash_config", {}), **fields.get("dspark_config", {})}


@dataclass(frozen=True)
class Drafter:
    """A model, a draft of the package for it, and the draft's config and weights as a checkpoint holds them."""

    one: Pair
    draft: Any
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def build(one: Pair, variant: str, seed: int) -> Drafter:
    """A random draft of a variant for a model."""
    fields = config_of(one, variant, seed)
    tensors = random_tensors(fields, seed)
    config = read_config(fields, one.config.num_hidden_layers)
    own = with_context(from_checkpoint(tensors, BlockParams.spec(config), NAMES))
    kind = DFlashDraft if variant == "dflash" else DSparkDraft
    return Drafter(one, kind(one.model, config, own), fields, tensors)


class Transcription:
    """One row: what the draft makes of the model's hidden states, and the logits it then gives."""

    def __init__(self, one: Drafter, embed: Tensor, head: Tensor) -> None:
        self.f = flattened(one.fields)
        self.w = {name: leaf.double().numpy() for name, leaf in one.tensors.items()}
        self.embed, self.head = embed.double().numpy(), head.double().numpy()
        self.keys: list[list[np.ndarray]] = [[] for _ in range(self.f["num_hidden_layers"])]
        self.values: list[list[np.ndarray]] = [[] for _ in self.keys]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        w = self.w[f"{name}.weight"] + (1 if self.f.get("use_gemma_norm") else 0)
        return x / np.sqrt((x * x).mean() + self.f["rms_norm_eps"]) * w

    def heads(self, x: np.ndarray, layer: int, kind: str, count: int) -> list[np.ndarray]:
        made = self.w[f"layers.{layer}.self_attn.{kind}_proj.weight"] @ x
        return [made[h * self.f["head_dim"] : (h + 1) * self.f["head_dim"]] for h in range(count)]

    def turned(self, x: np.ndarray, place: int) -> np.ndarray:
        half, out = len(x) // 2, x.copy()
        for i in range(half):
            angle = place * self.f["rope_parameters"]["rope_theta"] ** (-2 * i / len(x))
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def key_values(self, x: np.ndarray, layer: int, place: int) -> tuple[np.ndarray, np.ndarray]:
        count = self.f["num_key_value_heads"]
        name = f"layers.{layer}.self_attn.k_norm"
        keys = [self.turned(self.norm(k, name), place) for k in self.heads(x, layer, "k", count)]
        return np.stack(keys), np.stack(self.heads(x, layer, "v", count))

    def commit(self, hidden: Sequence[np.ndarray]) -> None:
        """A token more of context: `hidden` are the residual streams after the layers that the draft reads."""
        context = self.norm(self.w["fc.weight"] @ np.concatenate(hidden), "hidden_norm")
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            k, v = self.key_values(context, layer, len(keys))
            keys.append(k)
            values.append(v)

    def entries(self) -> dict[str, Tensor]:
        """The context as `fm.logical` names it."""
        found = {}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            found[f"layers.{layer}.k"] = torch.from_numpy(np.stack(keys))
            found[f"layers.{layer}.v"] = torch.from_numpy(np.stack(values))
        return found

    def sees(self, layer: int, query: int, key: int) -> bool:
        """Whether the token at one place may look at another."""
        sliding = self.f.get("layer_types", {layer: ""})[layer] == "sliding_attention"
        causal = sliding if self.f.get("is_causal") is None else self.f["is_causal"]
        if causal and key > query:
            return False
        return not sliding or abs(query - key) < self.f["sliding_window"]

    def block(self, root: int) -> list[np.ndarray]:
        """The hidden states of a block behind the context, after the last norm."""
        start, size = len(self.keys[0]), self.rows
        ids = [root] + [self.f["mask_token_id"]] * (size - 1)
        xs = [self.embed[token] for token in ids]
        for layer in range(len(self.keys)):
            name = f"layers.{layer}"
            normed = [self.norm(x, f"{name}.input_layernorm") for x in xs]
            own = [self.key_values(x, layer, start + i) for i, x in enumerate(normed)]
            keys = self.keys[layer] + [k for k, _ in own]
            values = self.values[layer] + [v for _, v in own]
            mixed = [self.attention(x, layer, start + i, keys, values) for i, x in enumerate(normed)]
            xs = [x + self.w[f"{name}.self_attn.o_proj.weight"] @ y for x, y in zip(xs, mixed, strict=True)]
            fed = [self.fed(self.norm(x, f"{name}.post_attention_layernorm"), layer) for x in xs]
            xs = [x + y for x, y in zip(xs, fed, strict=True)]
        return [self.norm(x, "norm") for x in xs]

    @property
    def rows(self) -> int:
        """Rows of a block."""
        dflash = self.f["architectures"] == ["DFlashDraftModel"]
        return self.f["block_size"] + (not dflash and not self.f.get("sample_from_anchor", True))

    def attention(
        self, x: np.ndarray, layer: int, place: int, keys: list[np.ndarray], values: list[np.ndarray]
    ) -> np.ndarray:
        heads, out = self.f["num_attention_heads"], []
        for h, q in enumerate(self.heads(x, layer, "q", heads)):
            q = self.turned(self.norm(q, f"layers.{layer}.self_attn.q_norm"), place)
            kv = h // (heads // self.f["num_key_value_heads"])
            seen = [j for j in range(len(keys)) if self.sees(layer, place, j)]
            scores = np.array([keys[j][kv] @ q for j in seen]) / np.sqrt(len(q))
            weights = np.exp(scores - scores.max())
            out.append(sum(w * values[j][kv] for w, j in zip(weights / weights.sum(), seen, strict=True)))
        return np.concatenate(out)

    def fed(self, x: np.ndarray, layer: int) -> np.ndarray:
        gate, up = (self.w[f"layers.{layer}.mlp.{part}_proj.weight"] @ x for part in ("gate", "up"))
        return self.w[f"layers.{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def drafts(self, root: int, drawn: Sequence[int] = ()) -> tuple[list[int], list[np.ndarray]]:
        """The greedy drafts after `root`, as the model's ids, and the logits of each over the model's tokens.

        Each is conditioned on the one before, or on those `drawn` instead.
        """
        rows = self.block(root)
        if self.f["architectures"] == ["DFlashDraftModel"] or not self.f.get("sample_from_anchor", True):
            rows = rows[1:]
        tokens, laws, before, memory = [], [], root, np.zeros(self.f.get("markov_rank", 0))
        for place, h in enumerate(rows):
            base = self.head @ h
            ids = np.arange(len(base))
            if "d2t" in self.w:
                ids = self.w["d2t"].astype(int) + np.arange(len(self.w["d2t"]))
            logits, memory = self.corrected(base[ids], h, before, memory)
            tokens.append(int(ids[logits.argmax()]))
            before = drawn[place] if drawn else tokens[-1]
            spread = np.full(len(base), -np.inf)
            spread[ids] = logits
            laws.append(spread)
        return tokens, laws

    def corrected(
        self, base: np.ndarray, h: np.ndarray, before: int, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits with what the Markov head adds, and its memory."""
        if "markov_head.markov_w1.weight" not in self.w:
            return base, memory
        found = self.w["markov_head.markov_w1.weight"][before]
        if self.f["markov_head_type"] == "gated":
            mixed = self.w["markov_head.gate_proj.weight"] @ np.concatenate((h, found))
            found = sigmoid(mixed + self.w["markov_head.gate_proj.bias"]) * found
        if self.f["markov_head_type"] == "rnn":
            mixed = self.w["markov_head.joint_proj.weight"] @ np.concatenate((memory, found, h))
            gate, candidate, out = np.split(mixed + self.w["markov_head.joint_proj.bias"], 3)
            memory = sigmoid(gate) * memory + (1 - sigmoid(gate)) * np.tanh(candidate)
            found = np.tanh(out)
        return base + self.w["markov_head.markov_w2.weight"] @ found, memory


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def begun(one: Drafter, prompts: Sequence[Sequence[int]], root: int = 1, **kwargs: Any) -> tuple[Any, ...]:
    """State, the draft's state and carry of rows whose prompts are in, each followed by `root`; and the output."""
    kwargs = {"page_size": 4} | kwargs
    state = one.one.model.init_state(len(prompts), 60, **kwargs)
    dstate = one.draft.init_state(state)
    batch = fm.Batch.from_lists(prompts, state)
    out, state = one.one.model.forward(one.one.params, state, batch, outputs=one.draft.outputs)
    following = fm.next_tokens(batch, torch.full((len(prompts),), root))
    return state, *one.draft.extend(one.one.params, dstate, out, batch, following), out
