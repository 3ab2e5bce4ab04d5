"""Indices and visibility: SPEC.md 3.2. Every mask of this backend is built here."""

from __future__ import annotations

import torch
from torch import Tensor

from iha_core.conditions import binding_conditions, index_conditions, only_causal
from iha_core.config import AttentionConfig
from iha_core.validation import Dims


def token_indices(dims: Dims, offset: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index among the keys of every query (B or 1, N) and of every key (1, M), int64 ([IDX-1])."""
    queries = torch.arange(dims.N, device=device)[None]
    if isinstance(offset, Tensor):
        offset = offset.to(torch.int64).reshape(-1, 1)  # (B or 1, 1)
    return queries + offset, torch.arange(dims.M, device=device)[None]


def virtual(index: Tensor, P: int) -> Tensor:
    """Virtual index n*P + p of every pseudo-token ([MIX-4]): int64 (B, tokens) -> (B, tokens*P)."""
    return (index[..., None] * P + torch.arange(P, device=index.device)).flatten(-2)


def repeat_virtual(per_token: Tensor, P: int) -> Tensor:
    """A token's value for each of its pseudo-tokens: (B, tokens) -> (B, tokens*P)."""
    return per_token[..., None].expand(*per_token.shape, P).flatten(-2)


def visibility(
    dims: Dims,
    config: AttentionConfig,
    offset: int | Tensor,
    query_index: Tensor,
    key_index: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    *,
    may_flag_causal: bool,
    always: bool,
) -> tuple[Tensor | None, bool]:
    """Which virtual keys each virtual query sees ([MASK-1] to [KEY-1]).

    Returns a boolean mask (B or 1, T or 1, S), or None where it would be all True; and whether
    the kernel's own causal flag (key index <= query index, counted from 0) stands for the mask,
    which happens only with `may_flag_causal`. With `always` there is a mask in any case.
    """
    P = dims.P
    causal, window = binding_conditions(config, dims, offset)
    starts_at_0 = not isinstance(offset, Tensor) and offset == 0
    flagged = may_flag_causal and not always and starts_at_0
    if flagged and only_causal(causal, window, key_mask, segment_ids):
        return None, True

    n, m = repeat_virtual(query_index, P)[:, :, None], repeat_virtual(key_index, P)[:, None, :]
    t, s = virtual(query_index, P)[:, :, None], virtual(key_index, P)[:, None, :]
    conditions = index_conditions(config, causal, window, P, n=n, m=m, t=t, s=s)
    if segment_ids is not None:  # [SEG-1]
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        query_segment = repeat_virtual(segment_ids.to(torch.int64), P)
        key_segment = repeat_virtual(keys.to(torch.int64), P)
        conditions.append(query_segment[:, :, None] == key_segment[:, None, :])
    if key_mask is not None:  # [KEY-1]
        conditions.append(repeat_virtual(key_mask, P)[:, None, :])

    mask = None
    for condition in conditions:
        mask = condition if mask is None else mask & condition
    if mask is None and always:
        mask = torch.ones(1, 1, dims.S, dtype=torch.bool, device=query_index.device)
    return mask, False
