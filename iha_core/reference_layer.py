"""The golden layer: SPEC.md chapter 10, projections and norms around the operation, in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_core.errors import ArgumentTypeError, ShapeError
from iha_core.initialisers import fixed_mixing
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.reference import Array, attention


def layer(
    parameters: Mapping[str, Any],
    x: Any,
    *,
    config: LayerConfig,
    key_mask: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
) -> Array:
    """A layer of interleaved heads, or of plain ones, exactly as specified, in float64.

    Args:
        parameters: all tensors of [CKPT-1] that the configuration has, by name.
        x: (B, N, D) input; any float dtype.
        config: sizes and choices of the layer.
        key_mask: (B, N) bool, True where a token may be attended; None for all.
        segment_ids: (B, N) int; attention stays within equal ids.
        positions: (B, N) int token positions for RoPE; None means index order.

    Returns:
        (B, N, D) float64.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md [LAY-2] to [LAY-6].
    """
    if not isinstance(config, LayerConfig):
        raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)
    wide = {name: np.asarray(x, dtype=np.float64) for name, x in parameters.items()}
    config.check_parameters({name: x.shape for name, x in wide.items()})
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 3 or x.shape[-1] != config.model_width:
        raise ShapeError("x", "shape", expected=f"(B, N, D={config.model_width})", found=str(x.shape))
    q, k, v = heads(wide, x, config)
    mixing = wide if config.kind == "iha" else fixed_mixing(config)  # [LAY-6]
    output = attention(
        q,
        k,
        v,
        *(mixing[name] for name in MIXING),
        config=config.attention,
        key_mask=key_mask,
        segment_ids=segment_ids,
        positions=positions,
    )  # (B, N, H, e)
    return project(output.reshape(*x.shape[:2], -1), wide, "o_proj")  # [LAY-3]


def heads(parameters: Mapping[str, Array], x: Array, config: LayerConfig) -> tuple[Array, Array, Array]:
    """Queries (B, N, H, d), keys (B, N, G, d) and values (B, N, G, e) of the operation ([LAY-2], [LAY-4])."""
    B, N, _ = x.shape
    q = project(x, parameters, "q_proj").reshape(B, N, config.num_heads, config.head_width)
    k = project(x, parameters, "k_proj").reshape(B, N, config.num_kv_heads, config.head_width)
    v = project(x, parameters, "v_proj").reshape(B, N, config.num_kv_heads, config.value_width)
    if config.qk_norm:
        q = rms_norm(q, parameters["q_norm.weight"], config.qk_norm_epsilon)
        k = rms_norm(k, parameters["k_norm.weight"], config.qk_norm_epsilon)
    return q, k, v


def project(x: Array, parameters: Mapping[str, Array], name: str) -> Array:
    """x Wᵀ + b ([LAY-2]): (B, N, in), weight (out, in) -> (B, N, out)."""
    product: Array = np.einsum("bni,oi->bno", x, parameters[f"{name}.weight"])
    return product + parameters.get(f"{name}.bias", 0.0)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Each head divided by its root mean square ([LAY-4]): (B, N, heads, d), weight (d,) -> alike."""
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    normalised: Array = x / np.sqrt(mean_square + epsilon) * weight
    return normalised
