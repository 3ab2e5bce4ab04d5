"""Mixing into virtual tokens, and the collapse back: SPEC.md 3.1 and 3.5."""

from __future__ import annotations

import torch
from torch import Tensor


def mix(x: Tensor, alpha: Tensor) -> Tensor:
    """Pseudo-heads as virtual tokens ([MIX-1] to [MIX-4]).

    x (B, N, source, width), alpha (source, H, P) -> (B, T, H, width) in x's dtype, contiguous.
    """
    B, N, source, width = x.shape
    _, H, P = alpha.shape
    matrix = alpha.permute(2, 1, 0).reshape(P * H, source)
    return _combine(matrix, x).view(B, N * P, H, width)  # (B, N, P*H, width) -> (B, T, H, width)


def collapse_heads(virtual_out: Tensor, collapse: Tensor) -> Tensor:
    """One output per head from its token's H*P pseudo outputs ([COL-1], [COL-2]).

    virtual_out (B, T, H, e), collapse (H, H, P) or (H, P) -> (B, N, H, e) in virtual_out's dtype.
    """
    B, T, H, e = virtual_out.shape
    P = collapse.shape[-1]
    if collapse.ndim == 3:
        matrix = collapse.permute(0, 2, 1).reshape(H, P * H)
        return _combine(matrix, virtual_out.reshape(B, T // P, P * H, e))
    compute = torch.promote_types(virtual_out.dtype, torch.float32)
    pseudo = virtual_out.to(compute).reshape(B, T // P, P, H, e)
    weight = collapse.to(compute).mT[:, :, None]  # (P, H, 1)
    return (pseudo * weight).sum(2).to(virtual_out.dtype)


def _combine(matrix: Tensor, x: Tensor) -> Tensor:
    """Linear combinations of the heads of each token, rounded once ([TYP-2]).

    matrix (rows, terms), x (B, tokens, terms, width) -> (B, tokens, rows, width), contiguous.

    bmm, since einsum and matmul may fold into one product that ends in another memory order: kernels
    are several times slower, or copy, where the last stride is not 1. 16-bit types are widened even
    where the parameters are too: their gradients sum over all tokens, and CPUs without 16-bit
    products take tens of times longer.
    """
    B, tokens, terms, width = x.shape
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = matrix.shape[0]
    per_token = x.to(compute).reshape(B * tokens, terms, width)
    product = torch.bmm(matrix.to(compute).expand(B * tokens, rows, terms), per_token)
    return product.to(x.dtype).view(B, tokens, rows, width)
