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
    """Few terms, most of them exact: limits that are a small part of the output in 16 bits, too.

    On random data the worst case of a whole layer is larger than its output in bfloat16, and shows next to
    nothing. Here projections pick lanes and mixing picks heads, both with a sign, so queries, keys and values
    are numbers of every dtype; x and the biases are multiples of 1/8, x within [-1, 1] and mostly small, so
    that few terms of a logit are large. Everything has a part in the output: see
    `test_sharp_examples_show_faults`.
    """
    parameters = {}
    for name, shape in config.parameter_shapes().items():
        stream = f"sharp layer {seed}/{name}"
        if name.endswith("proj.weight"):
            values = _picks(stream, shape)
        elif name.endswith("norm.weight"):  # unequal where two lanes turn: exchanged norms differ
            lane = np.arange(shape[0])
            values = np.where(lane == 0, 1.0, 0.5)
            values = values if name.startswith("q") else np.where(lane % 2 == 1, 1.0, 0.5)
        elif name.endswith("bias"):
            values = _signs(stream, shape) * integers(stream, shape, 1, 4 if name[0] in "qk" else 8) / 8
        elif len(shape) == 2:  # (H, P), of each head alone
            values = integers(stream, shape, 1, 3)
        else:  # (sources, H, P): one source for each of the others, the next one for the next pseudo-head
            first = integers(f"{stream} source", (shape[1], 1), 0, shape[0] - 1)
            source = (first + np.arange(shape[2])) % shape[0]
            factor = _signs(stream, shape[1:]) if name in ("alpha_q", "alpha_k") else 1
            values = factor * (np.arange(shape[0])[:, None, None] == source)
        narrow = parameter_dtype if parameter_dtype and name in MIXING else dtype
        parameters[name] = cast(values, narrow)
    stream, shape = f"sharp layer {seed}/x", (B, N, config.model_width)
    size = integers(stream, shape, 1, 8) * integers(f"{stream} twice", shape, 1, 8) // 8
    return parameters, cast(_signs(stream, shape) * size / 8, dtype)


def _signs(stream: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return 2.0 * integers(f"{stream} sign", shape, 0, 1) - 1.0


def _picks(stream: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """One number +-1 in each row, and in each column: more in a row only where there are more columns."""
    count = max(shape)
    order = np.argsort(integers(stream, (count,), 0, 2**24 - 1), kind="stable")
    values = np.zeros(shape)
    values[np.arange(count) % shape[0], order % shape[1]] = _signs(stream, (count,))
    return values


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
    """Hold a layer's output to its limits, of which a conforming one needs half; returns the worst ratio.

    `found` has the dtype that the layer gave it, which is to be `storage`.
    """
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
    assert found.dtype.name == storage
    found = np.asarray(found, dtype=np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(exact))
    finite = np.isfinite(exact)
    ratio = float(np.max(np.abs(found - exact)[finite] / limit[finite], initial=0.0))
    assert ratio <= 0.5, ratio
    return ratio


SAME_FUNCTION = 2.0**-40
"""Of golden layers that are the same function: as `SAME_GRADIENT`."""

SAME_GRADIENT = 2.0**-40
"""Largest difference of gradients in float64, as a part of the largest element, of two ways to run a layer.

The roundoff of float64, 2**-53, times some 10**3 terms that are summed in another order or fused; a gradient
that is wrong is off by a part of 1.
"""

DIFFERENCES = 1e-6
"""Of gradients in float64 and central differences with a step h of about 1e-5: h**2 and 2**-53 / h, times the
derivatives of third order and the sizes of what is summed, which are some 10**2."""


def assert_same(found: Any, wanted: Any, part: float) -> None:
    """Hold arrays of float64 to a largest difference, a part of the largest element that is wanted."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype == np.float64
    assert found.shape == wanted.shape
    difference, largest = (float(np.max(np.abs(x), initial=0.0)) for x in (found - wanted, wanted))
    assert difference <= part * largest, (difference, largest)
