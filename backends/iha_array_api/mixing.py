"""Mixing into virtual tokens, and the collapse back: SPEC.md 3.1 and 3.5."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from iha_core.validation import dtype_name

Array = Any


def compute_dtype(x: Array) -> str:
    """float64 for float64, and float32 for every narrower type: nothing is summed in 16 bits."""
    return "float64" if dtype_name(x) == "float64" else "float32"


def mix(xp: ModuleType, x: Array, alpha: Array) -> Array:
    """Pseudo-heads as virtual tokens ([MIX-1] to [MIX-4]).

    x (B, N, source, width), alpha (source, H, P) -> (B, T, H, width) in x's dtype.
    """
    B, N, source, width = x.shape
    _, H, P = alpha.shape
    matrix = xp.reshape(xp.permute_dims(alpha, (2, 1, 0)), (P * H, source))
    return xp.reshape(_combine(xp, matrix, x), (B, N * P, H, width))  # (B, N, P*H, width) -> (B, T, H, width)


def collapse_heads(xp: ModuleType, virtual_out: Array, collapse: Array) -> Array:
    """One output per head from its token's H*P pseudo outputs ([COL-1], [COL-2]).

    virtual_out (B, T, H, e), collapse (H, H, P) or (H, P) -> (B, N, H, e) in virtual_out's dtype.
    """
    B, T, H, e = virtual_out.shape
    P = collapse.shape[-1]
    if collapse.ndim == 3:
        matrix = xp.reshape(xp.permute_dims(collapse, (0, 2, 1)), (H, P * H))
        return _combine(xp, matrix, xp.reshape(virtual_out, (B, T // P, P * H, e)))
    compute = getattr(xp, compute_dtype(virtual_out))
    pseudo = xp.reshape(xp.astype(virtual_out, compute), (B, T // P, P, H, e))
    weight = xp.permute_dims(xp.astype(collapse, compute), (1, 0))[:, :, None]  # (P, H, 1)
    return xp.astype(xp.sum(pseudo * weight, axis=2), virtual_out.dtype)


def _combine(xp: ModuleType, matrix: Array, x: Array) -> Array:
    """Linear combinations of the heads of each token, rounded once ([TYP-2]).

    matrix (rows, terms), x (B, tokens, terms, width) -> (B, tokens, rows, width).
    """
    compute = getattr(xp, compute_dtype(x))
    return xp.astype(xp.matmul(xp.astype(matrix, compute), xp.astype(x, compute)), x.dtype)
