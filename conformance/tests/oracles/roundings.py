"""The operation with an error at every place where SPEC.md 6.1 lets an implementation round.

Derived from SPEC.md chapter 6 apart from `iha_core.bounds`, to hold its formulas to. Nothing is
linearised: the errors travel through the operation itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from iha_conformance.corpus.streams import cast
from iha_core import attention_stages
from iha_core.config import AttentionConfig

Array = npt.NDArray[np.float64]
Errors = Callable[[str, tuple[int, ...]], Array]
"""Given a rounding's name and shape: errors in units of its bound, with a leading axis of trials."""

UNITS = {
    "float64": (2.0**-53, 2.0**-53, 2.0**-1074),
    "float32": (2.0**-24, 2.0**-24, 2.0**-126),
    "float16": (2.0**-11, 2.0**-24, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-24, 2.0**-126),
}
"""u, A and eta of each storage dtype (SPEC.md 6.1)."""


class Roundings:
    """One call of the operation, to be run with errors.

    Args:
        tensors: q, k, v, alpha_q, alpha_k, alpha_v and collapse, holding values of the storage dtype.
        config: the configuration.
        storage: storage dtype whose roundings are made.
        angle: whether angles are off too, as far as [ROPE-5] lets them.
        independent: whether the n roundings of a sum are independent, so that one error stands for n;
            else they add up.
        indices: positions, query_offset and masks.
    """

    def __init__(
        self,
        tensors: dict[str, Array],
        config: AttentionConfig,
        storage: str,
        *,
        angle: bool = False,
        independent: bool = True,
        **indices: Any,
    ) -> None:
        self.tensors = {name: np.asarray(x, dtype=np.float64) for name, x in tensors.items()}
        self.config, self.storage, self.angle, self.independent = config, storage, angle, independent
        self.u, self.A, self.eta = UNITS[storage]
        self.exact = attention_stages(**self.tensors, config=config, **indices)
        self.B, self.N, self.H, self.d = self.tensors["q"].shape
        self.M = self.tensors["k"].shape[1]
        self.P = self.tensors["alpha_q"].shape[2]
        self.scale = config.resolve_scale(self.d)
        softmax = AttentionConfig(**{**config.to_dict(), "normalisation": "softmax"})
        seen = attention_stages(**self.tensors, config=softmax, **indices)["logits"] > -np.inf
        self.visible = seen[:, :1]  # (B, 1, T, S)
        self._hidden = -np.inf if config.normalisation == "softmax" else 0.0
        offset = np.asarray(indices.get("query_offset", self.M - self.N))
        positions = indices.get("positions")
        if positions is None:
            rows = offset[:, None] if offset.ndim else offset
            self.places = {"q": np.atleast_2d(rows + np.arange(self.N)), "k": np.arange(self.M)[None]}
        else:
            self.places = {"q": positions, "k": indices.get("kv_positions", positions)}

    def run(self, errors: Errors) -> dict[str, Array]:
        """All stages but lse, each with a leading axis of trials, and the errors that `errors` gives."""
        out: dict[str, Array] = {}
        for name in "qkv":
            out[f"mixed_{name}"] = self._mixed(name, errors)
        for name in "qk":
            out[f"rotated_{name}"] = self._rotated(name, out[f"mixed_{name}"], errors)
        out["logits"] = self._logits(out["rotated_q"], out["rotated_k"], errors)
        out["virtual_out"] = self._virtual_out(out["logits"], out["mixed_v"], errors)
        out["output"] = self._output(out["virtual_out"], errors)
        return out

    def _sum(self, errors: Errors, name: str, terms: Array, where: Any = True) -> Array:
        """Error of the sum over the last axis of `terms`, 0 for an exact one ([NUM-5])."""
        magnitude = np.abs(terms).sum(axis=-1)
        count = np.count_nonzero(terms, axis=-1)
        roundings = np.sqrt(count) if self.independent else count
        bound = np.where(where & ~self._is_exact(terms), roundings * self.A * magnitude, 0.0)
        return errors(f"{name} sum", magnitude.shape) * bound

    def _is_exact(self, terms: Array) -> npt.NDArray[np.bool_]:
        """Whether all terms are multiples of the least power of two g with sum |terms| <= g / A."""
        magnitude = np.abs(terms).sum(axis=-1, keepdims=True)
        g = 2.0 ** np.ceil(np.log2(np.where(magnitude == 0, 1.0, magnitude) * self.A))
        return np.asarray(np.all(np.fmod(terms, g) == 0, axis=-1))

    def _store(self, errors: Errors, name: str, exact: Array) -> Array:
        """Error of one rounding to storage, none for a number of the format."""
        rounds = exact != cast(exact, self.storage).astype(np.float64)
        return errors(f"{name} store", exact.shape) * np.where(rounds, self.u * np.abs(exact) + self.eta, 0.0)

    def _mixed(self, name: str, errors: Errors) -> Array:
        x, alpha, stage = self.tensors[name], self.tensors[f"alpha_{name}"], f"mixed_{name}"
        exact = self.exact[stage]

        terms = np.einsum("bngj,ghp->bnphjg", x, alpha).reshape(*exact.shape, len(alpha))
        return terms.sum(axis=-1) + self._sum(errors, stage, terms) + self._store(errors, stage, exact)

    def _rotated(self, name: str, x: Array, errors: Errors) -> Array:
        if self.config.rope == "none":
            return x
        stage, exact, unrotated = (
            f"rotated_{name}",
            self.exact[f"rotated_{name}"],
            self.exact[f"mixed_{name}"],
        )
        place = self.places[name][..., None] * (self.P if self.config.rope == "virtual" else 1)
        place = place + (np.arange(self.P) if self.config.rope == "virtual" else np.zeros(self.P))
        frequency = self.config.rope_theta ** (-2.0 * np.arange(self.d // 2) / self.d)
        phi = (
            place.reshape(len(place), place.shape[1] * self.P)[:, :, None, None] * frequency
        )  # (B or 1, T, 1, d/2)
        turning = phi != 0
        if self.angle:
            bound = (4 + np.abs(np.log(frequency))) * 2.0**-53 * np.abs(phi)
            phi = phi + errors(f"{stage} angle", phi.shape) * bound
        x_input, alpha = self.tensors[name], self.tensors[f"alpha_{name}"]
        mixing = np.einsum("bngj,ghp->bnphj", np.abs(x_input), np.abs(alpha)).reshape(unrotated.shape)
        roundings = np.sqrt(6.0) if self.independent else 6.0
        table = {}
        for entry, value in (("cos", np.cos(phi)), ("sin", np.sin(phi))):
            entries = (
                turning if self.config.rope == "virtual" else turning[:, :: self.P]
            )  # one for each position
            error = errors(f"{stage} {entry}", entries.shape)
            if self.config.rope == "token":
                error = np.repeat(error, self.P, axis=-3)
            table[entry] = value + (self.u * np.abs(value) + self.eta) * turning * error
        if self.config.rope_pairing == "half":
            first, second = np.arange(self.d // 2), np.arange(self.d // 2) + self.d // 2
        else:
            first, second = np.arange(0, self.d, 2), np.arange(1, self.d, 2)
        lanes = []
        for name_of_lane, lane, partner, sign in (
            ("first", first, second, -1.0),
            ("second", second, first, 1.0),
        ):
            terms = np.zeros(())
            for source, entry, factor in ((lane, "cos", 1.0), (partner, "sin", sign)):
                size = np.abs(unrotated[..., source] * (np.cos(phi) if entry == "cos" else np.sin(phi)))
                error = errors(f"{stage} {name_of_lane} {entry} product", unrotated[..., source].shape)
                rounded = turning * (self.u * size + self.eta) * error
                terms = terms + factor * x[..., source] * table[entry] + rounded
            work = roundings * self.A * (mixing[..., first] + mixing[..., second])
            lanes.append(terms + turning * work * errors(f"{stage} {name_of_lane} work", work.shape))
        order = np.argsort(np.concatenate([first, second]))
        rotated = np.concatenate(np.broadcast_arrays(*lanes), axis=-1)[..., order]
        turned = np.concatenate([turning, turning], axis=-1)[..., order]
        return rotated + np.where(turned, self._store(errors, stage, exact), 0.0)

    def _operand(self, name: str, x: Array, errors: Errors) -> Array:
        """Scaled by the root of the scale and stored again, unless that root is a power of two."""
        if _root_is_power_of_two(self.scale):
            return x
        exact = self.exact[f"rotated_{name}"]
        bound = np.where(exact == 0, 0.0, self.u * np.abs(exact) + self.eta)
        return x + bound * errors(f"{name} scaled", exact.shape)

    def _logits(self, q: Array, k: Array, errors: Errors) -> Array:
        exact_q, exact_k = self.exact["rotated_q"], self.exact["rotated_k"]
        product = "...thj,...shj->...hts"
        value = self.scale * np.einsum(product, self._operand("q", q, errors), self._operand("k", k, errors))
        exact = self.scale * np.einsum(product, exact_q, exact_k)
        terms = self.scale * np.einsum("bthj,bshj->bhtsj", exact_q, exact_k)
        rounds = ~self._is_exact(terms) if _root_is_power_of_two(self.scale) else True
        value = value + self._sum(errors, "logits", terms, where=rounds)
        value = value + errors("logits scaling", exact.shape) * np.where(
            rounds, 2 * self.A * np.abs(exact), 0.0
        )
        return np.where(self.visible, value, self._hidden)

    def _virtual_out(self, logits: Array, v: Array, errors: Errors) -> Array:
        exact, exact_v = self.exact["virtual_out"], self.exact["mixed_v"]
        if self.config.normalisation == "softmax":
            weights, size = self._weights(logits, errors)
        else:
            product = self.scale * np.einsum(
                "bthj,bshj->bhts", np.abs(self.exact["rotated_q"]), np.abs(self.exact["rotated_k"])
            )
            weights = logits + self._store(errors, "weights", self.exact["logits"])
            size = np.where(self.visible, product, 0.0)
        value = np.einsum("...hts,...shj->...thj", weights, v)
        magnitude = np.einsum("bhts,bshj->bthj", size, np.abs(exact_v))
        count = np.count_nonzero(np.broadcast_to(self.visible, size.shape), axis=-1)  # (B, H, T)
        count = np.swapaxes(count, 1, 2)[..., None]
        roundings = np.sqrt(count) if self.independent else count
        value = value + errors("virtual_out sum", magnitude.shape) * 2 * roundings * self.A * magnitude
        return value + self._store(errors, "virtual_out", exact)

    def _weights(self, logits: Array, errors: Errors) -> tuple[Array, Array]:
        """Softmax of logits that are off, with the weights' own errors; and the exact weights."""
        raw = self.exact["logits"]
        lse, largest = self.exact["lse"][..., None], np.max(raw, axis=-1, initial=-np.inf, keepdims=True)
        anything = np.isfinite(largest)
        lse, largest = np.where(anything, lse, 0.0), np.where(anything, largest, 0.0)
        a = np.exp(raw - lse)
        size = np.where(self.visible, np.abs(np.where(self.visible, raw, 0.0)) + np.abs(largest), 0.0)
        bound = np.where(self.visible, a * self.A * (4 + size) + self.u * a + self.eta, 0.0)
        powers = np.exp(logits - largest)
        total = np.where(anything, powers.sum(axis=-1, keepdims=True), 1.0)
        return powers / total + errors("weights", bound.shape) * bound, a

    def _output(self, virtual_out: Array, errors: Errors) -> Array:
        R = self.tensors["collapse"]
        if R.ndim == 2:
            R = np.eye(self.H)[:, :, None] * R

        def pseudo(x: Array) -> Array:
            return x.reshape(*x.shape[:-3], self.N, self.P, self.H, x.shape[-1])

        terms = np.einsum("bnphj,ihp->bnijhp", pseudo(self.exact["virtual_out"]), R)
        terms = terms.reshape(*self.exact["output"].shape, self.H * self.P)
        value = np.einsum("...nphj,ihp->...nij", pseudo(virtual_out), R)
        value = value + self._sum(errors, "output", terms)
        return value + self._store(errors, "output", self.exact["output"])


def _root_is_power_of_two(scale: float) -> bool:
    root = np.log2(scale) / 2
    return bool(root == np.round(root))
