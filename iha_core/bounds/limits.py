"""From error bounds to limits: the numbers that a result is judged by (SPEC.md [NUM-4] to [NUM-6])."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from iha_core.bounds import statistics, worst
from iha_core.bounds.chain import Chain, propagate
from iha_core.bounds.formats import HIGHEST, Arithmetic, Array, Format, arithmetic, tolerances
from iha_core.config import AttentionConfig
from iha_core.reference import STAGES, attention_stages, collapse_heads
from iha_core.validation import validate

CompanionKind = Literal["rms", "mean", "gain", "total mean", "total gain"]


@dataclasses.dataclass(frozen=True, slots=True)
class Companion:
    """A limit on a functional of the error of the whole output, for random data ([NUM-6]).

    Attributes:
        kind: "rms", "mean" and "gain" hold for each batch element and head; the others for all.
        weights: (B, N, H, e) of the functional sum(w * error); None for the root mean square.
        limit: (B, H), or () for the whole output.
    """

    kind: CompanionKind
    weights: Array | None
    limit: Array

    def measure(self, error: Array) -> Array:
        """The functional of an error (B, N, H, e), in the shape of `limit`."""
        axes = (1, 3) if self.limit.ndim == 2 else None
        if self.weights is None:
            return np.asarray(np.sqrt(np.mean(error**2, axis=axes)))
        return np.asarray(np.abs(np.sum(self.weights * error, axis=axes)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Exact arrays and their limits.

    Attributes:
        stages: values of the reference, stages or gradients by name.
        limits: largest allowed |error| per element, by the same names; inf for what a stage holds of a
            key that key_mask drops, which is not compared ([STG-2]).
        companions: further limits on the output, for random data.
    """

    stages: dict[str, Array]
    limits: dict[str, Array]
    companions: tuple[Companion, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardLimits(Limits):
    """Those of the forward pass.

    Attributes:
        worst: worst case E of the output, before floor and factor.
        exact: elements of the output that every conforming implementation gets right to the last bit.
    """

    worst: Array
    exact: np.ndarray[Any, np.dtype[np.bool_]]


def derive_limits(
    q: Any,
    k: Any,
    v: Any,
    alpha_q: Any,
    alpha_k: Any,
    alpha_v: Any,
    collapse: Any,
    *,
    config: AttentionConfig,
    storage: str,
    precision: str = HIGHEST,
    random: bool = False,
    key_mask: Any = None,
    segment_ids: Any = None,
    kv_segment_ids: Any = None,
    positions: Any = None,
    kv_positions: Any = None,
    query_offset: Any = None,
) -> ForwardLimits:
    """Run the reference and derive the limit of every element of every stage.

    Takes the arguments of `attention`, and:

    Args:
        storage: storage dtype of the result to be judged, which the inputs already have.
        precision: precision class of its products ([NUM-8]), one of `precision_classes()`.
        random: whether the data are random, so that errors may be treated as independent. Never say
            so of structured data: there one rounding repeats.

    Returns:
        The exact stages and their limits.

    Raises:
        IHAError: bad input, as from `attention`, or no such precision class.

    Source: SPEC.md chapter 6.
    """
    optional = {
        "key_mask": key_mask,
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "query_offset": query_offset,
    }
    dims = validate(q, k, v, alpha_q, alpha_k, alpha_v, collapse, config=config, **optional)
    names = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")
    arrays = (q, k, v, alpha_q, alpha_k, alpha_v, collapse)
    tensors = {name: np.asarray(x, dtype=np.float64) for name, x in zip(names, arrays, strict=True)}
    if key_mask is not None:
        # What the key mask drops has no influence whatever it holds, so zeros have the same limits.
        kept = np.asarray(key_mask)[:, :, None, None]
        tensors |= {name: np.where(kept, tensors[name], 0.0) for name in ("k", "v")}
    stages = attention_stages(**tensors, config=config, **optional)
    rules = arithmetic(storage, precision)

    with np.errstate(invalid="ignore", over="ignore"):
        chain = propagate(tensors, stages, dims, config, rules, optional)
        limits = _stage_limits(chain, stages)
        if key_mask is not None:  # [STG-2]
            dropped = np.repeat(~np.asarray(key_mask), dims.P, axis=1)  # (B, S)
            for name in ("mixed_k", "mixed_v", "rotated_k"):
                limits[name][dropped] = np.inf
        companions: tuple[Companion, ...] = ()
        if random and chain.output.value.size:
            # What rows of a table share, or all products of an operand, are no independent roundings: their
            # part of the worst case is not averaged.
            single = arithmetic(storage)
            averaged = independent = chain
            if rules.operands is not None:
                averaged = independent = propagate(tensors, stages, dims, config, single, optional)
            if config.rope != "none":
                independent = propagate(tensors, stages, dims, config, single, optional, angles="true")
            shared = limit_factor(rules) * np.maximum(0.0, chain.output.error - independent.output.error)
            sigma = np.sqrt(statistics.element_variance(averaged)) * reference_share(rules)
            statistical = tolerances()["limits"]["element"] * sigma + shared
            floor = least_limit(chain.output.value, _output_magnitude(chain), rules.storage, rules)
            limits["output"] = np.maximum(floor, np.minimum(limits["output"], statistical))
            companions = tuple(_companions(averaged, sigma, shared))
    output = chain.output
    return ForwardLimits(
        stages={name: value for name, value in stages.items() if name in limits},
        limits=limits,
        worst=output.error,
        # A quarter of the smallest float64 is 0, hence four times the error.
        exact=output.exact & (4 * output.error < rules.storage.spacing(output.value)),
        companions=companions,
    )


def _stage_limits(chain: Chain, stages: dict[str, Array]) -> dict[str, Array]:
    """Limits of all stages from their worst cases ([NUM-4])."""
    rules = chain.arithmetic
    limits = {
        name: element_limit(stage.value, stage.error, stage.magnitude, rules.storage, rules)
        for name, stage in (
            ("mixed_q", chain.q.mixed),
            ("mixed_k", chain.k.mixed),
            ("mixed_v", chain.v),
            ("rotated_q", chain.q.rotated),
            ("rotated_k", chain.k.rotated),
            ("virtual_out", chain.virtual_out),
        )
    }
    logits = chain.logits
    limits["logits"] = element_limit(logits.value, logits.error, logits.magnitude, rules.accumulator, rules)
    if chain.config.normalisation == "softmax":
        error = worst.log_sum(logits, stages["lse"], chain.weights, chain.visible, rules)
        lse = np.where(np.isfinite(stages["lse"]), stages["lse"], 0.0)
        limits["lse"] = element_limit(lse, error, np.abs(lse), rules.accumulator, rules)
    output = chain.output
    limits["output"] = element_limit(
        output.value, output.error, _output_magnitude(chain), rules.storage, rules
    )
    return {name: limits[name] for name in STAGES if name in limits}


def _output_magnitude(chain: Chain) -> Array:
    """Magnitude of everything that made an output: sum |R| sum |a| |mixed_v|, (B, N, H, e)."""
    return collapse_heads(chain.virtual_out.magnitude, np.abs(chain.R))


def limit_factor(rules: Arithmetic) -> float:
    """The limit as a multiple of the worst case."""
    factor: float = tolerances()["limits"]["worst"] * reference_share(rules)
    return factor


def reference_share(rules: Arithmetic) -> float:
    """2 where the reference has the precision of the result, and so may err as much; else 1."""
    factors = tolerances()["limits"]
    share: float = factors["worst_float64"] / factors["worst"] if rules.storage.name == "float64" else 1.0
    return share


def least_limit(value: Array, magnitude: Array, storage: Format, rules: Arithmetic) -> Array:
    """Least limit: one unit in the last place, and one roundoff of everything that was added up."""
    return np.maximum(storage.spacing(value), rules.A * magnitude)


def element_limit(value: Array, error: Array, magnitude: Array, storage: Format, rules: Arithmetic) -> Array:
    """The limit of each element from its worst case (21)."""
    return np.asarray(np.maximum(least_limit(value, magnitude, storage, rules), limit_factor(rules) * error))


def _companions(chain: Chain, sigma: Array, shared: Array) -> Iterator[Companion]:
    """Limits on root mean square, mean and gain of the error ([NUM-6]).

    `shared` (B, N, H, e) is what angles and operands may add to the error of each element.
    """
    constants = tolerances()["limits"]
    share = reference_share(chain.arithmetic)
    y = chain.output.value
    B, N, H, e = y.shape
    bias = constants["bias"] * share * chain.arithmetic.A * _output_magnitude(chain) + shared

    def limit(w: Array, factor: float, *, per_batch: bool) -> Array:
        deviation = np.sqrt(statistics.functional_variance(chain, w, per_batch=per_batch))
        shift = np.abs(w) * bias
        shift = shift.reshape(B, -1).sum(axis=1) if per_batch else shift.sum()
        return np.asarray(share * factor * deviation + shift)

    if N * e >= constants["group"]:
        rms = constants["rms"] * np.sqrt(np.mean(sigma**2, axis=(1, 3)))
        rms += np.sqrt(np.mean(bias**2, axis=(1, 3)))
        yield Companion(kind="rms", weights=None, limit=rms)
        square = np.sum(y**2, axis=(1, 3), keepdims=True)
        means = np.full_like(y, 1 / (N * e))
        gains = np.where(square > 0, y / np.where(square > 0, square, 1.0), 0.0)
        for kind, w, factor in (("mean", means, constants["mean"]), ("gain", gains, constants["gain"])):
            heads = []
            for i in range(H):
                only = np.zeros_like(w)
                only[:, :, i] = w[:, :, i]
                heads.append(limit(only, factor, per_batch=True))
            yield Companion(kind=kind, weights=w, limit=np.stack(heads, axis=1))  # type: ignore[arg-type]
    square_all = float(np.sum(y**2))
    if y.size >= constants["group"] and square_all > 0:
        total_mean = np.full_like(y, 1 / y.size)
        yield Companion(
            kind="total mean",
            weights=total_mean,
            limit=limit(total_mean, constants["total_mean"], per_batch=False),
        )
        total_gain = y / square_all
        yield Companion(
            kind="total gain",
            weights=total_gain,
            limit=limit(total_gain, constants["total_gain"], per_batch=False),
        )
