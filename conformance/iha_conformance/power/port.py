"""The operation composed from the reference's pieces, every step of which can be replaced.

A port rounds where SPEC.md [NUM-3] allows it. An honest one (`honest`) does a step in another legitimate
way; a mutant (`mutants`) is a port with one step replaced by a function that does it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import cast
from iha_conformance.power.steps import Array, Steps
from iha_core import AttentionConfig, dtype_name, reference, validate

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Masks = Mapping[str, Any]
Side = Literal["q", "k", "v"]
TENSORS = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")

STEPS = (
    "change_inputs",
    "change_config",
    "isolate",
    "mix",
    "order",
    "query_index",
    "angles",
    "rotate",
    "visible",
    "scale",
    "products",
    "softmax",
    "weighted_sum",
    "collapse",
    "change_output",
)
"""What may be replaced, in the order in which it happens; each is a method of `Port`."""


class Port(Steps):
    """A callable target, `port(inputs, config)`, that gives the output or all stages; see `Steps`.

    "stages" rounds every stage but logits and lse. The first two steps change arguments, configuration and
    sizes.

    Attributes:
        positions: RoPE positions of queries and keys, (B, N) and (B or 1, M).
    """

    STEPS = STEPS

    positions: tuple[Integers, Integers]

    def __call__(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        self.begin(dtype_name(inputs["q"]))
        with np.errstate(all="ignore"):
            results = self._forward(dict(inputs), dict(config))
            results["output"] = cast(results["output"], self.dtype)
        return results if self.stages else results["output"]

    # The steps.

    def change_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments as they are taken."""
        return inputs

    def change_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration as it is taken."""
        return config

    def isolate(self, x: Array, key_mask: Booleans) -> Array:
        """Keys or values without what the key mask drops ([KEY-3])."""
        return np.where(key_mask[:, :, None, None], x, 0.0)

    def mix(self, side: Side, x: Array, alpha: Array) -> Array:
        """[MIX-1] to [MIX-4]: (B, N, source, width), (source, H, P) -> (B, T, H, width)."""
        return self.multiply(reference.mix, x, alpha)

    def order(self, x: Array, inverse: bool) -> Array:
        """Rows of a mixed array (B, T, H, width) as attention sees them; with `inverse`, back again."""
        return x

    def query_index(self, offset: Any) -> Integers:
        """[ARG-1], [ARG-2]: (B, N)."""
        return reference.token_indices(self.dims, offset)[0]

    def angles(self, side: Side, position: Integers) -> Array | None:
        """[POS-1] to [ROPE-5]: (B or 1, N) -> (B or 1, T, 1, d/2), None without RoPE."""
        return reference.rope_angles(position, self.dims, self.config)

    def rotate(self, side: Side, x: Array, angles: Array | None) -> Array:
        """[ROPE-1]: (B, T, H, d), angles -> (B, T, H, d)."""
        return reference.rotate(x, angles, self.config)

    def visible(self, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
        """SPEC.md 3.2: (B, N), (M,) -> (B, T, S)."""
        return reference.visibility(query_index, key_index, self.dims, self.config, **masks)

    def scale(self) -> float:
        """[LOG-2]."""
        return self.config.resolve_scale(self.dims.d)

    def products(self, q: Array, k: Array, scale: float) -> Array:
        """[LOG-1]: (B, T, H, d), (B, S, H, d) -> (B, H, T, S)."""
        return self.multiply(lambda q, k: reference.scaled_products(q, k, scale), q, k)

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        """[SOFT-1] to [SOFT-3]: (B, H, T, S) -> weights alike, lse (B, H, T)."""
        return reference.softmax(logits)

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
        """(B, H, T, S), (B, S, H, e), (B, T, S) -> (B, T, H, e)."""
        if np.isfinite(mixed_v).all():  # one matrix product, as no value has to be kept from a weight of 0
            return self.multiply(
                lambda a, v: np.swapaxes(a @ np.swapaxes(v, 1, 2), 1, 2), weights * visible[:, None], mixed_v
            )
        return self.multiply(lambda a, v: reference.weighted_sum(a, v, visible), weights, mixed_v)

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        """[COL-1], [COL-2]: (B, T, H, e), R -> (B, N, H, e)."""
        return self.multiply(reference.collapse_heads, virtual_out, R)

    def change_output(self, output: Array) -> Array:
        """The output as it is given."""
        return output

    def _forward(self, inputs: dict[str, Any], config: dict[str, Any]) -> dict[str, Array]:
        self.config = AttentionConfig(**config)
        self.dims = validate(**inputs, config=self.config)
        self.inputs = inputs
        self.inputs = inputs = self.do("change_inputs", dict(inputs))
        self.config = AttentionConfig(**self.do("change_config", config))
        self.dims = validate(**inputs, config=self.config)
        wide = {name: np.asarray(inputs[name], np.float64) for name in TENSORS}
        key_mask = inputs.get("key_mask")
        if key_mask is not None:
            wide |= {name: self.do("isolate", wide[name], key_mask) for name in ("k", "v")}
        out: dict[str, Array] = {}
        for side in "qkv":
            mixed = self.do("mix", side, wide[side], wide[f"alpha_{side}"])
            out[f"mixed_{side}"] = self.store(self.do("order", mixed, False))
        query_index = self.do("query_index", inputs.get("query_offset"))
        key_index = np.arange(self.dims.M)
        self.positions = reference.token_positions(
            query_index, key_index, inputs.get("positions"), inputs.get("kv_positions")
        )
        for side, position in zip("qk", self.positions, strict=True):
            angles = self.do("angles", side, position)
            out[f"rotated_{side}"] = self.store(self.do("rotate", side, out[f"mixed_{side}"], angles))
        masks = {name: inputs.get(name) for name in ("key_mask", "segment_ids", "kv_segment_ids")}
        visible = self.do("visible", query_index, key_index, masks)
        raw = self.do("products", out["rotated_q"], out["rotated_k"], self.do("scale"))
        if self.config.normalisation == "softmax":
            out["logits"] = np.where(visible[:, None], raw, -np.inf)
            weights, out["lse"] = self.do("softmax", out["logits"])
        else:
            out["logits"] = weights = np.where(visible[:, None], raw, 0.0)
        summed = self.do("weighted_sum", self.store(weights), out["mixed_v"], visible)
        out["virtual_out"] = self.store(summed)
        collapsed = self.do("collapse", self.do("order", out["virtual_out"], True), wide["collapse"])
        out["output"] = self.do("change_output", collapsed)
        return out
