"""The gated delta rule over value-major states [v_dim k_dim], a few tokens a request or many.

Float32 inside a call; states are rounded where they are stored. Value head h reads key head h // (v_heads / k_heads).
Lengths are device tensors, one length a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import need, need_dtype, need_rank, need_shape, need_values, shown
from .registration import operator

RECURRENT_TOKENS = 8
"""Most tokens a request brings to the recurrent operator."""

CHUNK_WIDTH = 128
"""The width of keys and values that the chunked operator takes at most."""


def _need_given(**arguments: object) -> None:
    missing = [name for name, value in arguments.items() if value is None]
    need(not missing, f"{', '.join(missing)}: left out, which the schema allows and the operator does not")


def _need_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    beta: Tensor,
    g: Tensor | None,
    states: tuple[torch.dtype, ...],
) -> None:
    """Shapes and dtypes that both operators share. How many states there are is left to each."""
    need_dtype((torch.bfloat16,), query=query, key=key, value=value, beta=beta)
    need_dtype(states, state=state)
    need_dtype((torch.float32,), g=g)
    need_rank(3, 3, query=query, key=key, value=value)
    need_rank(4, 4, state=state)
    need_shape(query.shape, "tokens, key heads, k_dim, as query has", key=key)
    tokens, v_heads, v_dim = value.shape
    need(query.shape[0] == tokens, f"query is {shown(query)} and value {shown(value)}; their tokens differ")
    need(v_heads % query.shape[1] == 0, f"value has {v_heads} heads and key {query.shape[1]}; expected a multiple")
    need_shape((state.shape[0], v_heads, v_dim, query.shape[2]), "states, v_heads, v_dim, k_dim", state=state)
    need_shape((tokens, v_heads), "tokens, v_heads", beta=beta, g=g)


def _need_at_most(limit: int, query: Tensor, value: Tensor, axis: int, what: str) -> None:
    for name, x in (("key", query), ("value", value)):
        need(x.shape[axis] <= limit, f"{what} of {name}: {x.shape[axis]}; expected at most {limit}")


def _need_lengths(lengths: Tensor, tokens: int, longest: int) -> None:
    need_values(1, longest, "tokens of a request; not a running sum", actual_seq_lengths=lengths)
    total = int(lengths.sum())
    need(total == tokens, f"actual_seq_lengths add up to {total} for {tokens} tokens; it holds one length a request")


def _recurrent_like(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, beta: Any, scale: Any, actual_seq_lengths: Any,
    ssm_state_indices: Any, num_accepted_tokens: Tensor | None, g: Tensor | None, gk: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _need_given(beta=beta, scale=scale, actual_seq_lengths=actual_seq_lengths, ssm_state_indices=ssm_state_indices)
    need(g is None or gk is None, "g and gk are given; the reference covers one of them")
    _need_tokens(query, key, value, state, beta, g, (torch.bfloat16, torch.float32))
    need_dtype((torch.float32,), gk=gk)
    need_shape((*value.shape[:2], key.shape[2]), "tokens, v_heads, k_dim", gk=gk)
    _need_at_most(256, query, value, 1, "heads")
    _need_at_most(512, query, value, 2, "width")
    lists = {"actual_seq_lengths": actual_seq_lengths, "num_accepted_tokens": num_accepted_tokens}
    need_dtype((torch.int32,), ssm_state_indices=ssm_state_indices, **lists)
    need_rank(1, 1, **lists)
    need_shape((query.shape[0],), "one slot a token", ssm_state_indices=ssm_state_indices)
    need_shape(actual_seq_lengths.shape, "one count a request", num_accepted_tokens=num_accepted_tokens)
    need(value.numel() > 0, f"value is {shown(value)}; the operator does not take empty tensors")
    return torch.empty_like(value), torch.empty_like(state)


@operator("npu_recurrent_gated_delta_rule_functional", shapes=_recurrent_like)
def npu_recurrent_gated_delta_rule_functional(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, beta: Tensor, scale: float, actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor, num_accepted_tokens: Tensor | None, g: Tensor | None, gk: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of all tokens, and a copy of the states with the one after token t at `ssm_state_indices[t]`.

    A request starts from the slot of its first token, or of the last one accepted before (`num_accepted_tokens`).
    Where its tokens name one slot, the state after the last of them stays.
    """
    _need_lengths(actual_seq_lengths, len(value), RECURRENT_TOKENS)
    need_values(
        0, len(state) - 1, "slots of states; negative ones are not skipped", ssm_state_indices=ssm_state_indices
    )
    requests = list(ssm_state_indices.split(actual_seq_lengths.tolist()))
    _need_own_slots(requests)
    accepted = [1] * len(requests) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    after, out, token = state.clone(), [], 0
    for slots, taken in zip(requests, accepted, strict=True):
        need(1 <= taken <= len(slots), f"num_accepted_tokens has {taken}; expected 1 to the request's {len(slots)}")
        part = slice(token, token + len(slots))
        given = (query[part], key[part], value[part], beta[part], _part(g if gk is None else gk, part), scale)
        tokens = _steps(state[slots[taken - 1]], *given)
        for slot, (now, y) in zip(slots.tolist(), tokens, strict=True):
            after[slot] = now.to(state.dtype)
            out.append(y)
        token = part.stop
    return torch.stack(out).to(value.dtype), after


