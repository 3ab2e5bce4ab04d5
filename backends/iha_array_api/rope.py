"""Rotary position embedding of virtual tokens: SPEC.md 3.3."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from iha_array_api.masking import Wide, repeat_virtual, virtual
from iha_core.config import AttentionConfig, RopePairing
from iha_core.validation import Dims

Array = Any


def token_positions(
    wide: Wide, query_index: Array, key_index: Array, positions: Array | None, kv_positions: Array | None
) -> tuple[Array, Array]:
    """Token positions of queries (B or 1, N) and keys (B or 1, M); index order by default ([POS-3])."""
    if positions is None:
        return query_index, key_index
    keys = positions if kv_positions is None else kv_positions
    return wide.bring(positions, "int64"), wide.bring(keys, "int64")


def rotation(
    wide: Wide, position: Array, dims: Dims, config: AttentionConfig, dtype: str
) -> tuple[Array, Array]:
    """Cosines and sines of every virtual token and lane pair ([POS-1], [POS-2], [ROPE-5]).

    position (B or 1, tokens), wide int64 -> two tables (B or 1, tokens*P, 1, d/2), formed in
    float64 and rounded to `dtype`.
    """
    xp = wide.xp
    spread = virtual if config.rope == "virtual" else repeat_virtual
    frequency = xp.asarray(config.rope_frequencies(dims.d), dtype=xp.float64, device=wide.device)
    per_virtual = xp.astype(spread(wide, position, dims.P), xp.float64)
    angle = per_virtual[:, :, None, None] * frequency  # (B or 1, tokens*P, 1, d/2)
    return wide.home(xp.cos(angle), dtype), wide.home(xp.sin(angle), dtype)


def rotate(xp: ModuleType, x: Array, tables: tuple[Array, Array], pairing: RopePairing) -> Array:
    """Rotate lane pairs (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), rounded once ([ROPE-1] to [ROPE-3]).

    x (B, T, H, d), tables of the dtype to compute in -> (B, T, H, d) in x's dtype.
    """
    cos, sin = tables
    B, T, H, d = x.shape
    lanes = xp.astype(x, cos.dtype)
    if pairing == "half":
        lanes = xp.reshape(lanes, (B, T, H, 2, d // 2))
        x1, x2, axis = lanes[..., 0, :], lanes[..., 1, :], -2  # (B, T, H, d/2) each
    else:
        lanes = xp.reshape(lanes, (B, T, H, d // 2, 2))
        x1, x2, axis = lanes[..., 0], lanes[..., 1], -1  # (B, T, H, d/2) each
    rotated = xp.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis=axis)
    return xp.astype(xp.reshape(rotated, (B, T, H, d)), x.dtype)
