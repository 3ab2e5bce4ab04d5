"""The limits of gradients and layers: against adversaries, other derivations, and where they are exact.

Errors are put wherever SPEC.md allows a rounding, at its bound and in the worst direction: those of the
forward pass by `oracles.roundings`, those of the backward pass by `Pushed`. They travel through the operation
itself, and no limit may be less than twice what they do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from layers import CONFIGS, example, sharp_example
from test_bounds import one_hot, second_order, stored
from test_gradient import cotangent_of
from test_precision import ROUNDED
from test_reference import Case, normal_tensors, random_case

from iha_conformance.corpus.streams import cast
from iha_conformance.power.backward import BackwardPort, Tensors
from iha_conformance.power.backward_honest import (
    BACKWARD_HONEST,
    Recomputed,
    RotatedBeforeMixing,
)
from iha_conformance.power.measure import Problem, corpus, excess, stages, verdict
from iha_conformance.power.outcome import HALF
from iha_conformance.power.port import Port
from iha_conformance.power.steps import ROUNDINGS, Array, Rounding, to_bits
from iha_core import (
    GRADIENTS,
    AttentionConfig,
    LayerConfig,
    attention_stages,
    attention_vjp,
    dtype_name,
    layer,
    reference,
)
from iha_core.bounds import (
    Limits,
    arithmetic,
    contraction,
    derive_gradient_limits,
    derive_layer_limits,
    gradient_limits,
    precision_classes,
    worst,
)
from iha_core.bounds.chain import Chain
from iha_core.bounds.contraction import contracted, least_grid
from iha_core.bounds.formats import NO_GRID
from iha_core.bounds.worst import operand, operand_of
from iha_core.errors import ArgumentValueError
from iha_core.initialisers import fixed_mixing
from iha_core.layer_config import MIXING
from oracles.roundings import UNITS, Errors, Roundings

DTYPES = ("float64", "float32", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")


def limits_of(case: Case, cotangent: Array, dtype: str, **options: Any) -> Limits:
    return derive_gradient_limits(**case.arguments(), cotangent=cotangent, storage=dtype, **options)


def narrowed(case: Case, dtype: str, seed: int = 0, **factors: float) -> tuple[Case, Array]:
    """The case in a storage dtype, and a cotangent."""
    case = stored(case, dtype, **factors)
    return case, cast(np.random.default_rng(seed).standard_normal(cotangent_of(case).shape), dtype)


def ratios(found: Mapping[str, Array], allowed: Limits) -> dict[str, float]:
    """Largest error of each gradient in units of its limit."""
    worst_of = {}
    for name, limit in allowed.limits.items():
        error = np.abs(np.asarray(found[name], np.float64) - allowed.stages[name])
        assert error.shape == limit.shape, name
        worst_of[name] = float(np.max(error / limit, initial=0.0))
    return worst_of


# Errors at every rounding of the backward pass


class Pushed(BackwardPort):
    """A backward pass with an error at every place where [NUM-9] lets it round.

    Args:
        errors: given a rounding's name and shape, errors in units of its bound.
        forward: the stages of a forward pass that is itself off.
        exact: what each store would have had to store, by name, from a run without errors; None in that run.
        from_outputs: whether D of (26) is formed from virtual outputs.
        scaled: whether the gradients of the logits are stored with the scale.

    Attributes:
        held: what each store had to store.
        found: the gradients before they are rounded.
    """

    def __init__(
        self,
        errors: Callable[[str, tuple[int, ...]], Array],
        forward: Mapping[str, Array],
        *,
        exact: Mapping[str, Array] | None = None,
        from_outputs: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__("once")
        self.errors, self.pushed, self.exact = errors, forward, exact
        self.from_outputs, self.scaled = from_outputs, scaled
        self.held: dict[str, Array] = {}
        self.found: Tensors = {}
        self._where = ""
        self._stored: list[Array] = []
        self._magnitude: dict[str, Array] = {}

    def do(self, step: str, *arguments: Any) -> Any:
        """Carry out a step, under its name."""
        self._where = step + (f" {arguments[0]}" if isinstance(arguments[0], str) else "")
        return super().do(step, *arguments)

    def _run_forward(self, arguments: dict[str, Any], config: dict[str, Any]) -> None:
        super()._run_forward(arguments, config)
        forward = dict(self.pushed)
        if self.config.normalisation == "softmax":
            forward["lse"] = reference.softmax(forward["logits"])[1]
        self.u, self.A, self.eta = UNITS[self.dtype]
        self.forward = forward

    def off(self, name: str, bound: Array) -> Array:
        """An error within a bound."""
        return self.errors(name, bound.shape) * bound

    def store(self, x: Array) -> Array:
        """What has been stored and is unchanged, as by a rotation by 0, is not rounded again."""
        again = np.zeros(x.shape, dtype=bool)
        for before in self._stored:
            if before.shape == x.shape:
                again |= before == x
        name = f"{self._where} store {len(self._stored)}"
        self._stored.append(self.rounded(x, name, self.dtype, again))
        return self._stored[-1]

    def rounded(self, x: Array, name: str, dtype: str, again: Array | bool = False) -> Array:
        """Off by a rounding of what would be there without errors; no rounding is larger than the number."""
        u, _, eta = UNITS[dtype]
        self.held[name] = x
        exact = x if self.exact is None else self.exact[name]
        rounds = (exact != cast(exact, dtype).astype(np.float64)) & ~np.asarray(again)
        return x + self.off(name, np.where(rounds, np.minimum(u * np.abs(x) + eta, np.abs(x)), 0.0))

    def contract(self, equation: str, x: Array, y: Array) -> Array:
        """Every sum off by n·A·Σ|terms|, but for exact ones."""
        value = super().contract(equation, x, y)
        magnitude = np.asarray(np.einsum(equation, np.abs(x), np.abs(y)))
        count = np.einsum(equation, 1.0 * (x != 0), 1.0 * (y != 0))
        self._magnitude[self._where] = magnitude
        spared = self._are_exact(equation, x, y, magnitude)
        return value + self.off(f"{self._where} sum", np.where(spared, 0.0, count * self.A * magnitude))

    def _are_exact(self, equation: str, x: Array, y: Array, magnitude: Array) -> Array:
        """Whether all terms are multiples of the least power of two g with Σ|terms| <= g / A ([NUM-5])."""
        inputs, result = equation.split("->")
        summed = "".join(sorted(set(inputs) - set(result) - {","}))
        terms = np.einsum(f"{inputs}->{result}{summed}", x, y)
        g = 2.0 ** np.ceil(np.log2(np.where(magnitude == 0, 1.0, magnitude) * self.A))
        rest = np.fmod(terms, g.reshape(*g.shape, *[1] * len(summed)))
        return np.all(rest == 0, axis=tuple(range(g.ndim, terms.ndim)))

    def weights(self, logits: Array, lse: Array | None) -> Array:
        """(17), and what a rounded lse adds; a row of one key has the weight 1."""
        a = super().weights(logits, lse)
        if lse is None:
            return a
        seen = np.broadcast_to(self.visible[:, None], a.shape)
        size = np.where(seen, np.abs(np.where(seen, logits, 0.0)), 0.0)
        count = np.count_nonzero(seen, axis=-1, keepdims=True)
        largest = np.max(np.where(seen, logits, -np.inf), axis=-1, initial=-np.inf, keepdims=True)
        finite, log_sum = (np.where(np.isfinite(x), x, 0.0) for x in (largest, lse[..., None]))
        own = 4 + size + np.abs(finite)
        of_lse = count + 4 + 2 * np.max(size, axis=-1, initial=0.0, keepdims=True) + np.abs(log_sum)
        return a + self.off("weights", np.where(count > 1, a * self.A * (own + of_lse), 0.0))

    def row_term(self, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
        """D by one of its two sums."""
        if self.config.normalisation == "none":
            return super().row_term(weights, weights_bar, virtual_out_bar)
        if self.from_outputs:
            terms = np.swapaxes(virtual_out_bar * self.forward["virtual_out"], 1, 2)  # (B, H, T, e)
        else:
            terms = weights * weights_bar  # (B, H, T, S)
        count = np.count_nonzero(terms, axis=-1, keepdims=True)
        magnitude = np.sum(np.abs(terms), axis=-1, keepdims=True)
        return np.sum(terms, axis=-1, keepdims=True) + self.off("row term", count * self.A * magnitude)

    def logits_bar(self, weights: Array, weights_bar: Array, row_term: Array, seen: Any) -> Array:
        """A difference and a product; nothing but the sum that is there already without softmax."""
        bar = super().logits_bar(weights, weights_bar, row_term, seen)
        if self.config.normalisation == "none":
            return bar
        return bar + self.off("logits_bar", np.where(seen, 2 * self.A * np.abs(bar), 0.0))

    def queries_bar(self, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
        return self._through_products("q", super().queries_bar, logits_bar, rotated_k, scale)

    def keys_bar(self, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
        return self._through_products("k", super().keys_bar, logits_bar, rotated_q, scale)

    def _through_products(self, side: str, bar: Any, logits_bar: Array, other: Array, scale: float) -> Array:
        """The scale on one operand, which is stored once more, or on the product."""
        rounds = not _root_is_power_of_two(scale)
        if rounds and self.scaled:
            logits_bar, scale = scale * logits_bar, 1.0  # which is what is stored
        elif rounds:
            bound = np.where(other == 0, 0.0, self.u * np.abs(other) + self.eta / min(1.0, scale))
            other = other + self.off(f"{side} operand", bound)
        value: Array = bar(logits_bar, other, scale)
        self._magnitude[side] = scale * self._magnitude[self._where]
        return value + self.off(f"{side} scaling", 2 * self.A * rounds * np.abs(value))

    def rotate_back(self, side: Any, rotated_bar: Array, angles: Array | None) -> Array:
        """(15) with the opposite angles."""
        bar = super().rotate_back(side, rotated_bar, angles)
        if angles is None:
            return bar
        d, config = self.dims.d, self.config
        lanes = (
            np.arange(d).reshape(2, -1) if config.rope_pairing == "half" else np.arange(d).reshape(-1, 2).T
        )
        partner = np.empty(d, dtype=int)
        partner[lanes[0]], partner[lanes[1]] = lanes[1], lanes[0]
        pair = np.empty(d, dtype=int)
        pair[lanes[0]] = pair[lanes[1]] = np.arange(d // 2)
        phi, x, X = angles[..., pair], np.abs(rotated_bar), self._magnitude[side]
        frequency = (config.rope_theta ** (-2.0 * np.arange(d // 2) / d))[pair]
        angle = (4 + np.abs(np.log(frequency))) * 2.0**-53 * np.abs(phi)
        table = 2 * self.u * (x * np.abs(np.cos(phi)) + x[..., partner] * np.abs(np.sin(phi)))
        table = table + self.eta * (x + x[..., partner] + 2)
        bound = table + (6 * self.A + angle) * (X + X[..., partner])
        turning = (phi != 0) & (X + X[..., partner] != 0)
        return bar + self.off(f"rotate_back {side}", np.where(turning, bound, 0.0))

    def change_gradients(self, gradients: Tensors) -> Tensors:
        dtypes = {name: dtype_name(self.inputs[name]) for name in GRADIENTS}
        self.found = {name: self.rounded(x, f"{name} final", dtypes[name]) for name, x in gradients.items()}
        return gradients


def _root_is_power_of_two(scale: float) -> bool:
    return math.log2(scale) % 2 == 0


class Run:
    """One call, forwards and backwards, to be run with errors; gives the gradients of each trial."""

    def __init__(self, case: Case, cotangent: Array, dtype: str, **options: Any) -> None:
        self.inputs = {**case.tensors, **case.indices, "cotangent": cotangent}
        self.config, self.options = case.config.to_dict(), options
        self.forward = Roundings(
            case.tensors, case.config, dtype, angle=True, independent=False, **case.indices
        )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.exact: dict[str, Array] | None = None
        exact = {name: x for name, x in self.forward.exact.items() if name != "lse"}
        with_none = self._trial(exact, self._note)
        self.exact = with_none.held
        self.forward.run(lambda name, shape: self._note(name, shape)[None])

    def _note(self, name: str, shape: tuple[int, ...]) -> Array:
        self.shapes[name] = shape
        return np.zeros(shape)

    def _trial(self, forward: Mapping[str, Array], errors: Callable[[str, tuple[int, ...]], Array]) -> Pushed:
        pushed = Pushed(errors, forward, exact=self.exact, **self.options)
        pushed(self.inputs, self.config)
        return pushed

    def __call__(self, errors: Errors) -> list[Tensors]:
        forward = self.forward.run(errors)
        drawn: dict[str, Array] = {}

        def of_trial(i: int) -> Callable[[str, tuple[int, ...]], Array]:
            def error(name: str, shape: tuple[int, ...]) -> Array:
                if name not in drawn:
                    drawn[name] = errors(name, shape)
                return np.asarray(drawn[name][i])

            return error

        trials = len(forward["output"])
        return [
            self._trial({name: x[i] for name, x in forward.items()}, of_trial(i)).found for i in range(trials)
        ]

    def errors(self, signs: Array) -> Errors:
        """A row for each trial, with the errors of all places in their order."""
        starts = itertools.accumulate((math.prod(shape) for shape in self.shapes.values()), initial=0)
        of_place = dict(zip(self.shapes, itertools.pairwise(starts), strict=True))
        return lambda name, shape: signs[:, slice(*of_place[name])].reshape(-1, *shape)


def options_of(seed: int) -> dict[str, bool]:
    return {"from_outputs": seed % 2 == 1, "scaled": seed % 4 >= 2}


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_roundings_passes_half_of_a_limit(seed: int, dtype: str) -> None:
    """Every rounding at its bound, with random signs, for random arguments of every kind."""
    case = random_case(seed, most_tokens=4)
    case, cotangent = narrowed(case, dtype, q=1.0 + 3.0 * (seed % 2), k=1.0 + seed % 3)
    rng = np.random.default_rng(seed)
    run = Run(case, cotangent, dtype, **options_of(seed))
    allowed = limits_of(case, cotangent, dtype)
    for found in run(lambda name, shape: rng.choice([-1.0, 1.0], (8, *shape))):
        for name, ratio in ratios(found, allowed).items():
            assert ratio <= HALF + second_order(dtype), (name, ratio)


ADVERSE: Mapping[str, tuple[dict[str, int], AttentionConfig, dict[str, Any], dict[str, float]]] = {
    "paper": ({"N": 2, "H": 2, "P": 1, "d": 2, "e": 1}, AttentionConfig(), {}, {}),
    "pseudo-heads": ({"N": 2, "H": 1, "P": 2, "d": 2, "e": 2}, AttentionConfig(causal="none"), {}, {}),
    "linear": ({"N": 2, "H": 2, "P": 1, "d": 2, "e": 1}, AttentionConfig(normalisation="none"), {}, {}),
    "far": (
        {"N": 2, "H": 1, "P": 1, "d": 2, "e": 2},
        AttentionConfig(causal="token", rope_pairing="adjacent", scale=1.0),
        {"positions": np.array([[-4, 1000]])},
        {},
    ),
    # D and the gradients of weights are large beside their difference.
    "values far from 0": (
        {"N": 2, "M": 4, "H": 1, "P": 1, "d": 1, "e": 1},
        AttentionConfig(causal="none", rope="none"),
        {},
        {"v": 64.0, "q": 0.25},
    ),
    # Keys 0.02 apart and queries of 16: errors of the logits are the largest.
    "logits that cancel": (
        {"N": 1, "M": 4, "H": 1, "P": 1, "d": 2, "e": 1},
        AttentionConfig(causal="none", rope="none"),
        {},
        {"k": 16.0},
    ),
}
"""Sizes, configuration, arguments, and what is added to random tensors; small, as every error is tried."""


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ADVERSE)
def test_the_worst_roundings_for_one_element_stay_at_half_of_its_limit(name: str, dtype: str) -> None:
    """The sign of every error is chosen for what it does to that element of a gradient that it moves most."""
    sizes, config, indices, added = ADVERSE[name]
    reached: dict[str, float] = {}
    for variant in range(2):
        tensors = normal_tensors(np.random.default_rng(variant), B=1, **sizes)
        moved = {argument: x + added.get(argument, 0.0) for argument, x in tensors.items()}
        case, cotangent = narrowed(Case(moved, config, indices), dtype, variant)
        run = Run(case, cotangent, dtype, **options_of(variant))
        allowed = limits_of(case, cotangent, dtype)
        everything = np.eye(sum(math.prod(shape) for shape in run.shapes.values()))
        nothing = run(run.errors(0.0 * everything[:1]))[0]
        alone = run(run.errors(everything))
        for gradient in GRADIENTS:
            responses = np.stack([found[gradient] for found in alone]) - nothing[gradient]
            together = np.abs(responses).sum(axis=0) / allowed.limits[gradient]
            index = np.unravel_index(np.argmax(together), together.shape)
            response = responses[(slice(None), *index)]
            signs = np.where(response >= 0, 1.0, -1.0)
            for found in run(run.errors(np.stack([signs, -signs]))):
                error = abs(found[gradient][index] - allowed.stages[gradient][index])
                ratio = error / allowed.limits[gradient][index]
                assert ratio <= HALF + second_order(dtype), (gradient, ratio)
                reached[gradient] = max(reached.get(gradient, 0.0), ratio)
    # A bound that nothing approaches would judge nothing. (31) has sums of magnitudes where signs differ.
    if dtype != "float64":
        assert min(reached[gradient] for gradient in ("k", "v", "collapse")) > 0.2, reached
        assert config.normalisation == "softmax" or min(reached.values()) > 0.3, reached


# The formula


def parts_of(
    case: Case, cotangent: Array, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Chain, dict[str, Any]]:
    """What the bound has on its way: the forward pass, the gradients of outputs and weights, of logits."""
    found: dict[str, Any] = {}

    def noting(method: str, key: Callable[..., str]) -> None:
        plain = getattr(gradient_limits._Backward, method)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            found["chain"] = self.chain
            name = key(*arguments)
            found[name] = plain(self, *arguments, **options)
            return found[name]

        monkeypatch.setattr(gradient_limits._Backward, method, noted)

    noting("_product", lambda name, *_: str(name))
    noting("_virtual_out", lambda *_: "virtual_out")
    noting("_logits", lambda *_: "logits")
    limits_of(case, cotangent, dtype)
    return found["chain"], found


@pytest.mark.requirement("NUM-9")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_of_the_logits_is_that_of_the_specification(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(31), row by row."""
    u, A, eta = UNITS[dtype]
    rows = 0
    for seed in range(60):
        case, cotangent = narrowed(random_case(seed, most_tokens=4), dtype)
        if case.config.normalisation == "none":
            continue
        with monkeypatch.context() as patch:
            chain, parts = parts_of(case, cotangent, dtype, patch)
        weights, w_bar, o_bar, out = chain.weights, parts["weights"], parts["virtual_out"], chain.virtual_out
        lse = attention_stages(**case.arguments())["lse"]
        for b, h, t in np.ndindex(weights.value.shape[:3]):
            seen = np.broadcast_to(chain.visible, weights.value.shape)[b, h, t]
            if np.count_nonzero(seen) < 2 or np.any(weights.exact[b, h, t] & seen):
                continue  # one key, or exact
            at = (b, h, t, seen)
            a, l, ε_l, ε_a = (
                x[at] for x in (weights.value, chain.logits.value, weights.logit_error, weights.error)
            )
            ā, ε_ā, terms = w_bar.value[at], w_bar.error[at], w_bar.magnitude[at]
            ō, ε_ō, st_o = (x[b, t, h] for x in (o_bar.value, o_bar.error, out.stored))
            n, e = len(a), len(ō)
            D = np.sum(a * ā)
            c = ā - D
            g, least = np.expm1(ε_l), np.sum(a * np.exp(-ε_l))
            ε_w = ε_a + a * A * (n + 4 + 2 * np.max(np.abs(l)) + abs(lse[b, h, t]))
            ε_ρ = np.minimum(1, a * (g + np.sum(a * g)) / least) + ε_w
            ε_D = np.sum(a * np.abs(c) * g) / least + np.sum(ε_w * terms) + np.sum((a + ε_ρ) * ε_ā)
            ε_D += np.sum((np.abs(ō) + ε_ō) * st_o) + (2 * n + e) * A * np.sum(a * terms)
            expected = ε_ρ * np.abs(c) + (a + ε_ρ) * (ε_ā + ε_D)
            expected += 2 * A * a * (np.abs(ā) + abs(D)) + u * np.abs(a * c) + eta / min(1.0, chain.scale)
            np.testing.assert_allclose(parts["logits"].error[at], expected, rtol=1e-9)
            rows += 1
    assert rows > 200


