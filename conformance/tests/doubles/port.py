"""A port of the operation in NumPy whose every step can be replaced.

An honest port rounds where SPEC.md [NUM-3] allows it. A faulty one overrides one method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import cast
from iha_core import AttentionConfig, Dims, dtype_name, reference, validate

Array = NDArray[np.float64]
Config = Mapping[str, Any]


def nearest(x: Any, bits: int) -> Any:
    """Numbers with so many significant bits, of the dtype of x."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, bits)), exponent - bits).astype(x.dtype)


class Port:
    """Callable target: `port(inputs, config)` gives all stages, or the output alone.

    Args:
        rounding: "once" rounds the output only; "stages" rounds every stage but the logits and lse.
        stages: whether to return all stages.
        precision: precision class of the products ([NUM-8]).
    """

    def __init__(self, rounding: str = "once", *, stages: bool = False, precision: str = "highest") -> None:
        self.rounding = rounding
        self.stages = stages
        self.precision = precision

    def __call__(self, inputs: Mapping[str, Any], config: Config) -> Any:
        dtype = self.dtype = dtype_name(inputs["q"])
        with np.errstate(all="ignore"):
            results = self.forward(self.change_inputs(dict(inputs)), self.change_config(dict(config)), dtype)
        results["output"] = cast(results["output"], dtype)
        return results if self.stages else results["output"]

    # What a fault may replace.

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def scale(self, config: AttentionConfig, dims: Dims) -> float:
        return config.resolve_scale(dims.d)

    def isolate(self, x: Array, key_mask: NDArray[np.bool_]) -> Array:
        """Keys or values without what the key mask drops ([KEY-3])."""
        return np.where(key_mask[:, :, None, None], x, 0.0)

    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        return self.multiply(reference.mix, x, alpha)

    def order(self, x: Array, P: int) -> Array:
        """Rows of a mixed array (B, T, H, width) as attention sees them."""
        return x

    def unorder(self, x: Array, P: int) -> Array:
        return x

    def angles(self, position: NDArray[np.int64], dims: Dims, config: AttentionConfig) -> Array | None:
        return reference.rope_angles(position, dims, config)

    def rotate(self, x: Array, angles: Array | None, config: AttentionConfig) -> Array:
        return reference.rotate(x, angles, config)

    def query_index(self, dims: Dims, offset: Any) -> NDArray[np.int64]:
        return reference.token_indices(dims, offset)[0]

    def visible(
        self,
        query_index: NDArray[np.int64],
        key_index: NDArray[np.int64],
        dims: Dims,
        config: AttentionConfig,
        **masks: Any,
    ) -> NDArray[np.bool_]:
        return reference.visibility(query_index, key_index, dims, config, **masks)

    def products(self, q: Array, k: Array, scale: float) -> Array:
        return self.multiply(lambda q, k: reference.scaled_products(q, k, scale), q, k)

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        return reference.softmax(logits)

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        return self.multiply(lambda a, v: reference.weighted_sum(a, v, visible), weights, mixed_v)

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        return self.multiply(reference.collapse_heads, virtual_out, R)

    def change_output(self, output: Array) -> Array:
        return output

    def multiply(self, product: Callable[[Any, Any], Array], x: Any, y: Any) -> Array:
        """Sums of products of x and y, as a matrix unit of the class forms them."""
        if self.precision == "highest" or self.dtype == "float64":
            return product(x, y)
        if self.precision != "bf16x3":
            bits = {"tf32": 11, "bf16x1": 8}[self.precision]
            return product(nearest(x, bits), nearest(y, bits))
        high_x, high_y = nearest(x, 8), nearest(y, 8)
        low_x, low_y = nearest(x - high_x, 8), nearest(y - high_y, 8)
        return product(high_x, high_y) + product(high_x, low_y) + product(low_x, high_y)

    # The operation.

    def forward(self, inputs: dict[str, Any], raw_config: Config, dtype: str) -> dict[str, Array]:
        config = AttentionConfig(**raw_config)
        dims = validate(**inputs, config=config)
        wide = {
            name: np.asarray(x, np.float64)
            for name, x in inputs.items()
            if name in ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")
        }
        key_mask = inputs.get("key_mask")
        if key_mask is not None:
            for name in ("k", "v"):
                wide[name] = self.isolate(wide[name], key_mask)
        P = dims.P
        out: dict[str, Array] = {}
        for name in "qkv":
            out[f"mixed_{name}"] = self.store(
                self.order(self.mix(name, wide[name], wide[f"alpha_{name}"]), P), dtype
            )
        query_index = self.query_index(dims, inputs.get("query_offset"))
        key_index = np.arange(dims.M)
        positions = reference.token_positions(
            query_index, key_index, inputs.get("positions"), inputs.get("kv_positions")
        )
        for name, position in zip("qk", positions, strict=True):
            rotated = self.rotate(out[f"mixed_{name}"], self.angles(position, dims, config), config)
            out[f"rotated_{name}"] = self.store(rotated, dtype)
        masks = {name: inputs.get(name) for name in ("key_mask", "segment_ids", "kv_segment_ids")}
        visible = self.visible(query_index, key_index, dims, config, **masks)
        raw = self.products(out["rotated_q"], out["rotated_k"], self.scale(config, dims))
        if config.normalisation == "softmax":
            out["logits"] = np.where(visible[:, None], raw, -np.inf)
            weights, out["lse"] = self.softmax(out["logits"])
        else:
            out["logits"] = weights = np.where(visible[:, None], raw, 0.0)
        weights = self.store(weights, dtype)
        out["virtual_out"] = self.store(self.weighted_sum(weights, out["mixed_v"], visible), dtype)
        out["output"] = self.change_output(
            self.collapse(self.unorder(out["virtual_out"], P), wide["collapse"])
        )
        return out

    def store(self, x: Array, dtype: str) -> Array:
        return cast(x, dtype).astype(np.float64) if self.rounding == "stages" else x
