"""One sparse attention layer at published widths: ours, ours dense, and transformers', on the same weights and tokens.

    python -m tests.bench.bench_qsa [--quick] [--threads N] [--dtype f32] [--lengths 1024 4096] [--theirs 4096]

Prints a line a prompt length: seconds of the whole layer (hyper-connections, attention, 16 experts of which each token
takes 10) through our sparse attention, through ours with a budget that no row exceeds, and through transformers', up to
`--theirs` tokens, whose loop over queries takes long; beside them the projections and experts alone, which all three
share. Then the selection alone against transformers' indexer, decoding after the longest prompt, sparse and dense, and
the memory that the longest prompt took at its peak.
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.utils import logging

import funcmodels as fm
import params as checkpoints
from lowering import ops
from tests.bench.timing import best

logging.set_verbosity_error()

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PAGE = 128
LENGTHS = (1024, 4096, 8192, 16384)


def config() -> Qwen4ExpTextConfig:
    """One attention layer of the published model, with few experts and a small vocabulary."""
    return Qwen4ExpTextConfig(
        vocab_size=4096, hidden_size=2560, num_hidden_layers=1, layer_types=["indexed_attention"],
        num_attention_heads=24, num_key_value_heads=2, head_dim=256, num_experts=16, num_experts_per_tok=10,
        moe_intermediate_size=640, shared_expert_intermediate_size=640, hc_count=4, hc_lowrank=320, ple_layer_ids=[],
        ple_embed_dim=2560, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048,
        indexer_compress_ratio=4, max_position_embeddings=32768, rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    )  # fmt: skip


@dataclass
class Layer:
    """Both models on the same weights, ours also with a budget that selects everything."""

    dtype: torch.dtype
    theirs: Any = field(init=False)
    sparse: fm.Model = field(init=False)
    dense: fm.Model = field(init=False)
    params: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        theirs: Any = Qwen4ExpForCausalLM(config())
        self.theirs = theirs.to(self.dtype).eval()
        fields = self.theirs.config.to_dict()
        self.sparse, self.dense = fm.build(fields), fm.build(fields | {"indexer_budget": 2**20})
        self.params = checkpoints.from_checkpoint(
            dict(self.theirs.state_dict()), self.sparse.param_spec(), self.sparse.family.names
        )

    def prompt(self, tokens: int) -> list[int]:
        """Random ids."""
        return torch.randint(10, 4000, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()

    def empty(self, tokens: int) -> fm.State:
        """A state with room for the prompt and one page more."""
        return self.sparse.init_state(1, tokens + PAGE, self.dtype, page_size=PAGE)

    def ours(self, model: fm.Model, state: fm.State, ids: list[int]) -> fm.State:
        """The state after a prompt, of which the last logits are made."""
        return model.forward(self.params, state, fm.Batch.from_lists([ids], state), logits="last")[1]


def prefill(layer: Layer, tokens: int, most: int, rounds: int) -> list[float]:
    """Seconds of sparse, dense and, up to `most` tokens, transformers' layer."""
    ids = layer.prompt(tokens)
    batch = torch.tensor([ids])
    state = layer.empty(tokens)
    sides = [lambda: layer.ours(layer.sparse, state, ids), lambda: layer.ours(layer.dense, state, ids)]
    if tokens <= most:
        sides.append(lambda: layer.theirs(batch, logits_to_keep=1, use_cache=False))
    return best(rounds, *sides)


def shared(layer: Layer, tokens: int) -> float:
    """Seconds of the projections and experts alone: products of the same shapes."""
    attention = layer.params.layers[0].attn
    x, y = (torch.randn(tokens, w.weight.shape[1]).to(layer.dtype) for w in (attention.qkv, attention.out))
    mlp = layer.theirs.model.layers[0].mlp
    sides = (lambda: ops.linear(x, attention.qkv.weight), lambda: ops.linear(y, attention.out.weight))
    return sum(best(1, *sides, lambda: mlp(x[None])))


def selection(layer: Layer, tokens: int) -> list[float]:
    """Seconds from index heads to selected tokens, ours and transformers' indexer whole."""
    dtype, dim, ratio = layer.dtype, 128, 4
    start = torch.tensor([0, tokens], dtype=torch.int32)
    pages = tokens // PAGE + 1
    table, lengths = torch.arange(1, pages, dtype=torch.int32)[None], start[1:]
    raw_pages, index_pages = (torch.zeros(pages, size, dim, dtype=dtype) for size in (PAGE, PAGE // ratio))
    q, raw, norm = (torch.randn(*shape).to(dtype) for shape in ((tokens, 4, dim), (tokens, dim), (dim,)))
    slots = torch.arange(tokens) + PAGE

    def ours() -> Tensor:
        where = (table, lengths, start)
        ops.index_keys(raw_pages, index_pages, raw, norm, slots, *where, eps=1e-6, rotary_dim=64, theta=1e7)
        found = ops.index_scores_topk(q, index_pages, *where, max_query=tokens, uniform=True, ratio=ratio, top_k=512)
        return ops.expand_blocks(found, *where[1:], ratio=ratio)

    indexer = layer.theirs.model.layers[0].self_attn.indexer
    x = torch.randn(1, tokens, 2560).to(dtype)
    angles = layer.theirs.model.rotary_emb(x, torch.arange(tokens).expand(3, 1, -1))
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return best(1, ours, lambda: indexer(x, angles, mask, None))


def decode(layer: Layer, state: fm.State, rounds: int) -> list[float]:
    """Seconds of one token, sparse and dense. Each run starts from the same state, whose tail it overwrites."""
    return best(rounds, *(lambda model=model: layer.ours(model, state, [7]) for model in (layer.sparse, layer.dense)))


def peak() -> float:
    """GiB that the process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@torch.no_grad()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--theirs", type=int, default=4096, help="longest prompt for transformers")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    layer = Layer(DTYPES[asked.dtype])
    lengths = asked.lengths[:1] if asked.quick else asked.lengths
    print(f"one layer, {asked.dtype}, {asked.threads} thread(s), seconds")
    before, longest = peak(), max(lengths)
    # First of all, since what a process held at most never falls again.
    state = layer.ours(layer.sparse, layer.empty(longest), layer.prompt(longest))
    print(f"prefill of {longest}: peak memory {peak():.2f} GiB, of which weights and imports {before:.2f} GiB")
    sparse, dense = decode(layer, state, 5)
    print(f"decode after {longest}: sparse {1e3 * sparse:.2f} ms, dense {1e3 * dense:.2f} ms ({dense / sparse:.2f}x)")
    times: dict[int, float] = {}
    for tokens in lengths:
        sparse, dense, *theirs = prefill(layer, tokens, asked.theirs, asked.rounds)
        times[tokens] = sparse
        against = f", transformers {theirs[0]:.2f} ({theirs[0] / sparse:.2f}x)" if theirs else ""
        print(
            f"prefill {tokens:6d}: sparse {sparse:.2f}, dense {dense:.2f} ({dense / sparse:.2f}x){against}; "
            f"projections and experts alone {shared(layer, tokens):.2f}"
        )
        if tokens <= asked.theirs:
            ours, indexer = selection(layer, tokens)
            print(f"selection {tokens:4d}: {ours:.3f}, transformers {indexer:.3f} ({indexer / ours:.1f}x)")
        if tokens // 2 in times:
            print(f"from {tokens // 2} to {tokens} tokens: {times[tokens] / times[tokens // 2]:.2f}x")


if __name__ == "__main__":
    main()
