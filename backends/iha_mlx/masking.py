"""Indices and visibility: SPEC.md 3.2. Every mask of this backend is built here."""

from __future__ import annotations

import mlx.core as mx

from iha_core.conditions import binding_conditions, index_conditions, only_causal
from iha_core.config import AttentionConfig
from iha_core.validation import Dims


def token_indices(dims: Dims, offset: int | mx.array) -> tuple[mx.array, mx.array]:
    """Index among the keys of every query (B or 1, N) and of every key (1, M), int64 ([IDX-1])."""
    queries = mx.arange(dims.N, dtype=mx.int64)[None]
    if isinstance(offset, mx.array):
        offset = offset.astype(mx.int64).reshape(-1, 1)  # (B or 1, 1)
    return queries + offset, mx.arange(dims.M, dtype=mx.int64)[None]


def virtual(index: mx.array, P: int) -> mx.array:
    """Virtual index n*P + p of every pseudo-token ([MIX-4]): int64 (B, tokens) -> (B, tokens*P)."""
    return (index[..., None] * P + mx.arange(P, dtype=mx.int64)).flatten(-2)


def repeat_virtual(per_token: mx.array, P: int) -> mx.array:
    """A token's value for each of its pseudo-tokens: (B, tokens) -> (B, tokens*P)."""
    return mx.repeat(per_token, P, axis=-1)


def visibility(
    dims: Dims,
    config: AttentionConfig,
    offset: int | mx.array,
    query_index: mx.array,
    key_index: mx.array,
    key_mask: mx.array | None,
    segment_ids: mx.array | None,
    kv_segment_ids: mx.array | None,
    *,
    may_flag_causal: bool,
) -> tuple[mx.array | None, bool]:
    """Which virtual keys each virtual query sees ([MASK-1] to [KEY-1]).

    Returns a boolean mask (B or 1, T or 1, S), or None where it would be all True; and whether
    the kernel's own causal flag (the last query is aligned with the last key) stands for the mask,
    which happens only with `may_flag_causal`, and where no query precedes the keys.
    """
    P = dims.P
    causal, window = binding_conditions(config, dims, offset)
    is_last = isinstance(offset, int) and offset == dims.M - dims.N >= 0
    if may_flag_causal and is_last and only_causal(causal, window, key_mask, segment_ids):
        return None, True

    n, m = repeat_virtual(query_index, P)[:, :, None], repeat_virtual(key_index, P)[:, None, :]
    t, s = virtual(query_index, P)[:, :, None], virtual(key_index, P)[:, None, :]
    conditions = index_conditions(config, causal, window, P, n=n, m=m, t=t, s=s)
    if segment_ids is not None:  # [SEG-1]
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        query_segment = repeat_virtual(segment_ids.astype(mx.int64), P)
        key_segment = repeat_virtual(keys.astype(mx.int64), P)
        conditions.append(query_segment[:, :, None] == key_segment[:, None, :])
    if key_mask is not None:  # [KEY-1]
        conditions.append(repeat_virtual(key_mask, P)[:, None, :])

    mask = None
    for condition in conditions:
        # Not `&`, which in MLX 0.32.4 loses the axis that vmap maps if only the right side has it.
        mask = condition if mask is None else mx.logical_and(mask, condition)
    return mask, False
