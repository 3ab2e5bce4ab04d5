"""Indices and visibility: SPEC.md 3.2. Every mask of this backend is built here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_api_compat.numpy
import numpy as np

from iha_core.conditions import binding_conditions, index_conditions
from iha_core.config import AttentionConfig
from iha_core.validation import Dims

Array = Any


class Wide:
    """Where indices and angles are computed: in int64 and float64, which not every device has.

    That is the arrays' own namespace and device, or else NumPy on the host. Virtual indices pass
    2^31 ([IDX-2]) and angles need float64 ([ROPE-5]); of either only masks and rounded tables return.
    """

    def __init__(self, xp: ModuleType, device: Any) -> None:
        self._home, self._home_device = xp, device
        dtypes = xp.__array_namespace_info__().dtypes(device=device)
        self._is_home = "int64" in dtypes and "float64" in dtypes
        self.xp: ModuleType = xp if self._is_home else array_api_compat.numpy
        self.device = device if self._is_home else "cpu"

    def bring(self, x: Array, dtype: str) -> Array:
        """An array of the caller, in the dtype of that name."""
        x = x if self._is_home else np.from_dlpack(x, device="cpu")
        return self.xp.astype(x, getattr(self.xp, dtype))

    def home(self, x: Array, dtype: str) -> Array:
        """A result, in the dtype of that name, back where the caller's arrays are."""
        x = self.xp.astype(x, getattr(self.xp, dtype))
        return x if self._is_home else self._home.asarray(x, device=self._home_device)


def token_indices(wide: Wide, dims: Dims, offset: int | Array) -> tuple[Array, Array]:
    """Index among the keys of every query (B or 1, N) and of every key (1, M), int64 ([IDX-1])."""
    xp = wide.xp
    if not isinstance(offset, int):
        offset = xp.reshape(wide.bring(offset, "int64"), (-1, 1))  # (B or 1, 1)
    queries = xp.arange(dims.N, dtype=xp.int64, device=wide.device)[None, :]
    return queries + offset, xp.arange(dims.M, dtype=xp.int64, device=wide.device)[None, :]


def virtual(wide: Wide, index: Array, P: int) -> Array:
    """Virtual index n*P + p of every pseudo-token ([MIX-4]): int64 (B, tokens) -> (B, tokens*P)."""
    B, tokens = index.shape
    spread = index[:, :, None] * P + wide.xp.arange(P, dtype=wide.xp.int64, device=wide.device)
    return wide.xp.reshape(spread, (B, tokens * P))  # (B, tokens, P) -> (B, tokens*P)


def repeat_virtual(wide: Wide, per_token: Array, P: int) -> Array:
    """A token's value for each of its pseudo-tokens: (B, tokens) -> (B, tokens*P)."""
    B, tokens = per_token.shape
    return wide.xp.reshape(wide.xp.broadcast_to(per_token[:, :, None], (B, tokens, P)), (B, tokens * P))


def visibility(
    wide: Wide,
    dims: Dims,
    config: AttentionConfig,
    offset: int | Array,
    query_index: Array,
    key_index: Array,
    key_mask: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> Array | None:
    """Which virtual keys each virtual query sees ([MASK-1] to [KEY-1]).

    Returns a boolean mask (B or 1, T or 1, S), or None where it would be all True.
    """
    P = dims.P
    causal, window = binding_conditions(config, dims, offset)
    n, m = repeat_virtual(wide, query_index, P)[:, :, None], repeat_virtual(wide, key_index, P)[:, None, :]
    t, s = virtual(wide, query_index, P)[:, :, None], virtual(wide, key_index, P)[:, None, :]
    conditions = index_conditions(config, causal, window, P, n=n, m=m, t=t, s=s)
    if segment_ids is not None:  # [SEG-1]
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        query_segment = repeat_virtual(wide, wide.bring(segment_ids, "int64"), P)
        key_segment = repeat_virtual(wide, wide.bring(keys, "int64"), P)
        conditions.append(query_segment[:, :, None] == key_segment[:, None, :])
    if key_mask is not None:  # [KEY-1]
        conditions.append(repeat_virtual(wide, wide.bring(key_mask, "bool"), P)[:, None, :])

    mask = None
    for condition in conditions:
        mask = condition if mask is None else mask & condition
    return None if mask is None else wide.home(mask, "bool")
