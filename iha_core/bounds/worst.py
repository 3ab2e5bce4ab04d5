"""Worst-case error of a conforming result, per element, stage by stage (SPEC.md [NUM-4], [NUM-5]).

Every function takes the exact values of the reference together with bounds of their errors and
returns the same for the next stage. Letters are those of SPEC.md: u and A are the roundoffs of the
storage format and of the accumulator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iha_core.bounds.formats import NO_GRID, Arithmetic, Array, grid, sum_is_exact, tolerances
from iha_core.config import AttentionConfig
from iha_core.reference import collapse_heads, lane_pairs, mix, rope_frequencies

Booleans = NDArray[np.bool_]

MOST_GROWTH = 700.0
"""Errors of a logit are cut here, so that their exponential is finite."""

_ANY_FINER = np.int64(-8192)  # grid exponent of a value that is not exact: finer than any sum allows


@dataclasses.dataclass(frozen=True, slots=True)
class Quantity:
    """A stage: its exact value and how far a conforming implementation may be from it.

    Attributes:
        value: the reference's value.
        error: bound of the absolute error, before the limit's factor.
        exact: whether `value` is the mathematical value itself, free of float64 rounding.
        magnitude: sum of the absolute values of the terms that made it.
        stored: bound of the final rounding to the storage format; the part of `error` it added.
        summed: bound of the error of its own sum, the part of `error` that accumulation added.
        terms: number of terms that are not zero in that sum.
    """

    value: Array
    error: Array
    exact: Booleans
    magnitude: Array
    stored: Array
    summed: Array
    terms: Array

    def mapped(self, change: Callable[[Any], Any]) -> Quantity:
        """The same change of shape, or of some elements, in all arrays."""
        return Quantity(
            **{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )


def rounding(value: Array, incoming: Array, exact: Booleans, arithmetic: Arithmetic) -> Array:
    """Error that rounding to the storage format adds: u|x| + eta in general.

    Where the exact value is a number of the format, rounding to nearest moves a result no further
    than its distance to that value, so it adds at most the incoming error, and nothing where the
    incoming error is below a quarter of the spacing.
    """
    storage = arithmetic.storage
    general = storage.u * np.abs(value) + storage.eta
    attracted = exact & storage.represents(value)
    held = np.where(incoming < storage.spacing(value) / 4, 0.0, np.minimum(general, incoming))
    return np.where(attracted, held, general)


def rounded_sum(
    value: Array,
    *,
    magnitude: Array,
    terms: Array,
    term_grid: NDArray[np.int64],
    propagated: Array,
    arithmetic: Arithmetic,
) -> Quantity:
    """A sum of products formed in the accumulator and rounded to storage once."""
    exact = sum_is_exact(term_grid, magnitude, arithmetic.accumulator)
    summed = np.where(exact, 0.0, terms * arithmetic.A * magnitude)
    return kept(value, propagated, summed, exact, magnitude, terms, arithmetic)


def kept(
    value: Array,
    propagated: Array,
    summed: Array,
    exact: Booleans,
    magnitude: Array,
    terms: Array,
    arithmetic: Arithmetic,
) -> Quantity:
    """A sum with its errors, rounded to storage."""
    incoming = propagated + summed
    stored = rounding(value, incoming, exact, arithmetic)
    return Quantity(
        value=value,
        error=incoming + stored,
        exact=exact,
        magnitude=magnitude,
        stored=stored,
        summed=summed,
        terms=terms,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """A factor in a sum of products, as the precision class may take it ([NUM-8]).

    Attributes:
        absolute: its exact absolute value.
        error: bound of its error, its rounding as an operand included.
        grid: its grid exponent, finer than anything where it is not exact or may be rounded.
        parts: how many numbers it may be split into, each with products of its own.
    """

    absolute: Array
    error: Array
    grid: NDArray[np.int64]
    parts: Array

    @property
    def count(self) -> Array:
        """Its parts, none where it is zero and has no products."""
        return np.asarray(self.parts * (self.absolute != 0))


def operand(
    value: Array,
    arithmetic: Arithmetic,
    *,
    error: Array | float = 0.0,
    exact: Booleans | bool = True,
    stored: Array | float = 0.0,
) -> Operand:
    """A factor of this value, by default an input; its rounding as an operand adds c(|x| + error) + eta.

    A number that the class takes as it is, and that is off by less than any number of the accumulator, is not
    rounded. Nor is what has been rounded to a storage format whose numbers are all taken as they are: of
    that rounding, which is the part `stored` of the error, and the operand's only the larger one happens.
    """
    error = np.broadcast_to(error, value.shape)
    factor = Operand(
        absolute=np.abs(value),
        error=error,
        grid=np.where(exact, grid(value), _ANY_FINER),
        parts=np.ones_like(value),
    )
    rule = arithmetic.operands
    if rule is None:
        return factor
    held = rule.format.represents(value) & (error < arithmetic.accumulator.spacing(value) / 4)
    spared = stored if rule.hold(arithmetic.storage) else 0.0
    rounded = rule.c * (factor.absolute + error - spared) + rule.format.eta
    return Operand(
        absolute=factor.absolute,
        error=np.where(held, error, error + np.maximum(0.0, rounded - spared)),
        grid=np.where(held, factor.grid, _ANY_FINER),
        parts=np.where(held, 1.0, float(rule.parts)),
    )


def operand_of(stage: Quantity, arithmetic: Arithmetic) -> Operand:
    """A stage as a factor."""
    return operand(stage.value, arithmetic, error=stage.error, exact=stage.exact, stored=stage.stored)


def mixed(x: Array | Quantity, alpha: Array, value: Array, arithmetic: Arithmetic) -> Quantity:
    """Mixing, equations (1) to (4): x (B, N, source, width), alpha (source, H, P).

    x is an input, or a stage of a layer that is itself off.
    """
    inputs = operand_of(x, arithmetic) if isinstance(x, Quantity) else operand(x, arithmetic)
    parameters = operand(alpha, arithmetic)
    B, N, _, width = inputs.absolute.shape
    _, H, P = alpha.shape
    term_grid = np.full((B, N, P, H, width), NO_GRID)
    for source in range(alpha.shape[0]):
        per_target = parameters.grid[source].T[:, :, None]  # (P, H, 1)
        both = inputs.grid[:, :, None, None, source] + per_target  # (B, N, P, H, width)
        np.minimum(term_grid, both, out=term_grid)
    return rounded_sum(
        value,
        magnitude=mix(inputs.absolute, parameters.absolute),
        terms=mix(inputs.count, parameters.count),
        term_grid=term_grid.reshape(value.shape),
        propagated=mix(inputs.absolute, parameters.error)
        + mix(inputs.error, parameters.absolute + parameters.error),
        arithmetic=arithmetic,
    )


def rotated(
    x: Quantity,
    value: Array,
    turn: Array | None,
    config: AttentionConfig,
    arithmetic: Arithmetic,
    *,
    angles: Literal["allowed", "true"],
) -> Quantity:
    """Rotation, equation (6); a rotation by angle 0, or of zeros, is exact and changes nothing.

    `turn` (B or 1, T, 1, d/2) are the exact angles. With `angles` "true", what [ROPE-5] allows them to be
    off is left out.
    """
    if turn is None:
        return x
    constants = tolerances()["operations"]
    first, second = lane_pairs(value.shape[-1], config.rope_pairing)
    cosine, sine = np.abs(np.cos(turn)), np.abs(np.sin(turn))
    u, eta = arithmetic.u, arithmetic.storage.eta
    # The exponent of the frequency is rounded, which the power magnifies by its logarithm.
    frequency = rope_frequencies(value.shape[-1], config.rope_theta)
    angle_error = (constants["angle"] + np.abs(np.log(frequency))) * 2.0**-53 * np.abs(turn)
    if angles == "true":
        angle_error = np.zeros_like(turn)

    # In two steps around the mixing, errors are relative to what is mixed and not to the mixture.
    mixing = x.magnitude[..., first] + x.magnitude[..., second]
    work = (constants["rotation"] * arithmetic.A + angle_error) * mixing
    # The factors of that mixing are rotated, and no numbers that a class takes as they are. What their
    # rounding adds takes the place of what that of unrotated ones added to x.
    rule = arithmetic.operands
    of_rotated, of_unrotated = np.zeros_like(mixing), np.zeros_like(x.error)
    if rule is not None:
        most = np.maximum(x.terms[..., first], x.terms[..., second])
        of_rotated = (2 * rule.c + rule.c**2 + (rule.parts**2 - 1) * most * arithmetic.A) * mixing
        of_unrotated = np.maximum(0.0, x.error - x.summed - x.stored)

    own = np.empty_like(value)
    propagated = np.empty_like(value)
    magnitude = np.empty_like(value)
    unturned = np.empty(value.shape, dtype=np.bool_)
    for lane, partner in ((first, second), (second, first)):
        along, across = np.abs(x.value[..., lane]), np.abs(x.value[..., partner])
        magnitude[..., lane] = along * cosine + across * sine
        stored_table = constants["rotation_storage"] * u * magnitude[..., lane] + eta * (along + across + 2)
        replaced = cosine * of_unrotated[..., lane] + sine * of_unrotated[..., partner]
        own[..., lane] = stored_table + work + np.maximum(0.0, of_rotated - replaced)
        propagated[..., lane] = cosine * x.error[..., lane] + sine * x.error[..., partner]
        unturned[..., lane] = (turn == 0) | (mixing == 0)
    own = np.where(unturned, 0.0, own)
    exact = x.exact & unturned
    incoming = propagated + own
    stored = np.where(unturned, 0.0, rounding(value, incoming, exact, arithmetic))
    return Quantity(
        value=value,
        error=incoming + stored,
        exact=exact,
        magnitude=magnitude,
        stored=np.where(unturned, x.stored, stored),
        summed=own,
        terms=np.ones_like(value),
    )


def scaled_operand(x: Quantity, scale: float, arithmetic: Arithmetic) -> Quantity:
    """A rotated query or key as a kernel may use it: multiplied by sqrt(scale) and stored again.

    Kernels scale the product, one operand, or both by the root. Where the root is a power of two
    none of these rounds.
    """
    if root_is_power_of_two(scale):
        return x
    eta = arithmetic.storage.eta / min(1.0, scale)  # of what was multiplied by the scale or by its root
    extra = np.where(x.value == 0, 0.0, arithmetic.u * np.abs(x.value) + eta)
    return dataclasses.replace(x, error=x.error + extra, exact=x.exact & (x.value == 0))


def logits(q: Quantity, k: Quantity, value: Array, scale: float, arithmetic: Arithmetic) -> Quantity:
    """Logits, equation (7), which are never stored below float32 ([NUM-2])."""
    product = "bthd,bshd->bhts"
    queries, keys = operand_of(q, arithmetic), operand_of(k, arithmetic)
    magnitude = scale * np.einsum(product, queries.absolute, keys.absolute)
    terms = np.einsum(product, queries.count, keys.count)
    propagated = scale * (
        np.einsum(product, queries.absolute, keys.error)
        + np.einsum(product, queries.error, keys.absolute)
        + np.einsum(product, queries.error, keys.error)
    )
    q_grid, k_grid = np.moveaxis(queries.grid, 2, 1), np.moveaxis(keys.grid, 2, 1)  # (B, H, T or S, d)
    term_grid = np.full(value.shape, NO_GRID)
    for lane in range(q.value.shape[-1]):
        np.minimum(term_grid, q_grid[:, :, :, None, lane] + k_grid[:, :, None, :, lane], out=term_grid)
    exact = sum_is_exact(term_grid, magnitude / scale, arithmetic.accumulator)
    exact &= root_is_power_of_two(scale) | (magnitude == 0)
    scaling = tolerances()["operations"]["logit_scaling"]
    summed = np.where(exact, 0.0, arithmetic.A * (terms * magnitude + scaling * np.abs(value)))
    return Quantity(
        value=value,
        error=propagated + summed,
        exact=exact,
        magnitude=magnitude,
        stored=np.zeros_like(value),
        summed=summed,
        terms=terms,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Softmax weights, or masked logits under normalisation "none", with their own errors.

    Attributes:
        value: (B, H, T, S), 0 where hidden.
        error: their error; under softmax without that of the logits.
        own: the part of `error` that forming and storing the weights adds.
        logit_error: errors of the logits that enter through the softmax, 0 where hidden.
        exact: whether the weight is exact; under softmax those of the tied largest logits of an
            exact row.
        negligible: weights of an exact row that may be kept or flushed to zero.
        magnitude: sum of absolute values behind each weight.
    """

    value: Array
    error: Array
    own: Array
    logit_error: Array
    exact: Booleans
    negligible: Booleans
    magnitude: Array


