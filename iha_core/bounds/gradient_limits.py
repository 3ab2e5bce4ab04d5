"""How far conforming gradients may be from the golden ones, per element (SPEC.md 9.2).

The errors of the forward pass are those of `chain`; from there the bound is carried backwards, equation by
equation. A bar of the specification is the ending `_bar`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from iha_core.bounds import worst
from iha_core.bounds.chain import Chain, propagate
from iha_core.bounds.contraction import contracted
from iha_core.bounds.formats import (
    HIGHEST,
    NO_GRID,
    Arithmetic,
    Array,
    Format,
    arithmetic,
    sum_is_exact,
    tolerances,
)
from iha_core.bounds.limits import Limits, element_limit
from iha_core.bounds.worst import Booleans, Operand, Quantity, kept, operand, operand_of
from iha_core.config import AttentionConfig
from iha_core.gradient import GRADIENTS, backward, by_token, forward
from iha_core.reference import lane_pairs
from iha_core.validation import dtype_name


def derive_gradient_limits(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    cotangent: Any,
    storage: str,
    precision: str = HIGHEST,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> Limits:
    """Run the golden backward pass and derive the limit of every element of every gradient.

    Takes the arguments of `attention_vjp`, and:

    Args:
        storage: storage dtype of q, k and v. Gradients of parameters are judged in the dtype of alpha_q.
        precision: precision class of the products ([NUM-8]), one of `precision_classes()`.

    Returns:
        The exact gradients and their limits, by the names of the arguments.

    Raises:
        IHAError: bad input, as from `attention_vjp`, or no such precision class.

    Source: SPEC.md [NUM-9], [NUM-10].
    """
    optional = {
        "key_mask": key_mask,
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "query_offset": query_offset,
    }
    arrays = (q, k, v, alpha_q, alpha_k, alpha_v, collapse)
    call = forward(arrays, cotangent, config, optional)
    rules = arithmetic(storage, precision)
    parameter = arithmetic(dtype_name(alpha_q)).storage

    with np.errstate(invalid="ignore", over="ignore"):
        bars = backward(call, config, optional)
        chain = propagate(call.tensors, call.stages, call.dims, config, rules, optional)
        gradients = _Backward(chain, call.tensors, call.stages, bars, parameter).gradients()
    limits = {}
    for name in GRADIENTS:
        found, storage_of = gradients[name], rules.storage if name in "qkv" else parameter
        limits[name] = element_limit(found.value, found.error, found.magnitude, storage_of, rules)
    return Limits(stages={name: gradients[name].value for name in GRADIENTS}, limits=limits)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """One backward pass.

    Attributes:
        chain: the forward pass with its errors.
        tensors, stages, bars: exact inputs, stages and derivatives.
        parameter: format of the gradients of mixing tensors and collapse.
    """

    chain: Chain
    tensors: Mapping[str, Array]
    stages: Mapping[str, Array]
    bars: Mapping[str, Array]
    parameter: Format

    @property
    def rules(self) -> Arithmetic:
        return self.chain.arithmetic

    def gradients(self) -> dict[str, Quantity]:
        """The gradients with their errors, by the names of the arguments."""
        found = {"collapse": self._collapse()}
        virtual_out_bar = self._virtual_out()
        weights = self._weights()
        mixed = {"v": self._product("mixed_v", "bhts,bthe->bshe", weights, self._use(virtual_out_bar))}
        logits_bar = self._logits(weights, virtual_out_bar)
        sides = {"q": self.chain.q, "k": self.chain.k}
        for name, other, equation in (("q", "k", "bhts,bshd->bthd"), ("k", "q", "bhts,bthd->bshd")):
            operand_of_other = self._use(sides[other].operand)
            scale = self.chain.scale
            rotated = self._product(f"rotated_{name}", equation, logits_bar, operand_of_other, scale=scale)
            mixed[name] = self._rotated_back(name, rotated)
        for name in "qkv":
            found |= self._unmixed(name, mixed[name])
        return found

    def _use(self, stage: Quantity) -> Operand:
        return operand_of(stage, self.rules)

    def _product(
        self,
        name: str,
        equation: str,
        x: Operand,
        y: Operand,
        *,
        scale: float = 1.0,
        further: Array | float = 0.0,
        storage: Format | None = None,
    ) -> Quantity:
        """The derivative by what is named, as one sum of products."""
        value = self.bars[name]
        return contracted(equation, x, y, value, self.rules, scale=scale, further=further, storage=storage)

    def _collapse(self) -> Quantity:
        """(23)."""
        collapse = self.tensors["collapse"]
        equation = "bnhe,bnphe->hp" if collapse.ndim == 2 else "bnie,bnphe->ihp"
        per_token = self.chain.virtual_out.mapped(lambda x: by_token(x, collapse.shape[-1]))
        cotangent = operand(self.bars["output"], self.rules)
        return self._product("collapse", equation, cotangent, self._use(per_token), storage=self.parameter)

    def _virtual_out(self) -> Quantity:
        """(24): (B, T, H, e)."""
        collapse = self.tensors["collapse"]
        equation = "bnhe,hp->bnphe" if collapse.ndim == 2 else "bnie,ihp->bnphe"
        value = self.bars["virtual_out"]
        x, y = operand(self.bars["output"], self.rules), operand(collapse, self.rules)
        per_token = contracted(equation, x, y, by_token(value, collapse.shape[-1]), self.rules)
        return per_token.mapped(lambda array: array.reshape(value.shape))

    def _weights(self) -> Operand:
        """The weights of the backward pass: those of the forward one, or formed again from lse."""
        return self._without_negligible(self._factor(self._of_logits() + self._of_weights()))

    def _factor(self, error: Array) -> Operand:
        """The weights, off by so much, as a factor."""
        weights = self.chain.weights
        stored = np.minimum(weights.own, self._storage_roundoff(weights.value))
        return operand(weights.value, self.rules, error=error, exact=weights.exact, stored=stored)

    def _of_logits(self) -> Array:
        """What errors of the logits move each weight: the first term of ε_ρ in (31)."""
        weights = self.chain.weights
        growth, least = _growth(weights)
        total = np.sum(weights.value * growth, axis=-1, keepdims=True)
        return np.asarray(np.minimum(weights.value * (growth + total) / least, 1.0))

    def _of_weights(self) -> Array:
        """What forming and storing a weight, or forming it from lse, adds: ε_w of (31)."""
        weights = self.chain.weights
        if self.chain.config.normalisation == "none":
            return weights.error
        seen = np.broadcast_to(self.chain.visible, weights.value.shape)
        lse = np.where(np.isfinite(self.stages["lse"]), self.stages["lse"], 0.0)
        count = np.count_nonzero(seen, axis=-1)
        largest = np.max(np.where(seen, np.abs(self.chain.logits.value), 0.0), axis=-1, initial=0.0)
        constant = tolerances()["operations"]["exponential"]
        of_lse = self.rules.A * (count + constant + 2 * largest + np.abs(lse))  # (B, H, T)
        alone = np.count_nonzero(seen & ~weights.negligible, axis=-1) == 1
        of_lse = np.where(alone, 0.0, of_lse)
        return weights.error + of_lse[..., None] * weights.value

    def _storage_roundoff(self, value: Array) -> Array:
        return np.asarray(self.rules.u * np.abs(value) + self.rules.storage.eta)

    def _without_negligible(self, used: Operand) -> Operand:
        """What is hidden or negligible lies on any grid."""
        weights = self.chain.weights
        on_any = weights.negligible | ~np.broadcast_to(self.chain.visible, weights.value.shape)
        return dataclasses.replace(used, grid=np.where(on_any, NO_GRID, used.grid))

    def _logits(self, weights: Operand, virtual_out_bar: Quantity) -> Operand:
        """(26) and (31): (B, H, T, S)."""
        seen = np.broadcast_to(self.chain.visible, weights.absolute.shape)
        x, y = self._use(virtual_out_bar), self._use(self.chain.v)
        weights_bar = self._product("weights", "bthe,bshe->bhts", x, y)
        if self.chain.config.normalisation == "none":
            shown = weights_bar.mapped(lambda x: np.where(seen, x, np.zeros((), x.dtype)))
            return self._without_negligible(self._use(self._or_scaled(shown)))
        a, a_bar = self.chain.weights.value, np.where(seen, weights_bar.value, 0.0)
        total = np.sum(a * a_bar, axis=-1)  # D of (26)
        of_terms = np.min(weights.grid + self._use(weights_bar).grid, axis=-1, initial=NO_GRID)
        exact_total = sum_is_exact(of_terms, np.sum(a * np.abs(a_bar), axis=-1), self.rules.accumulator)
        centred = np.where(seen, a_bar - total[..., None], 0.0)  # c of (31)
        error = self._of_logits() + self._of_weights()  # ε_ρ, unrounded: no matrix unit takes these products
        of_total = self._total(error, weights_bar, virtual_out_bar, centred, exact_total)[..., None]
        propagated = error * np.abs(centred) + (a + error) * (weights_bar.error + of_total)
        propagated = np.where(seen, propagated, 0.0)
        value = self.bars["logits"]
        accumulator = self.rules.accumulator
        exact = self.chain.weights.exact & weights_bar.exact & exact_total[..., None]
        exact &= accumulator.represents(centred) & accumulator.represents(value)
        spared = (exact & (propagated == 0)) | ~seen
        work = 2 * self.rules.A * a * (np.abs(a_bar) + np.abs(total)[..., None])
        summed = np.where(spared, 0.0, work)
        exact |= ~seen
        quantity = kept(value, propagated, summed, exact, np.abs(value), np.ones_like(a), self.rules)
        return self._without_negligible(self._use(self._or_scaled(quantity)))

    def _or_scaled(self, logits_bar: Quantity) -> Quantity:
        """l̄ as it may have been stored: multiplied by the scale."""
        scale = self.chain.scale
        exact = logits_bar.exact & (math.frexp(scale)[0] == 0.5)
        incoming = scale * (logits_bar.error - logits_bar.stored)
        instead = worst.rounding(scale * logits_bar.value, incoming, exact, self.rules) / scale
        more = np.where(logits_bar.value == 0, 0.0, np.maximum(0.0, instead - logits_bar.stored))
        return dataclasses.replace(
            logits_bar,
            error=logits_bar.error + more,
            stored=logits_bar.stored + more,
            exact=logits_bar.exact & (more == 0),
        )

    def _total(
        self,
        weights_error: Array,
        weights_bar: Quantity,
        virtual_out_bar: Quantity,
        centred: Array,
        exact_total: Booleans,
    ) -> Array:
        """Error of D, by either of its sums, the second line of (31): (B, H, T)."""
        weights = self.chain.weights
        seen = np.broadcast_to(self.chain.visible, weights.value.shape)
        growth, least = _growth(weights)
        own = self._factor(self._of_weights()).error
        moved = np.sum(weights.value * np.abs(centred) * growth / least, axis=-1)
        terms = np.where(
            seen, own * weights_bar.magnitude + (weights.value + weights_error) * weights_bar.error, 0.0
        )
        out = self.chain.virtual_out
        rounded = np.sum(
            (np.abs(virtual_out_bar.value) + virtual_out_bar.error) * out.stored, axis=-1
        )  # (B, T, H)
        propagated = moved + np.sum(terms, axis=-1) + np.swapaxes(rounded, 1, 2)
        magnitude = np.sum(np.where(seen, weights.value * weights_bar.magnitude, 0.0), axis=-1)
        of_out = np.swapaxes(np.max(out.terms, axis=-1, initial=0.0), 1, 2)  # (B, H, T)
        count = 2 * of_out + out.value.shape[-1]
        whole = exact_total & np.swapaxes(np.all(out.exact, axis=-1), 1, 2) & (propagated == 0)
        return np.asarray(propagated + np.where(whole, 0.0, count * self.rules.A * magnitude))

    def _rotated_back(self, side: str, rotated: Quantity) -> Quantity:
        """(28), by (15) with the opposite angles."""
        turn = {"q": self.chain.q, "k": self.chain.k}[side].angles
        if turn is None:
            return rotated
        # The third line of (15) with ε_op = 0: what the operands of (27) are off stays wherever one rotates.
        rotated = dataclasses.replace(rotated, summed=rotated.error - rotated.stored)
        value = self.bars[f"mixed_{side}"]
        return worst.rotated(rotated, value, -turn, self.chain.config, self.rules, angles="allowed")

    def _unmixed(self, side: str, mixed_bar: Quantity) -> dict[str, Quantity]:
        """(29) and (30)."""
        alpha = self.tensors[f"alpha_{side}"]
        bar = self._use(mixed_bar.mapped(lambda x: by_token(x, alpha.shape[-1])))
        x = operand(self.tensors[side], self.rules)
        of_x = self._product(side, "bnphw,shp->bnsw", bar, operand(alpha, self.rules))
        further = self._of_rotated_pairs(side, x, bar)
        of_alpha = self._product(
            f"alpha_{side}", "bnsw,bnphw->shp", x, bar, further=further, storage=self.parameter
        )
        return {side: of_x, f"alpha_{side}": of_alpha}

    def _of_rotated_pairs(self, side: str, x: Operand, bar: Operand) -> Array | float:
        """How much more (30) may be off where both factors still have the rotation of their token.

        A pair of lanes then has up to (|x1| + |x2|)(|x̄1| + |x̄2|) of terms in place of |x1||x̄1| + |x2||x̄2|.
        """
        if side == "v" or self.chain.config.rope == "none":
            return 0.0
        equation = "bnsw,bnphw->shp"
        first, second = lane_pairs(x.absolute.shape[-1], self.chain.config.rope_pairing)
        (x1, x2), (bar1, bar2) = ((of.absolute[..., first], of.absolute[..., second]) for of in (x, bar))
        crossed = np.einsum(equation, x1, bar2) + np.einsum(equation, x2, bar1)
        terms = np.einsum(equation, (x1 + x2 > 0) * 2.0, (bar1 + bar2 > 0) * 1.0)
        return np.asarray(self.rules.A * terms * crossed)


def _growth(weights: worst.Weights) -> tuple[Array, Array]:
    """e^ε_l − 1 of each logit, and the least sum that errors of the logits leave, 1 of nothing."""
    capped = np.minimum(weights.logit_error, worst.MOST_GROWTH)
    least = np.sum(weights.value * np.exp(-capped), axis=-1, keepdims=True)
    return np.expm1(capped), np.where(least > 0, least, 1.0)