# Honest backward passes


def assert_half(port: BackwardPort, case: Case, cotangent: Array, allowed: Limits) -> None:
    found = port({**case.tensors, **case.indices, "cotangent": cotangent}, case.config.to_dict())
    for name, ratio in ratios(found, allowed).items():
        assert ratio <= HALF, (name, ratio, type(port).__name__, port.rounding)


MAKERS = tuple(dict.fromkeys(make for make, _ in BACKWARD_HONEST.values()))


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40, 70))
def test_honest_backward_passes_on_random_calls(seed: int, dtype: str) -> None:
    case, cotangent = narrowed(random_case(seed), dtype)
    allowed = limits_of(case, cotangent, dtype)
    for make, rounding in itertools.product(MAKERS, ROUNDINGS):
        assert_half(make(rounding), case, cotangent, allowed)


EXTREMES: Mapping[str, tuple[dict[str, float], dict[str, int]]] = {
    "large logits": ({"q": 16.0, "k": 16.0}, {}),
    "tiny data": ({"q": 2.0**-10, "k": 2.0**-10, "v": 2.0**-12}, {}),
    "tiny collapse": ({"collapse": 2.0**-14}, {}),
    "many pseudo-heads": ({}, {"P": 8, "N": 3}),
    "one key": ({}, {"N": 1}),
    "wide": ({"q": 4.0}, {"d": 64, "e": 32, "N": 3}),
    "long": ({}, {"N": 40, "B": 1}),
}


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_honest_backward_passes_at_extremes(name: str, dtype: str) -> None:
    factors, sizes = EXTREMES[name]
    for causal, normalisation in itertools.product(("virtual", "none"), ("softmax", "none")):
        config = AttentionConfig(causal=causal, normalisation=normalisation)  # type: ignore[arg-type]
        case = Case(normal_tensors(np.random.default_rng(3), **sizes), config)
        case, cotangent = narrowed(case, dtype, **factors)
        allowed = limits_of(case, cotangent, dtype)
        for make, rounding in BACKWARD_HONEST.values():
            assert_half(make(rounding), case, cotangent, allowed)


