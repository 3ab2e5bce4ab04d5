"""The golden forward pass: SPEC.md chapter 3, equation by equation, in NumPy float64.

Written to be read beside the specification. Nothing is optimised, nothing is fused, and every
function cites the requirement it carries out. Shapes use SPEC.md's dimension legend:
B batch, N query tokens, M key tokens, H heads, G key/value heads, P pseudo-heads, d query and key
width, e value width, T = N*P virtual queries, S = M*P virtual keys.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from iha_core.config import AttentionConfig, RopePairing
from iha_core.validation import Dims, validate

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

STAGES = (
    "mixed_q",
    "mixed_k",
    "mixed_v",
    "rotated_q",
    "rotated_k",
    "logits",
    "lse",
    "virtual_out",
    "output",
)
"""Names of the intermediate results, in order ([STG-1])."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> Array:
    """Interleaved Head Attention, exactly as specified, in float64.

    Args:
        q: (B, N, H, d) queries; float64, float32, float16 or bfloat16.
        k: (B, M, G, d) keys, dtype of q.
        v: (B, M, G, e) values, dtype of q.
        alpha_q: (H, H, P) mixing of queries [source, target, pseudo]; dtype of q, or float32
            while q is float16 or bfloat16.
        alpha_k: (G, H, P) mixing of keys, dtype of alpha_q.
        alpha_v: (G, H, P) mixing of values, dtype of alpha_q.
        collapse: (H, H, P) [out, source, pseudo], or (H, P) for the per-head restriction; dtype of
            alpha_q.
        config: the choices of the operation.
        key_mask: (B, M) bool, True where a key may be attended; None for all.
        segment_ids: (B, N) int; attention stays within equal ids.
        kv_segment_ids: (B, M) int; None means segment_ids, and then N = M.
        positions: (B, N) int token positions for RoPE; None means index order.
        kv_positions: (B, M) int; None means positions (and then N = M), or index order.
        query_offset: index of the first query among the keys: an int, or integers () or (B,);
            None means M - N.

    Returns:
        (B, N, H, e) float64, whatever the dtype of the inputs: the exact answer for these inputs,
        up to float64 rounding.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md chapter 3; arXiv:2602.21371, Section 4 and Algorithm 1.
    """
    return attention_stages(
        q,
        k,
        v,
        alpha_q,
        alpha_k,
        alpha_v,
        collapse,
        config=config,
        key_mask=key_mask,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        positions=positions,
        kv_positions=kv_positions,
        query_offset=query_offset,
    )["output"]


