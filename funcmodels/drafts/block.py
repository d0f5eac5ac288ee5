"""Drafting a block at a time: what DFlash and DSpark share.

A small model of Qwen3's layers reads two things. The *context* are all tokens that the model has run: their keys and
values are made from the model's own residual streams after a few of its layers, so that the draft runs no layer of its
own over them. The *block* is each row's newest token and masks behind it; one pass over it, in which all of its tokens
may see each other, proposes a token for each place. What the block writes lies past the row's length and is
overwritten by context.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from lowering import captured_with, ops
from params.modes import lasting
from params.spec import leaf
from params.tree import exactly, put, tree

from ..attention.gqa import Attention, KeyValuePages, key_value_layers
from ..blocks.linear import (
    GemmaNorm,
    Linear,
    Norm,
    add_normalised,
    head_weight,
    look_up,
    normalised,
    project,
)
from ..blocks.mlp import Mlp, mlp
from ..model import Model, at_least_one
from ..output import Output
from ..sampling.draws import DraftNoise
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import State, check_usable, commit, like, rewound
from ..state.step import Step, begin, finish, text_positions, writable
from .block_config import BlockConfig
from .checks import check_carry, check_embedded, check_empty, check_noise, check_output
from .markov import Markov
from .protocol import Carry, Draft, DraftedParams, Proposal, extend_inputs, kept_tokens, propose_inputs

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of each token's place."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, queries, keys and values of a block's tokens, to what they attend to."""


@tree
class Layer:
    """One layer, as Qwen3 has it: attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: Attention
    post_norm: Norm
    mlp: Mlp

    @staticmethod
    def spec(config: BlockConfig, norm: type[Norm]) -> Layer:
        """Spec of the parameters, with norms of this kind."""
        hidden, heads = config.hidden_size, (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attn = Attention.spec(hidden, *heads, norm=norm)
        return Layer(norm.spec(hidden), attn, norm.spec(hidden), Mlp.spec(hidden, config.intermediate_size))


@tree
class BlockParams:
    """All parameters. `markov` is None where rows are independent, `ids` where the draft has all of the model's tokens.

    `ids` are what to add to the draft's number of a token for the model's. `context` repeats rows of the layers'
    projections, of each layer those of keys, then those of values, as one product reads them; None makes it anew in
    every call, which is for training.
    """

    fc: Linear
    hidden_norm: Norm
    layers: tuple[Layer, ...]
    norm: Norm
    markov: Markov | None
    ids: Int[Tensor, " draft_vocab"] | None
    context: Linear | None

    @staticmethod
    def spec(config: BlockConfig) -> BlockParams:
        """The parameter tree of a checkpoint with a `TensorSpec` at each leaf."""
        hidden, vocab = config.hidden_size, config.draft_vocab_size
        norm = GemmaNorm if config.use_gemma_norm else Norm
        return BlockParams(
            fc=Linear.spec(len(config.target_layer_ids) * hidden, hidden),
            hidden_norm=norm.spec(hidden),
            layers=tuple(Layer.spec(config, norm) for _ in range(config.num_hidden_layers)),
            norm=norm.spec(hidden),
            markov=Markov.spec(config),
            ids=leaf((vocab,), "zeros", torch.int64) if vocab else None,
            context=None,
        )


def with_context(params: BlockParams) -> BlockParams:
    """The parameters with `context`, to draft with."""
    layers: list[Any] = [layer.attn for layer in params.layers]  # plain weights: a draft is loaded unquantised
    weights: list[Any] = [exactly(attn.qkv, Linear).weight for attn in layers]
    rows = [weight[attn.out.weight.shape[1] :] for weight, attn in zip(weights, layers, strict=True)]
    return put(params, "context", Linear(torch.cat(rows)))


def context_entries(
    config: BlockConfig, params: BlockParams, features: Float[Tensor, "tokens inputs"], angles: Angles
) -> tuple[Float[Tensor, "tokens layers kv_heads head_dim"], Float[Tensor, "tokens layers kv_heads head_dim"]]:
    """Keys and values of all layers, from residual streams of the model laid end to end: one product, one turn."""
    kv, eps = params.context or with_context(params).context, config.rms_norm_eps
    assert kv is not None
    context = normalised(params.hidden_norm, project(params.fc, features), eps=eps)
    sizes = {"layers": config.num_hidden_layers, "dim": config.head_dim, "two": 2}
    both = project(exactly(kv, Linear), context)
    k, v = rearrange(both, "tokens (layers two heads dim) -> two tokens layers heads dim", **sizes)
    norms = [layer.attn.k_norm for layer in params.layers]
    k = torch.cat([normalised(norm, k[:, layer], eps=eps) for layer, norm in enumerate(norms)], 1)
    # All layers turn by the same angles, so their heads are heads of one call; it wants queries too, and gets one.
    k, _ = ops.rotary(k, k[:, :1], *angles)
    return k.unflatten(1, (config.num_hidden_layers, -1)), v


def block_hidden(
    config: BlockConfig, params: BlockParams, x: Float[Tensor, "tokens hidden"], angles: Angles, attend: Attend
) -> Float[Tensor, "tokens hidden"]:
    """Embedded tokens of blocks through all layers and the final norm; `attend` is told of each layer's heads."""
    eps, sizes = config.rms_norm_eps, {"dim": config.head_dim}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    normed = normalised(params.layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in params.layers[1:]] + [params.norm]
    for index, (layer, next_norm) in enumerate(zip(params.layers, next_norms, strict=True)):
        mixed = project(exactly(layer.attn.qkv, Linear), normed)  # `context` has rows of its weight, and no bias
        mixed = rearrange(mixed, "tokens (heads dim) -> tokens heads dim", **sizes)
        q, k, v = mixed.split_with_sizes((heads, kv_heads, kv_heads), 1)
        q, k = normalised(layer.attn.q_norm, q, eps=eps), normalised(layer.attn.k_norm, k, eps=eps)
        q, k = ops.rotary(q, k, *angles)
        y = attend(index, q, k, v)
        normed, x = add_normalised(layer.post_norm, project(layer.attn.out, y.flatten(1)), x, eps=eps)
        normed, x = add_normalised(next_norm, mlp(layer.mlp, normed), x, eps=eps)
    return normed


