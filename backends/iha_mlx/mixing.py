"""Mixing into virtual tokens, and the collapse back: SPEC.md 3.1 and 3.5."""

from __future__ import annotations

import mlx.core as mx


def compute_dtype(x: mx.array) -> mx.Dtype:
    """float64 for float64, and float32 for every narrower type: nothing is summed in 16 bits."""
    return mx.float64 if x.dtype == mx.float64 else mx.float32


def mix(x: mx.array, alpha: mx.array) -> mx.array:
    """Pseudo-heads as virtual tokens ([MIX-1] to [MIX-4]).

    x (B, N, source, width), alpha (source, H, P) -> (B, T, H, width) in x's dtype.
    """
    B, N, source, width = x.shape
    _, H, P = alpha.shape
    matrix = alpha.transpose(2, 1, 0).reshape(P * H, source)
    return _combine(matrix, x).reshape(B, N * P, H, width)  # (B, N, P*H, width) -> (B, T, H, width)


def collapse_heads(virtual_out: mx.array, collapse: mx.array) -> mx.array:
    """One output per head from its token's H*P pseudo outputs ([COL-1], [COL-2]).

    virtual_out (B, T, H, e), collapse (H, H, P) or (H, P) -> (B, N, H, e) in virtual_out's dtype.
    """
    B, T, H, e = virtual_out.shape
    P = collapse.shape[-1]
    if collapse.ndim == 3:
        matrix = collapse.transpose(0, 2, 1).reshape(H, P * H)
        return _combine(matrix, virtual_out.reshape(B, T // P, P * H, e))
    compute = compute_dtype(virtual_out)
    pseudo = virtual_out.astype(compute).reshape(B, T // P, P, H, e)
    weight = collapse.astype(compute).T[:, :, None]  # (P, H, 1)
    return (pseudo * weight).sum(axis=2).astype(virtual_out.dtype)


def _combine(matrix: mx.array, x: mx.array) -> mx.array:
    """Linear combinations of the heads of each token, rounded once ([TYP-2]).

    matrix (rows, terms), x (B, tokens, terms, width) -> (B, tokens, rows, width).
    """
    compute = compute_dtype(x)
    return (matrix.astype(compute) @ x.astype(compute)).astype(x.dtype)
