"""The backward pass composed from pieces, every step of which can be replaced (SPEC.md chapter 9).

What `port` is for the operation. The forward pass is that of an honest port, and what [GRAD-8] leaves out
is what the reference leaves out: loops in the tests alone are independent of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.port import Booleans, Port, Side
from iha_conformance.power.steps import Array, Steps
from iha_core import GRADIENTS, AttentionConfig, dtype_name, reference, validate
from iha_core.gradient import by_token, without_unseen

Tensors = dict[str, Array]

BACKWARD_STEPS = (
    "change_cotangent",
    "leave_out",
    "weights",
    "collapse_bar",
    "virtual_out_bar",
    "values_bar",
    "weights_bar",
    "row_term",
    "logits_bar",
    "queries_bar",
    "keys_bar",
    "rotate_back",
    "unmix",
    "alpha_bar",
    "change_gradients",
)
"""What may be replaced, in the order in which it happens; each is a method of `BackwardPort`."""


class BackwardPort(Steps):
    """A callable target, `port(inputs, config)`, that gives the gradients by argument; see `Steps`.

    `inputs` have the cotangent among them. "stages" rounds wherever [NUM-3] and [NUM-9] allow it.

    Attributes:
        forward: stages of the forward pass.
        visible: (B, T, S).
        positions: RoPE positions of queries and keys, (B, N) and (B or 1, M).
        tensors: the seven arrays in float64, as `leave_out` left them.
    """

    STEPS = BACKWARD_STEPS

    forward: Mapping[str, Array]
    visible: Booleans
    positions: tuple[Any, Any]
    tensors: Tensors

    def __call__(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        self.begin(dtype_name(inputs["q"]))
        arguments = {name: value for name, value in inputs.items() if name != "cotangent"}
        with np.errstate(all="ignore"):
            self._run_forward(arguments, dict(config))
            found = self._backward(np.asarray(inputs["cotangent"], np.float64))
        dtypes = {name: dtype_name(inputs[name]) for name in GRADIENTS}
        with np.errstate(over="ignore", invalid="ignore"):
            return {name: cast(found[name], dtypes[name]) for name in GRADIENTS}

    # The steps.

    def change_cotangent(self, cotangent: Array) -> Array:
        """The cotangent as it is taken."""
        return cotangent

    def leave_out(self, tensors: Tensors, visible: Booleans) -> Tensors:
        """The arrays without what is not seen and does not see ([GRAD-8])."""
        return tensors | without_unseen(tensors, visible, self.dims)

    def weights(self, logits: Array, lse: Array | None) -> Array:
        """(B, H, T, S) -> weights alike; the logits themselves without softmax."""
        return logits if lse is None else reference.softmax(logits)[0]

    def collapse_bar(self, cotangent: Array, virtual_out: Array, R: Array) -> Array:
        """[GRAD-1]: (B, N, H, e), (B, T, H, e) -> shape of R."""
        equation = "bnhe,bnphe->hp" if R.ndim == 2 else "bnie,bnphe->ihp"
        return self.contract(equation, cotangent, self.by_token(virtual_out))

    def virtual_out_bar(self, cotangent: Array, R: Array) -> Array:
        """[GRAD-2]: (B, N, H, e), R -> (B, T, H, e)."""
        equation = "bnhe,hp->bnphe" if R.ndim == 2 else "bnie,ihp->bnphe"
        return self.by_row(self.contract(equation, cotangent, R))

    def values_bar(self, weights: Array, virtual_out_bar: Array) -> Array:
        """[GRAD-2]: (B, H, T, S), (B, T, H, e) -> (B, S, H, e)."""
        return self.contract("bhts,bthe->bshe", weights, virtual_out_bar)

    def weights_bar(self, virtual_out_bar: Array, mixed_v: Array) -> Array:
        """[GRAD-3]: (B, T, H, e), (B, S, H, e) -> (B, H, T, S)."""
        return self.contract("bthe,bshe->bhts", virtual_out_bar, mixed_v)

    def row_term(self, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
        """D of (26): (B, H, T, 1), 0 without softmax."""
        if self.config.normalisation == "none":
            return np.zeros((*weights.shape[:-1], 1))
        return np.asarray(np.sum(weights * weights_bar, axis=-1, keepdims=True))

    def logits_bar(self, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans) -> Array:
        """[GRAD-3], [GRAD-8]: (B, H, T, S)."""
        factor = weights if self.config.normalisation == "softmax" else 1.0
        return np.where(seen, factor * (weights_bar - row_term), 0.0)

    def queries_bar(self, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
        """[GRAD-4]: (B, H, T, S), (B, S, H, d) -> (B, T, H, d)."""
        return scale * self.contract("bhts,bshd->bthd", self.store(logits_bar), rotated_k)

    def keys_bar(self, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
        """[GRAD-4]: (B, H, T, S), (B, T, H, d) -> (B, S, H, d)."""
        return scale * self.contract("bhts,bthd->bshd", self.store(logits_bar), rotated_q)

    def rotate_back(self, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
        """[GRAD-5]: (B, T, H, d), the angles of the forward rotation -> (B, T, H, d)."""
        return reference.rotate(rotated_bar, None if angles is None else -angles, self.config)

    def unmix(self, side: Side, mixed_bar: Array, alpha: Array) -> Array:
        """[GRAD-6]: (B, T, H, width), (source, H, P) -> (B, N, source, width)."""
        return self.contract("bnphw,shp->bnsw", self.by_token(mixed_bar), alpha)

    def alpha_bar(self, side: Side, x: Array, mixed_bar: Array) -> Array:
        """[GRAD-7]: (B, N, source, width), (B, T, H, width) -> (source, H, P)."""
        return self.contract("bnsw,bnphw->shp", x, self.by_token(mixed_bar))

    def change_gradients(self, gradients: Tensors) -> Tensors:
        """The gradients as they are given."""
        return gradients

    # What steps are made of.

    def contract(self, equation: str, x: Array, y: Array) -> Array:
        """A sum of products, by an equation of einsum with two operands."""
        return self.multiply(lambda x, y: np.asarray(np.einsum(equation, x, y)), x, y)

    def by_token(self, x: Array) -> Array:
        """(B, T, H, width) -> (B, N, P, H, width)."""
        return by_token(x, self.dims.P)

    @staticmethod
    def by_row(x: Array) -> Array:
        """(B, N, P, H, width) -> (B, T, H, width)."""
        B, N, P, H, width = x.shape
        return x.reshape(B, N * P, H, width)

    def angles(self, side: str) -> Array | None:
        """Angles by which a side was rotated, (B or 1, T, 1, d/2)."""
        return reference.rope_angles(self.positions["qk".index(side)], self.dims, self.config)

    # The passes.

    def _run_forward(self, arguments: dict[str, Any], config: dict[str, Any]) -> None:
        self.config = AttentionConfig(**config)
        self.dims = validate(**arguments, config=self.config)
        self.inputs = arguments
        port = Port(self.rounding, stages=True, precision=self.precision)
        masks = {name: arguments.get(name) for name in ("key_mask", "segment_ids", "kv_segment_ids")}
        queries, keys = reference.token_indices(self.dims, arguments.get("query_offset"))
        self.visible = reference.visibility(queries, keys, self.dims, self.config, **masks)
        self.forward = port(arguments, config)
        self.positions = port.positions

    def _backward(self, cotangent: Array) -> Tensors:
        arrays = {name: np.asarray(self.inputs[name], np.float64) for name in GRADIENTS}
        forward, scale = self.forward, self.config.resolve_scale(self.dims.d)
        cotangent = self.do("change_cotangent", cotangent)
        self.tensors = tensors = self.do("leave_out", arrays, self.visible)
        weights = self.store(self.do("weights", forward["logits"], forward.get("lse")))
        found = {"collapse": self.do("collapse_bar", cotangent, forward["virtual_out"], tensors["collapse"])}
        virtual_out_bar = self.store(self.do("virtual_out_bar", cotangent, tensors["collapse"]))
        mixed = {"v": self.store(self.do("values_bar", weights, virtual_out_bar))}
        weights_bar = self.store(self.do("weights_bar", virtual_out_bar, forward["mixed_v"]))
        row_term = self.do("row_term", weights, weights_bar, virtual_out_bar)
        logits_bar = self.do("logits_bar", weights, weights_bar, row_term, self.visible[:, None])
        for side, step, other in (("q", "queries_bar", "rotated_k"), ("k", "keys_bar", "rotated_q")):
            rotated_bar = self.store(self.do(step, logits_bar, forward[other], scale))
            mixed[side] = self.store(self.do("rotate_back", side, rotated_bar, self.angles(side)))
        for side in "qkv":
            found[side] = self.do("unmix", side, mixed[side], tensors[f"alpha_{side}"])
            found[f"alpha_{side}"] = self.do("alpha_bar", side, tensors[side], mixed[side])
        changed: Tensors = self.do("change_gradients", found)
        return changed
