"""The limits against adversaries, against simulation, and at the edges where results are exact.

`oracles.roundings` carries errors through the operation itself, as SPEC.md chapter 6 allows them. The
worst case must bound whatever it is given; the standard deviations must be those of random errors.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from test_reference import Case, normal_tensors, random_case

from iha_conformance.corpus.streams import cast
from iha_conformance.power.outcome import HALF
from iha_conformance.power.port import Port
from iha_conformance.power.steps import ROUNDINGS
from iha_core import AttentionConfig
from iha_core.bounds import Limits, arithmetic, derive_limits, limits, statistics
from iha_core.config import Rope
from oracles.roundings import UNITS, Roundings

Array = npt.NDArray[Any]

DTYPES = ("float64", "float32", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")
SEEDS = range(40)


def stored(case: Case, dtype: str, **factors: float) -> Case:
    """The case with its tensors, multiplied by factors, in a storage dtype."""
    return case.replace(
        **{name: cast(factors.get(name, 1.0) * array, dtype) for name, array in case.tensors.items()}
    )


def limits_of(case: Case, dtype: str, *, random: bool = False) -> Limits:
    return derive_limits(**case.arguments(), storage=dtype, random=random)


def roundings_of(case: Case, dtype: str, **options: Any) -> Roundings:
    return Roundings(case.tensors, case.config, dtype, **options, **case.indices)


def second_order(dtype: str) -> float:
    """What the bound leaves out: products of errors, here a table entry's with its operand's."""
    return 8 * UNITS[dtype][0]


def worst_ratios(found: dict[str, Array], allowed: Limits) -> dict[str, float]:
    """Largest error of each stage in units of its limit; hidden logits must be as they are."""
    ratios = {}
    for stage, values in found.items():
        exact, limit = allowed.stages[stage], allowed.limits[stage]
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(
            np.broadcast_to(values, np.broadcast_shapes(values.shape, exact.shape))[..., ~finite],
            np.broadcast_to(exact[~finite], (*values.shape[: values.ndim - exact.ndim], (~finite).sum())),
        )
        error = np.abs(values - np.where(finite, exact, 0.0))[..., finite]
        ratios[stage] = float(np.max(error / limit[finite], initial=0.0))
    return ratios


# The worst case


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_of_roundings_passes_half_of_a_limit(seed: int, dtype: str) -> None:
    """Every rounding at its bound, with random signs, for random arguments of every kind."""
    case = stored(random_case(seed, most_tokens=4), dtype, q=1.0 + 3.0 * (seed % 2), k=1.0 + seed % 3)
    rng = np.random.default_rng(seed)
    run = roundings_of(case, dtype, angle=True, independent=False)
    found = run.run(lambda name, shape: rng.choice([-1.0, 1.0], (24, *shape)))
    for stage, ratio in worst_ratios(found, limits_of(case, dtype)).items():
        assert ratio <= HALF + second_order(dtype), (stage, ratio)


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [1, 2, 3, 12, 21, 25, 26, 27, 38])
def test_the_worst_roundings_for_one_output_stay_at_half_of_its_limit(seed: int, dtype: str) -> None:
    """The sign of every error is chosen for what it does to one output, rounding by rounding."""
    case = stored(random_case(seed, most_tokens=3, most_heads=2, widths=4), dtype, q=2.0)
    allowed = limits_of(case, dtype)
    assert allowed.limits["output"].size, "an empty output tests nothing"
    run = roundings_of(case, dtype, angle=True, independent=False)
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Array:
        shapes[name] = shape
        return np.zeros((1, *shape))

    run.run(note)
    rng = np.random.default_rng(seed)
    signs = {name: rng.choice([-1.0, 1.0], (1, *shape)) for name, shape in shapes.items()}
    index = np.unravel_index(rng.integers(allowed.limits["output"].size), allowed.limits["output"].shape)
    for name in reversed(shapes):
        # Two trials for each error of this rounding: it alone at +1, and at -1.
        count = signs[name].size
        tried = np.repeat(signs[name].reshape(1, count), 2 * count, axis=0)
        tried[np.arange(count), np.arange(count)] = 1.0
        tried[count + np.arange(count), np.arange(count)] = -1.0
        trials = {**signs, name: tried.reshape(2 * count, *shapes[name])}
        output = run.run(lambda name, _, trials=trials: trials[name])["output"]  # type: ignore[misc]
        reached = np.broadcast_to(output, (2 * count, *allowed.limits["output"].shape))[(slice(None), *index)]
        signs[name] = np.where(reached[:count] >= reached[count:], 1.0, -1.0).reshape(signs[name].shape)
    output = run.run(lambda name, _: signs[name])["output"]
    ratio = abs(output[(0, *index)] - allowed.stages["output"][index]) / allowed.limits["output"][index]
    assert ratio <= HALF + second_order(dtype)


def test_the_worst_case_is_reached() -> None:
    """A bound that nothing approaches would judge nothing: here roundings reach all of it."""
    reached = 0.0
    for seed in SEEDS:
        case = stored(random_case(seed, most_tokens=3, most_heads=2, widths=4), "bfloat16")
        rng = np.random.default_rng(seed)
        run = roundings_of(case, "bfloat16", angle=True, independent=False)
        found = run.run(lambda name, shape, rng=rng: rng.choice([-1.0, 1.0], (64, *shape)))
        reached = max(reached, worst_ratios(found, limits_of(case, "bfloat16"))["output"])
    assert reached > 0.45


EXTREMES = {
    "large logits": ({"q": 16.0, "k": 16.0}, {}),
    "tiny data": ({"q": 2.0**-10, "k": 2.0**-10, "v": 2.0**-12}, {}),
    "tiny outputs": ({"collapse": 2.0**-14}, {}),
    "many pseudo-heads": ({}, {"P": 8, "N": 3}),
    "one key": ({}, {"N": 1}),
    "wide": ({"q": 4.0}, {"d": 64, "e": 32, "N": 3}),
    "long": ({}, {"N": 48, "B": 1}),
}


@pytest.mark.requirement("NUM-3", "NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_honest_ports_at_extremes(name: str, dtype: str) -> None:
    factors, sizes = EXTREMES[name]
    for causal, normalisation in itertools.product(("virtual", "none"), ("softmax", "none")):
        tensors = normal_tensors(np.random.default_rng(3), **sizes)
        config = AttentionConfig(causal=causal, normalisation=normalisation)  # type: ignore[arg-type]
        case = stored(Case(tensors, config), dtype, **factors)
        allowed = limits_of(case, dtype)
        for rounding in ROUNDINGS:
            found = Port(rounding, stages=True)({**case.tensors, **case.indices}, config.to_dict())
            for stage, ratio in worst_ratios({n: x.astype(float) for n, x in found.items()}, allowed).items():
                assert ratio <= HALF, (stage, causal, normalisation, rounding)


@pytest.mark.requirement("NUM-3", "NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40, 80))
def test_honest_ports_on_random_calls(seed: int, dtype: str) -> None:
    case = stored(random_case(seed), dtype)
    allowed = limits_of(case, dtype)
    for rounding in ROUNDINGS:
        found = Port(rounding, stages=True)({**case.tensors, **case.indices}, case.config.to_dict())
        for stage, ratio in worst_ratios({n: x.astype(float) for n, x in found.items()}, allowed).items():
            assert ratio <= HALF, (stage, rounding)


@pytest.mark.requirement("ROPE-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_positions(dtype: str) -> None:
    """Angles of 10⁹ rad and more: what [ROPE-5] allows them is most of the bound in float64 and float32."""
    tensors = normal_tensors(np.random.default_rng(5), N=3)
    case = stored(
        Case(tensors, AttentionConfig(), {"positions": np.array([[2**30, 5, -(2**31)]] * 2)}), dtype
    )
    allowed = limits_of(case, dtype)
    rng = np.random.default_rng(6)
    run = roundings_of(case, dtype, angle=True, independent=False)
    found = run.run(lambda name, shape: rng.choice([-1.0, 1.0], (64, *shape)))
    # Where an angle has no effect of first order it has one of second.
    assert max(worst_ratios(found, allowed).values()) <= HALF + 0.005


# The standard deviations


def chain_of(case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Limits, statistics.Chain]:
    """Limits of a case of random data, and what the variances are computed from."""
    chains = []
    plain = statistics.element_variance

    def noting(chain: statistics.Chain) -> Array:
        chains.append(chain)
        return plain(chain)

    monkeypatch.setattr(limits.statistics, "element_variance", noting)
    return limits_of(case, dtype, random=True), chains[0]


SIMULATED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "open": ({"causal": "none", "rope": "none"}, {}, {}),
    "causal": ({"rope": "none"}, {}, {}),
    "window": ({"rope": "none", "window": 2, "scale": 0.25}, {"P": 3}, {}),
    "half": ({"rope_theta": 100.0}, {}, {}),
    "adjacent": ({"rope_pairing": "adjacent", "rope_theta": 10.0}, {"H": 3, "G": 2}, {}),
    "token": ({"rope": "token", "causal": "token", "scale": 0.7}, {"H": 3, "G": 4, "N": 3, "M": 5}, {}),
    "pseudo": ({"causal": "none", "scale": 0.25, "rope_theta": 3.0}, {"P": 3, "per_head": True}, {}),
    "offsets": ({"rope_theta": 10.0}, {"N": 2, "M": 4}, {"query_offset": np.array([1, 2])}),
    "linear": ({"rope": "none", "normalisation": "none"}, {}, {}),
    "linear rope": ({"normalisation": "none", "rope_theta": 10.0}, {"G": 3}, {}),
}
TRIALS = 6000
GROUPS = 12
"""Trials are drawn in groups, to keep arrays small."""


def simulated_case(name: str, dtype: str) -> Case:
    fields, sizes, indices = SIMULATED[name]
    tensors = normal_tensors(np.random.default_rng(9), **{"N": 4, **sizes})
    # Uniform data of moderate size: variances are of first order, and heavy tails would not be.
    return stored(
        Case({n: np.tanh(x) for n, x in tensors.items()}, AttentionConfig(**fields), indices), dtype
    )


@pytest.mark.requirement("NUM-6")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", SIMULATED)
def test_variances_are_those_of_random_roundings(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements, means and gains of simulated errors, against the formulas.

    A variance estimated from K trials is off by sqrt(2/K) of itself, here 1.8%, and of some 50 elements one
    may be off by three times as much. The rest of the tolerance is for what is not linear in the errors.
    """
    case = simulated_case(name, dtype)
    allowed, chain = chain_of(case, dtype, monkeypatch)
    run, rng = roundings_of(case, dtype), np.random.default_rng(11)
    error = np.concatenate(
        [
            run.run(lambda _, shape: rng.uniform(-1.0, 1.0, (TRIALS // GROUPS, *shape)))["output"]
            - allowed.stages["output"]
            for _ in range(GROUPS)
        ]
    )
    simulated, formula = np.mean(error**2, axis=0), statistics.element_variance(chain)
    np.testing.assert_allclose(formula, simulated, rtol=0.09)
    np.testing.assert_allclose(np.sum(formula), np.sum(simulated), rtol=0.03)

    y = allowed.stages["output"]
    B, _, H, _ = y.shape
    heads = np.arange(H)[:, None, None, None, None] == np.arange(H)[:, None]  # (H, 1, 1, H, 1)
    for w in (np.ones_like(y), y):
        for only in (*(w * head for head in heads), w):
            by_element = np.einsum("kbnhe,bnhe->kb", error, only)
            np.testing.assert_allclose(
                statistics.functional_variance(chain, only, per_batch=True),
                np.mean(by_element**2, axis=0),
                rtol=0.09,
            )
        everything = np.mean(by_element.sum(axis=1) ** 2)
        np.testing.assert_allclose(
            statistics.functional_variance(chain, w, per_batch=False), everything, rtol=0.09
        )
    assert B == 2


@pytest.mark.requirement("NUM-6")
@pytest.mark.parametrize("dtype", NARROW)
def test_an_element_is_a_functional_too(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variances are adjoints of the same roundings, computed by different formulas."""
    for name in SIMULATED:
        case = simulated_case(name, dtype)
        _, chain = chain_of(case, dtype, monkeypatch)
        by_element = statistics.element_variance(chain)
        for index in itertools.islice(np.ndindex(by_element.shape), 0, None, 5):
            w = np.zeros_like(by_element)
            w[index] = 1.0
            found = statistics.functional_variance(chain, w, per_batch=False)
            np.testing.assert_allclose(found, by_element[index], rtol=1e-9, err_msg=name)


@pytest.mark.requirement("NUM-4", "NUM-6")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factors_of_the_limits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2W, and 7 standard deviations on random data; twice as much in float64, whose reference errs too."""
    share = 2 if dtype == "float64" else 1
    tensors = normal_tensors(np.random.default_rng(18), N=12)
    case = stored(Case(tensors, AttentionConfig(rope="none")), dtype)
    plain, (random, chain) = limits_of(case, dtype), chain_of(case, dtype, monkeypatch)
    statistical = 7 * share * np.sqrt(statistics.element_variance(chain))
    ulp = arithmetic(dtype).storage.spacing(plain.stages["output"])
    worst, sharper = 2 * share * plain.worst, np.minimum(2 * share * plain.worst, statistical)
    # The floor is at least an ulp, and here no more than two.
    for found, expected in ((plain.limits["output"], worst), (random.limits["output"], sharper)):
        above = expected > 2 * ulp
        assert np.count_nonzero(above) > 10
        np.testing.assert_allclose(found[above], expected[above], rtol=1e-12)
        assert np.all((found >= ulp) & (found <= np.maximum(2 * ulp, expected) * (1 + 1e-12)))


@pytest.mark.requirement("NUM-6")
@pytest.mark.parametrize("rope", ["virtual", "none"])
def test_random_data_are_judged_no_looser_and_have_companions(rope: Rope) -> None:
    tensors = normal_tensors(np.random.default_rng(12), N=12, e=4)
    case = stored(Case(tensors, AttentionConfig(rope=rope)), "bfloat16")
    plain, random = limits_of(case, "bfloat16"), limits_of(case, "bfloat16", random=True)
    assert np.all(random.limits["output"] <= plain.limits["output"])
    assert np.mean(random.limits["output"]) < 0.7 * np.mean(plain.limits["output"])
    for stage in plain.limits.keys() - {"output"}:
        np.testing.assert_array_equal(random.limits[stage], plain.limits[stage])
    assert plain.companions == ()
    kinds = [companion.kind for companion in random.companions]
    assert kinds == ["rms", "mean", "gain", "total mean", "total gain"]
    for companion in random.companions:
        assert companion.limit.shape == ((2, 2) if "total" not in companion.kind else ())


@pytest.mark.requirement("NUM-6")
@pytest.mark.parametrize(("N", "kinds"), [(5, {"total mean", "total gain"}), (8, None), (1, set())])
def test_small_groups_have_no_companions(N: int, kinds: set[str] | None) -> None:
    """24 values a batch element and head, or in all, are needed."""
    case = stored(Case(normal_tensors(np.random.default_rng(13), N=N), AttentionConfig()), "float32")
    found = {companion.kind for companion in limits_of(case, "float32", random=True).companions}
    assert found == ({"rms", "mean", "gain", "total mean", "total gain"} if kinds is None else kinds)


# Exactness


def one_hot(dtype: str, *, gap: float = 64.0, tied: int = 1, **fields: Any) -> Case:
    """Four keys of P = 1, of which the last `tied` have the largest logit, `gap` above the others."""
    k = np.zeros((1, 4, 1, 16))
    k[0, 4 - tied :, 0, 0] = gap
    q = np.zeros((1, 4, 1, 16))
    q[..., 0] = 4.0  # the default scale is 1/4
    v = np.arange(1.0, 13.0).reshape(1, 4, 1, 3) * 4
    ones = np.ones((1, 1, 1))
    tensors = {"q": q, "k": k, "v": v, "alpha_q": ones, "alpha_k": ones, "alpha_v": ones, "collapse": ones}
    config = AttentionConfig(**{"causal": "none", "rope": "none", **fields})
    return stored(Case(tensors, config), dtype)


def is_exact(case: Case, dtype: str) -> bool:
    return bool(limits_of(case, dtype).exact.all())


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [1, 2, 4])
def test_tied_largest_logits_are_exact(dtype: str, tied: int) -> None:
    case = one_hot(dtype, tied=tied)
    allowed = limits_of(case, dtype)
    assert allowed.exact.all()
    expected = case.tensors["v"].astype(np.float64)[0, 4 - tied :, 0].mean(axis=0)
    np.testing.assert_array_equal(allowed.stages["output"][0, :, 0], np.tile(expected, (4, 1)))


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_exact(dtype: str) -> None:
    assert not is_exact(one_hot(dtype, tied=3), dtype), "a third is no number of any format"
    third = one_hot(dtype, tied=3)
    third.tensors["v"][:, :3], third.tensors["v"][:, 3] = 0, 16
    assert not is_exact(third, dtype), "nor is a third of a power of two"
    assert not is_exact(one_hot(dtype, gap=39.0), dtype), "e**-39 is not negligible"
    assert is_exact(one_hot(dtype, gap=40.0), dtype)
    assert not is_exact(one_hot(dtype, rope="token"), dtype), "rotated"
    still = one_hot(dtype, rope="virtual").replace(positions=np.zeros((1, 4), dtype=np.int64))
    assert is_exact(still, dtype), "rotated by 0"


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scale", "exact"), [(0.25, True), (1.0, True), (4.0, True), (0.5, False), (2.0, False), (0.75, False)]
)
def test_a_logit_is_exact_only_if_the_root_of_the_scale_is_a_power_of_two(
    dtype: str, scale: float, exact: bool
) -> None:
    """A kernel may multiply q and k by the root and round both."""
    assert is_exact(one_hot(dtype, gap=256.0, scale=scale), dtype) == exact


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_input_that_is_off_the_grid_makes_its_outputs_inexact(dtype: str) -> None:
    case = one_hot(dtype, tied=2)
    v = case.tensors["v"].copy()
    v[0, 3, 0, 1] = np.nextafter(v[0, 3, 0, 1], v.dtype.type(1))
    allowed = limits_of(case.replace(v=v), dtype)
    assert not allowed.exact[0, :, 0, 1].any(), "the mean of two neighbours is no number of the format"
    assert allowed.exact[0, :, 0, [0, 2]].all()

    k = case.tensors["k"].copy()
    k[0, 3, 0, 0] = np.nextafter(k[0, 3, 0, 0], k.dtype.type(0))
    assert not is_exact(case.replace(k=k), dtype), "the largest logits no longer tie"

    alpha = np.full_like(case.tensors["alpha_v"], 1) / 3
    assert not is_exact(case.replace(alpha_v=alpha.astype(v.dtype)), dtype)


@pytest.mark.requirement("NUM-4", "NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_limit_of_an_exact_output_is_one_ulp(dtype: str) -> None:
    case = one_hot(dtype, tied=2)
    allowed = limits_of(case, dtype)
    form = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    u, A, _ = UNITS[dtype]
    assert ml_dtypes.finfo(form).eps == 2 * u
    y = allowed.stages["output"]
    ulp = 2.0 ** np.floor(np.log2(y)) * 2 * u
    terms = np.abs(y)  # one pseudo output, positive values
    np.testing.assert_array_equal(allowed.limits["output"], np.maximum(ulp, A * terms))
    # The weights that are negligible make the worst case 10⁻²⁶ and not 0.
    assert np.all(allowed.worst < 1e-20)


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_exact(dtype: str) -> None:
    """The smallest limit there is, for queries that see nothing."""
    case = one_hot(dtype).replace(key_mask=np.zeros((1, 4), dtype=bool))
    allowed = limits_of(case, dtype)
    assert allowed.exact.all()
    assert np.all(allowed.limits["output"] > 0)
    assert np.all(allowed.limits["output"] <= 2.0**-24)


# What limits do not depend on


@pytest.mark.requirement("KEY-3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_limits_do_not_depend_on_what_dropped_keys_hold(
    dtype: str, poison: float, normalisation: Any
) -> None:
    tensors = normal_tensors(np.random.default_rng(14), N=6, G=3)
    key_mask = np.random.default_rng(15).random((2, 6)) < 0.6
    config = AttentionConfig(normalisation=normalisation, causal="token")
    clean = stored(Case(tensors, config, {"key_mask": key_mask}), dtype)
    k, v = clean.tensors["k"].copy(), clean.tensors["v"].copy()
    k[~key_mask], v[~key_mask] = poison, poison
    expected = limits_of(clean, dtype, random=True)
    found = limits_of(clean.replace(k=k, v=v), dtype, random=True)
    for stage in expected.limits:
        np.testing.assert_array_equal(found.limits[stage], expected.limits[stage])
        if stage not in ("mixed_k", "mixed_v", "rotated_k"):
            np.testing.assert_array_equal(found.stages[stage], expected.stages[stage])
    for stage in ("mixed_k", "mixed_v", "rotated_k"):
        dropped = np.repeat(~key_mask, 2, axis=1)
        assert np.all(found.limits[stage][dropped] == np.inf)
        assert np.all(np.isfinite(found.limits[stage][~dropped]))
    for ours, theirs in zip(found.companions, expected.companions, strict=True):
        np.testing.assert_array_equal(ours.limit, theirs.limit)


@pytest.mark.requirement("DIM-2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(("B", "N", "M"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_empty_arrays(dtype: str, normalisation: Any, random: bool, B: int, N: int, M: int) -> None:
    tensors = normal_tensors(np.random.default_rng(16), B=B, N=N, M=M)
    case = stored(Case(tensors, AttentionConfig(normalisation=normalisation)), dtype)
    allowed = limits_of(case, dtype, random=random)
    for stage, limit in allowed.limits.items():
        assert limit.shape == allowed.stages[stage].shape
        assert np.all(limit > 0)
    assert allowed.exact.all()


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_are_positive_and_finite(dtype: str) -> None:
    for seed in SEEDS:
        case = stored(random_case(seed, most_tokens=3), dtype)
        if "key_mask" in case.indices:
            continue
        for random in (False, True):
            for stage, limit in limits_of(case, dtype, random=random).limits.items():
                assert np.all((limit > 0) & np.isfinite(limit)), (seed, stage)


@pytest.mark.requirement("TYP-2")
@pytest.mark.parametrize("dtype", NARROW)
def test_float32_parameters(dtype: str) -> None:
    """Limits are those of the storage dtype; a port that rounds the parameters first is outside them."""
    tensors = normal_tensors(np.random.default_rng(17), N=3)
    wide = {name: cast(x, dtype if name in "qkv" else "float32") for name, x in tensors.items()}
    case = Case(wide, AttentionConfig())
    allowed = limits_of(case, dtype)
    found = Port("stages", stages=True)(case.tensors, case.config.to_dict())
    assert max(worst_ratios({n: x.astype(float) for n, x in found.items()}, allowed).values()) <= HALF
    rounded = stored(case, dtype).stages()
    assert worst_ratios({"mixed_q": rounded["mixed_q"]}, allowed)["mixed_q"] > 1
