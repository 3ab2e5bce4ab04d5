"""Scale, logits and their format (SPEC.md 3.4)."""

from __future__ import annotations

import math

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.mutants.registry import mutant
from iha_conformance.power.port import Port
from iha_conformance.power.steps import Array, to_bits
from iha_core.validation import NARROW_DTYPES

WIDE = ("float64", "float32")
"""Storage that is wider than 16 bits."""


def narrow(dtype: str) -> str:
    """The 16-bit format that an implementation in this storage dtype would use."""
    return dtype if dtype in NARROW_DTYPES else "bfloat16"


# Scale


def scale_of(port: Port, width: int) -> float:
    """The configured scale, or by default 1/sqrt(width)."""
    return 1.0 / math.sqrt(width) if port.config.scale is None else port.config.scale


@mutant("scale of d + 1", "LOG-2", step="scale")
def scale_of_next_width(port: Port) -> float:
    return scale_of(port, port.dims.d + 1)


@mutant("scale of e", "LOG-2", step="scale")
def scale_of_value_width(port: Port) -> float:
    return scale_of(port, port.dims.e)


@mutant("scale of the padded width", "LOG-2", step="scale")
def scale_of_padded_width(port: Port) -> float:
    """1/sqrt of the next power of two."""
    return scale_of(port, 2 ** int(np.ceil(np.log2(port.dims.d))))


@mutant("scale of all pseudo-heads' width", "LOG-2", step="scale")
def scale_of_all_pseudo_heads(port: Port) -> float:
    return port.scale() / math.sqrt(port.dims.P)


@mutant("default scale, whatever is configured", "LOG-2", "CFG-1", step="scale")
def scale_ignored(port: Port) -> float:
    return 1.0 / math.sqrt(port.dims.d)


@mutant("configured scale times the default", "LOG-2", step="scale")
def scale_twice(port: Port) -> float:
    default: float = 1.0 if port.config.scale is None else float(port.dims.d) ** -0.5
    return port.scale() * default


@mutant("q and k x 1.01", "LOG-1", step="products")
def larger_q_and_k(port: Port, q: Array, k: Array, scale: float) -> Array:
    return port.products(q * 1.01, k * 1.01, scale)


@mutant("last lane left out", "LOG-1", step="products")
def last_lane_left_out(port: Port, q: Array, k: Array, scale: float) -> Array:
    return port.products(q[..., :-1], k[..., :-1], scale)


@mutant("first head's keys for all heads", "LOG-1", step="products")
def first_heads_keys(port: Port, q: Array, k: Array, scale: float) -> Array:
    return port.products(q, np.broadcast_to(k[:, :, :1], k.shape), scale)


@mutant("logits capped softly at 50", "LOG-1", step="products")
def soft_cap(port: Port, q: Array, k: Array, scale: float) -> Array:
    return np.asarray(50.0 * np.tanh(port.products(q, k, scale) / 50.0))


# Formats of logits and operands


@mutant("logits stored in 16 bits", "NUM-2", step="products")
def narrow_logits(port: Port, q: Array, k: Array, scale: float) -> Array:
    return cast(port.products(q, k, scale), narrow(port.dtype)).astype(np.float64)


@mutant("logits stored in 16 bits, saturating", "NUM-2", step="products")
def saturating_logits(port: Port, q: Array, k: Array, scale: float) -> Array:
    return narrow_logits(port, q, k, scale).clip(-60000, 60000)


@mutant(
    "logits less their maximum stored in 16 bits",
    "NUM-2",
    step="softmax",
    dtypes=WIDE,
    because=(
        "with u the roundoff of 16 bits, a logit x below the maximum is off by u*x and its weight, e**-x of"
        " the largest, by u*x*e**-x, at most u/e of that; [NUM-3] allows u for the weight itself and u*|l|"
        " for each operand of the logit; only many such keys together show more, e**8 of them two limits"
    ),
)
def narrow_differences(port: Port, logits: Array) -> tuple[Array, Array]:
    largest = np.max(logits, axis=-1, initial=-np.inf, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0.0)
    weights, lse = port.softmax(cast(logits - shift, narrow(port.dtype)).astype(np.float64))
    return weights, lse + shift[..., 0]


@mutant(
    "operands rounded to 11 bits",
    "NUM-8",
    step="products",
    dtypes=("float32",),
    because="operands that are stored in 16 bits have 11 or fewer, and float64 is multiplied unrounded",
)
def narrow_operands(port: Port, q: Array, k: Array, scale: float) -> Array:
    """As matrix units of class tf32 do."""
    return port.products(to_bits(q, 11), to_bits(k, 11), scale)
