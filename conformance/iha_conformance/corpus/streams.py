"""Pseudo-random integers that are the same on every platform (SPEC.md [GEN-1]).

Only integer arithmetic and one exact scaling by a power of two: no platform's random generator and
no transcendental function is involved, so inputs agree to the last bit everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def bits24(stream: str, shape: Sequence[int]) -> NDArray[np.int64]:
    """Integers in [0, 2**24): upper bits of SplitMix64, keyed by the SHA-256 of the stream's name."""
    key = np.uint64(int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little"))
    count = math.prod(shape)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        z = key + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.int64).reshape(shape)


def uniform(stream: str, shape: Sequence[int], amplitude: float) -> Array:
    """Multiples of amplitude * 2**-23 spread evenly over [-amplitude, amplitude)."""
    return (bits24(stream, shape) - 2**23).astype(np.float64) * (amplitude * 2.0**-23)


def integers(stream: str, shape: Sequence[int], low: int, high: int) -> Array:
    """Whole numbers from low to high, both included."""
    return (low + bits24(stream, shape) * (high - low + 1) // 2**24).astype(np.float64)


def cast(x: Any, dtype: str) -> NDArray[Any]:
    """Round to a storage dtype, to nearest and ties to even."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(x, dtype=np.float64).astype(np.float32).astype(ml_dtypes.bfloat16)
    return np.asarray(x).astype(dtype)
