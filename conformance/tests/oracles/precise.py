"""The operation with 50 digits, organised as one list of virtual tokens for each batch element and head.

Derived from SPEC.md apart from `loops` and on purpose by other means: lanes are rotated as complex
numbers, visibility is an interval of virtual key indices, the softmax needs no maximum because mpmath's
exponents do not overflow, and the collapse is the H by H·P matrix of [COL-1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
from mpmath import mp

from iha_core.config import AttentionConfig

DIGITS = 50

Array = npt.NDArray[Any]
Stages = dict[str, npt.NDArray[np.float64]]
Real = Any
"""An mpmath number; the library has no types."""


@dataclasses.dataclass(frozen=True)
class VirtualToken:
    """One virtual query or key of one head.

    Attributes:
        token: index of its token among the keys, n̂ or m of (5).
        index: virtual index, t̂ or s of (5).
        segment: segment id of its token, None where there are none.
        kept: False for a key that key_mask drops.
        mixed: the head vector of (1) or (2).
        rotated: the vector after (6).
        value: the value vector of (3); empty for a query.
    """

    token: int
    index: int
    segment: int | None
    kept: bool
    mixed: list[Real]
    rotated: list[Real]
    value: list[Real]


def attention_precise(
    q: Array,
    k: Array,
    v: Array,
    alpha_q: Array,
    alpha_k: Array,
    alpha_v: Array,
    collapse: Array,
    *,
    config: AttentionConfig,
    key_mask: Array | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    positions: Array | None = None,
    kv_positions: Array | None = None,
    query_offset: int | Array | None = None,
) -> Stages:
    """All stages of SPEC.md chapter 4, each number rounded to float64 once, at the end.

    Args: those of SPEC.md chapter 2, valid ones. Floating-point arrays of any dtype are taken at
        their exact value; positions and offsets are exact integers.

    Returns:
        The stages by name, in the order of [STG-1]; "lse" is absent under normalisation "none".
    """
    batch, n_queries, heads, width = q.shape
    n_keys, value_width, pseudo = k.shape[1], v.shape[3], alpha_q.shape[2]
    rows, columns = n_queries * pseudo, n_keys * pseudo
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    if kv_positions is None:
        kv_positions = positions
    first_query = np.broadcast_to(
        np.asarray(n_keys - n_queries if query_offset is None else query_offset), (batch,)
    )

    stages = {
        "mixed_q": np.zeros((batch, rows, heads, width)),
        "mixed_k": np.zeros((batch, columns, heads, width)),
        "mixed_v": np.zeros((batch, columns, heads, value_width)),
        "rotated_q": np.zeros((batch, rows, heads, width)),
        "rotated_k": np.zeros((batch, columns, heads, width)),
        "logits": np.zeros((batch, heads, rows, columns)),
        "lse": np.zeros((batch, heads, rows)),
        "virtual_out": np.zeros((batch, rows, heads, value_width)),
        "output": np.zeros((batch, n_queries, heads, value_width)),
    }
    with mpmath.workdps(DIGITS):
        scale = 1 / mp.sqrt(width) if config.scale is None else mp.mpf(config.scale)
        hidden_logit = -mp.inf if config.normalisation == "softmax" else mp.zero
        for b in range(batch):
            attended: list[list[list[Real]]] = []
            for h in range(heads):
                offset = int(first_query[b])
                queries = _virtual_tokens(
                    q[b], alpha_q[:, h], config, offset, _row(segment_ids, b), _row(positions, b)
                )
                keys = _virtual_tokens(
                    k[b],
                    alpha_k[:, h],
                    config,
                    0,
                    _row(kv_segment_ids, b),
                    _row(kv_positions, b),
                    keep=_row(key_mask, b),
                    values=v[b],
                    alpha_values=alpha_v[:, h],
                )
                _store(stages["mixed_q"][b, :, h], [query.mixed for query in queries])
                _store(stages["mixed_k"][b, :, h], [key.mixed for key in keys])
                _store(stages["mixed_v"][b, :, h], [key.value for key in keys])
                _store(stages["rotated_q"][b, :, h], [query.rotated for query in queries])
                _store(stages["rotated_k"][b, :, h], [key.rotated for key in keys])

                attended.append([])
                for t, query in enumerate(queries):
                    low, high = _interval(query, pseudo, config)
                    row = {
                        key.index: scale * mp.fdot(query.rotated, key.rotated)  # (7)
                        for key in keys
                        if low <= key.index <= high and key.kept and key.segment == query.segment
                    }
                    weights = row
                    if config.normalisation == "softmax":
                        powers = {s: mp.exp(logit) for s, logit in row.items()}
                        total = mp.fsum(powers.values())
                        weights = {s: power / total for s, power in powers.items()}  # (8)
                        stages["lse"][b, h, t] = mp.log(total) if row else -mp.inf  # (9)
                    attended[h].append(  # (10)
                        [
                            mp.fsum(weight * keys[s].value[j] for s, weight in weights.items())
                            for j in range(value_width)
                        ]
                    )
                    _store(stages["logits"][b, h, t], [row.get(key.index, hidden_logit) for key in keys])
                _store(stages["virtual_out"][b, :, h], attended[h])

            matrix = _collapse_matrix(collapse)
            for n in range(n_queries):
                pseudo_outputs = [attended[h][n * pseudo + p] for h in range(heads) for p in range(pseudo)]
                for i in range(heads):  # (11)
                    for j in range(value_width):
                        stages["output"][b, n, i, j] = mp.fdot(matrix[i], [out[j] for out in pseudo_outputs])
    if config.normalisation == "none":
        del stages["lse"]
    return stages


def _virtual_tokens(
    vectors: Array,
    alpha: Array,
    config: AttentionConfig,
    first_token: int,
    segments: Array | None,
    positions: Array | None,
    *,
    keep: Array | None = None,
    values: Array | None = None,
    alpha_values: Array | None = None,
) -> list[VirtualToken]:
    """The virtual tokens of one target head in the order of (4), so that P follow each token.

    Args:
        vectors: (tokens, source heads, width), queries or keys of one batch element.
        alpha: (source heads, P), the mixing of this target head.
        first_token: index of token 0 among the keys.
        segments, positions, keep: one entry for each token, or None.
        values, alpha_values: alike `vectors` and `alpha`, for keys.
    """
    pseudo = alpha.shape[1]
    virtual_tokens = []
    for number in range(len(vectors)):
        token = first_token + number
        position = token if positions is None else int(positions[number])
        for p in range(pseudo):
            mixed = _mix(vectors[number], alpha[:, p])
            value = []
            if values is not None and alpha_values is not None:
                value = _mix(values[number], alpha_values[:, p])
            step = {"virtual": position * pseudo + p, "token": position, "none": 0}[config.rope]
            virtual_tokens.append(
                VirtualToken(
                    token=token,
                    index=token * pseudo + p,
                    segment=None if segments is None else int(segments[number]),
                    kept=keep is None or bool(keep[number]),
                    mixed=mixed,
                    rotated=mixed if config.rope == "none" else _turn(mixed, step, config),
                    value=value,
                )
            )
    return virtual_tokens


def _mix(vectors: Array, coefficients: Array) -> list[Real]:
    """One combination of the source heads, (1) to (3)."""
    return [
        mp.fdot((mp.mpf(float(c)), mp.mpf(float(x))) for c, x in zip(coefficients, lane, strict=True))
        for lane in vectors.T
    ]


def _turn(vector: list[Real], position: int, config: AttentionConfig) -> list[Real]:
    """(6) as multiplication of x₁ + i x₂ by e^(iφ); pairs are taken from views of the lanes."""
    width = len(vector)
    lanes = np.arange(width)
    pairs = lanes.reshape(2, -1).T if config.rope_pairing == "half" else lanes.reshape(-1, 2)
    turned: list[Real] = [mp.zero] * width
    for i, (real, imaginary) in enumerate(pairs):
        angle = position * mp.mpf(config.rope_theta) ** (-mp.mpf(2 * i) / width)
        z = mp.mpc(vector[real], vector[imaginary]) * mp.expj(angle)
        turned[real], turned[imaginary] = z.real, z.imag
    return turned


def _interval(query: VirtualToken, pseudo: int, config: AttentionConfig) -> tuple[Real, Real]:
    """First and last virtual key index that causality and window leave to a query ([MASK-1] to [WIN-3])."""
    own_first = query.token * pseudo
    own_last = own_first + pseudo - 1
    low, high = -mp.inf, mp.inf
    if config.causal != "none":
        high = query.index if config.causal == "virtual" else own_last
    if config.window is not None:
        if config.window_unit == "virtual":
            start, stop, reach = query.index, query.index, config.window * pseudo - 1
        else:
            start, stop, reach = own_first, own_last, (config.window - 1) * pseudo
        low = start - reach
        if config.causal == "none":
            high = stop + reach
    return low, high


def _collapse_matrix(collapse: Array) -> list[list[Real]]:
    """R as H rows of H·P columns, column h·P + p for pseudo output (h, p) ([COL-1], [COL-2])."""
    heads, pseudo = collapse.shape[0], collapse.shape[-1]
    if collapse.ndim == 3:
        rows = collapse.reshape(heads, heads * pseudo)
    else:
        rows = np.zeros((heads, heads * pseudo))
        for h in range(heads):
            rows[h, h * pseudo : (h + 1) * pseudo] = collapse[h]
    return [[mp.mpf(float(x)) for x in row] for row in rows]


def _row(array: Array | None, b: int) -> Array | None:
    return None if array is None else array[b]


def _store(target: npt.NDArray[np.float64], numbers: Sequence[Any]) -> None:
    """Round mpmath numbers to float64 into an array of their shape."""
    target[...] = np.array(numbers, dtype=object).reshape(target.shape).astype(np.float64)
