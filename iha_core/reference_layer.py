"""The golden layer: SPEC.md chapter 10, projections and norms around the operation, in NumPy float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_core.checkpoint import check_tensors
from iha_core.errors import ArgumentTypeError, DTypeError
from iha_core.initialisers import fixed_mixing
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.reference import Array, attention
from iha_core.validation import FLOAT_DTYPES, check_array, dtype_name


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
    if not isinstance(parameters, Mapping):
        expected, found = "a mapping of arrays by name", type(parameters).__name__
        raise ArgumentTypeError("parameters", "", expected=expected, found=found)
    for name, array in [*parameters.items(), ("x", x)]:
        check_array(str(name), array)
    check_tensors(parameters, config)
    config.check_input(x)
    if dtype_name(x) not in FLOAT_DTYPES:
        expected = "one of " + ", ".join(FLOAT_DTYPES)
        raise DTypeError("x", "dtype", expected=expected, found=dtype_name(x))
    wide = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in parameters.items()}
    x = np.asarray(x, dtype=np.float64)
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
        query_offset=0,
    )  # (B, N, H, e): [LAY-5]
    B, N, H, e = output.shape
    return project(output.reshape(B, N, H * e), wide, "o_proj")  # [LAY-3]


def heads(parameters: Mapping[str, Array], x: Array, config: LayerConfig) -> tuple[Array, Array, Array]:
    """Queries (B, N, H, d), keys (B, N, G, d), values (B, N, G, e): (32), (34), [LAY-2], [LAY-4]."""
    B, N, _ = x.shape
    q = project(x, parameters, "q_proj").reshape(B, N, config.num_heads, config.head_width)
    k = project(x, parameters, "k_proj").reshape(B, N, config.num_kv_heads, config.head_width)
    v = project(x, parameters, "v_proj").reshape(B, N, config.num_kv_heads, config.value_width)
    if config.qk_norm:
        q = rms_norm(q, parameters["q_norm.weight"], config.qk_norm_epsilon)
        k = rms_norm(k, parameters["k_norm.weight"], config.qk_norm_epsilon)
    return q, k, v


def project(x: Array, parameters: Mapping[str, Array], name: str) -> Array:
    """x Wᵀ + b, (32) and (33), [LAY-2], [LAY-3]: (B, N, in), weight (out, in) -> (B, N, out)."""
    product: Array = np.einsum("bni,oi->bno", x, parameters[f"{name}.weight"])
    return product + parameters.get(f"{name}.bias", 0.0)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Each head divided by its root mean square, (34), [LAY-4]: (B, N, heads, d), weight (d,) -> alike."""
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    normalised: Array = x / np.sqrt(mean_square + epsilon) * weight
    return normalised
