"""Rotary position embedding of virtual tokens: SPEC.md 3.3."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from iha_core.config import AttentionConfig, RopePairing
from iha_core.validation import MAX_TOKEN_INDEX, Dims

TURNS_PER_RADIAN = Fraction(0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410, 2**192)
"""1/(2 pi) to 192 binary places."""


def rotation(position: Array, dims: Dims, config: AttentionConfig, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines of every virtual token and lane pair ([POS-1], [POS-2], [ROPE-5]).

    position (B or 1, tokens) of any integer dtype -> two tables (B or 1, tokens*P, 1, d/2) in
    float32, or float64 where q has it.
    """
    steps = (dims.P, 1) if config.rope == "virtual" else (1, 0)
    tables = _float64_tables if dtype == jnp.float64 else _float32_tables
    position = position.astype(jnp.int32)[:, :, None]  # what [IDX-2] allows fits
    cos, sin = tables(position, steps=steps, P=dims.P, frequencies=config.rope_frequencies(dims.d))
    shape = (position.shape[0], -1, 1, dims.d // 2)  # (B, tokens, P, d/2) -> (B, tokens*P, 1, d/2)
    return cos.reshape(shape), sin.reshape(shape)


@partial(jax.jit, static_argnames=("steps", "P", "frequencies"))  # traced once for queries and keys
def _float64_tables(
    position: Array, *, steps: tuple[int, int], P: int, frequencies: tuple[float, ...]
) -> tuple[Array, Array]:
    """Cosines and sines, (B or 1, tokens, P, d/2), of position (B or 1, tokens, 1)."""
    pseudo = jnp.arange(P, dtype=jnp.float64)[None, None, :, None]
    virtual = position[..., None].astype(jnp.float64) * steps[0] + pseudo * steps[1]
    angle = virtual * jnp.asarray([[[frequencies]]])
    return jnp.cos(angle), jnp.sin(angle)


@partial(jax.jit, static_argnames=("steps", "P", "frequencies"))  # traced once for queries and keys
def _float32_tables(
    position: Array, *, steps: tuple[int, int], P: int, frequencies: tuple[float, ...]
) -> tuple[Array, Array]:
    """The same without any float64, which not every device has.

    Of an angle, counted in turns, only the fraction matters. It is held in 64 bits, as four digits of 16 bits
    each in uint32, so that a few sums and products of them fit before they are carried. Products with whole
    positions are exact, and what overflows is full turns. What is left beside quarter turns is small enough
    for float32. Lanes so slow that no position takes them beyond an eighth of a turn use the plain
    product, whose error is relative to the angle.
    """
    # All constants are of rank 3, (1, 1, d/2): JAX can be told not to promote ranks.
    slow = np.array([[[f * MAX_TOKEN_INDEX * P <= math.pi / 4 for f in frequencies]]])
    per_step = jnp.asarray([[frequencies]], dtype=jnp.float32)
    per_token = [_turns(steps[0] * Fraction(f)) for f in frequencies]
    per_pseudo = [[[[_turns(p * steps[1] * Fraction(f)) for f in frequencies]]] for p in range(P)]
    token_digits = _multiply(position, per_token)  # 4 of (B or 1, tokens, d/2)

    def tables(pseudo: tuple[Array, list[Array]]) -> tuple[Array, Array]:
        p, pseudo_digits = pseudo
        quarters, rest = _quarter_turns([a + b for a, b in zip(token_digits, pseudo_digits, strict=True)])
        product = (position.astype(jnp.float32) * steps[0] + p * steps[1]) * per_step
        angle = jnp.where(slow, product, rest)
        quarters = jnp.where(slow, jnp.uint32(0), quarters)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        is_odd, is_half = quarters & 1 == 1, quarters >= 2
        cos, sin = jnp.where(is_odd, -sin, cos), jnp.where(is_odd, cos, sin)
        return jnp.where(is_half, -cos, cos), jnp.where(is_half, -sin, sin)

    # In a loop over pseudo-heads, whose result is kept: else XLA forms the tables anew for every head.
    digits = [jnp.asarray(digit) for digit in _digits(per_pseudo)]  # 4 of (P, 1, 1, d/2)
    cos, sin = lax.map(tables, (jnp.arange(P, dtype=jnp.float32), digits))  # (P, B or 1, tokens, d/2)
    return jnp.moveaxis(cos, 0, 2), jnp.moveaxis(sin, 0, 2)


def _multiply(position: Array, turns: list[int]) -> list[Array]:
    """Products of int32 with numbers below 2^64, modulo 2^64: four digits of 16 bits, not yet carried.

    position (B, tokens, 1) and a number for each lane pair -> (B, tokens, d/2) each, the lowest first.
    """
    step, wrap = _digits([[turns]]), _digits([[[-(2**32) * number for number in turns]]])
    # Read as uint32 a negative position is larger by 2^32: its sum starts from -2^32 times the number.
    n = lax.bitcast_convert_type(position, jnp.uint32)
    columns = [jnp.where(position < 0, digit, np.uint32(0)) for digit in wrap]
    for i, digit in enumerate((n & 0xFFFF, n >> 16)):
        for j in range(4 - i):
            product = digit * step[j]
            columns[i + j] += product & 0xFFFF
            if i + j < 3:
                columns[i + j + 1] += product >> 16
    return columns


def _quarter_turns(columns: list[Array]) -> tuple[Array, Array]:
    """A fraction of a turn as quarters of it, 0 to 3 (uint32), and a rest of at most pi/4 (float32).

    Four digits of 16 bits, not yet carried, the lowest first.
    """
    digits = list(columns)
    for k in range(3):
        digits[k + 1] += digits[k] >> 16  # of the last digit, what is beyond 16 bits is full turns
    high = (digits[3] << 16) | (digits[2] & 0xFFFF)  # the fraction of a turn is (high + low / 2^32) / 2^32
    low = (digits[1] << 16) | (digits[0] & 0xFFFF)
    quarters = (high + 2**29) >> 30  # to the nearest; a full turn overflows to 0
    high = high - (quarters << 30)
    negative = high >> 31 == 1
    high, low = (jnp.where(negative, ~part, part).astype(jnp.float32) for part in (high, low))
    size = high * (2 * math.pi / 2**32) + low * (2 * math.pi / 2**64)
    return quarters, jnp.where(negative, -size, size)


def _turns(radians: Fraction) -> int:
    """The fraction of a turn that is left of an angle without its full turns, in units of 2^-64 turn."""
    return round(radians * TURNS_PER_RADIAN * 2**64) % 2**64


def _digits(numbers: Any) -> list[NDArray[np.uint32]]:
    """Integers below 2^64 as four digits of 16 bits, the lowest first: arrays of the shape of `numbers`."""
    whole = np.array(numbers, dtype=object) % 2**64
    return [((whole >> (16 * k)) & 0xFFFF).astype(np.uint32) for k in range(4)]


def rotate(x: Array, tables: tuple[Array, Array], pairing: RopePairing) -> Array:
    """Rotate lane pairs (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), rounded once ([ROPE-1] to [ROPE-3]).

    x (B, T, H, d) -> (B, T, H, d) in x's dtype.
    """
    cos, sin = tables
    B, T, H, d = x.shape
    pairs, lane = ((2, d // 2), 3) if pairing == "half" else ((d // 2, 2), 4)
    lanes = x.astype(cos.dtype).reshape(B, T, H, *pairs)
    x1, x2 = (lax.index_in_dim(lanes, i, lane, keepdims=False) for i in (0, 1))  # (B, T, H, d/2) each
    rotated = jnp.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis=lane)
    return rotated.reshape(B, T, H, d).astype(x.dtype)
