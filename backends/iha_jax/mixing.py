"""Mixing into virtual tokens, and the collapse back: SPEC.md 3.1 and 3.5."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike

from iha_core.config import describe
from iha_core.errors import ArgumentValueError


def mix(x: Array, alpha: Array, precision: PrecisionLike) -> Array:
    """Pseudo-heads as virtual tokens ([MIX-1] to [MIX-4]).

    x (B, N, source, width), alpha (source, H, P) -> (B, T, H, width) in x's dtype.
    """
    B, N, _, width = x.shape
    _, H, P = alpha.shape
    mixed = _einsum("bnsw,shp->bnphw", x, alpha, precision)
    return mixed.reshape(B, N * P, H, width)  # (B, N, P, H, width) -> (B, T, H, width)


def collapse_heads(virtual_out: Array, collapse: Array, precision: PrecisionLike) -> Array:
    """One output per head from its token's H*P pseudo outputs ([COL-1], [COL-2]).

    virtual_out (B, T, H, e), collapse (H, H, P) or (H, P) -> (B, N, H, e) in virtual_out's dtype.
    """
    B, T, H, e = virtual_out.shape
    P = collapse.shape[-1]
    pseudo = virtual_out.reshape(B, T // P, P, H, e)
    subscripts = "bnpse,osp->bnoe" if collapse.ndim == 3 else "bnphe,hp->bnhe"
    return _einsum(subscripts, pseudo, collapse, precision)


def compute_dtype(x: Array) -> Any:
    """What sums are formed in ([NUM-1]); asked without promotion, which users may have forbidden."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def precision_word(precision: PrecisionLike) -> str | None:
    """JAX's own word for a precision of products, which all of its functions take.

    Raises:
        ArgumentValueError: it is none, or a pair, one for each operand.
    """
    if precision is None:
        return None
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name
    try:
        return lax.Precision(precision).name.lower()
    except (TypeError, ValueError):
        if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
            return precision
    expected = "None, or a word of JAX for one precision, such as 'highest', 'high' or 'default'"
    raise ArgumentValueError("precision", "", expected=expected, found=describe(precision))


def _einsum(subscripts: str, x: Array, parameter: Array, precision: PrecisionLike) -> Array:
    """A product with a mixing tensor, with sums in float32 or float64, rounded once ([TYP-2], [NUM-1])."""
    compute = compute_dtype(x)
    product = jnp.einsum(subscripts, x.astype(compute), parameter.astype(compute), precision=precision)
    return product.astype(x.dtype)