def attention_stages(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> dict[str, Array]:
    """All intermediate results of `attention`, by the names of `STAGES`, in float64.

    Takes the arguments of `attention`. Returns mixed_q, mixed_k, mixed_v (B, T or S, H, d or e);
    rotated_q, rotated_k; logits (B, H, T, S), -inf where hidden (0 under normalisation "none");
    lse (B, H, T), absent under normalisation "none"; virtual_out (B, T, H, e); output
    (B, N, H, e). Raises what `attention` raises. Source: [STG-1].
    """
    dims = validate(
        q,
        k,
        v,
        alpha_q,
        alpha_k,
        alpha_v,
        collapse,
        config=config,
        key_mask=key_mask,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        positions=positions,
        kv_positions=kv_positions,
        query_offset=query_offset,
    )
    q, k, v, alpha_q, alpha_k, alpha_v, collapse = (
        np.asarray(array, dtype=np.float64) for array in (q, k, v, alpha_q, alpha_k, alpha_v, collapse)
    )
    query_index, key_index = token_indices(dims, query_offset)

    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf travel as IEEE has it ([KEY-3])
        stages = {"mixed_q": mix(q, alpha_q), "mixed_k": mix(k, alpha_k), "mixed_v": mix(v, alpha_v)}

        query_position, key_position = token_positions(query_index, key_index, positions, kv_positions)
        stages["rotated_q"] = rotate(stages["mixed_q"], rope_angles(query_position, dims, config), config)
        stages["rotated_k"] = rotate(stages["mixed_k"], rope_angles(key_position, dims, config), config)

        visible = visibility(
            query_index,
            key_index,
            dims,
            config,
            key_mask=key_mask,
            segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
        )
        scale = config.resolve_scale(dims.d)  # [LOG-2]
        raw_logits = scaled_products(stages["rotated_q"], stages["rotated_k"], scale)
        if config.normalisation == "softmax":
            stages["logits"] = np.where(visible[:, None], raw_logits, -np.inf)  # [LOG-3]
            weights, stages["lse"] = softmax(stages["logits"])
        else:
            stages["logits"] = weights = np.where(visible[:, None], raw_logits, 0.0)  # [LIN-1]
        stages["virtual_out"] = weighted_sum(weights, stages["mixed_v"], visible)
        stages["output"] = collapse_heads(stages["virtual_out"], collapse)
    return stages


# 3.1 Mixing and interleaving


def mix(x: Array, alpha: Array) -> Array:
    """Pseudo-heads as virtual tokens ([MIX-1] to [MIX-4]).

    x (B, N, source, width), alpha (source, H, P) -> (B, T, H, width), virtual index t = n*P + p.
    """
    B, N, _, width = x.shape
    _, H, P = alpha.shape
    mixed: Array = np.einsum("bnsw,shp->bnphw", x, alpha)  # (B, N, P, H, width)
    return mixed.reshape(B, N * P, H, width)


# 3.2 Indices and visibility


def token_indices(dims: Dims, query_offset: ArrayLike | None) -> tuple[Integers, Integers]:
    """Index of every query among the keys, and of every key: (B, N), (M,).

    Equation (5); the queries are the last N tokens by default ([ARG-1], [ARG-2], [IDX-2]).
    """
    offset = dims.M - dims.N if query_offset is None else query_offset
    per_row = np.broadcast_to(np.asarray(offset, dtype=np.int64), (dims.B,))
    return per_row[:, None] + np.arange(dims.N), np.arange(dims.M)


def virtual(index: Integers, P: int) -> Integers:
    """Virtual index t = n*P + p of every pseudo-token ([MIX-4]): (..., N) -> (..., N*P)."""
    spread = index[..., None] * P + np.arange(P)  # (..., N, P)
    return spread.reshape(*index.shape[:-1], index.shape[-1] * P)


def visibility(
    query_index: Integers,
    key_index: Integers,
    dims: Dims,
    config: AttentionConfig,
    *,
    key_mask: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
) -> Booleans:
    """Which virtual keys each virtual query sees, (B, T, S): every condition must hold."""
    P = dims.P
    tq = virtual(query_index, P)[:, :, None]  # (B, T, 1)
    tk = virtual(key_index, P)[None, None, :]  # (1, 1, S)
    n, m = tq // P, tk // P  # token of each; // rounds down, as negative indices need
    visible = np.ones((dims.B, dims.T, dims.S), dtype=np.bool_)

    if config.causal == "virtual":  # [MASK-1]
        visible &= tk <= tq
    elif config.causal == "token":  # [MASK-2]
        visible &= m <= n
    # causal "none" has no condition: [MASK-3]

    if config.window is not None:  # [CFG-2]
        virtual_unit = config.window_unit == "virtual"
        distance = tq - tk if virtual_unit else n - m
        if config.causal == "none":  # [WIN-3]
            distance = np.abs(distance)
        visible &= distance < config.window * (P if virtual_unit else 1)  # [WIN-1], [WIN-2]

    if segment_ids is not None:  # [SEG-1], [ARG-3]
        query_segment = np.repeat(np.asarray(segment_ids), P, axis=1)
        keys = segment_ids if kv_segment_ids is None else kv_segment_ids
        key_segment = np.repeat(np.asarray(keys), P, axis=1)
        visible &= query_segment[:, :, None] == key_segment[:, None, :]

    if key_mask is not None:  # [KEY-1]
        visible &= np.repeat(np.asarray(key_mask), P, axis=1)[:, None, :]
    return visible


# 3.3 Positions and rotation


def token_positions(
    query_index: Integers, key_index: Integers, positions: ArrayLike | None, kv_positions: ArrayLike | None
) -> tuple[Integers, Integers]:
    """RoPE positions of queries and keys, index order by default: (B, N), (B or 1, M).

    [POS-3], [ARG-4].
    """
    if positions is None:
        return query_index, key_index[None, :]
    keys = positions if kv_positions is None else kv_positions
    return np.asarray(positions, dtype=np.int64), np.asarray(keys, dtype=np.int64)


def rope_angles(position: Integers, dims: Dims, config: AttentionConfig) -> Array | None:
    """Rotation angle of every virtual token and lane pair, (B or 1, T, 1, d/2): [POS-1], [POS-2]."""
    if config.rope == "none":
        return None
    P, d = dims.P, dims.d
    per_virtual = virtual(position, P) if config.rope == "virtual" else np.repeat(position, P, axis=1)
    angles: Array = per_virtual[:, :, None, None] * rope_frequencies(d, config.rope_theta)
    return angles


def rope_frequencies(d: int, theta: float) -> Array:
    """Angle for each step of position, theta ** (-2i/d), for i = 0 ... d/2 - 1 ([ROPE-4]).

    -2i/d is rarely a float64, and the power magnifies its rounding by ln theta. The first-order term
    of what rounding took away puts it back ([ROPE-5]).
    """
    exact = [Fraction(-2 * i, d) for i in range(d // 2)]
    rounded = [float(exponent) for exponent in exact]
    lost = [float(exponent - Fraction(held)) for exponent, held in zip(exact, rounded, strict=True)]
    frequencies: Array = theta ** np.array(rounded) * (1.0 + np.array(lost) * np.log(theta))
    return frequencies


def lane_pairs(d: int, pairing: RopePairing) -> tuple[Integers, Integers]:
    """First and second lanes of the pairs that rotate together ([ROPE-2], [ROPE-3]): (d/2,) each."""
    lanes = np.arange(d)
    return (lanes[: d // 2], lanes[d // 2 :]) if pairing == "half" else (lanes[0::2], lanes[1::2])


def rotate(x: Array, angles: Array | None, config: AttentionConfig) -> Array:
    """Rotate lane pairs (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in place ([ROPE-1])."""
    if angles is None:
        return x
    first, second = lane_pairs(x.shape[-1], config.rope_pairing)
    x1, x2 = x[..., first], x[..., second]
    rotated = np.empty_like(x)
    rotated[..., first] = x1 * np.cos(angles) - x2 * np.sin(angles)
    rotated[..., second] = x2 * np.cos(angles) + x1 * np.sin(angles)
    return rotated


# 3.4 Attention over virtual tokens


def scaled_products(rotated_q: Array, rotated_k: Array, scale: float) -> Array:
    """Scaled dot products of all pairs ([LOG-1]): (B, T, H, d), (B, S, H, d) -> (B, H, T, S)."""
    products: Array = np.einsum("bthd,bshd->bhts", rotated_q, rotated_k)
    return scale * products


def softmax(logits: Array) -> tuple[Array, Array]:
    """Weights (B, H, T, S) and natural log of the sum of exponentials (B, H, T).

    A row without a visible key has weights 0 and lse -inf ([SOFT-1] to [SOFT-3]).
    """
    largest = np.max(logits, axis=-1, initial=-np.inf)  # (B, H, T)
    shift = np.where(largest == -np.inf, 0.0, largest)[..., None]
    exponentials = np.exp(logits - shift)
    total = np.sum(exponentials, axis=-1)  # 0 only where no key is visible
    weights = exponentials / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        return weights, shift[..., 0] + np.log(total)


def weighted_sum(weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Sum of visible values by weight ([OUT-1]); hidden values are never multiplied ([KEY-2], [KEY-3]).

    (B, H, T, S), (B, S, H, e), (B, T, S) -> (B, T, H, e). `where`, since 0 * NaN is NaN; row by row, so
    that no array (B, H, T, S, e) is formed.
    """
    B, H, T, _ = weights.shape
    values = np.swapaxes(mixed_v, 1, 2)  # (B, H, S, e)
    out = np.zeros((B, T, H, values.shape[-1]))
    for t in range(T):
        seen = np.where(visible[:, None, t, :, None], values, 0.0)  # (B, H, S, e)
        out[:, t] = np.einsum("bhs,bhse->bhe", weights[:, :, t], seen)
    return out


# 3.5 Collapse


def collapse_heads(virtual_out: Array, collapse: Array) -> Array:
    """One output per head from its token's H*P pseudo outputs ([COL-1], [COL-2]).

    (B, T, H, e), collapse (H, H, P) or (H, P) -> (B, N, H, e).
    """
    P = collapse.shape[-1]
    B, T, H, e = virtual_out.shape
    pseudo = virtual_out.reshape(B, T // P, P, H, e)
    equation = "bnphe,hp->bnhe" if collapse.ndim == 2 else "bnphe,ihp->bnie"
    output: Array = np.einsum(equation, pseudo, collapse)
    return output
