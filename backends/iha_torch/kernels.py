"""Attention over virtual tokens: PyTorch's kernel, or composed from elementary operations. SPEC.md 3.4."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from iha_core.conditions import scale_factors
from iha_core.config import AttentionConfig
from iha_core.validation import dtype_name

FEW_KEYS = 64
"""Virtual keys below which `needs_mask` holds; the vectors of PyTorch's CPU kernel hold up to 32 numbers."""


def has_native_kernel(config: AttentionConfig) -> bool:
    """Whether PyTorch's kernel computes this configuration exactly.

    It does for every softmax: its logits and statistics are at least float32, e may differ from d,
    sizes may be 0, and a row that sees nothing gives zeros with zero gradients ([SOFT-2]).
    """
    return config.normalisation == "softmax"


def needs_mask(k: Tensor) -> bool:
    """Whether PyTorch's kernel must be given a mask, even one that hides nothing; k is (B, S, H, d).

    Without one, its CPU kernel takes a row of few logits that are all NaN for one that sees nothing, and
    gives zeros ([KEY-3]).
    """
    # What is exported serves any length, and must not be fixed to one side of a branch.
    return k.device.type == "cpu" and (torch.compiler.is_exporting() or k.shape[1] < FEW_KEYS)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> Tensor:
    """Softmax attention by PyTorch's kernel ([LOG-1] to [SOFT-2], [OUT-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype.
    """
    storage = q.dtype
    factor, power = scale_factors(scale, dtype_name(q))
    if power != 1:  # float32 does not hold the scale
        q, k, v = (x.to(torch.float32) for x in (q, k, v))
        q, k, scale = q * factor, k * power, 1.0
    per_head = functional.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, d)
        k.transpose(1, 2),  # (B, H, S, d)
        v.transpose(1, 2),  # (B, H, S, e)
        attn_mask=None if mask is None else mask[:, None],  # (B or 1, 1, T or 1, S)
        is_causal=is_causal,
        scale=scale,
    )
    return per_head.transpose(1, 2).to(storage)  # (B, T, H, e)


def composed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """Linear attention: the logits are the weights, 0 where hidden ([LIN-1]).

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e), mask (B or 1, T or 1, S) bool or None
    -> (B, T, H, e) in q's dtype, and the logits (B, H, T, S) in float32 or float64.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (x.to(compute).transpose(1, 2) for x in (q, k, v))  # (B, H, T or S, ·)
    factor, power = scale_factors(scale, dtype_name(q))
    logits = power * (factor * (queries @ keys.mT))  # (B, H, T, S)
    if mask is not None:
        logits = torch.where(mask[:, None], logits, 0)
    return (logits @ values).to(q.dtype).transpose(1, 2), logits  # (B, T, H, e)
