"""Attention over virtual tokens: MLX's kernel, or composed from elementary operations. SPEC.md 3.4."""

from __future__ import annotations

import math

import mlx.core as mx

from iha_core.conditions import scale_factors
from iha_core.config import AttentionConfig
from iha_core.validation import dtype_name
from iha_mlx.mixing import compute_dtype


def has_native_kernel(q: mx.array, k: mx.array, config: AttentionConfig, *, scale: float) -> bool:
    """Whether MLX's kernel computes this call exactly; q is (B, T, H, d), k (B, S, H, d).

    It does in float32: e may differ from d, and a row that sees nothing is made zero afterwards. In
    float64 its exponentials have the errors of float32. It may multiply q by the scale first, which
    overflows before the products do ([SOFT-1]) if that is above 1. It refuses some empty arrays.
    """
    exact = config.normalisation == "softmax" and q.dtype != mx.float64 and scale <= 1
    return exact and q.size > 0 and k.size > 0


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, *, is_causal: bool, scale: float
) -> mx.array:
    """Softmax attention by MLX's kernel ([LOG-1] to [SOFT-2], [OUT-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype.

    16-bit types are widened on every device. Metal's fused kernels would form float32 logits from
    them, but MLX leaves those for 16-bit logits ([NUM-2]) on the CPU, for many widths, and whenever
    it differentiates.
    """
    queries, keys, values = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))  # (B, H, T or S, ·)
    per_head = mx.fast.scaled_dot_product_attention(
        queries,
        keys,
        values,
        scale=scale,
        mask="causal" if is_causal else None if mask is None else mask[:, None],  # (B or 1, 1, T or 1, S)
    )
    if mask is not None:  # [SOFT-2]: the kernel gives the mean of the values
        per_head = mx.where(mask.any(axis=-1)[:, None, :, None], per_head, 0)
    return per_head.swapaxes(1, 2).astype(q.dtype)  # (B, T, H, e)


def composed(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, *, config: AttentionConfig, scale: float
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Attention in float32, or float64 for float64 ([LOG-1] to [OUT-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype; and, unrounded, the logits (B, H, T, S) and, under softmax, lse (B, H, T).
    """
    compute = compute_dtype(q)
    queries, keys, values = (x.astype(compute).swapaxes(1, 2) for x in (q, k, v))  # (B, H, T or S, ·)
    factor, power = scale_factors(scale, dtype_name(q))
    # As an array, since MLX 0.32.0 rounds to float32 a number that meets an array of float64.
    logits = power * (mx.array(factor, dtype=compute) * (queries @ keys.swapaxes(2, 3)))  # (B, H, T, S)
    softmax = config.normalisation == "softmax"
    if mask is not None:
        logits = mx.where(mask[:, None], logits, -math.inf if softmax else 0)  # [LOG-3], [LIN-1]
    weights, lse = _softmax(logits) if softmax else (logits, None)
    return (weights @ values).swapaxes(1, 2).astype(q.dtype), logits, lse


def _softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Weights (B, H, T, S) and lse (B, H, T); 0 and -inf where nothing is seen ([SOFT-1] to [SOFT-3])."""
    if logits.size:
        largest = mx.stop_gradient(logits.max(axis=-1, keepdims=True))  # (B, H, T, 1)
        shift = mx.where(largest == -math.inf, 0, largest)
    else:  # MLX refuses the maximum of nothing
        shift = logits.sum(axis=-1, keepdims=True)
    exponentials = _exp(logits - shift)
    total = exponentials.sum(axis=-1, keepdims=True)  # (B, H, T, 1), 0 only where nothing is seen
    divisor = mx.where(total == 0, 1, total)
    lse = mx.where(total == 0, -math.inf, shift + mx.log(divisor))
    return exponentials / divisor, lse[..., 0]


def _exp(x: mx.array) -> mx.array:
    """Exponential. MLX's own has the errors of float32, in float64 too, but its powers are accurate.

    The rounded base costs half a rounding of the exponent, for which (17) allows one.
    """
    return mx.power(mx.array(math.e, dtype=x.dtype), x) if x.dtype == mx.float64 else mx.exp(x)