@pytest.mark.requirement("NUM-9", "TYP-2")
@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_of_float32_parameters_are_judged_in_float32(dtype: str) -> None:
    """Rounded to 16 bits they are outside, though the data are in 16 bits; those of the data are not."""
    tensors = normal_tensors(np.random.default_rng(4), N=3)
    wide = {name: cast(x, dtype if name in "qkv" else "float32") for name, x in tensors.items()}
    case = Case(wide, AttentionConfig())
    cotangent = cast(cotangent_of(Case(tensors, case.config)), dtype)
    allowed = limits_of(case, cotangent, dtype)
    for make, rounding in BACKWARD_HONEST.values():
        assert_half(make(rounding), case, cotangent, allowed)
    for name in GRADIENTS:
        kept = arithmetic(dtype if name in "qkv" else "float32").storage
        assert np.all(allowed.limits[name] >= kept.spacing(allowed.stages[name]))
    accumulated = problem("gradient/float32-accumulation", dtype, "highest").expectation.limits
    for name in ("v", "alpha_v", "collapse"):
        exact = np.abs(accumulated.stages[name])
        finest = np.min(accumulated.limits[name][exact > 0] / exact[exact > 0])
        assert (finest < 2.0**-13) == (name != "v"), (name, finest)


@pytest.mark.requirement("NUM-8", "NUM-9")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("make", MAKERS)
def test_honest_backward_passes_of_a_class(make: Any, precision: str, rounding: Rounding) -> None:
    """Operands of every product rounded, in float32; those of few bits are no results of `highest`."""
    port = make(rounding, precision=precision)
    for case in corpus("gradient"):
        if "float32" in case.dtypes:
            tried = problem(case.id, "float32", precision)
            found = verdict(stages(port, tried), tried)
            assert found.status == "passed", (case.id, found)
            assert excess(found) <= HALF, (case.id, found)
    highest = problem("gradient/paper", "float32", "highest")
    status = verdict(stages(port, highest), highest).status
    assert status == ("passed" if precision == "bf16x3" else "failed")


