"""How far rounding may move what a port of a dialect gives (SPEC.md 6.2), step by step as in `model`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from iha_conformance.diagnose.model import Array, Call, Stages, lay, normalised, unlay
from iha_core import reference
from iha_core.bounds import Arithmetic, tolerances, worst
from iha_core.bounds.worst import Quantity

NORM_ALLOWANCE = 1e-5
"""What ports add to a mean square before its root, at most; no choice of it makes a dialect."""


def limit(call: Call, stages: Stages, rules: Arithmetic) -> Array:
    """Largest |error| of each element of the output (B, N, H, e) that a port of the dialect may have."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        sides = {side: mixed_bound(call, side, rules) for side in "qkv"}
        q, k = (rotated_bound(call, side, sides[side], stages[f"rotated_{side}"], rules) for side in "qk")
        scores = logits_bound(call, q, k, stages["logits"], rules)
        out = sum_bound(call, scores, stages["logits"], sides["v"], stages["virtual_out"], rules)
        return allowed(collapsed_bound(call, out, stages["output"], rules), rules)


def allowed(stage: Quantity, rules: Arithmetic) -> Array:
    """The limit of a stage in the storage format ([NUM-4])."""
    floor = np.maximum(rules.storage.spacing(stage.value), rules.A * stage.magnitude)
    return np.asarray(np.maximum(floor, tolerances()["limits"]["worst"] * stage.error))


def given(value: Array, rules: Arithmetic) -> Quantity:
    """A stage as a port gave it: what it went on with may be off by one rounding ([STG-1])."""
    error = rules.u * np.abs(value) + rules.storage.eta
    zero = np.zeros_like(value)
    return Quantity(
        value=value,
        error=error,
        exact=np.zeros(value.shape, np.bool_),
        magnitude=np.abs(value),
        stored=error,
        summed=zero,
        terms=np.ones_like(value),
    )


def mixed_bound(call: Call, side: str, rules: Arithmetic) -> Quantity:
    x, alpha = getattr(call, side), getattr(call, f"alpha_{side}")
    bound = worst.mixed(x, alpha, reference.mix(x, alpha), rules)
    if call.dialect.qk_norm == "before_mix" and side != "v":
        own = reference.mix(_norm_error(call.plain[side], x, np.zeros_like(x), rules), np.abs(alpha))
        bound = dataclasses.replace(
            bound, error=bound.error + own, exact=np.zeros(bound.value.shape, np.bool_)
        )
    P = alpha.shape[2]
    return _rearranged(bound, lambda x: lay(call.dialect, x, P))


def rotated_bound(call: Call, side: str, x: Quantity, value: Array, rules: Arithmetic) -> Quantity:
    if call.dialect.qk_norm == "after_mix":
        held = normalised(x.value, call.dialect.qk_multiplier)
        growth = np.sqrt(np.sum(held**2, axis=-1, keepdims=True) / np.sum(x.value**2, axis=-1, keepdims=True))
        x = dataclasses.replace(
            x,
            value=held,
            error=_norm_error(x.value, held, growth * x.error, rules),
            exact=np.zeros(held.shape, np.bool_),
            magnitude=growth * x.magnitude,
        )
    turn = call.turn_q if side == "q" else call.turn_k
    return worst.rotated(x, value, turn, call.config, rules, angles="allowed")


def _norm_error(plain: Array, held: Array, incoming: Array, rules: Arithmetic) -> Array:
    """Error of x once it is normalised, `held`, when it was off by `incoming` in the measure of that."""
    d = held.shape[-1]
    square = np.sum(held**2, axis=-1, keepdims=True)
    by_others = np.sum(np.abs(held) * incoming, axis=-1, keepdims=True) / np.where(square > 0, square, 1.0)
    added = NORM_ALLOWANCE / (2 * np.mean(plain**2, axis=-1, keepdims=True))
    own = by_others + (d + 4) * rules.A + 2 * rules.u + added
    return np.asarray(incoming + np.abs(held) * own + rules.storage.eta)


def logits_bound(call: Call, q: Quantity, k: Quantity, value: Array, rules: Arithmetic) -> Quantity:
    raw = np.where(call.visible[:, None], value, 0.0)
    q, k = (worst.scaled_operand(side, call.scale, rules) for side in (q, k))
    return worst.logits(q, k, raw, call.scale, rules)


def sum_bound(
    call: Call, scores: Quantity, logits: Array, v: Quantity, value: Array, rules: Arithmetic
) -> Quantity:
    visible = call.visible[:, None]
    if call.dialect.normalisation == "softmax":
        weights = worst.softmax_weights(scores, reference.softmax(logits)[0], visible, rules)
    else:
        weights = worst.linear_weights(scores, visible, rules)
    return worst.weighted_sum(weights, v, value, visible, rules)


def collapsed_bound(call: Call, out: Quantity, value: Array, rules: Arithmetic) -> Quantity:
    P = call.R.shape[2]
    laid = _rearranged(out, lambda x: unlay(call.dialect, x, P))
    bound = worst.collapsed(laid, call.R, value, rules)
    return dataclasses.replace(bound, magnitude=reference.collapse_heads(laid.magnitude, np.abs(call.R)))


def _rearranged(stage: Quantity, rearrange: Callable[[Any], Any]) -> Quantity:
    """A stage with its virtual tokens in another order."""
    fields = {field.name: rearrange(getattr(stage, field.name)) for field in dataclasses.fields(Quantity)}
    return Quantity(**fields)
