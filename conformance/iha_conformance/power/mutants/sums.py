"""Sums that are too narrow ([NUM-1]), and the weighted sum ([OUT-1])."""

from __future__ import annotations

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.mutants.logits import WIDE, narrow
from iha_conformance.power.mutants.registry import mutant
from iha_conformance.power.mutants.softmax import exponentials
from iha_conformance.power.port import Booleans, Port, Side
from iha_conformance.power.steps import Array, Steps


def added(port: Steps, terms: Array) -> Array:
    """Sum over the last axis, rounded to 16 bits after every term."""
    total = np.zeros(terms.shape[:-1])
    for i in range(terms.shape[-1]):
        total = cast(total + terms[..., i], narrow(port.dtype)).astype(np.float64)
    return total


@mutant("mixing summed in 16 bits", "NUM-1", step="mix")
def narrow_mixing(port: Port, side: Side, x: Array, alpha: Array) -> Array:
    terms = np.einsum("bnsw,shp->bnphws", x, alpha)
    B, N, P, H, width, _ = terms.shape
    return added(port, terms).reshape(B, N * P, H, width)


@mutant("products summed in 16 bits", "NUM-1", "LOG-1", step="products")
def narrow_products(port: Port, q: Array, k: Array, scale: float) -> Array:
    return added(port, scale * np.einsum("bthd,bshd->bhtsd", q, k))


@mutant("denominator summed in 16 bits", "NUM-1", "SOFT-1", step="softmax")
def narrow_denominator(port: Port, logits: Array) -> tuple[Array, Array]:
    found, _ = exponentials(logits, -1)
    total = added(port, found)[..., None]
    return found / np.where(total == 0, 1.0, total), port.softmax(logits)[1]


@mutant("weighted sum in 16 bits", "NUM-1", "OUT-1", step="weighted_sum")
def narrow_weighted_sum(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    return added(port, np.einsum("bhts,bshe->bthes", weights, mixed_v))


@mutant("collapse summed in 16 bits", "NUM-1", "COL-1", step="collapse")
def narrow_collapse(port: Port, virtual_out: Array, R: Array) -> Array:
    if R.ndim == 2:
        R = np.eye(len(R))[:, :, None] * R
    B, T, H, e = virtual_out.shape
    P = R.shape[-1]
    terms = np.einsum("bnphe,ihp->bniehp", virtual_out.reshape(B, T // P, P, H, e), R)
    return added(port, terms.reshape(*terms.shape[:4], H * P))


@mutant("values of the first head for all", "OUT-1", step="weighted_sum")
def first_heads_values(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    return port.weighted_sum(weights, np.broadcast_to(mixed_v[:, :, :1], mixed_v.shape), visible)


@mutant("values one virtual key late", "OUT-1", "MIX-4", step="weighted_sum")
def values_late(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Weights and values of neighbouring keys paired."""
    return port.weighted_sum(weights, np.roll(mixed_v, 1, axis=1), visible)


@mutant("value of pseudo-head 0 for all virtual keys", "MIX-3", "OUT-1", step="weighted_sum")
def values_of_pseudo_head_zero(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Every virtual key of a token with the value of its pseudo-head 0."""
    P = port.dims.P
    return port.weighted_sum(weights, np.repeat(mixed_v[:, ::P], P, axis=1), visible)


# What may be rounded to storage, rounded to 16 bits where storage is wider

ALLOWED = "in 16-bit storage it is what [NUM-3] allows"


def stored_narrow(port: Port, x: Array) -> Array:
    return cast(x, narrow(port.dtype)).astype(np.float64)


@mutant("weights stored in 16 bits", "NUM-3", step="weighted_sum", dtypes=WIDE, because=ALLOWED)
def narrow_weights(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    return port.weighted_sum(stored_narrow(port, weights), mixed_v, visible)


@mutant("mixed values stored in 16 bits", "NUM-3", step="weighted_sum", dtypes=WIDE, because=ALLOWED)
def narrow_values(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    return port.weighted_sum(weights, stored_narrow(port, mixed_v), visible)


@mutant("rotated queries and keys stored in 16 bits", "NUM-3", step="rotate", dtypes=WIDE, because=ALLOWED)
def narrow_rotated(port: Port, side: Side, x: Array, angles: Array | None) -> Array:
    return stored_narrow(port, port.rotate(side, x, angles))


@mutant("virtual outputs stored in 16 bits", "NUM-3", step="collapse", dtypes=WIDE, because=ALLOWED)
def narrow_virtual_out(port: Port, virtual_out: Array, R: Array) -> Array:
    return port.collapse(stored_narrow(port, virtual_out), R)


@mutant(
    "virtual outputs truncated, not rounded",
    "NUM-3",
    step="weighted_sum",
    dtypes=("float16", "bfloat16"),
    because="in float32 and float64 one unit in the last place, all that it costs, is within every limit",
)
def truncated(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Towards zero, as cutting off the lower half of a binary32 does."""
    out = port.weighted_sum(weights, mixed_v, visible)
    stored = cast(out, port.dtype)
    too_large = np.abs(stored.astype(np.float64)) > np.abs(out)
    return np.where(too_large, np.nextafter(stored, stored.dtype.type(0)), stored).astype(np.float64)