class PushedOperands(BackwardPort):
    """Operands of the backward pass off by all that the class allows, where it rounds them."""

    BITS: Mapping[str, int] = {"tf32": 11, "bf16x3": 8, "bf16x1": 8}
    C: Mapping[str, float] = {"tf32": 2.0**-11, "bf16x3": 3 * 2.0**-17, "bf16x1": 2.0**-8}

    def __init__(self, *arguments: Any, signs: float | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.signs, self.rng = signs, np.random.default_rng(10)

    def multiply(self, product: Callable[[Any, Any], Array], x: Any, y: Any) -> Array:
        return product(self.pushed(x), self.pushed(y))

    def pushed(self, x: Array) -> Array:
        signs = self.rng.choice([-1.0, 1.0], x.shape) if self.signs is None else self.signs
        rounds = to_bits(x, self.BITS[self.precision]) != x
        return np.where(rounds, x * (1 + self.C[self.precision] * signs), x)


class PushedAndRecomputed(PushedOperands, Recomputed):
    """The same with weights from lse and the row term from outputs."""


@pytest.mark.requirement("NUM-8", "NUM-9")
@pytest.mark.parametrize("signs", [-1.0, 1.0, None])
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("make", [PushedOperands, PushedAndRecomputed])
def test_operands_may_be_off_by_all_that_they_are_allowed(
    make: type[PushedOperands], precision: str, signs: float | None
) -> None:
    port, reached = make("once", precision=precision, signs=signs), 0.0
    for case in corpus("gradient"):
        if "float32" in case.dtypes:
            tried = problem(case.id, "float32", precision)
            found = verdict(stages(port, tried), tried)
            # What is left out is of second order: products of an operand's rounding with what it moves.
            assert excess(found) <= HALF * (1 + 4 * port.C[precision]), (case.id, found)
            reached = max(reached, excess(found))
    assert reached > 0.25, "a limit that nothing approaches judges nothing"


@pytest.mark.requirement("NUM-8", "NUM-9")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("dtype", NARROW)
def test_honest_backward_passes_of_a_class_with_16_bits(
    dtype: str, precision: str, rounding: Rounding
) -> None:
    for case in corpus("gradient"):
        if dtype in case.dtypes and ("quick" in case.flags or "float32_parameters" in case.parameters):
            tried = problem(case.id, dtype, precision)
            for make in (BackwardPort, RotatedBeforeMixing):
                found = verdict(stages(make(rounding, precision=precision), tried), tried)
                assert excess(found) <= HALF, (case.id, make, found)


@cache
def problem(case_id: str, dtype: str, precision: str) -> Problem:
    return Problem.of(next(case for case in corpus("gradient") if case.id == case_id), dtype, precision)


# How limits compare


def moderate(dtype: str) -> tuple[Case, Array]:
    """Numbers of few bits, which every dtype has."""
    tensors = normal_tensors(np.random.default_rng(6), N=4, M=5, H=2, G=3)
    case = Case({name: np.rint(8 * x) / 8 for name, x in tensors.items()}, AttentionConfig(window=2))
    cotangent = np.rint(8 * cotangent_of(case)) / 8
    return stored(case, dtype), cast(cotangent, dtype)


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", NARROW)
def test_limits_grow_with_the_roundoff_of_the_dtype(dtype: str) -> None:
    found = [limits_of(*moderate(name), name) for name in ("float64", "float32", dtype)]
    for narrow, wide in itertools.pairwise(found):
        for name in GRADIENTS:
            np.testing.assert_array_equal(narrow.stages[name], wide.stages[name])
            assert np.all(narrow.limits[name] <= wide.limits[name])
            nonzero = narrow.stages[name] != 0
            assert np.all(narrow.limits[name][nonzero] < wide.limits[name][nonzero])


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("dtype", ["float32", *NARROW])
def test_limits_grow_with_the_roundoff_of_the_class(dtype: str) -> None:
    widened = dict.fromkeys(ROUNDED, 0)
    for case in corpus("gradient"):
        if dtype not in case.dtypes or "quick" not in case.flags:
            continue
        limits = {
            name: problem(case.id, dtype, name).expectation.limits.limits for name in precision_classes()
        }
        for gradient in GRADIENTS:
            for name in ROUNDED:
                assert np.all(limits[name][gradient] >= limits["highest"][gradient]), (case.id, name)
                widened[name] += bool(np.any(limits[name][gradient] > limits["highest"][gradient]))
            assert np.all(limits["tf32"][gradient] <= limits["bf16x1"][gradient] * (1 + 1e-12))
            if dtype != "bfloat16":
                assert np.all(limits["bf16x3"][gradient] <= limits["bf16x1"][gradient] * (1 + 1e-12))
    assert all(widened.values()), widened


@pytest.mark.requirement("NUM-8")
def test_classes_do_not_concern_float64() -> None:
    case, cotangent = moderate("float64")
    expected = limits_of(case, cotangent, "float64")
    for name in ROUNDED:
        found = limits_of(case, cotangent, "float64", precision=name)
        for gradient in GRADIENTS:
            np.testing.assert_array_equal(found.limits[gradient], expected.limits[gradient])


@pytest.mark.requirement("NUM-8", "ERR-1")
@pytest.mark.parametrize("name", ["tf31", "high"])
def test_an_unknown_class_is_refused(name: str) -> None:
    case, cotangent = moderate("float32")
    with pytest.raises(ArgumentValueError, match=f"`precision`: expected one of highest, .*, got '{name}'"):
        limits_of(case, cotangent, "float32", precision=name)


@pytest.mark.requirement("NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_scale_with_the_cotangent(dtype: str) -> None:
    """By a power of two they are multiplied exactly, but for roundings of what is next to 0."""
    case, cotangent = moderate(dtype)
    once, fourfold = (limits_of(case, cotangent * cotangent.dtype.type(x), dtype) for x in (1, 4))
    eta = arithmetic(dtype).storage.eta
    for name in GRADIENTS:
        nonzero = once.stages[name] != 0
        np.testing.assert_array_equal(fourfold.stages[name], 4 * once.stages[name])
        expected = 4 * once.limits[name][nonzero]
        relative = 1e-12 + (1e-3 if dtype == "float16" else 0.0)
        np.testing.assert_allclose(fourfold.limits[name][nonzero], expected, rtol=relative, atol=100 * eta)
    nothing = limits_of(case, 0 * cotangent, dtype)
    for name in GRADIENTS:
        assert not np.any(nothing.stages[name])
        assert np.all(nothing.limits[name] <= 1e4 * eta)


@pytest.mark.requirement("NUM-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_are_positive_and_finite_and_belong_to_the_golden_gradient(dtype: str) -> None:
    for seed in range(40):
        case, cotangent = narrowed(random_case(seed, most_tokens=3), dtype)
        allowed = limits_of(case, cotangent, dtype)
        assert allowed.companions == ()
        assert list(allowed.stages) == list(allowed.limits) == list(GRADIENTS)
        exact = attention_vjp(**case.arguments(), cotangent=cotangent)
        for name, limit in allowed.limits.items():
            np.testing.assert_array_equal(allowed.stages[name], exact[name])
            assert limit.shape == exact[name].shape
            assert np.all((limit > 0) & np.isfinite(limit)), (seed, name)
            kept = dtype_name(case.tensors[name])
            assert np.all(limit >= arithmetic(kept).storage.spacing(exact[name]))


@pytest.mark.requirement("GRAD-8", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_nothing_is_allowed_where_a_gradient_is_exactly_0(dtype: str, poison: float) -> None:
    """At dropped and unseen tokens, and at queries that see nothing: the least limit that there is."""
    tensors = normal_tensors(np.random.default_rng(7), N=4, M=5, H=2, G=3)
    key_mask = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]], dtype=bool)
    config = AttentionConfig(window=2, window_unit="token")
    case, cotangent = narrowed(Case(tensors, config, {"key_mask": key_mask, "query_offset": -1}), dtype)
    clean = limits_of(case, cotangent, dtype)
    k, v = (case.tensors[name].copy() for name in "kv")
    k[~key_mask], v[~key_mask] = poison, poison
    allowed = limits_of(case.replace(k=k, v=v), cotangent, dtype)
    for name in GRADIENTS:
        np.testing.assert_array_equal(allowed.limits[name], clean.limits[name])
    seen = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=bool)  # queries -1 to 2 are those of keys to 2
    sees = np.array([[0, 1, 1, 1], [0, 0, 0, 1]], dtype=bool)
    least = arithmetic(dtype).storage.spacing(np.zeros(()))
    for name, of in (("q", sees), ("k", seen), ("v", seen)):
        assert np.all(allowed.limits[name][~of] == least)
        assert not np.any(allowed.stages[name][~of])
        if name == "v":
            assert np.all(allowed.limits[name][of] > least)


