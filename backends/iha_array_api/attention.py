"""The public functions, and the core that they share.

Shapes use SPEC.md's dimension legend: B batch, N query tokens, M key tokens, H heads, G key/value
heads, P pseudo-heads, d query and key width, e value width, T = N*P, S = M*P.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, SupportsIndex

import array_api_compat

from iha_array_api.kernels import composed
from iha_array_api.masking import Wide, token_indices, visibility
from iha_array_api.mixing import collapse_heads, compute_dtype, mix
from iha_array_api.rope import rotate, rotation, token_positions
from iha_core.conditions import resolve_offset
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError, ArgumentValueError
from iha_core.validation import validate

Array = Any


def attention(
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
    query_offset: SupportsIndex | Array | None = None,
) -> Array:
    """Interleaved Head Attention.

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
        query_offset: index of the first query among the keys: an int, or integers () or (B,); None
            means M - N.

    Returns:
        (B, N, H, e), dtype, namespace and device of q.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md chapter 3.
    """
    output, _ = _forward(
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
        stages=None,
    )
    return output


def attention_stages(
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
    query_offset: SupportsIndex | Array | None = None,
) -> tuple[dict[str, Array], str]:
    """The stages that `attention` forms, and the kernel that it uses.

    Takes the arguments of `attention`. Returns the stages by the names of [STG-1], `output` bit for
    bit that of `attention`, and "composed", the one kernel of this backend.
    """
    stages: dict[str, Array] = {}
    _, kernel = _forward(
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
        stages=stages,
    )
    return stages, kernel


def _forward(
    q: Array,
    k: Array,
    v: Array,
    alpha_q: Array,
    alpha_k: Array,
    alpha_v: Array,
    collapse: Array,
    *,
    config: AttentionConfig,
    key_mask: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    positions: Array | None,
    kv_positions: Array | None,
    query_offset: SupportsIndex | Array | None,
    stages: dict[str, Array] | None,
) -> tuple[Array, str]:
    """The output and the name of the kernel; `stages`, where given, receives the intermediate results."""
    floats = {
        "q": q,
        "k": k,
        "v": v,
        "alpha_q": alpha_q,
        "alpha_k": alpha_k,
        "alpha_v": alpha_v,
        "collapse": collapse,
    }
    options = {
        "key_mask": key_mask,
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "query_offset": query_offset,
    }
    dims = validate(**floats, config=config, **options)
    offset = resolve_offset(query_offset, dims)
    xp, device = _common_home(floats | options | {"query_offset": offset})

    def keep(name: str, stage: Array) -> Array:
        if stages is not None:
            stages[name] = stage
        return stage

    if key_mask is not None:  # [KEY-3]: a zero weight would not stop NaN, nor a zero gradient
        k = xp.where(key_mask[:, :, None, None], k, 0)
        v = xp.where(key_mask[:, :, None, None], v, 0)
    q = keep("mixed_q", mix(xp, q, alpha_q))  # (B, T, H, d)
    k = keep("mixed_k", mix(xp, k, alpha_k))  # (B, S, H, d)
    v = keep("mixed_v", mix(xp, v, alpha_v))  # (B, S, H, e)

    wide = Wide(xp, device)
    query_index, key_index = token_indices(wide, dims, offset)
    if config.rope != "none":
        query_position, key_position = token_positions(wide, query_index, key_index, positions, kv_positions)
        dtype = compute_dtype(q)
        q = rotate(xp, q, rotation(wide, query_position, dims, config, dtype), config.rope_pairing)
        k = rotate(xp, k, rotation(wide, key_position, dims, config, dtype), config.rope_pairing)
    keep("rotated_q", q)
    keep("rotated_k", k)

    mask = visibility(
        wide, dims, config, offset, query_index, key_index, key_mask, segment_ids, kv_segment_ids
    )
    virtual_out, logits, lse = composed(xp, q, k, v, mask, config=config, scale=config.resolve_scale(dims.d))
    keep("logits", logits)  # (B, H, T, S)
    if lse is not None:
        keep("lse", lse)  # (B, H, T)
    keep("virtual_out", virtual_out)  # (B, T, H, e)
    output = keep("output", collapse_heads(xp, virtual_out, collapse))  # (B, N, H, e)
    return output, "composed"


def _common_home(arguments: Mapping[str, Any]) -> tuple[ModuleType, Any]:
    """The one namespace and the one device of all arrays."""
    home, device = None, None
    for argument, value in arguments.items():
        if value is None or isinstance(value, int):
            continue
        try:
            namespace = array_api_compat.array_namespace(value)
        except TypeError:
            raise ArgumentTypeError(
                argument, "", expected="an array of the array API standard", found=type(value).__name__
            ) from None
        if home is None:  # q, the first
            home, device = namespace, array_api_compat.device(value)
        if namespace is not home:
            raise ArgumentTypeError(
                argument,
                "",
                expected=f"an array of {home.__name__}, the namespace of `q`",
                found=f"one of {namespace.__name__}",
            )
        if array_api_compat.device(value) != device:
            raise ArgumentValueError(
                argument,
                "device",
                expected=f"{device}, the device of `q`",
                found=str(array_api_compat.device(value)),
            )
    assert home is not None  # q is an array
    return home, device
