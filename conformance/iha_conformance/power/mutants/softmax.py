"""Softmax, queries that see nothing, and linear attention (SPEC.md 3.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from iha_conformance.power.mutants.registry import mutant
from iha_conformance.power.port import Booleans, Integers, Masks, Port
from iha_conformance.power.steps import Array


@mutant("no maximum subtracted", "SOFT-1", step="softmax")
def no_maximum(port: Port, logits: Array) -> tuple[Array, Array]:
    found = np.exp(logits.astype(port.accumulator())).astype(np.float64)
    total = found.sum(-1, keepdims=True)
    return found / np.where(total == 0, 1.0, total), np.log(total[..., 0])


def exponentials(logits: Array, axes: int | tuple[int, ...]) -> tuple[Array, Array]:
    """Exponentials and their sums over some axes; sums of nothing are 1."""
    largest = np.max(logits, axis=axes, initial=-np.inf, keepdims=True)
    found = np.exp(logits - np.where(np.isfinite(largest), largest, 0.0))
    total = found.sum(axis=axes, keepdims=True)
    return found, np.where(total == 0, 1.0, total)


@mutant("softmax over the queries", "SOFT-1", step="softmax")
def over_queries(port: Port, logits: Array) -> tuple[Array, Array]:
    found, total = exponentials(logits, -2)
    return found / total, port.softmax(logits)[1]


@mutant("softmax over the heads", "SOFT-1", step="softmax")
def over_heads(port: Port, logits: Array) -> tuple[Array, Array]:
    found, total = exponentials(logits, 1)
    return found / total, port.softmax(logits)[1]


@mutant("softmax over the P queries of a token together", "SOFT-1", step="softmax")
def over_pseudo_queries(port: Port, logits: Array) -> tuple[Array, Array]:
    B, H, T, S = logits.shape
    P = port.dims.P
    found, total = exponentials(logits.reshape(B, H, T // P, P, S), (-2, -1))
    return (found / total).reshape(logits.shape), port.softmax(logits)[1]


@mutant("softmax over the keys of each pseudo-head", "SOFT-1", step="softmax")
def over_keys_of_a_pseudo_head(port: Port, logits: Array) -> tuple[Array, Array]:
    B, H, T, S = logits.shape
    P = port.dims.P
    found, total = exponentials(logits.reshape(B, H, T, S // P, P), -2)
    return (found / total / P).reshape(logits.shape), port.softmax(logits)[1]


@mutant("not normalised", "SOFT-1", step="softmax")
def not_normalised(port: Port, logits: Array) -> tuple[Array, Array]:
    return exponentials(logits, -1)[0], port.softmax(logits)[1]


@mutant("hidden keys in the denominator", "SOFT-1", "LOG-3", step="softmax")
def hidden_keys_counted(port: Port, logits: Array) -> tuple[Array, Array]:
    """Hidden logits taken for 0, and their weights for 0 afterwards."""
    found, total = exponentials(np.where(np.isneginf(logits), 0.0, logits), -1)
    return np.where(np.isneginf(logits), 0.0, found / total), port.softmax(logits)[1]


@mutant("padding in the denominator", "SOFT-1", step="softmax")
def padding_counted(port: Port, logits: Array) -> tuple[Array, Array]:
    """Keys padded with zeros to a multiple of 8, and their logits, 0, not hidden."""
    more = -logits.shape[-1] % 8
    padded = np.concatenate([logits, np.zeros((*logits.shape[:-1], more))], axis=-1)
    return port.softmax(padded)[0][..., : logits.shape[-1]], port.softmax(logits)[1]


@mutant("a zero logit beside the others", "SOFT-1", step="softmax")
def one_more(port: Port, logits: Array) -> tuple[Array, Array]:
    """1 + the sum in the denominator, so that a query may attend to nothing."""
    padded = np.concatenate([logits, np.zeros((*logits.shape[:-1], 1))], axis=-1)
    return port.softmax(padded)[0][..., :-1], port.softmax(logits)[1]


@mutant("denominator + 0.001", "SOFT-1", step="softmax")
def epsilon(port: Port, logits: Array) -> tuple[Array, Array]:
    found, total = exponentials(logits, -1)
    return found / (total + 1e-3), port.softmax(logits)[1]


@mutant("weights below 0.001 dropped", "SOFT-1", step="softmax")
def small_weights_dropped(port: Port, logits: Array) -> tuple[Array, Array]:
    weights, lse = port.softmax(logits)
    return np.where(weights < 1e-3, 0.0, weights), lse


@mutant("base 2 without the factor log2(e)", "SOFT-1", step="softmax")
def base_two(port: Port, logits: Array) -> tuple[Array, Array]:
    return port.softmax(logits * np.log(2.0))[0], port.softmax(logits)[1]


@mutant("lse to base 2", "SOFT-3", step="softmax", shown_by="lse")
def binary_logarithm(port: Port, logits: Array) -> tuple[Array, Array]:
    """Natural for the weights, and lse to base 2."""
    weights, lse = port.softmax(logits)
    return weights, lse / np.log(2.0)


@mutant("lse without the maximum", "SOFT-3", step="softmax", shown_by="lse")
def lse_without_maximum(port: Port, logits: Array) -> tuple[Array, Array]:
    weights, lse = port.softmax(logits)
    return weights, lse - np.max(logits, axis=-1, initial=-np.inf)


# Rows that see nothing, and what is not finite


@mutant("mean where nothing is seen", "SOFT-2", "LOG-3", step="weighted_sum")
def mean_where_nothing_is_seen(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """What a large negative number in place of -inf gives."""
    out = port.weighted_sum(weights, mixed_v, visible)
    empty = ~np.any(visible, axis=-1, keepdims=True)[..., None]
    mean = mixed_v.sum(axis=1, keepdims=True) / max(1, mixed_v.shape[1])
    return np.where(empty, mean, out) if port.config.normalisation == "softmax" else out


@mutant("NaN where nothing is seen", "SOFT-2", step="softmax")
def nan_where_nothing_is_seen(port: Port, logits: Array) -> tuple[Array, Array]:
    found = np.exp(logits - np.max(logits, axis=-1, initial=-np.inf, keepdims=True))
    return found / found.sum(axis=-1, keepdims=True), port.softmax(logits)[1]


@mutant("dropped keys leak", "KEY-3", step="weighted_sum")
def dropped_keys_leak(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Weights of 0 times dropped values, which NaN and infinity survive."""
    v, alpha = (np.asarray(port.inputs[name], np.float64) for name in ("v", "alpha_v"))
    leaking: Array = np.einsum("bhts,bshe->bthe", weights, port.mix("v", v, alpha))
    return leaking


