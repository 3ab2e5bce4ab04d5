"""Ports that differ from the reference in legitimate ways (SPEC.md 6.1), and must pass with room to spare.

Some do their sums in the accumulator's format, others in the reference's float64 and round at its stages;
tiled, split and reordered sums are those of the kernels that people really run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.power.port import Booleans, Port, Side
from iha_conformance.power.steps import Array, Rounding, turn
from iha_core import reference

Narrow = NDArray[Any]


class RotatedBeforeMixing(Port):
    """Each token rotated at n*P before mixing and each pseudo-head by the angle of p after it (3.3).

    The work of both steps is done in the accumulator's format, without a rounding to storage between.
    """

    def rotate(self, side: Side, x: Array, angles: Array | None) -> Array:
        if angles is None:
            return x
        accumulator = self.accumulator()
        unmixed, alpha = (self.inputs[name].astype(accumulator) for name in (side, f"alpha_{side}"))
        P = self.dims.P
        position = self.positions["qk".index(side)]
        frequencies = reference.rope_frequencies(self.dims.d, self.config.rope_theta)
        virtual = self.config.rope == "virtual"
        of_token = (position * P if virtual else position)[:, :, None, None] * frequencies
        of_pseudo = np.arange(P) * (1 if virtual else 0)
        per_row = np.tile(of_pseudo, position.shape[1])[None, :, None, None] * frequencies
        if side == "k" and "key_mask" in self.inputs:
            unmixed = self.isolate(unmixed, self.inputs["key_mask"])
        pairing = self.config.rope_pairing
        mixed = self.multiply(reference.mix, turn(unmixed, of_token, pairing), alpha)
        return np.asarray(turn(mixed, per_row, pairing), np.float64)


class RootOfScaleOnBothSides(Port):
    """Queries and keys multiplied by the root of the scale and stored, as kernels do."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        root = float(np.sqrt(scale))
        return super().products(self.store(q * root), self.store(k * root), 1.0)


class ScaledQueries(Port):
    """The scale multiplied into the queries, which are stored with it."""

    def products(self, q: Array, k: Array, scale: float) -> Array:
        return super().products(self.store(q * scale), k, 1.0)


class StoredTable(Port):
    """A RoPE table in the storage dtype, and products formed in it."""

    def rotate(self, side: Side, x: Array, angles: Array | None) -> Array:
        if angles is None:
            return x
        first, second = reference.lane_pairs(x.shape[-1], self.config.rope_pairing)
        cosine, sine = (self.store(table) for table in (np.cos(angles), np.sin(angles)))
        x1, x2 = x[..., first], x[..., second]
        turned = np.empty_like(x)
        turned[..., first] = self.store(x1 * cosine) - self.store(x2 * sine)
        turned[..., second] = self.store(x2 * cosine) + self.store(x1 * sine)
        return turned


class FusedProjection(Port):
    """Mixing and collapse in the accumulator's format, as one product of all heads with the parameters.

    The heads of a token are one vector, and mixing is one projection of it, as when the parameters are
    folded into the projections of a layer.
    """

    def mix(self, side: Side, x: Array, alpha: Array) -> Array:
        accumulator = self.accumulator()

        def fused(x: Narrow, alpha: Narrow) -> Array:
            B, N, sources, width = x.shape
            _, H, P = alpha.shape
            # (source*width, P*H*width): alpha for equal lanes, 0 for others
            eye = np.eye(width, dtype=accumulator)
            weights = np.einsum("shp,wv->swphv", alpha.astype(accumulator), eye)
            weights = weights.reshape(sources * width, P * H * width)
            # NaN of one lane must not reach others by way of 0 * NaN
            flat = np.nan_to_num(x.astype(accumulator), nan=0.0).reshape(B * N, sources * width)
            mixed = (flat @ weights).reshape(B, N * P, H, width)
            if np.isnan(x).any():
                mixed = np.where(np.isnan(reference.mix(x, alpha)), np.nan, mixed)
            return np.asarray(mixed, dtype=np.float64)

        return self.multiply(fused, x, alpha)

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        accumulator = self.accumulator()
        return self.multiply(
            lambda x, R: reference.collapse_heads(x.astype(accumulator), R.astype(accumulator)).astype(
                np.float64
            ),
            virtual_out,
            R,
        )


Addition = Callable[[Sequence[Narrow]], Narrow]