def softmax_weights(l: Quantity, value: Array, visible: Booleans, arithmetic: Arithmetic) -> Weights:
    """Weights of equation (8); value is (B, H, T, S), visible (B, 1, T, S)."""
    constants = tolerances()["operations"]
    seen = np.broadcast_to(visible, value.shape)
    score = np.where(seen, l.value, -np.inf)
    largest = np.max(score, axis=-1, initial=-np.inf, keepdims=True)
    largest = np.where(largest == -np.inf, 0.0, largest)
    logit_error = np.where(seen, l.error, 0.0)

    # An exact row: the largest logits tie in a power-of-two number, nothing is uncertain, and all
    # others are negligible. Its weights are 1/2**k and 0 in any arithmetic.
    top = seen & (score == largest)
    ties = np.count_nonzero(top, axis=-1, keepdims=True)
    power_of_two = (ties > 0) & (ties & (ties - 1) == 0)
    certain = np.all(~seen | l.exact, axis=-1, keepdims=True) & ~np.any(logit_error, axis=-1, keepdims=True)
    below = np.all(~seen | top | (score <= largest - constants["separated"]), axis=-1, keepdims=True)
    exact_row = power_of_two & certain & below

    with np.errstate(invalid="ignore"):
        distance = np.where(seen, np.abs(l.value) + np.abs(largest), 0.0)
    error = value * (arithmetic.A * (constants["exponential"] + distance) + arithmetic.u)
    error += np.where(seen, arithmetic.storage.eta, 0.0)
    error += np.where(value < constants["negligible_weight"], value, 0.0)
    error = np.where(exact_row & top, 0.0, np.where(exact_row, value, error))
    error = np.where(seen, error, 0.0)
    return Weights(
        value=value,
        error=error,
        own=error,
        logit_error=logit_error,
        exact=(exact_row & top) | ~seen,
        negligible=exact_row & seen & ~top,
        magnitude=value,
    )


