"""Layers to test with, and the judge of what a backend's layer gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_conformance.corpus.streams import cast, integers, uniform
from iha_core import AttentionConfig, LayerConfig
from iha_core.bounds import derive_layer_limits
from iha_core.layer_config import MIXING

_TOKEN = AttentionConfig(causal="token", rope="token", window_unit="token")

CONFIGS: Mapping[str, LayerConfig] = {
    "paper": LayerConfig(model_width=12, num_heads=3, head_width=4, num_pseudo_heads=2),
    "grouped": LayerConfig(
        model_width=10,
        num_heads=4,
        head_width=6,
        num_pseudo_heads=3,
        num_kv_heads=2,
        value_width=5,
        bias=True,
        qk_norm=True,
    ),
    "per head": LayerConfig(
        model_width=12, num_heads=3, head_width=4, num_pseudo_heads=3, collapse="per_head", attention=_TOKEN
    ),
    "window": LayerConfig(
        model_width=8,
        num_heads=2,
        head_width=4,
        num_pseudo_heads=2,
        num_kv_heads=3,
        qk_norm=True,
        attention=AttentionConfig(window=2, rope="token", rope_pairing="adjacent"),
    ),
    "mha": LayerConfig(
        kind="mha", model_width=12, num_heads=4, head_width=4, num_kv_heads=2, bias=True, attention=_TOKEN
    ),
}
"""Layers by name: all sizes distinct somewhere, every choice made somewhere."""


def example(
    config: LayerConfig,
    dtype: str,
    *,
    seed: int = 0,
    B: int = 2,
    N: int = 7,
    parameter_dtype: str | None = None,
) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Random parameters, all of them, and an input (B, N, D), rounded to a dtype; see `sharp_example`.

    With `parameter_dtype` the tensors of the operation have that one.
    """
    parameters = {}
    for name, shape in config.parameter_shapes().items():
        size = 1.0 if len(shape) == 1 else (3.0 / shape[-1 if name.endswith("weight") else 0]) ** 0.5
        values = uniform(f"layer {seed}/{name}", shape, size)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.5 * values
        narrow = parameter_dtype if parameter_dtype and name in MIXING else dtype
        parameters[name] = cast(values, narrow)
    return parameters, cast(uniform(f"layer {seed}/x", (B, N, config.model_width), 2.0), dtype)


def sharp_example(
    config: LayerConfig,
    dtype: str,
    *,
    seed: int = 0,
    B: int = 2,
    N: int = 7,
    parameter_dtype: str | None = None,
) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Whole numbers, projections that pick lanes, and logits of 0: limits of few ulps in 16 bits, too.

    On random data the worst case of a whole layer is larger than its output in bfloat16, and shows next to
    nothing. Queries are 0, so this one shows everything but queries and keys.
    """
    parameters = {}
    for name, shape in config.parameter_shapes().items():
        if name.endswith("proj.weight"):
            lane = integers(f"layer {seed}/{name}", shape[:1], 0, shape[1] - 1)
            values = 1.0 * (np.arange(shape[1]) == lane[:, None])
        elif name.endswith(".weight"):
            values = np.ones(shape)
        else:
            values = integers(f"layer {seed}/{name}", shape, -2, 2)
        if name.startswith("q_proj"):
            values = 0.0 * values
        narrow = parameter_dtype if parameter_dtype and name in MIXING else dtype
        parameters[name] = cast(values, narrow)
    x = integers(f"layer {seed}/x", (B, N, config.model_width), -4, 4)
    return parameters, cast(x, dtype)


def assert_within_limits(
    found: np.ndarray[Any, Any],
    parameters: Mapping[str, Any],
    x: Any,
    *,
    config: LayerConfig,
    storage: str,
    key_mask: Any = None,
    segment_ids: Any = None,
    positions: Any = None,
) -> float:
    """Hold a layer's output to its limits, of which a conforming one needs half; returns the worst ratio."""
    exact, limit = derive_layer_limits(
        parameters,
        x,
        config=config,
        storage=storage,
        key_mask=key_mask,
        segment_ids=segment_ids,
        positions=positions,
    )
    assert found.shape == exact.shape
    found = np.asarray(found, dtype=np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(exact))
    finite = np.isfinite(exact)
    ratio = float(np.max(np.abs(found - exact)[finite] / limit[finite], initial=0.0))
    assert ratio <= 0.5, ratio
    return ratio
