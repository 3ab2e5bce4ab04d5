"""Attention over virtual tokens: JAX's own function, or composed from elementary operations. SPEC.md 3.4."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike

from iha_core.conditions import scale_factors
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentValueError
from iha_jax.mixing import compute_dtype

Kernel = Literal["dot_product_attention", "splash_attention", "composed"]


def choose_kernel(config: AttentionConfig, q: Array, scale: float, implementation: str | None) -> Kernel:
    """What computes this configuration exactly; `implementation` is the caller's wish.

    JAX's function does for every softmax but that of float64, which it computes in float32, and for
    every scale that float32 holds.

    Raises:
        ArgumentValueError: an implementation that is not known.
    """
    if implementation not in (None, "splash"):
        raise ArgumentValueError(
            "implementation", "", expected="None or 'splash'", found=repr(implementation)
        )
    if implementation == "splash":
        return "splash_attention"
    native = (
        config.normalisation == "softmax"
        and q.dtype != jnp.float64
        and scale_factors(scale, q.dtype.name)[1] == 1
    )
    return "dot_product_attention" if native else "composed"


def dot_product_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    *,
    is_causal: bool,
    scale: float,
    precision: PrecisionLike,
) -> Array:
    """Softmax attention by JAX's function ([LOG-1] to [OUT-1]), but for queries that see nothing.

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype.
    """
    d, e = q.shape[-1], v.shape[-1]

    def native(q: Array, k: Array, v: Array) -> Array:
        # One width for all: zeros add nothing to a logit, and the columns that they make are cut off.
        q, k, v = (_widen(x, max(d, e)) for x in (q, k, v))  # (B, T or S, H, max(d, e))
        heads = None if mask is None else mask[:, None]  # (B or 1, 1, T or 1, S)
        with jax.default_matmul_precision(precision), jax.numpy_dtype_promotion("standard"):
            out = jax.nn.dot_product_attention(q, k, v, mask=heads, scale=scale, is_causal=is_causal)
        return out[..., :e]

    def in_float32(q: Array, k: Array, v: Array) -> Array:
        return native(*(x.astype(jnp.float32) for x in (q, k, v))).astype(q.dtype)

    if q.dtype == jnp.float32:
        out = native(q, k, v)
    else:  # not every platform multiplies every 16-bit type with sums in float32
        able = ["cuda", "rocm", "tpu"] if q.dtype == jnp.bfloat16 else ["cuda", "rocm"]
        out = lax.platform_dependent(q, k, v, **dict.fromkeys(able, native), default=in_float32)
    return out


def zero_empty_rows(virtual_out: Array, mask: Array | None) -> Array:
    """Zeros for queries that see nothing ([SOFT-2]): kernels give them the mean of some values.

    virtual_out (B, T, H, e), mask (B or 1, T or 1, S) bool or None -> (B, T, H, e).
    """
    if mask is None:
        return virtual_out
    return jnp.where(jnp.any(mask, axis=-1)[:, :, None, None], virtual_out, 0)


def _widen(x: Array, width: int) -> Array:
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])


def composed(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    *,
    config: AttentionConfig,
    scale: float,
    precision: PrecisionLike,
) -> tuple[Array, Array, Array | None]:
    """Attention in float32, or float64 for float64 ([LOG-1] to [OUT-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype; and, unrounded, the logits (B, H, T, S) and, under softmax, lse (B, H, T).
    """
    compute = compute_dtype(q)
    queries, keys, values = (x.astype(compute) for x in (q, k, v))
    factor, power = scale_factors(scale, q.dtype.name)
    if power == 1:
        logits = factor * jnp.einsum("bthd,bshd->bhts", queries, keys, precision=precision)
    else:  # one factor to each side: XLA would multiply both first, if they met
        logits = jnp.einsum("bthd,bshd->bhts", factor * queries, power * keys, precision=precision)
    softmax = config.normalisation == "softmax"
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, -math.inf if softmax else 0.0)  # [LOG-3], [LIN-1]
    weights, lse = _softmax(logits) if softmax else (logits, None)
    out = jnp.einsum("bhts,bshe->bthe", weights, values, precision=precision)
    return out.astype(q.dtype), logits, lse


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Weights (B, H, T, S) and lse (B, H, T); 0 and -inf where nothing is seen ([SOFT-1] to [SOFT-3])."""
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=-math.inf)  # (B, H, T, 1)
    shift = lax.stop_gradient(jnp.where(largest == -math.inf, 0.0, largest))
    exponentials = jnp.exp(logits - shift)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)  # (B, H, T, 1), 0 only where nothing is seen
    divisor = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -math.inf, shift + jnp.log(divisor))
    return exponentials / divisor, lse[..., 0]