def _need_own_slots(requests: list[Tensor]) -> None:
    seen: set[int] = set()
    for slots in requests:
        own = set(slots.tolist())
        need(not own & seen, f"ssm_state_indices gives slot {min(own & seen, default=0)} to two requests")
        seen |= own


def _part(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def _steps(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """State and output after each token of one request, in float32."""
    shared = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(shared, 1) for x in (q, k))
    now, q = state.float(), q * scale
    decay = torch.zeros_like(beta, dtype=torch.float32) if g is None else g
    left = decay.reshape(*beta.shape, -1).exp()  # one a head, or one a channel of its keys
    for step in range(len(v)):
        now = now * left[step][:, None, :]
        update = (v[step].float() - torch.einsum("hvk,hk->hv", now, k[step])) * beta[step].float()[:, None]
        now = now + update[..., None] * k[step][:, None]
        yield now, torch.einsum("hvk,hk->hv", now, q[step])


def _chunk_like(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Any,
    initial_state: Any,
    actual_seq_lengths: Any,
    scale: Any,
    g: Any,
) -> tuple[Tensor, Tensor]:
    _need_given(beta=beta, initial_state=initial_state, actual_seq_lengths=actual_seq_lengths, scale=scale, g=g)
    _need_tokens(query, key, value, initial_state, beta, g, (torch.bfloat16,))
    _need_at_most(64, query, value, 1, "heads")
    _need_at_most(CHUNK_WIDTH, query, value, 2, "width")
    need(value.numel() > 0, f"value is {shown(value)}; the operator does not take empty tensors")
    need_dtype((torch.int32,), actual_seq_lengths=actual_seq_lengths)
    need_shape((initial_state.shape[0],), "one length for each initial state", actual_seq_lengths=actual_seq_lengths)
    return torch.empty_like(value), torch.empty_like(initial_state)


@operator("npu_chunk_gated_delta_rule", shapes=_chunk_like)
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    actual_seq_lengths: Tensor,
    scale: float,
    g: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs of all tokens, and the state of each request after its last. Computed token by token here."""
    _need_lengths(actual_seq_lengths, len(value), len(value))
    final, out, token = initial_state.clone(), [], 0
    for row, length in enumerate(actual_seq_lengths.tolist()):
        part = slice(token, token + length)
        for after, y in _steps(initial_state[row], query[part], key[part], value[part], beta[part], g[part], scale):
            final[row] = after.to(final.dtype)
            out.append(y)
        token = part.stop
    return torch.stack(out).to(value.dtype), final
