"""The public functions, and the core that they share.

Shapes use SPEC.md's dimension legend: B batch, N query tokens, M key tokens, H heads, G key/value
heads, P pseudo-heads, d query and key width, e value width, T = N*P, S = M*P.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from iha_core.conditions import resolve_offset, token_positions
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError, ArgumentValueError
from iha_core.validation import validate
from iha_torch.kernels import composed, has_native_kernel, needs_mask, scaled_dot_product_attention
from iha_torch.masking import token_indices, visibility
from iha_torch.mixing import collapse_heads, mix
from iha_torch.rope import rotate, rotation


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha_q: Tensor,
    alpha_k: Tensor,
    alpha_v: Tensor,
    collapse: Tensor,
    *,
    config: AttentionConfig,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    query_offset: SupportsIndex | Tensor | None = None,
) -> Tensor:
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
        query_offset: index of the first query among the keys: an int, or an integer tensor () or
            (B,), whose values are never read on the host; None means M - N.

    Returns:
        (B, N, H, e), dtype and device of q.

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha_q: Tensor,
    alpha_k: Tensor,
    alpha_v: Tensor,
    collapse: Tensor,
    *,
    config: AttentionConfig,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    query_offset: SupportsIndex | Tensor | None = None,
) -> tuple[dict[str, Tensor], str]:
    """The stages that `attention` forms, and the kernel that it uses.

    Takes the arguments of `attention`. Returns the stages by the names of [STG-1], `output` bit for
    bit that of `attention`, and "scaled_dot_product_attention" or "composed". Only the composed
    kernel forms `logits`.
    """
    stages: dict[str, Tensor] = {}
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha_q: Tensor,
    alpha_k: Tensor,
    alpha_v: Tensor,
    collapse: Tensor,
    *,
    config: AttentionConfig,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    positions: Tensor | None,
    kv_positions: Tensor | None,
    query_offset: SupportsIndex | Tensor | None,
    stages: dict[str, Tensor] | None,
) -> tuple[Tensor, str]:
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
    _check_tensors(floats | options | {"query_offset": offset}, q)

    def keep(name: str, stage: Tensor) -> Tensor:
        if stages is not None:
            stages[name] = stage
        return stage

    # The dtype of q decides, and autocast would narrow the float32 mixing that [TYP-2] asks for.
    autocasts = torch.amp.is_autocast_available(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if autocasts else contextlib.nullcontext():
        if key_mask is not None:  # [KEY-3]: a zero weight would not stop NaN, nor a zero gradient
            k = torch.where(key_mask[:, :, None, None], k, 0)
            v = torch.where(key_mask[:, :, None, None], v, 0)
        q = keep("mixed_q", mix(q, alpha_q))  # (B, T, H, d)
        k = keep("mixed_k", mix(k, alpha_k))  # (B, S, H, d)
        v = keep("mixed_v", mix(v, alpha_v))  # (B, S, H, e)

        query_index, key_index = token_indices(dims, offset, q.device)
        if config.rope != "none":
            query_position, key_position = token_positions(query_index, key_index, positions, kv_positions)
            q = rotate(q, rotation(query_position, dims, config, q.dtype), config.rope_pairing)
            k = rotate(k, rotation(key_position, dims, config, k.dtype), config.rope_pairing)
        keep("rotated_q", q)
        keep("rotated_k", k)

        native = has_native_kernel(config)
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
            always=native and needs_mask(k),
        )
        scale = config.resolve_scale(dims.d)
        if native:
            virtual_out = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        else:
            virtual_out, logits = composed(q, k, v, mask, scale=scale)
            keep("logits", logits)  # (B, H, T, S)
        keep("virtual_out", virtual_out)  # (B, T, H, e)
        output = keep("output", collapse_heads(virtual_out, collapse))  # (B, N, H, e)
    return output, "scaled_dot_product_attention" if native else "composed"


def _check_tensors(arguments: Mapping[str, Any], q: Tensor) -> None:
    """Every array is a tensor on the device of q."""
    for argument, value in arguments.items():
        if value is None or isinstance(value, int):
            continue
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(argument, "", expected="a torch.Tensor", found=type(value).__name__)
        if value.layout is not torch.strided:
            raise ArgumentTypeError(argument, "", expected="a dense tensor", found=str(value.layout))
        if value.device != q.device:
            raise ArgumentValueError(
                argument, "device", expected=f"{q.device}, the device of `q`", found=str(value.device)
            )
