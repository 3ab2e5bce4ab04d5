"""All stages of one call with their errors, carried from the inputs to the output (SPEC.md 6.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iha_core.bounds import worst
from iha_core.bounds.formats import Arithmetic, Array
from iha_core.bounds.worst import Quantity, Weights
from iha_core.config import AttentionConfig
from iha_core.reference import rope_angles, softmax, token_indices, token_positions, visibility
from iha_core.validation import Dims


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """The query or the key side.

    Attributes:
        mixed, rotated: its stages, (B, T or S, H, d).
        operand: the rotated stage as the product may use it, scaled and stored once more.
        angles: its rotation, (B or 1, T or S, 1, d/2); None without one.
    """

    mixed: Quantity
    rotated: Quantity
    operand: Quantity
    angles: Array | None


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """All stages of one call with their errors.

    Attributes:
        arithmetic, config, scale: formats, configuration, factor of the logits.
        visible: (B, 1, T, S).
        q, k: the two sides of the logits.
        v: mixed values (B, S, H, e).
        logits, weights: (B, H, T, S).
        virtual_out: (B, T, H, e).
        output: (B, N, H, e).
        R: the collapse as a global one, (H, H, P).
    """

    arithmetic: Arithmetic
    config: AttentionConfig
    scale: float
    visible: NDArray[np.bool_]
    q: Side
    k: Side
    v: Quantity
    logits: Quantity
    weights: Weights
    virtual_out: Quantity
    output: Quantity
    R: Array


def propagate(
    tensors: Mapping[str, Any],
    stages: Mapping[str, Array],
    dims: Dims,
    config: AttentionConfig,
    rules: Arithmetic,
    optional: Mapping[str, Any],
    *,
    angles: Literal["allowed", "true"] = "allowed",
) -> Chain:
    """Carry the error bounds from the inputs to the output.

    Args:
        tensors: the seven arrays by name, exact; q, k and v may be quantities that are off already.
        stages: values of the reference.
        dims, config: sizes and configuration.
        rules: formats.
        optional: the optional arguments of `attention`, all of them.
        angles: "true" leaves out what [ROPE-5] allows the angles to be off.

    Returns:
        The chain; its values are those of `stages`.

    Source: SPEC.md 6.2.
    """
    scale = config.resolve_scale(dims.d)
    query_index, key_index = token_indices(dims, optional["query_offset"])
    positions = token_positions(query_index, key_index, optional["positions"], optional["kv_positions"])
    masks = {name: optional[name] for name in ("key_mask", "segment_ids", "kv_segment_ids")}
    visible = visibility(query_index, key_index, dims, config, **masks)[:, None]  # (B, 1, T, S)
    sides = []
    for name, position in zip("qk", positions, strict=True):
        mixed = worst.mixed(tensors[name], tensors[f"alpha_{name}"], stages[f"mixed_{name}"], rules)
        turn = rope_angles(position, dims, config)
        rotated = worst.rotated(mixed, stages[f"rotated_{name}"], turn, config, rules, angles=angles)
        operand = worst.scaled_operand(rotated, scale, rules)
        sides.append(Side(mixed=mixed, rotated=rotated, operand=operand, angles=turn))
    q_side, k_side = sides
    mixed_v = worst.mixed(tensors["v"], tensors["alpha_v"], stages["mixed_v"], rules)
    raw = np.where(visible, stages["logits"], 0.0)
    logits = worst.logits(q_side.operand, k_side.operand, raw, scale, rules)
    if config.normalisation == "softmax":
        weights = worst.softmax_weights(logits, softmax(stages["logits"])[0], visible, rules)
    else:
        weights = worst.linear_weights(logits, visible, rules)
    virtual_out = worst.weighted_sum(weights, mixed_v, stages["virtual_out"], visible, rules)
    return Chain(
        arithmetic=rules,
        config=config,
        scale=scale,
        visible=visible,
        q=q_side,
        k=k_side,
        v=mixed_v,
        logits=logits,
        weights=weights,
        virtual_out=virtual_out,
        output=worst.collapsed(virtual_out, tensors["collapse"], stages["output"], rules),
        R=worst.as_global(tensors["collapse"]),
    )
