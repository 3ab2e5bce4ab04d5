"""Interleaved Head Attention in NumPy, as PORTING.md builds it in five steps.

    iha run --target port:attention

judges it, from this folder. Ids in brackets are requirements of SPEC.md, letters those of its chapter 1.
"""

import numpy as np


def attention(inputs, config):
    """Arguments by name and the configuration to stages by name (README.md, "Hold your own port to it")."""
    accumulator = np.float64 if inputs["q"].dtype == np.float64 else np.float32  # [NUM-1], [NUM-2]
    q, k, v, alpha_q, alpha_k, alpha_v, R = (
        inputs[name].astype(accumulator)
        for name in ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")
    )
    key_mask = inputs.get("key_mask")
    if key_mask is not None:  # 0 * NaN is NaN, so what is dropped must not be multiplied [KEY-3]
        k, v = (np.where(key_mask[:, :, None, None], x, 0) for x in (k, v))

    stages = {"mixed_q": mix(q, alpha_q), "mixed_k": mix(k, alpha_k), "mixed_v": mix(v, alpha_v)}
    B, N, M, P = len(q), q.shape[1], k.shape[1], alpha_q.shape[2]
    offset = np.broadcast_to(np.asarray(inputs.get("query_offset", M - N)), (B,))  # [ARG-1], [ARG-2]
    n, m = offset[:, None] + np.arange(N), np.broadcast_to(np.arange(M), (B, M))  # (5)
    query_position = inputs.get("positions", n)  # [POS-3]
    key_position = inputs.get("kv_positions", inputs.get("positions", m))
    stages["rotated_q"] = rotate(stages["mixed_q"], query_position, P, config)
    stages["rotated_k"] = rotate(stages["mixed_k"], key_position, P, config)

    visible = visibility(n, m, P, config)
    if key_mask is not None:  # [KEY-1]
        visible &= np.repeat(key_mask, P, axis=1)[:, None]
    if "segment_ids" in inputs:  # [SEG-1], [ARG-3]
        of_queries = inputs["segment_ids"]
        of_keys = inputs.get("kv_segment_ids", of_queries)
        visible &= np.repeat(of_queries, P, axis=1)[:, :, None] == np.repeat(of_keys, P, axis=1)[:, None]
    visible = visible[:, None]  # (B, 1, T, S)

    scale = config["scale"] or q.shape[-1] ** -0.5  # [LOG-2]
    products = np.einsum("bthd,bshd->bhts", stages["rotated_q"], stages["rotated_k"])
    logits = (products * np.float64(scale)).astype(accumulator)  # the scale may be no number of float32
    if config["normalisation"] == "softmax":
        stages["logits"] = np.where(visible, logits, -np.inf)  # [LOG-3]
        weights, stages["lse"] = softmax(stages["logits"])
    else:
        stages["logits"] = weights = np.where(visible, logits, 0)  # [LIN-1]
    stages["virtual_out"] = weighted_sum(weights, stages["mixed_v"], visible)
    stages["output"] = collapse(stages["virtual_out"], R, P)
    return stages


def mix(x, alpha):
    """(1) to (4): (B, N, source, width), (source, H, P) -> (B, N*P, H, width), row n*P + p ([MIX-4])."""
    B, N, _, width = x.shape
    _, H, P = alpha.shape
    return np.einsum("bnsw,shp->bnphw", x, alpha).reshape(B, N * P, H, width)


def virtual(tokens, P):
    """Virtual index n*P + p of every virtual token: (B, N) -> (B, N*P)."""
    B, N = tokens.shape
    return (tokens[:, :, None] * P + np.arange(P)).reshape(B, N * P)


def visibility(n, m, P, config):
    """Causality and window, (B, T, S) [MASK-1 to MASK-3], [WIN-1 to WIN-3]."""
    t, s = virtual(n, P)[:, :, None], virtual(m, P)[:, None]
    n, m = np.floor_divide(t, P), np.floor_divide(s, P)
    visible = np.ones(np.broadcast_shapes(t.shape, s.shape), bool)
    if config["causal"] == "virtual":
        visible &= s <= t
    elif config["causal"] == "token":
        visible &= m <= n
    if config["window"] is not None:
        W = min(config["window"], 2**33)  # [IDX-2]
        distance, bound = (t - s, W * P) if config["window_unit"] == "virtual" else (n - m, W)
        visible &= (np.abs(distance) if config["causal"] == "none" else distance) < bound
    return visible


def rotate(x, position, P, config):
    """(6), tables formed in float64 [ROPE-1 to ROPE-5]: (B, T, H, d), (B, N) -> (B, T, H, d)."""
    if config["rope"] == "none":
        return x
    d = x.shape[-1]
    i = np.arange(d // 2)
    rows = virtual(position, P) if config["rope"] == "virtual" else np.repeat(position, P, axis=1)
    angles = rows[:, :, None, None] * config["rope_theta"] ** (-2 * i / d)
    cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = (i, i + d // 2) if config["rope_pairing"] == "half" else (2 * i, 2 * i + 1)
    rotated = np.empty_like(x)
    rotated[..., first] = x[..., first] * cosine - x[..., second] * sine
    rotated[..., second] = x[..., second] * cosine + x[..., first] * sine
    return rotated


def softmax(logits):
    """(8), (9) [SOFT-1 to SOFT-3]: weights, 0 where hidden, and lse, -inf for a query that sees no key."""
    largest = np.max(logits, axis=-1, initial=-np.inf, keepdims=True)
    shift = np.where(largest == -np.inf, 0, largest)
    powers = np.exp(logits - shift)
    total = powers.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return powers / np.where(total == 0, 1, total), (shift + np.log(total))[..., 0]


def weighted_sum(weights, values, visible):
    """(10) over visible keys alone [OUT-1], [KEY-3]: (B, H, T, S), (B, S, H, e) -> (B, T, H, e)."""
    values = values.swapaxes(1, 2)
    rows = [
        np.einsum("bhs,bhse->bhe", weights[:, :, t], np.where(visible[:, :, t, :, None], values, 0))
        for t in range(weights.shape[2])
    ]
    B, H, _, e = values.shape
    return np.stack(rows, axis=1) if rows else np.zeros((B, 0, H, e), values.dtype)


def collapse(virtual_out, R, P):
    """(11), (12) [COL-1], [COL-2]: (B, T, H, e) -> (B, N, H, e)."""
    B, T, H, e = virtual_out.shape
    pseudo = virtual_out.reshape(B, T // P, P, H, e)
    return np.einsum("bnphe,ihp->bnie" if R.ndim == 3 else "bnphe,hp->bnhe", pseudo, R)
