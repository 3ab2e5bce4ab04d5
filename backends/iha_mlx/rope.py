"""Rotary position embedding of virtual tokens: SPEC.md 3.3."""

from __future__ import annotations

import math
from fractions import Fraction

import mlx.core as mx

from iha_core.config import AttentionConfig, RopePairing
from iha_core.validation import Dims
from iha_mlx.masking import repeat_virtual, virtual

TURNS_PER_RADIAN = Fraction("0.159154943091895335768883763372514362034459645740")
"""1/(2 pi) to 48 digits."""
COARSE_BITS = 20
"""Bits of the coarse part of a frequency: its products with virtual positions up to 2^33 are exact, beyond
that rounded once, which [ROPE-5] allows."""
TERMS = 9
"""Terms of the series of sine and cosine: the first one left out is below 2e-18 at an eighth of a turn."""


def rotation(
    position: mx.array, dims: Dims, config: AttentionConfig, table: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Cosines and sines of every virtual token and lane pair ([POS-1], [POS-2], [ROPE-5]).

    position (B or 1, tokens) of any integer dtype -> two tables (B or 1, tokens*P, 1, d/2), formed
    in float64 and rounded to `table`.
    """
    with mx.stream(mx.cpu):  # GPUs have no float64, and memory is shared
        spread = virtual if config.rope == "virtual" else repeat_virtual
        per_virtual = spread(position.astype(mx.int64), dims.P).astype(mx.float64)[:, :, None, None]
        parts = [_turns(frequency) for frequency in config.rope_frequencies(dims.d)]
        coarse, fine = (mx.array(part, dtype=mx.float64) for part in zip(*parts, strict=True))  # (d/2,) each
        turns = _fraction(per_virtual * coarse) + _fraction(per_virtual * fine)
        cos, sin = _cos_sin(turns)  # (B or 1, tokens*P, 1, d/2) each
        return cos.astype(table), sin.astype(table)


def rotate(x: mx.array, tables: tuple[mx.array, mx.array], pairing: RopePairing) -> mx.array:
    """Rotate lane pairs (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), rounded once ([ROPE-1] to [ROPE-3]).

    x (B, T, H, d), tables of the dtype to compute in -> (B, T, H, d) in x's dtype.
    """
    cos, sin = tables
    B, T, H, d = x.shape
    lanes = x.astype(cos.dtype)
    if pairing == "half":
        x1, x2, axis = lanes[..., : d // 2], lanes[..., d // 2 :], -2  # (B, T, H, d/2) each
    else:
        x1, x2, axis = lanes[..., ::2], lanes[..., 1::2], -1  # (B, T, H, d/2) each
    rotated = mx.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=axis)
    return rotated.reshape(B, T, H, d).astype(x.dtype)


def _turns(frequency: float) -> tuple[float, float]:
    """A frequency in radians as turns: a part of few bits, and the rest."""
    exact = Fraction(frequency) * TURNS_PER_RADIAN
    mantissa, exponent = math.frexp(float(exact))
    coarse = math.ldexp(round(mantissa * 2**COARSE_BITS), exponent - COARSE_BITS)
    return coarse, float(exact - Fraction(coarse))


def _fraction(turns: mx.array) -> mx.array:
    """Turns less the nearest whole number of them, exactly."""
    return turns - mx.round(turns)


def _cos_sin(turns: mx.array) -> tuple[mx.array, mx.array]:
    """Cosine and sine of float64 turns: MLX's own have the errors of float32, in float64 too.

    With r the distance, in quarter turns, to the nearest quarter: the series of cos(r pi/2) and
    sin(r pi/2), exchanged and negated as that quarter asks.
    """
    quarter = mx.round(4 * turns)
    r = 4 * turns - quarter
    square = r * r
    cos, sin = mx.zeros_like(r), mx.zeros_like(r)
    for term in reversed(range(TERMS)):
        sign, even, odd = (-1) ** term, 2 * term, 2 * term + 1
        # As arrays, since MLX 0.32.0 rounds to float32 a number that meets an array of float64.
        cos = cos * square + mx.array(sign * (math.pi / 2) ** even / math.factorial(even), dtype=mx.float64)
        sin = sin * square + mx.array(sign * (math.pi / 2) ** odd / math.factorial(odd), dtype=mx.float64)
    sin = sin * r
    quarter = quarter.astype(mx.int32)
    swapped = (quarter & 1) == 1
    cos, sin = mx.where(swapped, sin, cos), mx.where(swapped, cos, sin)
    return mx.where(((quarter + 1) & 2) == 2, -cos, cos), mx.where((quarter & 2) == 2, -sin, sin)
