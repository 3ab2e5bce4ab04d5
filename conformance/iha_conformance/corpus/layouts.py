"""The same values in other places of memory ([ARG-5]): slices, transposed and broadcast views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]


def _sliced(x: AnyArray) -> AnyArray:
    """A view into an array that is larger on every side; what lies around it is not zero."""
    around = np.ones([size + 2 for size in x.shape], dtype=x.dtype)
    inner = around[tuple(slice(1, size + 1) for size in x.shape)]
    inner[...] = x
    return inner


def _transposed(x: AnyArray) -> AnyArray:
    """A view whose axes lie in memory in the opposite order."""
    return np.ascontiguousarray(x.T).T


def _stepped(x: AnyArray) -> AnyArray:
    """Every second element of the last axis of a larger array."""
    wide = np.ones((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _broadcast(x: AnyArray) -> AnyArray:
    """A view with stride 0 along the first axis; x must repeat along it."""
    view: AnyArray = np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))
    return view


def _each(view: Callable[[AnyArray], AnyArray], names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    def apply(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: view(value) if name in names else value for name, value in inputs.items()}

    return apply


def _fused(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """q, k and v as slices of one projection (B, N, H + 2 G, d); needs N = M and d = e."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    H, G = q.shape[2], k.shape[2]
    together = np.concatenate([q, k, v], axis=2)
    parts = {"q": together[:, :, :H], "k": together[:, :, H : H + G], "v": together[:, :, H + G :]}
    return {**inputs, **parts}


_FLOATS = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse", "cotangent")
_ARRAYS = (*_FLOATS, "key_mask", "segment_ids", "kv_segment_ids", "positions", "kv_positions")

LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "contiguous": dict,
    "sliced": _each(_sliced, _ARRAYS),
    "transposed": _each(_transposed, _ARRAYS),
    "stepped": _each(_stepped, _ARRAYS),
    "broadcast": _each(_broadcast, ("q", "k", "v")),
    "fused": _fused,
}


def apply_layout(inputs: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """The inputs with the same values, laid out in memory as the case wants."""
    return LAYOUTS[layout](inputs)