def linear_weights(l: Quantity, visible: Booleans, arithmetic: Arithmetic) -> Weights:
    """Weights under normalisation "none" ([LIN-1]): the logits, which may be stored once."""
    seen = np.broadcast_to(visible, l.value.shape)
    value = np.where(seen, l.value, 0.0)
    stored = rounding(l.value, l.error, l.exact, arithmetic)
    return Weights(
        value=value,
        error=np.where(seen, l.error + stored, 0.0),
        own=np.where(seen, stored, 0.0),
        logit_error=np.zeros_like(value),
        exact=l.exact | ~seen,
        negligible=np.zeros_like(seen),
        magnitude=np.where(seen, l.magnitude, 0.0),
    )


def log_sum(l: Quantity, lse: Array, weights: Weights, visible: Booleans, arithmetic: Arithmetic) -> Array:
    """Bound of the error of the log of the sum of exponentials, equation (9)."""
    constants = tolerances()["operations"]
    count = np.count_nonzero(np.broadcast_to(visible, l.value.shape), axis=-1)
    uncertain = np.log1p(np.sum(weights.value * np.expm1(_capped(weights.logit_error)), axis=-1))
    largest = np.max(np.where(visible, np.abs(l.value), 0.0), axis=-1, initial=0.0)
    finite = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    return np.asarray(uncertain + arithmetic.A * (count + constants["exponential"] + 2 * largest + finite))


