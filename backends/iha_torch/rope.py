"""Rotary position embedding of virtual tokens: SPEC.md 3.3."""

from __future__ import annotations

import torch
from torch import Tensor

from iha_core.config import AttentionConfig, RopePairing
from iha_core.validation import Dims
from iha_torch.masking import repeat_virtual, virtual


def rotation(
    position: Tensor, dims: Dims, config: AttentionConfig, storage: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every virtual token and lane pair ([POS-1], [POS-2], [ROPE-5]).

    position (B or 1, tokens) of any integer dtype -> two tables (B or 1, tokens*P, 1, d/2) in
    float32, or float64 where that is the storage dtype.
    """
    device = position.device
    # Metal has no float64: its tables are formed on the host and only then moved.
    position = position.to("cpu" if device.type == "mps" else device, torch.int64)
    spread = virtual if config.rope == "virtual" else repeat_virtual
    frequency = torch.tensor(config.rope_frequencies(dims.d), dtype=torch.float64, device=position.device)
    angle = spread(position, dims.P)[:, :, None, None] * frequency  # (B or 1, tokens*P, 1, d/2)
    table = torch.promote_types(storage, torch.float32)
    return angle.cos().to(table).to(device), angle.sin().to(table).to(device)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], pairing: RopePairing) -> Tensor:
    """Rotate lane pairs (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), rounded once ([ROPE-1] to [ROPE-3]).

    x (B, T, H, d) -> (B, T, H, d) in x's dtype, contiguous.
    """
    cos, sin = tables
    B, T, H, d = x.shape
    pairs, lane = ((2, d // 2), -2) if pairing == "half" else ((d // 2, 2), -1)
    x1, x2 = x.reshape(B, T, H, *pairs).unbind(lane)  # (B, T, H, d/2) each; products have cos's dtype
    rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=lane)
    return rotated.reshape(B, T, H, d).to(x.dtype)
