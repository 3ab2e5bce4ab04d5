"""Indices and visibility: SPEC.md 3.2. Every mask of this backend is built here.

All indices are int32, which every device has: JAX has int64 only where it is enabled.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from iha_core.conditions import binding_conditions, index_conditions, only_causal
from iha_core.config import AttentionConfig
from iha_core.validation import Dims

MAX_INT32 = 2**31 - 1


def token_indices(dims: Dims, offset: int | Array) -> tuple[Array, Array]:
    """Index among the keys of every query (B or 1, N) and of every key (1, M), int32 ([IDX-1])."""
    if not isinstance(offset, int):
        offset = offset.astype(jnp.int32).reshape(-1, 1)  # (B or 1, 1)
    return jnp.arange(dims.N, dtype=jnp.int32)[None] + offset, jnp.arange(dims.M, dtype=jnp.int32)[None]


def virtual(index: Array, P: int) -> Array:
    """Virtual index n*P + p of every pseudo-token ([MIX-4]): int32 (B, tokens) -> (B, tokens*P)."""
    spread = index[..., None] * P + jnp.arange(P, dtype=jnp.int32)[None, None]  # (B, tokens, P)
    return spread.reshape(index.shape[0], -1)


def repeat_virtual(per_token: Array, P: int) -> Array:
    """A token's value for each of its pseudo-tokens: (B, tokens) -> (B, tokens*P)."""
    return jnp.repeat(per_token, P, axis=1)


def nearby(index: Array, M: int, window: int | None) -> tuple[Array, int | None]:
    """Query indices and a window that hide the same keys, at most 2M + 3 in size: P times them fits int32.

    Virtual indices pass 2^31 ([IDX-2]), their differences too. But a query that is farther from all keys
    than the window is wide may as well be less far. And a window that is wider than M + 2 hides no key from
    queries in [-1, M], whatever its width is; so it loses what goes beyond M + 2, and the queries outside of
    that range come as much nearer. index (B or 1, N), int32.
    """
    width = 0 if window is None else min(window, M + 2)
    surplus = 0 if window is None else window - width
    if surplus:  # where a bound is beyond int32, so is every index that would pass it
        after = _clip(index, M + surplus, None) - surplus if M + surplus <= MAX_INT32 else jnp.int32(M)
        before = _clip(index, None, -1 - surplus) + surplus if surplus <= MAX_INT32 else jnp.int32(-1)
        index = jnp.where(index > M, after, jnp.where(index < -1, before, index))
    return _clip(index, -1 - width, M + width), None if window is None else width


def _clip(index: Array, low: int | None, high: int | None) -> Array:
    """Clip to bounds that int32 holds, without widening the index; None for no bound."""
    return jnp.clip(index, None if low is None else jnp.int32(low), None if high is None else jnp.int32(high))


def visibility(
    dims: Dims,
    config: AttentionConfig,
    offset: int | Array,
    query_index: Array,
    key_index: Array,
    key_mask: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    *,
    may_flag_causal: bool,
) -> tuple[Array | None, bool]:
    """Which virtual keys each virtual query sees ([MASK-1] to [KEY-1]).

    Returns a boolean mask (B or 1, T or 1, S), or None where it would be all True; and whether
    the kernel's own causal flag (key index <= query index, counted from 0) stands for the mask,
    which happens only with `may_flag_causal`.
    """
    P = dims.P
    causal, window = binding_conditions(config, dims, offset)
    starts_at_0 = isinstance(offset, int) and offset == 0
    if may_flag_causal and starts_at_0 and only_causal(causal, window, key_mask, segment_ids):
        return None, True

    query_index, window = nearby(query_index, dims.M, window)
    n, m = repeat_virtual(query_index, P)[:, :, None], repeat_virtual(key_index, P)[:, None, :]
    t, s = virtual(query_index, P)[:, :, None], virtual(key_index, P)[:, None, :]
    conditions = index_conditions(config, causal, window, P, n=n, m=m, t=t, s=s)
    if segment_ids is not None:  # [SEG-1]
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        query_segment, key_segment = repeat_virtual(segment_ids, P), repeat_virtual(keys, P)
        conditions.append(_equal(query_segment[:, :, None], key_segment[:, None, :]))
    if key_mask is not None:  # [KEY-1]
        conditions.append(repeat_virtual(key_mask, P)[:, None, :])

    mask = None
    for condition in conditions:
        mask = condition if mask is None else mask & condition
    return mask, False


def _equal(a: Array, b: Array) -> Array:
    """Whether integers of possibly different types are equal; JAX compares uint32 with int32 in int32."""
    if a.dtype != b.dtype and jnp.uint32 in (a.dtype, b.dtype) and jnp.int64 not in (a.dtype, b.dtype):
        return (a.astype(jnp.uint32) == b.astype(jnp.uint32)) & (a >= 0) & (b >= 0)
    return a == b
