"""One sparse attention layer at published widths: ours, ours dense, and transformers', on the same weights and tokens.

    python -m tests.bench.bench_qsa [--quick] [--ops] [--threads N] [--dtype f32] [--lengths 1024 4096] [--theirs 4096]

Prints the memory that the longest prompt took at its peak, and decoding after it, sparse and dense; then a line for
each prompt length: seconds of the whole layer (hyper-connections, attention, 16 experts of which each token takes 10)
through our sparse attention, through ours with a budget that no row exceeds, and through transformers', up to
`--theirs` tokens, whose loop over queries takes long; beside them the projections and experts alone, which all three
share. Then, of the ops alone: selection, attention to what it selects of random keys, which neighbours hardly share,
attention to blocks that drift from token to token, and dense attention.
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
import lowering
import params as checkpoints
from lowering import ops
from lowering.host import HostLengths
from tests.bench.timing import best

logging.set_verbosity_error()

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PAGE, RATIO = 128, 4
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


@dataclass
class Ops:
    """The ops of one layer over one row of random keys and index keys, at published widths."""

    dtype: torch.dtype
    tokens: int
    blocks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        pages, generator = self.tokens // PAGE + 1, torch.Generator().manual_seed(self.tokens)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.pools = drawn(pages, PAGE, 2, 256), drawn(pages, PAGE, 2, 256)
        self.index = (
            torch.zeros(pages, PAGE, 128, dtype=self.dtype),
            torch.zeros(pages, PAGE // RATIO, 128).to(self.dtype),
        )
        self.q, self.index_q = drawn(self.tokens, 24, 256), drawn(self.tokens, 4, 128)
        self.raw, self.norm = drawn(self.tokens, 128), drawn(128)
        start, table = (
            torch.tensor([0, self.tokens], dtype=torch.int32),
            torch.arange(1, pages, dtype=torch.int32)[None],
        )
        host = HostLengths((self.tokens,), (self.tokens,), tuple(map(tuple, table.tolist())), True)
        self.rows = lowering.Rows(start, start[1:], table, max_query=self.tokens, uniform=True, host=host)
        self.select()

    def select(self) -> None:
        """From index heads to blocks."""
        slots = torch.arange(self.tokens) + PAGE
        ops.index_keys(*self.index, self.raw, self.norm, slots, self.rows, eps=1e-6, rotary_dim=64, theta=1e7)
        self.blocks = ops.index_scores_topk(self.index_q, self.index[1], self.rows, ratio=RATIO, top_k=512)

    def sparse(self) -> Tensor:
        """Attention to the tokens of the blocks selected."""
        places = ops.expand_blocks(self.blocks, self.rows, ratio=RATIO)
        return ops.sparse_attention(self.q, *self.pools, places, self.rows, scale=1 / 16)

    def dense(self) -> Tensor:
        """Attention to all."""
        return ops.paged_attention(self.q, *self.pools, self.rows, scale=1 / 16)

    def drift(self) -> None:
        """Other blocks: at the end of the row each token has all but ten of those of the token before it."""
        count = self.tokens // RATIO
        ranks, numbers = torch.rand(count, generator=torch.Generator().manual_seed(1)), torch.arange(count)
        for at in torch.arange(self.tokens).split(256):
            ahead = (ranks - at[:, None] * (10 / count)) % 1
            ahead.masked_fill_(numbers >= (at[:, None] + 1) // RATIO, torch.inf)
            nearest = ahead.topk(min(512, count), largest=False)
            self.blocks[at, : nearest.indices.shape[1]] = torch.where(nearest.values < 1, nearest.indices, -1).int()


def measured(dtype: torch.dtype, tokens: int) -> tuple[float, float, float, float]:
    """Seconds of selection, attention to what it selects of random keys, attention to blocks that drift, and dense."""
    one = Ops(dtype, tokens)
    select, sparse, dense = best(1, one.select, one.sparse, one.dense)
    one.drift()
    return select, sparse, best(1, one.sparse)[0], dense


def indexer(layer: Layer, tokens: int) -> float:
    """Seconds of transformers' indexer."""
    x = torch.randn(1, tokens, 2560).to(layer.dtype)
    angles = layer.theirs.model.rotary_emb(x, torch.arange(tokens).expand(3, 1, -1))
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return best(1, lambda: layer.theirs.model.layers[0].self_attn.indexer(x, angles, mask, None))[0]


def decode(layer: Layer, state: fm.State, rounds: int) -> list[float]:
    """Seconds of one token, sparse and dense. Each run starts from the same state, whose tail it overwrites."""
    return best(rounds, *(lambda model=model: layer.ours(model, state, [7]) for model in (layer.sparse, layer.dense)))


def peak() -> float:
    """GiB that the process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def whole(asked: argparse.Namespace) -> None:
    """Print what a layer takes."""
    layer = Layer(DTYPES[asked.dtype])
    before, longest = peak(), max(asked.lengths)
    # First of all, since what a process held at most never falls again.
    state = layer.ours(layer.sparse, layer.empty(longest), layer.prompt(longest))
    print(f"prefill of {longest}: peak memory {peak():.2f} GiB, of which weights and imports {before:.2f} GiB")
    sparse, dense = decode(layer, state, 5)
    print(f"decode after {longest}: sparse {1e3 * sparse:.2f} ms, dense {1e3 * dense:.2f} ms ({dense / sparse:.2f}x)")
    times: dict[int, float] = {}
    for tokens in asked.lengths:
        sparse, dense, *theirs = prefill(layer, tokens, asked.theirs, asked.rounds)
        times[tokens] = sparse
        against = f", transformers {theirs[0]:.2f} ({theirs[0] / sparse:.2f}x)" if theirs else ""
        print(
            f"prefill {tokens:6d}: sparse {sparse:.2f}, dense {dense:.2f} ({dense / sparse:.2f}x){against}; "
            f"projections and experts alone {shared(layer, tokens):.2f}{growth(times, tokens)}"
        )
        if tokens <= asked.theirs:
            print(f"transformers' indexer {tokens:6d}: {indexer(layer, tokens):.2f}")


def alone(asked: argparse.Namespace) -> None:
    """Print what the ops take."""
    times: dict[int, float] = {}
    for tokens in asked.lengths:
        select, sparse, drifting, dense = measured(DTYPES[asked.dtype], tokens)
        times[tokens] = select + sparse
        print(
            f"ops {tokens:6d}: selection {select:.2f}, attention {sparse:.2f}, to blocks that drift {drifting:.2f}, "
            f"dense {dense:.2f} ({dense / (select + sparse):.2f}x){growth(times, tokens)}"
        )


def growth(times: dict[int, float], tokens: int) -> str:
    """Against half as many tokens, where these were measured."""
    return f"; {times[tokens] / times[tokens // 2]:.2f}x of {tokens // 2}" if tokens // 2 in times else ""


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens only")
    parser.add_argument("--ops", action="store_true", help="the ops only, without the layer around them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--theirs", type=int, default=4096, help="longest prompt for transformers")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    asked.lengths = asked.lengths[:1] if asked.quick else asked.lengths
    print(f"one layer, {asked.dtype}, {asked.threads} thread(s), seconds")
    if not asked.ops:
        whole(asked)
    alone(asked)


if __name__ == "__main__":
    main()