@mutant("visible NaN erased", "KEY-3", step="weighted_sum")
def nan_erased(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """NaN of a weighted sum taken for a query that sees nothing."""
    return np.nan_to_num(port.weighted_sum(weights, mixed_v, visible), nan=0.0)


# Linear attention


@mutant("normalisation ignored", "LIN-1", "CFG-1", step="change_config")
def normalisation_ignored(port: Port, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"normalisation": "softmax"}


@mutant("linear divided by the number of keys", "LIN-1", step="weighted_sum")
def linear_mean(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    out = port.weighted_sum(weights, mixed_v, visible)
    if port.config.normalisation == "softmax":
        return out
    count = np.maximum(1, visible.sum(axis=-1))[..., None, None]
    return np.asarray(out / count)


@mutant("linear without the scale", "LIN-1", "LOG-2", step="scale")
def linear_without_scale(port: Port) -> float:
    return port.scale() if port.config.normalisation == "softmax" else 1.0


@mutant("linear sees hidden keys", "LIN-1", "KEY-2", step="visible")
def linear_sees_all(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """Without softmax, and without a key mask, everything is visible."""
    visible = port.visible(query_index, key_index, masks)
    linear = port.config.normalisation == "none" and masks["key_mask"] is None
    return np.ones_like(visible) if linear else visible
