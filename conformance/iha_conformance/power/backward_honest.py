"""Backward passes that differ from the reference in legitimate ways (SPEC.md 9.2), and must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from iha_conformance.power.backward import BackwardPort
from iha_conformance.power.port import Booleans, Side
from iha_conformance.power.steps import Array, Rounding, turn
from iha_core import reference


class Recomputed(BackwardPort):
    """Weights formed again from logits and lse, the row term from stored outputs, as flash kernels do."""

    def weights(self, logits: Array, lse: Array | None) -> Array:
        if lse is None:
            return logits
        accumulator = self.accumulator()
        kept = lse.astype(accumulator)[..., None]
        with np.errstate(invalid="ignore"):
            found = np.exp(logits.astype(accumulator) - np.where(np.isneginf(kept), 0, kept))
        return np.asarray(found, np.float64)

    def row_term(self, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
        if self.config.normalisation == "none":
            return super().row_term(weights, weights_bar, virtual_out_bar)
        of_row = np.sum(virtual_out_bar * self.forward["virtual_out"], axis=-1)  # (B, T, H)
        return np.asarray(np.swapaxes(of_row, 1, 2)[..., None])


class Accumulated(BackwardPort):
    """Sums of products in the accumulator's format."""

    def contract(self, equation: str, x: Array, y: Array) -> Array:
        accumulator = self.accumulator()
        return self.multiply(
            lambda x, y: np.einsum(equation, x.astype(accumulator), y.astype(accumulator)).astype(np.float64),
            x,
            y,
        )

    def logits_bar(self, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans) -> Array:
        a, bar, D = (x.astype(self.accumulator()) for x in (weights, weights_bar, row_term))
        return super().logits_bar(a, bar, D, seen).astype(np.float64)


class Backwards(Accumulated):
    """The same with the terms in reverse order."""

    def contract(self, equation: str, x: Array, y: Array) -> Array:
        reverse = super().contract(equation, np.flip(x), np.flip(y))
        return np.flip(reverse)


class ScaledLogits(Recomputed):
    """The scale multiplied into the gradients of the logits, which are stored with it alone."""

    def queries_bar(self, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
        return super().queries_bar(logits_bar * scale, rotated_k, 1.0)

    def keys_bar(self, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
        return super().keys_bar(logits_bar * scale, rotated_q, 1.0)


class RootOfScale(BackwardPort):
    """Queries and keys stored with the root of the scale, which their gradients have once more."""

    def queries_bar(self, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
        root = float(np.sqrt(scale))
        return root * super().queries_bar(logits_bar, self.store(rotated_k * root), 1.0)

    def keys_bar(self, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
        root = float(np.sqrt(scale))
        return root * super().keys_bar(logits_bar, self.store(rotated_q * root), 1.0)


class RotatedBeforeMixing(BackwardPort):
    """The gradient of a rotation before the mixing (3.3): only the angle of p is undone before it.

    Each token's own angle is undone after the mixing, and its queries or keys are rotated for the gradient of
    the mixing tensor; all in the accumulator.
    """

    def rotate_back(self, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
        if angles is None:
            return rotated_bar
        virtual = self.config.rope == "virtual"
        pseudo = np.tile(np.arange(self.dims.P) * virtual, angles.shape[1] // self.dims.P)
        return self._turn(rotated_bar, -pseudo[None, :, None, None] * self._frequencies())

    def unmix(self, side: Side, mixed_bar: Array, alpha: Array) -> Array:
        unmixed = super().unmix(side, mixed_bar, alpha)
        return unmixed if side == "v" else self._turn(unmixed, -self._of_token(side))

    def alpha_bar(self, side: Side, x: Array, mixed_bar: Array) -> Array:
        return super().alpha_bar(side, x if side == "v" else self._turn(x, self._of_token(side)), mixed_bar)

    def _frequencies(self) -> Array:
        return reference.rope_frequencies(self.dims.d, self.config.rope_theta)

    def _of_token(self, side: Side) -> Array:
        """Angle of every token, (B or 1, N, 1, d/2); 0 without rotation."""
        if self.config.rope == "none":
            return np.zeros((1, 1, 1, self.dims.d // 2))
        position = self.positions["qk".index(side)] * (self.dims.P if self.config.rope == "virtual" else 1)
        return np.asarray(position[:, :, None, None] * self._frequencies())

    def _turn(self, x: Array, angles: Array) -> Array:
        if self.config.rope == "none":
            return x
        turned = turn(x.astype(self.accumulator()), angles, self.config.rope_pairing)
        return np.asarray(turned, np.float64)


BACKWARD_HONEST: Mapping[str, tuple[Callable[..., BackwardPort], Rounding]] = {
    "gradient, naive": (BackwardPort, "once"),
    "gradient, rounded wherever it may be": (BackwardPort, "stages"),
    "gradient, weights formed again from lse": (Recomputed, "stages"),
    "gradient, weights formed again, rounded once": (Recomputed, "once"),
    "gradient, sums in the accumulator": (Accumulated, "stages"),
    "gradient, sums in reverse": (Backwards, "once"),
    "gradient, scale on the logits": (ScaledLogits, "stages"),
    "gradient, root of the scale on both sides": (RootOfScale, "stages"),
    "gradient, rotated before mixing": (RotatedBeforeMixing, "stages"),
}
"""Honest backward passes by name: what makes them, and how they round."""
