"""The public functions, and the core that they share.

Shapes use SPEC.md's dimension legend: B batch, N query tokens, M key tokens, H heads, G key/value
heads, P pseudo-heads, d query and key width, e value width, T = N*P, S = M*P.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

import mlx.core as mx

from iha_core.conditions import resolve_offset, token_positions
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError
from iha_core.validation import validate
from iha_mlx.kernels import composed, has_native_kernel, scaled_dot_product_attention
from iha_mlx.masking import token_indices, visibility
from iha_mlx.mixing import collapse_heads, compute_dtype, mix
from iha_mlx.rope import rotate, rotation


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    alpha_q: mx.array,
    alpha_k: mx.array,
    alpha_v: mx.array,
    collapse: mx.array,
    *,
    config: AttentionConfig,
    key_mask: mx.array | None = None,
    segment_ids: mx.array | None = None,
    kv_segment_ids: mx.array | None = None,
    positions: mx.array | None = None,
    kv_positions: mx.array | None = None,
    query_offset: SupportsIndex | mx.array | None = None,
) -> mx.array:
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
        query_offset: index of the first query among the keys: an int, or an integer array () or
            (B,), whose values are never read on the host; None means M - N.

    Returns:
        (B, N, H, e), dtype of q, not yet evaluated.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).
        NotImplementedError: float64 while the default device is a GPU, which has none.

    It may be differentiated, vectorised and compiled: `mx.grad`, `mx.vmap` and `mx.compile`, but for
    `shapeless=True`, since it reads shapes.

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
    q: mx.array,
    k: mx.array,
    v: mx.array,
    alpha_q: mx.array,
    alpha_k: mx.array,
    alpha_v: mx.array,
    collapse: mx.array,
    *,
    config: AttentionConfig,
    key_mask: mx.array | None = None,
    segment_ids: mx.array | None = None,
    kv_segment_ids: mx.array | None = None,
    positions: mx.array | None = None,
    kv_positions: mx.array | None = None,
    query_offset: SupportsIndex | mx.array | None = None,
) -> tuple[dict[str, mx.array], str]:
    """The stages that `attention` forms, and the kernel that it uses.

    Takes the arguments of `attention`. Returns the stages by the names of [STG-1], `output` bit for
    bit that of `attention`, and "scaled_dot_product_attention", that " in float32" where q is
    narrower, or "composed". Only the composed kernel forms `logits` and `lse`.
    """
    stages: dict[str, mx.array] = {}
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
    q: mx.array,
    k: mx.array,
    v: mx.array,
    alpha_q: mx.array,
    alpha_k: mx.array,
    alpha_v: mx.array,
    collapse: mx.array,
    *,
    config: AttentionConfig,
    key_mask: mx.array | None,
    segment_ids: mx.array | None,
    kv_segment_ids: mx.array | None,
    positions: mx.array | None,
    kv_positions: mx.array | None,
    query_offset: SupportsIndex | mx.array | None,
    stages: dict[str, mx.array] | None,
) -> tuple[mx.array, str]:
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
    _check_arrays(floats | options | {"query_offset": offset})
    if q.dtype == mx.float64 and mx.default_device() == mx.gpu:
        raise NotImplementedError("float64 runs on the CPU only: enter `with mx.stream(mx.cpu)`")

    def keep(name: str, stage: mx.array) -> mx.array:
        if stages is not None:
            stages[name] = stage
        return stage

    if key_mask is not None:  # [KEY-3]: a zero weight would not stop NaN, nor a zero gradient
        k = mx.where(key_mask[:, :, None, None], k, 0)
        v = mx.where(key_mask[:, :, None, None], v, 0)
    q = keep("mixed_q", mix(q, alpha_q))  # (B, T, H, d)
    k = keep("mixed_k", mix(k, alpha_k))  # (B, S, H, d)
    v = keep("mixed_v", mix(v, alpha_v))  # (B, S, H, e)

    query_index, key_index = token_indices(dims, offset)
    if config.rope != "none":
        query_position, key_position = token_positions(query_index, key_index, positions, kv_positions)
        table = compute_dtype(q)
        q = rotate(q, rotation(query_position, dims, config, table), config.rope_pairing)
        k = rotate(k, rotation(key_position, dims, config, table), config.rope_pairing)
    keep("rotated_q", q)
    keep("rotated_k", k)

    scale = config.resolve_scale(dims.d)
    native = has_native_kernel(q, k, config, scale=scale)
    mask, is_causal = visibility(
        dims,
        config,
        offset,
        query_index,
        key_index,
        key_mask,
        segment_ids,
        kv_segment_ids,
        may_flag_causal=native,
    )
    if native:
        virtual_out = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        kernel = "scaled_dot_product_attention" + ("" if q.dtype == mx.float32 else " in float32")
    else:
        virtual_out, logits, lse = composed(q, k, v, mask, config=config, scale=scale)
        kernel = "composed"
        keep("logits", logits)  # (B, H, T, S)
        if lse is not None:
            keep("lse", lse)  # (B, H, T)
    keep("virtual_out", virtual_out)  # (B, T, H, e)
    output = keep("output", collapse_heads(virtual_out, collapse))  # (B, N, H, e)
    return output, kernel


def _check_arrays(arguments: Mapping[str, Any]) -> None:
    """Every array is one of MLX."""
    for argument, value in arguments.items():
        if not (value is None or isinstance(value, (int, mx.array))):
            raise ArgumentTypeError(argument, "", expected="an mlx.core.array", found=type(value).__name__)
