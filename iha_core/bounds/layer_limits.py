"""Limits of a whole layer: projections and norms around the operation (SPEC.md [LAY-7], [NUM-4])."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_core.bounds.chain import propagate
from iha_core.bounds.contraction import contracted
from iha_core.bounds.formats import HIGHEST, Arithmetic, Array, arithmetic, tolerances
from iha_core.bounds.limits import element_limit
from iha_core.bounds.worst import Operand, Quantity, kept, operand, operand_of
from iha_core.initialisers import fixed_mixing
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.reference import attention_stages
from iha_core.reference_layer import layer, project, rms_norm
from iha_core.validation import validate


def derive_layer_limits(
    parameters: Mapping[str, Any],
    x: Any,
    *,
    config: LayerConfig,
    storage: str,
    precision: str = HIGHEST,
    key_mask: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
) -> tuple[Array, Array]:
    """Run the golden layer and derive the limit of every element of its output.

    Takes the arguments of `layer`, and:

    Args:
        storage: storage dtype of the result, which x and the parameters already have (those of the operation
            may have float32).
        precision: precision class of the products ([NUM-8]).

    Returns:
        The exact output (B, N, D) and the largest allowed error of each element.

    Raises:
        IHAError: bad input, as from `layer`, or no such precision class.

    Source: SPEC.md 6.2, [LAY-7].
    """
    optional = {"key_mask": key_mask, "segment_ids": segment_ids, "positions": positions}
    output = layer(parameters, x, config=config, **optional)
    wide = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in parameters.items()}
    x = np.asarray(x, dtype=np.float64)
    rules = arithmetic(storage, precision)
    with np.errstate(invalid="ignore", over="ignore"):
        q, k, v = (_heads(side, wide, x, config, rules) for side in "qkv")
        if key_mask is not None:  # what is dropped has no influence
            kept = np.asarray(key_mask)[:, :, None, None]
            k, v = (side.mapped(lambda x: np.where(kept, x, np.zeros((), x.dtype))) for side in (k, v))
        mixing = wide if config.kind == "iha" else fixed_mixing(config)
        tensors = {name: mixing[name] for name in MIXING}
        values = {"q": q.value, "k": k.value, "v": v.value} | tensors
        attention = config.attention
        dims = validate(**values, config=attention, **optional)
        stages = attention_stages(**values, config=attention, **optional)
        every = optional | {"kv_segment_ids": None, "kv_positions": None, "query_offset": None}
        chain = propagate({"q": q, "k": k, "v": v} | tensors, stages, dims, attention, rules, every)
        width = config.num_heads * config.value_width
        merged = chain.output.mapped(lambda array: array.reshape(*x.shape[:2], width))  # (B, N, H*e)
        y = _projected("o_proj", operand_of(merged, rules), wide, output, rules)
    return output, element_limit(y.value, y.error, y.magnitude, rules.storage, rules)


def _heads(
    side: str, parameters: Mapping[str, Array], x: Array, config: LayerConfig, rules: Arithmetic
) -> Quantity:
    """Queries, keys or values with what they are off, (B, N, heads, width)."""
    name, width = f"{side}_proj", config.value_width if side == "v" else config.head_width
    flat = project(x, parameters, name)
    projected = _projected(name, operand(x, rules), parameters, flat, rules)
    shape = (*x.shape[:2], flat.shape[-1] // width, width)
    split = projected.mapped(lambda array: array.reshape(shape))  # (B, N, heads, width)
    if side == "v" or not config.qk_norm:
        return split
    return _normalised(split, parameters[f"{side}_norm.weight"], config.qk_norm_epsilon, rules)


def _projected(
    name: str, x: Operand, parameters: Mapping[str, Array], value: Array, rules: Arithmetic
) -> Quantity:
    """Equations (32) and (33)."""
    weight = operand(parameters[f"{name}.weight"], rules)
    bias = parameters.get(f"{name}.bias")
    addend = None if bias is None else np.broadcast_to(bias, value.shape)
    return contracted("bni,oi->bno", x, weight, value, rules, addend=addend)


def _normalised(x: Quantity, weight: Array, epsilon: float, rules: Arithmetic) -> Quantity:
    """Equation (34): with an error of m = mean x² + epsilon, 1/√m moves most where m is least."""
    d = x.value.shape[-1]
    value = rms_norm(x.value, weight, epsilon)
    square = np.mean(x.value**2, axis=-1, keepdims=True) + epsilon
    moved = np.mean(2 * np.abs(x.value) * x.error + x.error**2, axis=-1, keepdims=True)
    moved = moved + (d + 2) * rules.A * square
    least = np.sqrt(np.maximum(square - moved, epsilon * (1 - (d + 2) * rules.A)))
    inverse = 1 / least - 1 / np.sqrt(square)
    propagated = np.abs(weight) * (x.error / least + np.abs(x.value) * inverse)
    # A root, a division and two products, of which a fast inverse root has one unit more.
    summed = tolerances()["operations"]["norm"] * rules.A * np.abs(value)
    exact = np.zeros(value.shape, dtype=np.bool_)
    return kept(value, propagated, summed, exact, np.abs(value), np.ones_like(value), rules)