def weighted_sum(
    weights: Weights, v: Quantity, value: Array, visible: Booleans, arithmetic: Arithmetic
) -> Quantity:
    """Weighted sum of the values, equation (10): value (B, T, H, e), visible (B, 1, T, S).

    With weights a e^delta / sum(a e^delta), |delta| <= eps, the result moves by
    sum(a (e^delta - 1) (v - o)) / sum(a e^delta), and it never leaves the hull of the visible values.
    """
    constants = tolerances()["operations"]
    B, H, T, S = weights.value.shape
    e = value.shape[-1]
    values = operand_of(v, arithmetic)
    v_value, v_error, v_parts = (
        np.swapaxes(x, 1, 2) for x in (v.value, values.error, values.parts)
    )  # (B, H, S, e)
    v_grid = np.swapaxes(values.grid, 1, 2)
    # A NaN or infinity adds nothing where it is hidden, and where it is seen there is no limit.
    v_error = np.where(np.isfinite(v_value), v_error, 0.0)
    v_value = np.where(np.isfinite(v_value), v_value, 0.0)
    by_storage = np.minimum(weights.own, arithmetic.u * np.abs(weights.value) + arithmetic.storage.eta)
    factors = operand(
        weights.value, arithmetic, error=weights.error, exact=weights.exact, stored=by_storage
    )  # (B, H, T, S)
    seen = np.broadcast_to(visible, weights.value.shape)

    moved = np.zeros((B, H, T, e))
    term_grid = np.full((B, H, T, e), NO_GRID)
    growth = np.expm1(_capped(weights.logit_error))
    shrunk = np.sum(weights.value * np.exp(-_capped(weights.logit_error)), axis=-1)
    weight_grid = np.where(weights.negligible | ~seen, NO_GRID, factors.grid)
    any_moved = bool(np.any(growth))
    for t in range(T) if S else ():
        row = seen[:, :, t, :, None]
        if any_moved:
            gap = np.where(row, np.abs(v_value - np.swapaxes(value[:, t : t + 1], 1, 2)), 0.0)  # (B, H, S, e)
            shift = np.einsum("bhs,bhse->bhe", weights.value[:, :, t] * growth[:, :, t], gap)
            total = np.where(shrunk[:, :, t] > 0, shrunk[:, :, t], 1.0)[..., None]
            moved[:, :, t] = np.minimum(shift / total, np.max(gap, axis=2))
        np.min(weight_grid[:, :, t, :, None] + v_grid, axis=2, out=term_grid[:, :, t])

    def over_keys(per_weight: Array, per_value: Array) -> Array:
        return np.asarray(np.einsum("bhts,bhse->bhte", per_weight, per_value))

    absolute = factors.absolute
    counted = np.where(weights.negligible, 0.0, weights.magnitude)
    magnitude = over_keys(weights.magnitude, np.abs(v_value))
    exact_magnitude = over_keys(np.where(weights.negligible, 0.0, absolute), np.abs(v_value))
    propagated = (
        moved + over_keys(factors.error, np.abs(v_value)) + over_keys(absolute + factors.error, v_error)
    )
    # Under softmax the denominator is a sum too; it is exact in the rows whose weights are.
    exact = sum_is_exact(term_grid, exact_magnitude, arithmetic.accumulator)
    v_most = np.max(v_parts, axis=2, keepdims=True, initial=1.0)  # (B, H, 1, e)
    parts = np.max(factors.parts, axis=3, keepdims=True, initial=1.0) * v_most
    terms = np.count_nonzero(seen, axis=-1)[..., None] * parts  # (B, H, T, e)
    sums = constants["sums_per_weighted_sum"]
    summed = np.where(exact, 0.0, sums * terms * arithmetic.A * over_keys(counted, np.abs(v_value)))
    exact = np.swapaxes(exact, 1, 2)  # (B, T, H, e), as all that follows
    summed, propagated, magnitude, terms = (
        np.swapaxes(x, 1, 2) for x in (summed, propagated, magnitude, terms)
    )
    return kept(value, propagated, summed, exact, magnitude, terms, arithmetic)


