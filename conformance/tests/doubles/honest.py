"""Ports that differ from the reference in legitimate ways (SPEC.md 6.1), and must pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubles.port import Array, Port
from iha_core import AttentionConfig, Dims, reference


class RotatedBeforeMixing(Port):
    """Each token rotated at n*P before mixing and each pseudo-head by the angle of p after it (3.3).

    The work of both steps is done in the accumulator's format, without a rounding to storage between.
    """

    def mix(self, name: str, x: Array, alpha: Array) -> Array:
        if name == "q":
            self._unmixed: list[tuple[Array, Array]] = []
            self._steps: list[tuple[Array, Array]] = []
        self._unmixed.append((x, alpha))
        return super().mix(name, x, alpha)

    def angles(self, position: NDArray[np.int64], dims: Dims, config: AttentionConfig) -> Array | None:
        if config.rope != "none":
            frequency = np.array(config.rope_frequencies(dims.d))
            virtual = config.rope == "virtual"
            of_token = (position * dims.P if virtual else position)[:, :, None, None] * frequency
            of_pseudo = np.arange(dims.P) * (1 if virtual else 0)
            per_row = np.tile(of_pseudo, position.shape[1])[None, :, None, None] * frequency
            self._steps.append((of_token, per_row))
        return super().angles(position, dims, config)

    def rotate(self, x: Array, angles: Array | None, config: AttentionConfig) -> Array:
        unmixed, alpha = self._unmixed.pop(0)
        if angles is None:
            return x
        of_token, per_row = self._steps.pop(0)
        accumulator = np.float64 if self.dtype == "float64" else np.float32
        before = self._turn(unmixed.astype(accumulator), of_token, config)
        mixed = self.multiply(reference.mix, before, alpha.astype(accumulator))
        return self._turn(mixed, per_row, config).astype(np.float64)

    @staticmethod
    def _turn(x: Any, angles: Array, config: AttentionConfig) -> Any:
        """Rotation in the dtype of x, with tables rounded to it."""
        first, second = reference.lane_pairs(x.shape[-1], config.rope_pairing)
        cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        turned = np.empty_like(x)
        turned[..., first] = x[..., first] * cosine - x[..., second] * sine
        turned[..., second] = x[..., second] * cosine + x[..., first] * sine
        return turned


class RootOfScaleOnBothSides(Port):
    """Queries and keys multiplied by the root of the scale and stored, as kernels do."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        root = float(np.sqrt(scale))
        return super().products(self.store(q * root, self.dtype), self.store(k * root, self.dtype), 1.0)


class StoredTable(Port):
    """A RoPE table in the storage dtype, and products formed in it."""

    def rotate(self, x: Array, angles: Array | None, config: AttentionConfig) -> Array:
        if angles is None:
            return x
        first, second = reference.lane_pairs(x.shape[-1], config.rope_pairing)
        cosine, sine = (self.store(table, self.dtype) for table in (np.cos(angles), np.sin(angles)))
        x1, x2 = x[..., first], x[..., second]
        turned = np.empty_like(x)
        turned[..., first] = self.store(x1 * cosine, self.dtype) - self.store(x2 * sine, self.dtype)
        turned[..., second] = self.store(x2 * cosine, self.dtype) + self.store(x1 * sine, self.dtype)
        return turned


class AccumulatedInOrder(Port):
    """Products, weights and sums in the accumulator's format, keys one after the other from the last."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        accumulator = np.float64 if self.dtype == "float64" else np.float32

        def in_order(q: Array, k: Array) -> Array:
            q, k = (np.moveaxis(x, 2, 1).astype(accumulator) for x in (q, k))  # (B, H, T or S, d)
            total = np.zeros((*q.shape[:3], k.shape[2]), accumulator)
            for lane in range(q.shape[-1]):
                total += q[:, :, :, None, lane] * k[:, :, None, :, lane]
            return total.astype(np.float64)

        total = self.multiply(in_order, q, k).astype(accumulator)
        return (total * accumulator(scale)).astype(np.float64)

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: NDArray[np.bool_]) -> Array:
        accumulator = np.float64 if self.dtype == "float64" else np.float32

        def in_order(weights: Array, mixed_v: Array) -> Array:
            out = np.zeros((*np.moveaxis(weights, 1, 2).shape[:3], mixed_v.shape[-1]), accumulator)
            for s in reversed(range(weights.shape[-1])):
                of_key = np.moveaxis(weights[..., s], 1, 2)[..., None].astype(accumulator)  # (B, T, H, 1)
                term = of_key * mixed_v[:, None, s].astype(accumulator)
                out += np.where(visible[:, :, s, None, None], term, 0.0)
            return out.astype(np.float64)

        return self.multiply(in_order, weights, mixed_v)


HONEST = {
    "as the reference": Port,
    "rotated before mixing": RotatedBeforeMixing,
    "root of the scale on both sides": RootOfScaleOnBothSides,
    "table and products stored": StoredTable,
    "accumulated in order": AccumulatedInOrder,
}
"""Honest ports by name."""
