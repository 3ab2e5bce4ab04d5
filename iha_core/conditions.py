"""What follows from sizes and configuration alone, decided once for every backend: SPEC.md 3.2.

The reference does not use this; it states the conditions for itself.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from iha_core.config import AttentionConfig, Causal
from iha_core.validation import MAX_TOKEN_INDEX, Dims


def resolve_offset(query_offset: Any, dims: Dims) -> Any:
    """A valid query offset as a plain int, by default M - N, or the array that it is ([ARG-1]).

    Scalars of NumPy, which have a shape but are hashable numbers of the host, count as plain.
    """
    if query_offset is None:
        return dims.M - dims.N
    # Asked first, since a compiler cannot ask a symbolic integer for its attributes.
    if isinstance(query_offset, int):
        return query_offset
    is_array = hasattr(query_offset, "shape") and not isinstance(query_offset, np.generic)
    return query_offset if is_array else operator.index(query_offset)


def scale_factors(scale: float, storage: str) -> tuple[float, float]:
    """Two factors of the scale that the accumulator holds, the second a power of two ([CFG-1], [SOFT-1]).

    Logits are multiplied by one after the other; the second is 1 where the accumulator of that storage
    dtype, float32 or float64, holds the scale itself. Beyond 2^250 either way no product of float32 but 0
    has a logit that is neither 0 nor infinite, so such scales count as 2^250 or 2^-250.
    """
    if storage == "float64" or 2.0**-126 <= scale < 2.0**128:
        return scale, 1.0
    scale = min(max(scale, 2.0**-250), 2.0**250)
    power = 2.0 ** round(math.log2(scale) / 2)
    return scale / power, power


def binding_conditions(config: AttentionConfig, dims: Dims, offset: Any) -> tuple[Causal, int | None]:
    """Causality and window, "none" or None where it provably hides no key at all.

    Nothing is proved of an offset that is an array, whose values are not read, except that a window
    beyond all distances of [IDX-2] hides nothing.
    """
    causal, window = config.causal, config.window
    if window is not None and window >= 4 * MAX_TOKEN_INDEX:
        window = None
    if not isinstance(offset, int):
        return causal, window
    N, M, P = dims.N, dims.M, dims.P
    first_sees_last = offset >= M if causal == "virtual" and P > 1 else offset >= M - 1
    reaches_back = window is not None and offset + N <= window
    reaches_ahead = window is not None and (config.causal != "none" or M - offset <= window)
    return "none" if first_sees_last else causal, None if reaches_back and reaches_ahead else window


def only_causal(causal: Causal, window: int | None, key_mask: Any, segment_ids: Any) -> bool:
    """Whether nothing but causality over virtual tokens hides a key: a kernel's own flag may do ([MASK-1]).

    `causal` and `window` are what `binding_conditions` left.
    """
    return causal == "virtual" and window is None and key_mask is None and segment_ids is None


def token_positions(
    query_index: Any, key_index: Any, positions: Any | None, kv_positions: Any | None
) -> tuple[Any, Any]:
    """Token positions of queries (B or 1, N) and keys (B or 1, M); index order by default ([POS-3])."""
    if positions is None:
        return query_index, key_index
    return positions, positions if kv_positions is None else kv_positions


def index_conditions(
    config: AttentionConfig, causal: Causal, window: int | None, P: int, *, n: Any, m: Any, t: Any, s: Any
) -> list[Any]:
    """The conditions on indices that bind, as boolean arrays of the framework ([MASK-1] to [WIN-3]).

    Args:
        config: the configuration.
        causal, window: what `binding_conditions` left of it.
        P: pseudo-heads per head.
        n, t: token and virtual index of every virtual query, (B or 1, T, 1), integers.
        m, s: token and virtual index of every virtual key, (B or 1, 1, S), integers.
    """
    conditions = []
    if causal == "virtual":  # [MASK-1]
        conditions.append(s <= t)
    elif causal == "token":  # [MASK-2]
        conditions.append(m <= n)
    if window is not None:  # compared with t - W*P: the distance itself would be an integer for every pair
        virtual_unit = config.window_unit == "virtual"
        query, key, width = (t, s, window * P) if virtual_unit else (n, m, window)
        conditions.append(key > query - width)  # [WIN-1], [WIN-2]
        if config.causal == "none":  # [WIN-3]
            conditions.append(key < query + width)
    return conditions