def collapsed(o: Quantity, collapse: Array, value: Array, arithmetic: Arithmetic) -> Quantity:
    """Collapse, equations (11) and (12): o (B, T, H, e) -> (B, N, H, e)."""
    R = operand(as_global(collapse), arithmetic)
    pseudo = operand_of(o, arithmetic)
    H, P = R.absolute.shape[1:]
    B, T, _, e = o.value.shape
    o_grid = pseudo.grid.reshape(B, T // P, P, H, e)
    term_grid = np.full(value.shape, NO_GRID)
    for h in range(H):
        for p in range(P):
            both = R.grid[:, h, p][None, None, :, None] + o_grid[:, :, p, h][:, :, None, :]  # (B, N, H, e)
            np.minimum(term_grid, both, out=term_grid)
    return rounded_sum(
        value,
        magnitude=collapse_heads(pseudo.absolute, R.absolute),
        terms=collapse_heads(pseudo.count, R.count),
        term_grid=term_grid,
        propagated=collapse_heads(pseudo.error, R.absolute)
        + collapse_heads(pseudo.absolute + pseudo.error, R.error),
        arithmetic=arithmetic,
    )


def as_global(collapse: Array) -> Array:
    """A per-head collapse written as the global one it is ([COL-2]): (H, P) -> (H, H, P)."""
    if collapse.ndim == 3:
        return collapse
    return np.asarray(np.eye(len(collapse))[:, :, None] * collapse[None])


def _capped(error: Any) -> Array:
    """Keep e**error finite; beyond this the hull of the values is the bound."""
    return np.asarray(np.minimum(error, MOST_GROWTH))


def root_is_power_of_two(scale: float) -> bool:
    """Whether neither a scale nor its root, which kernels multiply both sides by, rounds anything."""
    fraction, exponent = math.frexp(scale)
    return fraction == 0.5 and (exponent - 1) % 2 == 0
