"""The golden backward pass: SPEC.md chapter 9, equation by equation, in NumPy float64.

Written to be read beside `reference`, whose letters it uses. A bar of the specification is the ending
`_bar` here: the derivative of the loss by what it stands behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from iha_core.config import AttentionConfig
from iha_core.reference import (
    Array,
    Booleans,
    attention_stages,
    rope_angles,
    rotate,
    softmax,
    token_indices,
    token_positions,
    visibility,
    weighted_sum,
)
from iha_core.validation import Dims, validate, validate_cotangent

GRADIENTS = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")
"""Arguments that have a gradient, in the order of the signature."""


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    cotangent: Any,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> dict[str, Array]:
    """Gradient of sum(cotangent * attention(...)) by each of the seven arrays, in float64.

    Takes the arguments of `attention`, and:

    Args:
        cotangent: (B, N, H, e), the derivative of a loss by the output; dtype of q.

    Returns:
        By the names of the arguments, `GRADIENTS`, arrays of their shapes.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md chapter 9.
    """
    optional = {
        "key_mask": key_mask,
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "query_offset": query_offset,
    }
    arrays = (q, k, v, alpha_q, alpha_k, alpha_v, collapse)
    call = forward(arrays, cotangent, config, optional)
    with np.errstate(invalid="ignore", over="ignore"):
        bars = backward(call, config, optional)
    return {name: bars[name] for name in GRADIENTS}


class Forward(NamedTuple):
    """What a backward pass starts from.

    Attributes:
        tensors: the seven arrays by name, without what is not seen and does not see ([GRAD-8]).
        stages: the forward pass.
        visible: (B, T, S).
        dims: sizes.
        cotangent: (B, N, H, e).
    """

    tensors: dict[str, Array]
    stages: dict[str, Array]
    visible: Booleans
    dims: Dims
    cotangent: Array


def forward(
    arrays: Sequence[Any], cotangent: Any, config: AttentionConfig, optional: Mapping[str, Any]
) -> Forward:
    """Check all arguments and run the forward pass.

    Args:
        arrays: in the order of `GRADIENTS`.
        cotangent, config: as of `attention_vjp`.
        optional: the optional arguments of `attention`, all of them.

    Raises:
        IHAError: bad input.
    """
    dims = validate(*arrays, config=config, **optional)
    validate_cotangent(cotangent, arrays[0], dims)
    tensors = {name: np.asarray(x, dtype=np.float64) for name, x in zip(GRADIENTS, arrays, strict=True)}
    query_index, key_index = token_indices(dims, optional["query_offset"])
    masks = {name: optional[name] for name in ("key_mask", "segment_ids", "kv_segment_ids")}
    visible = visibility(query_index, key_index, dims, config, **masks)
    tensors |= without_unseen(tensors, visible, dims)
    stages = attention_stages(**tensors, config=config, **optional)
    return Forward(tensors, stages, visible, dims, np.asarray(cotangent, dtype=np.float64))


def without_unseen(tensors: Mapping[str, Array], visible: Booleans, dims: Dims) -> dict[str, Array]:
    """q, k and v with zeros where nothing is seen of a token, or by it: it adds nothing ([GRAD-8])."""
    pairs = visible.reshape(dims.B, dims.N, dims.P, dims.M, dims.P)
    sees, seen = np.any(pairs, axis=(2, 3, 4)), np.any(pairs, axis=(1, 2, 4))  # (B, N), (B, M)
    kept = {"q": sees, "k": seen, "v": seen}
    return {name: np.where(of[:, :, None, None], tensors[name], 0.0) for name, of in kept.items()}


def backward(call: Forward, config: AttentionConfig, optional: Mapping[str, Any]) -> dict[str, Array]:
    """All derivatives of the backward pass by the name of what they stand over, stages and arguments."""
    tensors, stages, visible, dims, cotangent = call
    scale = config.resolve_scale(dims.d)
    bars: dict[str, Array] = {"output": cotangent}
    bars["collapse"] = collapse_bar(cotangent, stages["virtual_out"], tensors["collapse"])
    bars["virtual_out"] = virtual_out_bar(cotangent, tensors["collapse"])

    is_softmax = config.normalisation == "softmax"
    weights = softmax(stages["logits"])[0] if is_softmax else stages["logits"]
    bars["mixed_v"] = over_queries(weights, bars["virtual_out"], visible)  # (25), [GRAD-2]
    bars["weights"] = weights_bar(bars["virtual_out"], stages["mixed_v"])
    bars["logits"] = logits_bar(weights, bars["weights"], visible, config)

    # (27), [GRAD-4]
    bars["rotated_q"] = scale * weighted_sum(bars["logits"], stages["rotated_k"], visible)
    bars["rotated_k"] = scale * over_queries(bars["logits"], stages["rotated_q"], visible)
    index = token_indices(dims, optional["query_offset"])
    positions = token_positions(*index, optional["positions"], optional["kv_positions"])
    for side, position in zip("qk", positions, strict=True):
        angles = rope_angles(position, dims, config)
        turned_back = None if angles is None else -angles
        bars[f"mixed_{side}"] = rotate(bars[f"rotated_{side}"], turned_back, config)  # (28), [GRAD-5]
    for side in "qkv":
        bars[side] = unmix(bars[f"mixed_{side}"], tensors[f"alpha_{side}"])
        bars[f"alpha_{side}"] = alpha_bar(tensors[side], bars[f"mixed_{side}"], dims.P)
    return bars


def collapse_bar(cotangent: Array, virtual_out: Array, collapse: Array) -> Array:
    """(23), [GRAD-1]: (B, N, H, e), (B, T, H, e) -> (H, H, P), or (H, P) for a per-head collapse."""
    equation = "bnhe,bnphe->hp" if collapse.ndim == 2 else "bnie,bnphe->ihp"
    bar: Array = np.einsum(equation, cotangent, by_token(virtual_out, collapse.shape[-1]))
    return bar


def virtual_out_bar(cotangent: Array, collapse: Array) -> Array:
    """(24), [GRAD-2]: (B, N, H, e), (H, H, P) or (H, P) -> (B, T, H, e)."""
    equation = "bnhe,hp->bnphe" if collapse.ndim == 2 else "bnie,ihp->bnphe"
    bar: Array = np.einsum(equation, cotangent, collapse)
    B, N, P, H, e = bar.shape
    return bar.reshape(B, N * P, H, e)


def over_queries(weights: Array, rows: Array, visible: Booleans) -> Array:
    """What each key receives from the queries that see it: (25), and the second line of (27) but the scale.

    (B, H, T, S), (B, T, H, width), (B, T, S) -> (B, S, H, width).
    """
    return weighted_sum(np.swapaxes(weights, 2, 3), rows, np.swapaxes(visible, 1, 2))


def weights_bar(virtual_out_bar: Array, mixed_v: Array) -> Array:
    """The first line of (26), [GRAD-3]: (B, T, H, e), (B, S, H, e) -> (B, H, T, S)."""
    bar: Array = np.einsum("bthe,bshe->bhts", virtual_out_bar, mixed_v)
    return bar


def logits_bar(weights: Array, weights_bar: Array, visible: Booleans, config: AttentionConfig) -> Array:
    """The rest of (26), [GRAD-3]; 0 where hidden ([GRAD-8]): (B, H, T, S)."""
    seen = visible[:, None]
    if config.normalisation == "none":
        return np.where(seen, weights_bar, 0.0)
    D = np.sum(np.where(seen, weights * weights_bar, 0.0), axis=-1, keepdims=True)  # (B, H, T, 1)
    return np.where(seen, weights * (weights_bar - D), 0.0)


def unmix(mixed_bar: Array, alpha: Array) -> Array:
    """(29), [GRAD-6]: (B, T, H, width), (source, H, P) -> (B, N, source, width)."""
    bar: Array = np.einsum("bnphw,shp->bnsw", by_token(mixed_bar, alpha.shape[-1]), alpha)
    return bar


def alpha_bar(x: Array, mixed_bar: Array, P: int) -> Array:
    """(30), [GRAD-7]: (B, N, source, width), (B, T, H, width) -> (source, H, P)."""
    bar: Array = np.einsum("bnsw,bnphw->shp", x, by_token(mixed_bar, P))
    return bar


def by_token(x: Array, P: int) -> Array:
    """The virtual tokens of each token together: (B, T, H, width) -> (B, N, P, H, width)."""
    B, T, H, width = x.shape
    return x.reshape(B, T // P, P, H, width)