# Exact cases


EXACT: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # The other weights are 0 in any format, and an lse that is the one visible logit is that number.
    "one key": ({"gap": 1024.0}, GRADIENTS),
    "linear": ({"gap": 2.0, "normalisation": "none"}, GRADIENTS),
    # Weights may be formed from a rounded lse; the gradient of the collapse has those of the forward pass.
    "two keys": ({"gap": 1024.0, "tied": 2}, ("collapse",)),
    "four keys": ({"gap": 1024.0, "tied": 4}, ("collapse",)),
}


@pytest.mark.requirement("NUM-5", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_limits_of_exact_gradients_are_one_ulp(name: str, dtype: str) -> None:
    """One head, mixing and collapse 1: (29) has one term, (23) and (30) have all tokens and lanes."""
    fields, gradients = EXACT[name]
    case = one_hot(dtype, **fields)
    cotangent = cast(np.random.default_rng(1).integers(-1, 2, cotangent_of(case).shape), dtype)
    allowed = limits_of(case, cotangent, dtype)
    exact, storage = allowed.stages, arithmetic(dtype).storage
    wide = {name: x.astype(np.float64) for name, x in case.tensors.items()}
    terms = {name: np.abs(exact[name]) for name in "qkv"}
    terms |= {f"alpha_{name}": np.sum(np.abs(wide[name] * exact[name])) for name in "qkv"}
    terms["collapse"] = np.sum(np.abs(cotangent.astype(np.float64) * case.output()))
    judged = 0
    for gradient in gradients:
        limit, held = allowed.limits[gradient], cast(exact[gradient], dtype).astype(np.float64)
        least = np.maximum(storage.spacing(held), UNITS[dtype][1] * terms[gradient])
        is_number = held == exact[gradient]
        nonzero = is_number & (held != 0)
        np.testing.assert_allclose(limit[nonzero], least[nonzero], rtol=1e-12, err_msg=gradient)
        # What is next to 0 may be flushed.
        assert np.all(limit[is_number] <= np.maximum(least, 100 * storage.eta)[is_number]), gradient
        judged += int(np.count_nonzero(nonzero))
    assert judged >= (len(gradients) if name == "linear" else 1)


# The sum of products


@pytest.mark.parametrize("step", [1, 5, 2**22])
def test_the_least_grid_is_that_of_every_sum(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against loops over all terms; a few rows at a time gives what all at once do."""
    monkeypatch.setattr(contraction, "LARGEST_STEP", step)
    rng = np.random.default_rng(8)
    sizes = {"b": 2, "n": 3, "p": 4, "h": 5, "i": 5, "w": 2, "s": 3, "t": 6, "e": 1, "o": 4}
    equations = (
        *("bnie,bnphe->ihp", "bnhe,bnphe->hp", "bnie,ihp->bnphe", "bhts,bthe->bshe", "bthe,bshe->bhts"),
        *("bnphw,shp->bnsw", "bnsw,bnphw->shp", "bhts,bhts->bht", "bni,oi->bno", "bni,oi->on", "ts,st->s"),
    )
    for equation in equations:
        of_x, of_y, result = equation.replace("->", ",").split(",")
        x, y = (
            np.where(
                rng.random(shape := [sizes[a] for a in letters]) < 0.3, NO_GRID, rng.integers(-9, 9, shape)
            )
            for letters in (of_x, of_y)
        )
        expected = np.full([sizes[a] for a in result], np.iinfo(np.int64).max)
        letters = "".join(dict.fromkeys(of_x + of_y))
        for index in np.ndindex(*(sizes[a] for a in letters)):
            at = dict(zip(letters, index, strict=True))
            place = tuple(at[a] for a in result)
            term = x[tuple(at[a] for a in of_x)] + y[tuple(at[a] for a in of_y)]
            expected[place] = min(expected[place], term)
        found = least_grid(equation, x, y)
        np.testing.assert_array_equal(found, expected, err_msg=equation, strict=True)


def test_the_least_grid_of_nothing_is_any() -> None:
    for empty in ("b", "s", "w"):
        sizes = {"b": 2, "n": 3, "s": 4, "w": 5, empty: 0}
        x, y = (np.zeros([sizes[a] for a in letters], np.int64) for letters in ("bnsw", "bns"))
        found = least_grid("bnsw,bns->bn", x, y)
        assert found.shape == (sizes["b"], 3)
        assert np.all(found == NO_GRID)


def assert_same_quantity(found: Any, expected: Any, *, at_least: bool = False) -> None:
    """Two bounds of one sum; `at_least` where a sum of terms that are off is never taken for exact."""
    np.testing.assert_array_equal(found.value, expected.value)
    np.testing.assert_array_equal(found.exact, expected.exact)
    np.testing.assert_array_equal(found.terms, expected.terms)
    np.testing.assert_allclose(found.magnitude, expected.magnitude, rtol=1e-12)
    for part in ("summed", "stored", "error"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        if at_least:
            assert np.all(ours >= theirs * (1 - 1e-12)), part
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=part)


EVERY_ARITHMETIC = [("float64", "highest"), *itertools.product(DTYPES[1:], precision_classes())]


@pytest.mark.requirement("NUM-5", "NUM-8")
@pytest.mark.parametrize(("dtype", "precision"), EVERY_ARITHMETIC)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_one_rule_of_sums_gives_what_the_forward_pass_has(
    dtype: str, precision: str, whole: bool, per_head: bool
) -> None:
    rules = arithmetic(dtype, precision)
    tensors = normal_tensors(np.random.default_rng(9), N=3, M=4, H=2, G=3, per_head=per_head)
    if whole:
        tensors = {name: np.rint(4 * x) for name, x in tensors.items()}
    case = stored(Case(tensors, AttentionConfig(rope="none", scale=0.25)), dtype)
    wide = {name: x.astype(np.float64) for name, x in case.tensors.items()}
    values, P = case.stages(), 2

    def by_token(x: Array) -> Array:
        return x.reshape(len(x), -1, P, *x.shape[2:])

    sides = {}
    for name in "qkv":
        x, alpha, value = wide[name], wide[f"alpha_{name}"], values[f"mixed_{name}"]
        expected = worst.mixed(x, alpha, value, rules)
        operands = operand(x, rules), operand(alpha, rules)
        found = contracted("bnsw,shp->bnphw", *operands, by_token(value), rules)
        assert_same_quantity(found, expected.mapped(by_token))
        again = reference.mix(value, alpha[:2] if name in "kv" else alpha)
        twice = worst.mixed(expected, alpha[:2], again, rules)
        operands = operand_of(expected, rules), operand(alpha[:2], rules)
        found = contracted("bnsw,shp->bnphw", *operands, by_token(again), rules)
        assert_same_quantity(found, twice.mapped(by_token), at_least=True)
        sides[name] = expected

    for scale in (0.25, 0.3):
        raw = reference.scaled_products(values["mixed_q"], values["mixed_k"], scale)
        expected = worst.logits(sides["q"], sides["k"], raw, scale, rules)
        operands = operand_of(sides["q"], rules), operand_of(sides["k"], rules)
        options: dict[str, Any] = {"scale": scale, "storage": rules.accumulator}
        found = contracted("bthd,bshd->bhts", *operands, raw, rules, **options)
        # A logit is rounded to the accumulator in any case; a sum that is not scaled has been already.
        logit = np.where(found.exact | (scale == 0.3), 0.0, 2 * rules.A * np.abs(raw))
        incoming = dataclasses.replace(
            found,
            summed=found.summed + logit,
            error=found.error - found.stored + logit,
            stored=0.0 * found.stored,
        )
        assert_same_quantity(incoming, expected, at_least=True)

    collapsed = reference.collapse_heads(sides["q"].value, wide["collapse"])
    expected = worst.collapsed(sides["q"], wide["collapse"], collapsed, rules)
    equation = "bnphe,hp->bnhe" if per_head else "bnphe,ihp->bnie"
    operands = operand_of(sides["q"].mapped(by_token), rules), operand(wide["collapse"], rules)
    assert_same_quantity(contracted(equation, *operands, collapsed, rules), expected, at_least=True)


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_addend_is_one_more_term(dtype: str) -> None:
    """The bias of a projection: in the sum of magnitudes, in the number of terms and on a grid of its own."""
    rules = arithmetic(dtype)
    x, w = np.array([[3.0, -1.0, 0.0]]), np.array([[2.0, 5.0, 7.0]])
    operands = operand(x, rules), operand(w, rules)
    plain = contracted("ni,oi->no", *operands, np.array([[1.0]]), rules)
    assert (plain.magnitude, plain.terms, plain.exact, plain.error) == (11.0, 2.0, True, 0.0)
    third = cast(np.array([[1 / 3]]), dtype).astype(np.float64)
    found = contracted("ni,oi->no", *operands, 1 + third, rules, addend=third)
    assert found.magnitude == 11 + third
    assert found.terms == 3
    if dtype in ("float64", "float32"):
        assert not found.exact
        assert found.summed == 3 * rules.A * (11 + third)
    whole = contracted("ni,oi->no", *operands, np.array([[3.0]]), rules, addend=np.array([[2.0]]))
    assert (whole.exact, whole.error, whole.terms) == (True, 0.0, 3.0)
    none = contracted("ni,oi->no", *operands, np.array([[1.0]]), rules, addend=np.array([[0.0]]))
    assert (none.exact, none.terms) == (True, 2.0)


@pytest.mark.requirement("NUM-5", "NUM-9")
def test_a_sum_of_terms_that_are_off_is_rounded() -> None:
    """Its exact terms lie on a grid, but nobody adds those."""
    rules, x = arithmetic("float32"), np.array([[3.0, 5.0]])
    y, value = operand(np.array([1.0, 2.0]), rules), np.array([13.0])
    plain = contracted("ni,i->n", operand(x, rules), y, value, rules)
    assert (plain.exact, plain.summed, plain.error) == (True, 0.0, 0.0)
    off = operand(x, rules, error=np.array([[0.0, 2.0**-12]]))
    found = contracted("ni,i->n", off, y, value, rules)
    assert found.summed == 2 * rules.A * 13
    assert found.error >= 2 * 2.0**-12 + found.summed


# Layers


def numpy_layer(
    parameters: Mapping[str, Any],
    x: Any,
    config: LayerConfig,
    dtype: str,
    rounding: Rounding = "stages",
    *,
    bias_first: bool = False,
    **indices: Any,
) -> Array:
    """A layer in the accumulator's arithmetic, stored in a dtype wherever [LAY-7] allows it."""
    accumulator = np.float64 if dtype == "float64" else np.float32
    B, N, _ = x.shape

    def projected(name: str, x: Any) -> Any:
        if bias_first and f"{name}.bias" in parameters:
            y = np.broadcast_to(
                parameters[f"{name}.bias"].astype(accumulator), (B, N, len(parameters[f"{name}.bias"]))
            )
            for lane, weight in zip(np.moveaxis(x, -1, 0), parameters[f"{name}.weight"].T, strict=True):
                y = y + lane[..., None].astype(accumulator) * weight.astype(accumulator)
            return cast(y, dtype)
        y = np.flip(x, -1).astype(accumulator) @ np.flip(parameters[f"{name}.weight"], -1).T.astype(
            accumulator
        )
        if f"{name}.bias" in parameters:
            y = y + parameters[f"{name}.bias"].astype(accumulator)
        return cast(y, dtype)

    def heads(side: str, width: int) -> Any:
        y = projected(f"{side}_proj", x).reshape(B, N, -1, width)
        if side == "v" or not config.qk_norm:
            return y
        wide = y.astype(accumulator)
        root = np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + accumulator(config.qk_norm_epsilon))
        return cast(wide / root * parameters[f"{side}_norm.weight"].astype(accumulator), dtype)

    inputs = {"q": heads("q", config.head_width), "k": heads("k", config.head_width)}
    inputs["v"] = heads("v", config.value_width)
    fixed = {} if config.kind == "iha" else fixed_mixing(config)
    inputs |= {name: cast(fixed[name], dtype) if fixed else parameters[name] for name in MIXING}
    output = Port(rounding)(inputs | indices, config.attention.to_dict())
    return np.asarray(projected("o_proj", output.reshape(B, N, -1)), np.float64)


def layer_ratio(
    found: Array, parameters: Any, x: Any, config: LayerConfig, dtype: str, **indices: Any
) -> float:
    exact, limit = derive_layer_limits(parameters, x, config=config, storage=dtype, **indices)
    assert found.shape == exact.shape == limit.shape
    assert np.all(limit > 0)
    np.testing.assert_array_equal(exact, layer(parameters, x, config=config, **_operation(indices)))
    return float(np.max(np.abs(found - exact) / limit))


def _operation(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name != "precision"}


LAYER_INDICES: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"key_mask": np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1]], dtype=bool)},
    "packed": {
        "segment_ids": np.array([[0, 0, 1, 1, 1, 2, 2]] * 2),
        "positions": np.array([[0, 1, 0, 1, 2, 0, 1]] * 2),
    },
}


