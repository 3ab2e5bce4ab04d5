"""The public functions, and the core that they share.

Shapes use SPEC.md's dimension legend: B batch, N query tokens, M key tokens, H heads, G key/value
heads, P pseudo-heads, d query and key width, e value width, T = N*P, S = M*P.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike

from iha_core.conditions import resolve_offset, token_positions
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError
from iha_core.validation import validate
from iha_jax.kernels import choose_kernel, composed, dot_product_attention, zero_empty_rows
from iha_jax.masking import token_indices, visibility
from iha_jax.mixing import collapse_heads, mix, precision_word
from iha_jax.rope import rotate, rotation


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
    precision: PrecisionLike = "highest",
    implementation: Literal["splash"] | None = None,
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
        query_offset: index of the first query among the keys: an int, or an integer array () or
            (B,), whose values are never read on the host; None means M - N.
        precision: of the products ([NUM-8]), in JAX's words; None means JAX's default, which on GPUs
            and TPUs rounds float32 operands.
        implementation: "splash" for the Pallas kernel of TPUs, which is interpreted elsewhere; None for
            what is exact everywhere.

    Under `jax.jit`, config, precision and implementation are static.

    Returns:
        (B, N, H, e), dtype and devices of q.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).
        NotImplementedError: the implementation that was asked for does not take this call.

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
        precision=precision,
        implementation=implementation,
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
    precision: PrecisionLike = "highest",
    implementation: Literal["splash"] | None = None,
) -> tuple[dict[str, Array], str]:
    """The stages that `attention` forms, and the kernel that it uses.

    Takes the arguments of `attention`. Returns the stages by the names of [STG-1], `output` bit for
    bit that of `attention`, and "dot_product_attention", "splash_attention" or "composed". Only the
    composed kernel forms `logits` and `lse`.
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
        precision=precision,
        implementation=implementation,
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
    precision: PrecisionLike,
    implementation: Literal["splash"] | None,
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
    _check_arrays(floats | options | {"query_offset": offset})
    precision = precision_word(precision)

    def keep(name: str, stage: Array) -> Array:
        if stages is not None:
            stages[name] = stage
        return stage

    if key_mask is not None:  # [KEY-3]: a zero weight would not stop NaN, nor a zero gradient
        k = jnp.where(key_mask[:, :, None, None], k, 0)
        v = jnp.where(key_mask[:, :, None, None], v, 0)
    q = keep("mixed_q", mix(q, alpha_q, precision))  # (B, T, H, d)
    k = keep("mixed_k", mix(k, alpha_k, precision))  # (B, S, H, d)
    v = keep("mixed_v", mix(v, alpha_v, precision))  # (B, S, H, e)

    query_index, key_index = token_indices(dims, offset)
    if config.rope != "none":
        query_position, key_position = token_positions(query_index, key_index, positions, kv_positions)
        q = rotate(q, rotation(query_position, dims, config, q.dtype), config.rope_pairing)
        k = rotate(k, rotation(key_position, dims, config, k.dtype), config.rope_pairing)
    keep("rotated_q", q)
    keep("rotated_k", k)

    scale = config.resolve_scale(dims.d)
    kernel = choose_kernel(config, q, scale, implementation)
    mask, is_causal = visibility(
        dims,
        config,
        offset,
        query_index,
        key_index,
        key_mask,
        segment_ids,
        kv_segment_ids,
        may_flag_causal=kernel != "composed",
    )
    if kernel == "dot_product_attention":
        virtual_out = dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, precision=precision
        )
    elif kernel == "splash_attention":
        from iha_jax.splash import splash_attention  # Pallas is slow to import, and few ask for it

        virtual_out = splash_attention(
            q,
            k,
            v,
            dims,
            config,
            offset,
            key_mask,
            segment_ids,
            kv_segment_ids,
            scale=scale,
            precision=precision,
        )
    else:
        virtual_out, logits, lse = composed(q, k, v, mask, config=config, scale=scale, precision=precision)
        keep("logits", logits)  # (B, H, T, S)
        if lse is not None:
            keep("lse", lse)  # (B, H, T)
    if kernel != "composed":
        virtual_out = zero_empty_rows(virtual_out, mask)
    keep("virtual_out", virtual_out)  # (B, T, H, e)
    output = keep("output", collapse_heads(virtual_out, collapse, precision))  # (B, N, H, e)
    return output, kernel


def _check_arrays(arguments: Mapping[str, Any]) -> None:
    """Every array is one of JAX: what NumPy holds in 64 bits would be narrowed silently."""
    for argument, value in arguments.items():
        if not (value is None or isinstance(value, (int, Array))):
            raise ArgumentTypeError(argument, "", expected="a jax.Array", found=type(value).__name__)