def angles_at(config: BlockConfig, positions: Int[Tensor, " tokens"]) -> Angles:
    """What queries and keys at these places turn by."""
    return ops.rotary_angles(positions, rotary_dim=config.head_dim, theta=config.rope_theta)


@dataclass(frozen=True, eq=False)
class BlockDraft(Draft):
    """A draft for `model` with parameters of its own; embedding and output projection are the model's.

    `propose` and `extend` take the model's parameters. Captured functions are handed `joined(params)` in their place.
    """

    model: Model
    config: BlockConfig
    params: BlockParams

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The values of the model's forward that `extend` needs: give them as its `outputs`."""
        return tuple(dict.fromkeys(f"layers.{layer}" for layer in self.config.target_layer_ids))

    @property
    def most_steps(self) -> int:
        """How many tokens one block proposes."""
        return self.config.drafts

    def joined(self, params: Any) -> DraftedParams:
        """The model's parameters and the draft's as one value, which every function of the draft takes as `params`."""
        return params if isinstance(params, DraftedParams) else DraftedParams(params, self.params)

    @abc.abstractmethod
    def step_logits(
        self,
        own: BlockParams,
        base: Float[Tensor, "rows vocab"],
        hidden: Float[Tensor, "rows hidden"],
        before: Int[Tensor, " rows"],
        memory: Any,
    ) -> tuple[Float[Tensor, "rows vocab"], Any]:
        """Logits of one place of a block, given those of its row and the token before it; and what is remembered."""

    def likeliest(
        self,
        own: BlockParams,
        read: Float[Tensor, "rows drafts inputs"],
        hidden: Float[Tensor, "rows drafts hidden"],
        root: Int[Tensor, " rows"],
        head: Any,
        ids: Int[Tensor, " draft_vocab"] | None,
    ) -> Int[Tensor, "rows drafts"]:
        """The greedy tokens of a block whose places are independent of each other: all at once.

        `read` is `hidden` in the dtype of `head`, `ids` are the tokens to choose among, None for all.
        """
        return self.model.agreed(ops.greedy_token(read, head, ids))

    @lasting
    def init_state(self, state: State) -> State:
        """An empty state of the draft for the rows of `state`, which must be empty too, with room for a block more."""
        check_empty(state)
        return like(state, self._entries, room=self.config.block)

    @lasting
    def own_state(
        self,
        rows: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int = 128,
    ) -> State:
        """An empty state of the draft for rows of a model that is not run here; arguments as for `Model.init_state`."""
        at_least_one("own_state: max_len", max_len)
        return self.model.empty_state(self._entries, rows, max_len + self.config.block, dtype, None, device, page_size)

    def _entries(self, space: Space) -> tuple[KeyValuePages, ...]:
        return key_value_layers(space, self.config, self.config.num_hidden_layers)

    @captured_with(extend_inputs)
    @lasting
    def extend(
        self,
        params: Any,
        state: State,
        out: Output,
        batch: Batch,
        next_tokens: Int[Tensor, "*lead"],
        carry: Carry | None = None,
    ) -> tuple[State, Carry]:
        """Take in what the model has just run, as `MtpDraft.extend`; `out` was asked for `outputs`.

        Of each row the places before the first -1 of `next_tokens` count, and become context.
        """
        check_output(out, batch)
        if carry is not None:
            check_carry(state, carry)
        own = self.joined(params).draft
        following, kept = kept_tokens(batch, next_tokens)
        features = self._features(out, own)
        step = begin(state, batch, keep_steps=True, axes=(1,), kinds=(KeyValuePages,) * len(own.layers))
        k, v = context_entries(self.config, own, features, angles_at(self.config, text_positions(batch, step)))
        entries = [_written(step, layer, k[:, layer], v[:, layer]) for layer in range(len(own.layers))]
        after = finish(step, entries)
        assert after is not None
        kept = kept.to(following.device)
        last = (batch.query_start[:-1] + kept - 1).clamp(min=0).long()
        new = Carry(following[last], out.hidden[last])
        return commit(after, kept), new if carry is None else new.where(kept > 0, carry)

    def _features(self, out: Output, own: BlockParams) -> Float[Tensor, "tokens inputs"]:
        """The model's values that the draft reads, laid end to end, in the draft's dtype."""
        missing = [name for name in self.outputs if name not in out.extra]
        if missing:
            raise ValueError(f"extend: the output has no {', '.join(missing)}; run forward(..., outputs=draft.outputs)")
        found = torch.cat([out.extra[f"layers.{layer}"] for layer in self.config.target_layer_ids], -1)
        wanted = own.fc.weight.shape[1]
        if found.shape[1] != wanted:
            raise ValueError(
                f"extend: {', '.join(self.outputs)} of this model are {found.shape[1]} wide together, the draft reads "
                f"{wanted}; it is for models with one residual stream of {self.config.hidden_size}"
            )
        return found.to(own.hidden_norm.weight.dtype)

    def embed(self, params: Any, root: Int[Tensor, " rows"]) -> Float[Tensor, "rows block hidden"]:
        """What `propose` starts from: the newest token of each row and masks behind it, from the model's table."""
        both = self.joined(params)
        return look_up(both.model.embed, self._tokens(root)).to(both.draft.norm.weight.dtype)

    def _tokens(self, root: Int[Tensor, " rows"]) -> Int[Tensor, "rows block"]:
        masks = root.new_full((root.shape[0], self.config.block - 1), self.config.mask_token_id)
        return torch.cat((root[:, None], masks), 1)

    @captured_with(propose_inputs)
    @lasting
    @torch.no_grad()
    def propose(
        self,
        params: Any,
        state: State,
        carry: Carry,
        steps: int = 3,
        noise: DraftNoise | None = None,
        embedded: Float[Tensor, "rows block hidden"] | None = None,
    ) -> tuple[Proposal, State]:
        """The first `steps` tokens of a block after each row's newest; as `MtpDraft.propose`, in one pass.

        `embedded` is what `embed` gives, or stands in for it; without it the lookup is part of this. Captured, the two
        are programs of their own. Raises `ValueError` for more steps than a block has and another shape of `embedded`.
        """
        at_least_one("propose: steps", steps)
        if steps > self.most_steps:
            raise ValueError(f"propose: {steps} steps, and a block of this draft has {self.most_steps}; give fewer")
        check_usable(state)
        check_carry(state, carry)
        check_noise(state, noise)
        both = self.joined(params)
        hidden, after = self.hidden(both, state, carry, embedded)
        first = 0 if self.config.from_anchor else 1
        hidden = hidden[:, first : first + steps]
        tokens, laws = self._chosen(both, hidden, carry.token, state.lengths, noise)
        return Proposal(carry.token, tokens, state.lengths, laws), rewound(after, state)

    def hidden(
        self, params: Any, state: State, carry: Carry, embedded: Float[Tensor, "rows block hidden"] | None = None
    ) -> tuple[Float[Tensor, "rows block hidden"], State]:
        """The draft's hidden states of a block a row, behind its final norm, and the state with the block in it.

        Go on from `state`, whose length does not count the block's tokens. `embedded` is that of `propose`.
        """
        both = self.joined(params)
        own, x = both.draft, self.embed(both, carry.token) if embedded is None else embedded
        check_embedded(x, (state.rows, self.config.block, self.config.hidden_size), own.norm.weight.dtype)
        batch = Batch.from_tokens(self._tokens(carry.token).flatten(), [self.config.block] * state.rows, state)
        step = begin(state, batch, kinds=(KeyValuePages,) * len(own.layers))
        entries: list[KeyValuePages | None] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = _written(step, layer, k, v)
            entries.append(pages)
            return self._attend(layer, q, pages, step)

        hidden = block_hidden(self.config, own, x.flatten(0, 1), angles_at(self.config, step.positions), attend)
        after = finish(step, entries)
        assert after is not None
        return hidden.unflatten(0, (state.rows, -1)), after

    def _attend(self, layer: int, q: Tensor, pages: KeyValuePages, step: Step) -> Tensor:
        op = ops.paged_attention if self.config.causal(layer) else ops.block_attention
        scale, window = self.config.head_dim**-0.5, self.config.window(layer)
        return op(q, pages.k, pages.v, step.rows, scale=scale, window=window)

    def _chosen(
        self,
        both: DraftedParams,
        hidden: Float[Tensor, "rows drafts hidden"],
        root: Int[Tensor, " rows"],
        lengths: Int[Tensor, " rows"],
        noise: DraftNoise | None,
    ) -> tuple[Int[Tensor, "rows drafts"], Float[Tensor, "rows drafts vocab"] | None]:
        """The tokens of a block, and the laws that drawn ones came from, one after the other."""
        target, own = both.model, both.draft
        read, head = hidden.to(target.embed.weight.dtype), head_weight(target.embed, target.head)
        ids = None if own.ids is None else own.ids + torch.arange(own.ids.shape[0], device=own.ids.device)
        if noise is None:
            return self.likeliest(own, read, hidden, root, head, ids), None
        base = ops.linear(read.flatten(0, 1), head).unflatten(0, hidden.shape[:2])
        vocab = base.shape[2]
        base = base if ids is None else base[..., ids]
        tokens, laws, memory = [root], [], None
        for step in range(hidden.shape[1]):
            logits, memory = self.step_logits(own, base[:, step], hidden[:, step], tokens[-1], memory)
            token, law = noise.draw(_spread(logits, ids, vocab), lengths + 1 + step)
            tokens.append(self.model.agreed(token))
            laws += [] if law is None else [law]
        return torch.stack(tokens[1:], 1), torch.stack(laws, 1) if laws else None


def _spread(
    logits: Float[Tensor, "rows draft_vocab"], ids: Int[Tensor, " draft_vocab"] | None, vocab: int
) -> Float[Tensor, "rows vocab"]:
    """Logits of the draft's tokens among those of the model's, which it cannot propose where they are -inf."""
    if ids is None:
        return logits
    return logits.new_full((logits.shape[0], vocab), -torch.inf).index_copy(1, ids, logits)


def _written(step: Step, layer: int, k: Tensor, v: Tensor) -> KeyValuePages:
    """The pages of a layer with keys and values of the step's tokens in them."""
    past = step.past(layer, KeyValuePages)
    assert past is not None
    past = writable(past, k, v)
    return KeyValuePages(*ops.write_pages(past.k, past.v, k, v, step.slots))
