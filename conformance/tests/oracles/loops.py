"""The operation as nested loops over Python floats, every equation of SPEC.md chapter 3 written out.

Nothing here is vectorised and nothing is reordered: an array is filled element by element from the
formula whose number stands beside it. Hidden keys are skipped, never multiplied by zero, so whatever
they hold has no influence ([KEY-2], [KEY-3]).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from iha_core.config import AttentionConfig

Array = npt.NDArray[Any]
Stages = dict[str, npt.NDArray[np.float64]]


def attention_loops(
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
    """All stages of SPEC.md chapter 4 in float64, in the order of [STG-1].

    Args: those of SPEC.md chapter 2, valid ones. Floating-point arrays of any dtype are taken at
        their exact value.

    Returns:
        The stages by name; "lse" is absent under normalisation "none".
    """
    B, N, H, d = q.shape
    _, M, G, e = v.shape
    P = alpha_q.shape[2]
    T, S = N * P, M * P
    scale = config.resolve_scale(d)

    # Nested lists hold Python floats: their products overflow to inf and breed NaN without a warning.
    q_, k_, v_ = _floats(q), _floats(k), _floats(v)
    aq, ak, av = _floats(alpha_q), _floats(alpha_k), _floats(alpha_v)
    R = _floats(collapse)

    offset = _offsets(query_offset, B, N, M)
    seg_q, seg_k = _both_sides(segment_ids, kv_segment_ids)
    pos_q, pos_k = _both_sides(positions, kv_positions)

    mixed_q = np.zeros((B, T, H, d))
    mixed_k = np.zeros((B, S, H, d))
    mixed_v = np.zeros((B, S, H, e))
    for b in range(B):
        for h in range(H):
            for p in range(P):
                for n in range(N):
                    for j in range(d):  # (1), (4)
                        mixed_q[b, n * P + p, h, j] = _sum(aq[g][h][p] * q_[b][n][g][j] for g in range(H))
                for m in range(M):
                    for j in range(d):  # (2), (4)
                        mixed_k[b, m * P + p, h, j] = _sum(ak[g][h][p] * k_[b][m][g][j] for g in range(G))
                    for j in range(e):  # (3), (4)
                        mixed_v[b, m * P + p, h, j] = _sum(av[g][h][p] * v_[b][m][g][j] for g in range(G))

    rotated_q = mixed_q.copy()
    rotated_k = mixed_k.copy()
    if config.rope != "none":
        for b in range(B):
            for n in range(N):
                token = n + offset[b] if pos_q is None else pos_q[b][n]  # [POS-3]
                for p in range(P):
                    position = token * P + p if config.rope == "virtual" else token  # [POS-1], [POS-2]
                    for h in range(H):
                        rotated_q[b, n * P + p, h] = _rotated(
                            mixed_q[b, n * P + p, h].tolist(), position, config
                        )
            for m in range(M):
                token = m if pos_k is None else pos_k[b][m]
                for p in range(P):
                    position = token * P + p if config.rope == "virtual" else token
                    for h in range(H):
                        rotated_k[b, m * P + p, h] = _rotated(
                            mixed_k[b, m * P + p, h].tolist(), position, config
                        )

    softmax = config.normalisation == "softmax"
    logits = np.full((B, H, T, S), -math.inf if softmax else 0.0)
    lse = np.full((B, H, T), -math.inf)
    virtual_out = np.zeros((B, T, H, e))
    rq, rk, mv = _floats(rotated_q), _floats(rotated_k), _floats(mixed_v)
    for b in range(B):
        for n in range(N):
            for p in range(P):
                t = n * P + p
                visible = []
                for m in range(M):
                    same_segment = seg_q is None or seg_k is None or seg_q[b][n] == seg_k[b][m]  # [SEG-1]
                    kept = key_mask is None or bool(key_mask[b, m])  # [KEY-1]
                    for p_key in range(P):
                        in_order = _sees(n + offset[b], p, m, p_key, P, config)
                        if same_segment and kept and in_order:
                            visible.append(m * P + p_key)
                for h in range(H):
                    for s in visible:  # (7)
                        logits[b, h, t, s] = scale * _sum(rq[b][t][h][j] * rk[b][s][h][j] for j in range(d))
                    if not visible:  # [SOFT-2], [SOFT-3]
                        continue
                    row = {s: float(logits[b, h, t, s]) for s in visible}
                    weight = row  # [LIN-1]
                    if softmax:  # (8), (9)
                        mu = _max(row.values())
                        total = _sum(math.exp(row[s] - mu) for s in visible)
                        weight = {s: math.exp(row[s] - mu) / total for s in visible}
                        lse[b, h, t] = mu + math.log(total)
                    for j in range(e):  # (10)
                        virtual_out[b, t, h, j] = _sum(weight[s] * mv[b][s][h][j] for s in visible)

    output = np.zeros((B, N, H, e))
    vo = _floats(virtual_out)
    for b in range(B):
        for n in range(N):
            for i in range(H):
                for j in range(e):
                    if collapse.ndim == 3:  # (11)
                        terms = [R[i][h][p] * vo[b][n * P + p][h][j] for h in range(H) for p in range(P)]
                    else:  # (12)
                        terms = [R[i][p] * vo[b][n * P + p][i][j] for p in range(P)]
                    output[b, n, i, j] = _sum(terms)

    stages = {
        "mixed_q": mixed_q,
        "mixed_k": mixed_k,
        "mixed_v": mixed_v,
        "rotated_q": rotated_q,
        "rotated_k": rotated_k,
        "logits": logits,
    }
    if softmax:
        stages["lse"] = lse
    return {**stages, "virtual_out": virtual_out, "output": output}


def _sees(n_hat: int, p: int, m: int, p_key: int, P: int, config: AttentionConfig) -> bool:
    """Whether causality and window let query (n̂, p) see key (m, p′): [MASK-1] to [WIN-3]."""
    t_hat = n_hat * P + p  # (5)
    s = m * P + p_key
    if config.causal == "virtual" and not s <= t_hat:
        return False
    if config.causal == "token" and not m <= n_hat:
        return False
    if config.window is None:
        return True
    if config.window_unit == "virtual":
        distance, limit = t_hat - s, config.window * P
    else:
        distance, limit = n_hat - m, config.window
    if config.causal == "none":
        distance = abs(distance)
    return distance < limit


def _rotated(x: list[float], position: int, config: AttentionConfig) -> list[float]:
    """One head vector after (6), at an integer position."""
    d = len(x)
    rotated = list(x)
    for i in range(d // 2):
        phi = position * config.rope_theta ** (-2 * i / d)
        # [ROPE-2], [ROPE-3]
        first, second = (i, i + d // 2) if config.rope_pairing == "half" else (2 * i, 2 * i + 1)
        rotated[first] = x[first] * math.cos(phi) - x[second] * math.sin(phi)
        rotated[second] = x[second] * math.cos(phi) + x[first] * math.sin(phi)
    return rotated


def _offsets(query_offset: int | Array | None, B: int, N: int, M: int) -> list[int]:
    """Index of the first query among the keys for each batch element ([ARG-1], [ARG-2])."""
    if query_offset is None:
        return [M - N] * B
    if np.ndim(query_offset) == 0:
        return [int(query_offset)] * B
    return [int(offset) for offset in np.asarray(query_offset)]


def _both_sides(queries: Array | None, keys: Array | None) -> tuple[Any, Any]:
    """Integers of the query and key tokens; one array serves both sides ([ARG-3], [ARG-4])."""
    if queries is None:
        return None, None
    return queries.tolist(), (queries if keys is None else keys).tolist()


def _floats(array: Array) -> Any:
    return array.astype(np.float64).tolist()


def _sum(terms: Iterable[float]) -> float:
    """The correctly rounded sum; where an infinity or an overflow is met, the sum IEEE arithmetic gives."""
    values = list(terms)
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def _max(values: Iterable[float]) -> float:
    """The largest value, NaN if any is: `max` would let the order decide."""
    collected = list(values)
    return math.nan if any(map(math.isnan, collected)) else max(collected)
