"""Attention over virtual tokens, composed from functions of the standard. SPEC.md 3.4."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from iha_array_api.mixing import compute_dtype
from iha_core.conditions import scale_factors
from iha_core.config import AttentionConfig
from iha_core.validation import dtype_name

Array = Any


def composed(
    xp: ModuleType, q: Array, k: Array, v: Array, mask: Array | None, *, config: AttentionConfig, scale: float
) -> tuple[Array, Array, Array | None]:
    """Attention in float32, or float64 for float64 ([LOG-1] to [OUT-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype; and, unrounded, the logits (B, H, T, S) and, under softmax, lse (B, H, T).
    """
    compute = getattr(xp, compute_dtype(q))
    queries, keys, values = (xp.astype(x, compute) for x in (q, k, v))
    per_head = xp.permute_dims(queries, (0, 2, 1, 3))  # (B, H, T, d)
    factor, power = scale_factors(scale, dtype_name(q))
    logits = power * (factor * xp.matmul(per_head, xp.permute_dims(keys, (0, 2, 3, 1))))  # (B, H, T, S)
    softmax = config.normalisation == "softmax"
    if mask is not None:
        logits = xp.where(mask[:, None, :, :], logits, -math.inf if softmax else 0.0)  # [LOG-3], [LIN-1]
    weights, lse = _softmax(xp, logits) if softmax else (logits, None)
    per_head = xp.matmul(weights, xp.permute_dims(values, (0, 2, 1, 3)))  # (B, H, T, e)
    return xp.astype(xp.permute_dims(per_head, (0, 2, 1, 3)), q.dtype), logits, lse


def _softmax(xp: ModuleType, logits: Array) -> tuple[Array, Array]:
    """Weights (B, H, T, S) and lse (B, H, T); 0 and -inf where nothing is seen ([SOFT-1] to [SOFT-3])."""
    if logits.shape[-1]:
        largest = xp.max(logits, axis=-1, keepdims=True)  # (B, H, T, 1)
        shift = xp.where(largest == -math.inf, 0.0, largest)
    else:  # the standard leaves the maximum of nothing open
        shift = xp.sum(logits, axis=-1, keepdims=True)
    exponentials = xp.exp(logits - shift)
    total = xp.sum(exponentials, axis=-1, keepdims=True)  # (B, H, T, 1), 0 only where nothing is seen
    divisor = xp.where(total == 0, 1.0, total)
    lse = xp.where(total == 0, -math.inf, shift + xp.log(divisor))
    return exponentials / divisor, lse[..., 0]