@pytest.mark.requirement("LAY-7", "NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_of_numpy_stay_at_half(name: str, dtype: str) -> None:
    config, reached = CONFIGS[name], 0.0
    for make, (seed, indices), rounding in itertools.product(
        (example, sharp_example), enumerate(LAYER_INDICES.values()), ROUNDINGS
    ):
        parameters, x = make(config, dtype, seed=seed)
        found = numpy_layer(parameters, x, config, dtype, rounding, **indices)
        ratio = layer_ratio(found, parameters, x, config, dtype, **indices)
        assert ratio <= HALF, (make, indices, rounding)
        reached = max(reached, ratio)
    assert reached > 0, "no rounding at all"


@pytest.mark.requirement("LAY-7", "NUM-1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.bias])
def test_a_bias_is_one_more_term_of_its_sum(name: str, dtype: str) -> None:
    """A large one, to which all others are added."""
    config = CONFIGS[name]
    for seed in range(4):
        parameters, x = example(config, dtype, seed=seed)
        large = cast(10000 + np.float64(parameters["o_proj.bias"]), dtype)
        changed = parameters | {"o_proj.bias": large}
        found = numpy_layer(changed, x, config, dtype, bias_first=True)
        assert layer_ratio(found, changed, x, config, dtype) <= HALF


@pytest.mark.requirement("LAY-4", "LAY-7")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_norms_of_what_nearly_cancels(dtype: str) -> None:
    """Tokens nearly alike, less nearly all of it: what a projection is off is large beside what is left."""
    config = dataclasses.replace(CONFIGS["grouped"], qk_norm_epsilon=1e-12)
    for seed in range(4):
        parameters, x = example(config, dtype, seed=seed)
        alike = cast(np.float64(x[:1, :1]) + np.float64(x) / 2**14, dtype)
        for side in "qk":
            rest = -np.float64(x[0, 0]) @ np.float64(parameters[f"{side}_proj.weight"]).T
            parameters[f"{side}_proj.bias"] = cast(rest, dtype)
        found = numpy_layer(parameters, alike, config, dtype)
        assert layer_ratio(found, parameters, alike, config, dtype) <= HALF


@pytest.mark.requirement("LAY-7", "TYP-2")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.kind == "iha"])
def test_layers_with_float32_mixing_stay_at_half(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    for make in (example, sharp_example):
        parameters, x = make(config, dtype, parameter_dtype="float32")
        found = numpy_layer(parameters, x, config, dtype)
        assert layer_ratio(found, parameters, x, config, dtype) <= HALF


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_that_are_wrong_exceed(name: str, dtype: str) -> None:
    """One weight at a time, off by 1 %, in 16 bits by half. One of the first six of a tensor shows it."""
    config = CONFIGS[name]
    factor = 1.5 if dtype in NARROW else 1.01
    parameters, x = sharp_example(config, dtype)
    wide = {tensor: cast(values, "float64") for tensor, values in parameters.items()}
    for tensor in parameters:
        of_logits = tensor.startswith(("q_", "k_")) or tensor in ("alpha_q", "alpha_k")
        if dtype in ("float16", "bfloat16") and of_logits:
            continue  # one weight moves logits by less than 16 bits may; rows exchanged are another test's
        worst_ratio = 0.0
        for index in np.argwhere(np.asarray(parameters[tensor], np.float64) != 0)[:6]:
            changed = np.array(parameters[tensor], np.float64)
            changed[tuple(index)] *= factor
            wrong = layer(wide | {tensor: changed}, x, config=config)
            worst_ratio = max(worst_ratio, layer_ratio(wrong, parameters, x, config, dtype))
        assert worst_ratio > 2, tensor


@pytest.mark.requirement("LAY-7")
@pytest.mark.parametrize("name", CONFIGS)
def test_limits_of_layers_grow_with_the_roundoff(name: str) -> None:
    """Of dtypes and of classes; numbers of sharp examples are numbers of every dtype."""
    config = CONFIGS[name]
    found = []
    for dtype in ("float64", "float32", "bfloat16"):
        parameters, x = sharp_example(config, dtype)
        found.append(derive_layer_limits(parameters, x, config=config, storage=dtype)[1])
    for narrow, wide in itertools.pairwise(found):
        assert np.all(narrow <= wide)
        assert np.any(narrow < wide)
    parameters, x = example(config, "float32")
    limits = {
        precision: derive_layer_limits(parameters, x, config=config, storage="float32", precision=precision)[
            1
        ]
        for precision in precision_classes()
    }
    for precision in ROUNDED:
        assert np.all(limits["highest"] < limits[precision])
        assert np.all(limits[precision] <= limits["bf16x1"] * (1 + 1e-12))
