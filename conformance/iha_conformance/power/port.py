"""The operation composed from the reference's pieces, every step of which can be replaced.

A port rounds where SPEC.md [NUM-3] allows it. An honest one (`honest`) does a step in another legitimate
way; a mutant (`mutants`) is a port with one step replaced by a function that does it wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import cast
from iha_core import AttentionConfig, Dims, dtype_name, reference, validate
from iha_core.bounds import HIGHEST, arithmetic

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Masks = Mapping[str, Any]
Side = Literal["q", "k", "v"]
Rounding = Literal["once", "stages"]
Replacement = Callable[..., Any]
Trace = Sequence[Any]
"""Results of the steps of a call, in order."""

ROUNDINGS: tuple[Rounding, ...] = ("once", "stages")

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


def to_bits(x: Any, bits: int) -> Any:
    """x rounded to nearest with so many significant bits; shape and dtype of x."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, bits)), exponent - bits).astype(x.dtype)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two results of a step have the same bits."""
    if ours is theirs:
        return True
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


class Port:
    """A callable target, `port(inputs, config)`, that gives the output or all stages.

    A replacement is called as `function(port, *arguments of the step)`. It finds the step as it should be
    under `port.<step>`, and what is known of the call in the attributes below.

    Args:
        rounding: "once" rounds the output only; "stages" rounds every stage but the logits and lse.
        stages: whether to return all stages.
        precision: precision class of the products ([NUM-8]).
        replace: functions by the name of the step that they replace.
        known: what the steps of an honest port gave for the same call and rounding (`record`). Steps are
            taken from there until a replaced one gives something else.

    Raises:
        ValueError: something else than a step is to be replaced.

    Attributes:
        deviates: whether, in the last call, a replaced step gave something else than `known` has.
        dtype: storage dtype of the call.
        inputs, config, dims: its arguments, configuration and sizes, as changed by the first two steps.
        positions: RoPE positions of queries and keys, (B, N) and (B or 1, M).
    """

    dtype: str
    inputs: dict[str, Any]
    config: AttentionConfig
    dims: Dims
    positions: tuple[Integers, Integers]

    def __init__(
        self,
        rounding: Rounding = "once",
        *,
        stages: bool = False,
        precision: str = HIGHEST,
        replace: Mapping[str, Replacement] | None = None,
        known: Trace | None = None,
    ) -> None:
        self.rounding = rounding
        self.stages = stages
        self.precision = precision
        self._replaced = dict(replace or {})
        self._known = known
        self._trace: list[Any] = []
        self.deviates = known is None
        unknown = sorted(set(self._replaced) - set(STEPS))
        if unknown:
            raise ValueError(f"replace: expected steps among {', '.join(STEPS)}, got {unknown[0]!r}")

    def __call__(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        self.dtype = dtype_name(inputs["q"])
        self.deviates = self._known is None
        self._trace = []
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

    # What steps are made of.

    def store(self, x: Array) -> Array:
        """What storing leaves of a stage."""
        return cast(x, self.dtype).astype(np.float64) if self.rounding == "stages" else x

    def accumulator(self) -> type[np.floating[Any]]:
        """The narrowest format that sums may have ([NUM-1])."""
        return np.float64 if arithmetic(self.dtype).accumulator.name == "float64" else np.float32

    def multiply(self, product: Callable[[Any, Any], Array], x: Any, y: Any) -> Array:
        """Sums of products of x and y, as a matrix unit of the class forms them."""
        if self.precision == HIGHEST or self.dtype == "float64":
            return product(x, y)
        if self.precision != "bf16x3":
            bits = {"tf32": 11, "bf16x1": 8}[self.precision]
            return product(to_bits(x, bits), to_bits(y, bits))
        high_x, high_y = to_bits(x, 8), to_bits(y, 8)
        low_x, low_y = to_bits(x - high_x, 8), to_bits(y - high_y, 8)
        return product(high_x, high_y) + product(high_x, low_y) + product(low_x, high_y)

    # The operation.

    def record(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Trace:
        """What each step gives for a call, in order; not to be written to."""
        self(inputs, config)
        for array in itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in self._trace):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return self._trace

    def _do(self, step: str, *arguments: Any) -> Any:
        replacement = self._replaced.get(step)
        known = None if self.deviates or self._known is None else self._known[len(self._trace)]
        if replacement is not None:
            result = replacement(self, *arguments)
            self.deviates = self.deviates or not _same(result, known)
        else:
            result = getattr(self, step)(*arguments) if self.deviates else known
        self._trace.append(result)
        return result

    def _forward(self, inputs: dict[str, Any], config: dict[str, Any]) -> dict[str, Array]:
        self.config = AttentionConfig(**config)
        self.dims = validate(**inputs, config=self.config)
        self.inputs = inputs
        self.inputs = inputs = self._do("change_inputs", dict(inputs))
        self.config = AttentionConfig(**self._do("change_config", config))
        self.dims = validate(**inputs, config=self.config)
        wide = {name: np.asarray(inputs[name], np.float64) for name in TENSORS}
        key_mask = inputs.get("key_mask")
        if key_mask is not None:
            wide |= {name: self._do("isolate", wide[name], key_mask) for name in ("k", "v")}
        out: dict[str, Array] = {}
        for side in "qkv":
            mixed = self._do("mix", side, wide[side], wide[f"alpha_{side}"])
            out[f"mixed_{side}"] = self.store(self._do("order", mixed, False))
        query_index = self._do("query_index", inputs.get("query_offset"))
        key_index = np.arange(self.dims.M)
        self.positions = reference.token_positions(
            query_index, key_index, inputs.get("positions"), inputs.get("kv_positions")
        )
        for side, position in zip("qk", self.positions, strict=True):
            angles = self._do("angles", side, position)
            out[f"rotated_{side}"] = self.store(self._do("rotate", side, out[f"mixed_{side}"], angles))
        masks = {name: inputs.get(name) for name in ("key_mask", "segment_ids", "kv_segment_ids")}
        visible = self._do("visible", query_index, key_index, masks)
        raw = self._do("products", out["rotated_q"], out["rotated_k"], self._do("scale"))
        if self.config.normalisation == "softmax":
            out["logits"] = np.where(visible[:, None], raw, -np.inf)
            weights, out["lse"] = self._do("softmax", out["logits"])
        else:
            out["logits"] = weights = np.where(visible[:, None], raw, 0.0)
        summed = self._do("weighted_sum", self.store(weights), out["mixed_v"], visible)
        out["virtual_out"] = self.store(summed)
        collapsed = self._do("collapse", self._do("order", out["virtual_out"], True), wide["collapse"])
        out["output"] = self._do("change_output", collapsed)
        return out