def in_order(terms: Sequence[Narrow]) -> Narrow:
    """One after the other, from the first."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def reversed_order(terms: Sequence[Narrow]) -> Narrow:
    """One after the other, from the last."""
    return in_order(terms[::-1])


def pairwise(terms: Sequence[Narrow]) -> Narrow:
    """Halves added up for themselves."""
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return pairwise(terms[:middle]) + pairwise(terms[middle:])


class Accumulated(Port):
    """Every sum in the accumulator's format, its terms added in a given order."""

    addition: Addition = staticmethod(in_order)

    def mix(self, side: Side, x: Array, alpha: Array) -> Array:
        def product(x: Narrow, alpha: Narrow) -> Array:
            x, alpha = x.astype(self.accumulator()), alpha.astype(self.accumulator())
            B, N, sources, width = x.shape
            _, H, P = alpha.shape
            terms = [
                x[:, :, None, None, source] * alpha[source].T[:, :, None] for source in range(sources)
            ]  # (B, N, P, H, width) each
            added: Array = self.addition(terms).reshape(B, N * P, H, width).astype(np.float64)
            return added

        return self.multiply(product, x, alpha)

    def products(self, q: Array, k: Array, scale: float) -> Array:
        accumulator = self.accumulator()

        def product(q: Array, k: Array) -> Array:
            q, k = (np.moveaxis(x, 2, 1).astype(accumulator) for x in (q, k))  # (B, H, T or S, d)
            terms = [q[:, :, :, None, lane] * k[:, :, None, :, lane] for lane in range(q.shape[-1])]
            return self.addition(terms).astype(np.float64)

        scaled = self.multiply(product, q, k).astype(accumulator) * accumulator(scale)
        return np.asarray(scaled, dtype=np.float64)

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        if logits.shape[-1] == 0:
            return super().softmax(logits)
        logits = logits.astype(self.accumulator())
        largest = np.max(logits, axis=-1)
        shift = np.where(np.isneginf(largest), 0, largest)
        found = np.exp(logits - shift[..., None])
        total = self.addition([found[..., s] for s in range(found.shape[-1])])
        weights = found / np.where(total == 0, 1, total)[..., None]
        return weights.astype(np.float64), (shift + np.log(total)).astype(np.float64)

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
        if weights.shape[-1] == 0:
            return super().weighted_sum(weights, mixed_v, visible)
        accumulator = self.accumulator()

        def product(weights: Array, mixed_v: Array) -> Array:
            of_row = np.moveaxis(weights, 1, 2).astype(accumulator)  # (B, T, H, S)
            terms = [
                np.where(
                    visible[:, :, s, None, None],
                    of_row[..., s, None] * mixed_v[:, None, s].astype(accumulator),
                    accumulator(0),
                )
                for s in range(weights.shape[-1])
            ]
            return self.addition(terms).astype(np.float64)

        return self.multiply(product, weights, mixed_v)

    def collapse(self, virtual_out: Array, R: Array) -> Array:
        def product(x: Narrow, R: Narrow) -> Array:
            x, R = x.astype(self.accumulator()), R.astype(self.accumulator())
            B, T, H, e = x.shape
            P = R.shape[-1]
            x = x.reshape(B, T // P, P, H, e)
            if R.ndim == 2:
                terms = [x[:, :, p] * R[:, p, None] for p in range(P)]
            else:
                terms = [x[:, :, p, None, h] * R[:, h, p, None] for h in range(H) for p in range(P)]
            return self.addition(terms).astype(np.float64)  # (B, N, H, e)

        return self.multiply(product, virtual_out, R)


class Reversed(Accumulated):
    """Terms added from the last to the first."""

    addition = staticmethod(reversed_order)


class Pairwise(Accumulated):
    """Terms added in halves, as vectorised libraries do."""

    addition = staticmethod(pairwise)


class OnlineSoftmax(Port):
    """Keys taken tile by tile with a running maximum and denominator, as flash kernels do.

    Weights of a tile are against the maximum so far, rounded to storage before they meet the values, and
    the sum is divided at the end.
    """

    tile: int = 16

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        self._logits = logits.astype(self.accumulator())
        return super().softmax(self._logits.astype(np.float64))

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
        if self.config.normalisation != "softmax":
            return super().weighted_sum(weights, mixed_v, visible)
        _, total, out = self._part(mixed_v, visible, range(weights.shape[-1]))
        return self._divided(total, out)

    def _part(self, mixed_v: Array, visible: Booleans, keys: range) -> tuple[Narrow, Narrow, Narrow]:
        """Maximum (B, H, T), denominator (B, H, T) and unnormalised sum (B, T, H, e) over a range of keys."""
        accumulator = self.accumulator()
        B, H, T, _ = self._logits.shape
        largest = np.full((B, H, T), -np.inf, accumulator)
        total = np.zeros((B, H, T), accumulator)
        out = np.zeros((B, T, H, mixed_v.shape[-1]), accumulator)
        for start in range(keys.start, keys.stop, self.tile):
            rows = slice(start, min(start + self.tile, keys.stop))
            logits = self._logits[..., rows]
            now = np.maximum(largest, np.max(logits, axis=-1))
            shift = np.where(np.isneginf(now), 0, now)
            kept = np.exp(np.where(np.isneginf(largest), -np.inf, largest - shift))
            found = np.exp(logits - shift[..., None])
            total = total * kept + found.sum(axis=-1, dtype=accumulator)
            stored = self.store(found.astype(np.float64))
            tile = Port.weighted_sum(self, stored, mixed_v[:, rows], visible[..., rows])
            out = out * np.moveaxis(kept, 1, 2)[..., None] + tile.astype(accumulator)
            largest = now
        return largest, total, out

    @staticmethod
    def _divided(total: Narrow, out: Narrow) -> Array:
        divisor = np.where(total == 0, 1, total)
        return (out / np.moveaxis(divisor, 1, 2)[..., None]).astype(np.float64)


class SmallTiles(OnlineSoftmax):
    """The same in tiles of five keys, that no size is a multiple of."""

    tile = 5


class SplitKeys(OnlineSoftmax):
    """Two ranges of keys attended to apart, as in decoding over split caches.

    They are merged by their maxima and denominators: by a rounded lse they would be off by A*|lse| (6.1).
    """

    tile = 1 << 20

    def weighted_sum(self, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
        S = weights.shape[-1]
        if self.config.normalisation != "softmax":
            return super().weighted_sum(weights, mixed_v, visible)
        parts = [self._part(mixed_v, visible, keys) for keys in (range(S // 2), range(S // 2, S))]
        largest = np.maximum(*(part[0] for part in parts))
        shift = np.where(np.isneginf(largest), 0, largest)
        merged = [(np.exp(of_part - shift), total, out) for of_part, total, out in parts]
        total = sum(share * total for share, total, _ in merged)
        return self._divided(
            total, sum(np.moveaxis(share, 1, 2)[..., None] * out for share, _, out in merged)
        )


class BinaryExponentials(Port):
    """Logits multiplied by log2(e), exponentials to base 2, in the accumulator's format."""

    def softmax(self, logits: Array) -> tuple[Array, Array]:
        accumulator = self.accumulator()
        scaled = logits.astype(accumulator) * accumulator(np.log2(np.e))
        largest = np.max(scaled, axis=-1, initial=-np.inf)
        shift = np.where(np.isneginf(largest), 0, largest).astype(accumulator)
        found = np.exp2(scaled - shift[..., None])
        total = found.sum(axis=-1, dtype=accumulator)
        weights = found / np.where(total == 0, 1, total)[..., None]
        lse = (shift + np.log2(total)) * accumulator(np.log(2.0))
        return weights.astype(np.float64), lse.astype(np.float64)


HONEST: Mapping[str, tuple[Callable[..., Port], Rounding]] = {
    "naive": (Port, "once"),
    "rounded at every stage but the logits": (Port, "stages"),
    "rotated before mixing": (RotatedBeforeMixing, "stages"),
    "root of the scale on both sides": (RootOfScaleOnBothSides, "stages"),
    "scale on the queries": (ScaledQueries, "stages"),
    "RoPE table and products stored": (StoredTable, "stages"),
    "fused projection in the accumulator": (FusedProjection, "stages"),
    "sums in order": (Accumulated, "once"),
    "sums in reverse": (Reversed, "stages"),
    "sums pairwise": (Pairwise, "stages"),
    "online softmax, tiles of 16": (OnlineSoftmax, "stages"),
    "online softmax, tiles of 5": (SmallTiles, "stages"),
    "split keys, merged": (SplitKeys, "stages"),
    "exponentials to base 2": (BinaryExponentials, "once"),
}
"""Honest ports by name: what makes them, and how they round."""
