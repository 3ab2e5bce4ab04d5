"""Initialisers: the very arrays, the noise, and which starts compute what multi-head attention does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from layers import CONFIGS, SAME_FUNCTION, assert_same, assert_within_limits, sharp_example

import iha_core
from iha_conformance.corpus.streams import cast
from iha_core import AttentionConfig, ConfigError, IHAError, LayerConfig
from iha_core.bounds import derive_layer_limits
from iha_core.initialisers import (
    INITIALISERS,
    difference_from_mha,
    fixed_mixing,
    one_hot_mixing,
    sample,
    starts,
)
from iha_core.layer_config import MIXING

COPYING = ("noisy-average", "replicated-average", "replicated-first", "replicated-last", "zero-pseudo-keys")
REPLICATED = ("replicated-average", "replicated-first", "replicated-last")


def test_names_are_those_of_the_specification() -> None:
    assert INITIALISERS == (
        "noisy-average",
        "replicated-average",
        "replicated-first",
        "replicated-last",
        "random",
        "zero-mixing",
        "zero-pseudo-keys",
    )


# The arrays, by hand: two heads of three pseudo-heads, and four heads in two groups

OWN = [[[1, 1, 1], [0, 0, 0]], [[0, 0, 0], [1, 1, 1]]]
FIRST = [[[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]]
LAST = [[[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 1]]]
AVERAGE = np.array(OWN) / 3
NOTHING = np.zeros((2, 2, 3))

EXPECTED: dict[str, tuple[Any, Any, Any]] = {
    # alpha_q; alpha_k and alpha_v; collapse: [source, target, pseudo] and [out, source, pseudo]
    "noisy-average": (OWN, OWN, AVERAGE),
    "replicated-average": (OWN, OWN, AVERAGE),
    "replicated-first": (OWN, OWN, FIRST),
    "replicated-last": (OWN, OWN, LAST),
    "random": (NOTHING, NOTHING, NOTHING),
    "zero-mixing": (NOTHING, NOTHING, AVERAGE),
    "zero-pseudo-keys": (OWN, FIRST, FIRST),
}


@pytest.mark.requirement("INIT-2", "INIT-3", "INIT-4", "INIT-5")
@pytest.mark.parametrize("initialiser", INITIALISERS)
@pytest.mark.parametrize("collapse", ["global", "per_head"])
def test_means_of_the_mixing(collapse: Any, initialiser: Any) -> None:
    config = LayerConfig(model_width=4, num_heads=2, num_pseudo_heads=3, collapse=collapse)
    found = starts(config, initialiser)
    queries, keys, combined = EXPECTED[initialiser]
    if collapse == "per_head":
        combined = np.array(combined)[[0, 1], [0, 1]]  # (H, P), of a head's own pseudo-heads
    for name, expected in zip(MIXING, (queries, keys, keys, combined), strict=True):
        assert found[name].mean.dtype == np.float64
        np.testing.assert_array_equal(found[name].mean, expected, strict=False, err_msg=name)


GROUPED_KEYS = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])[:, :, None]  # (G, H, 1): heads 0, 1 have source 0


@pytest.mark.requirement("INIT-2", "INIT-5", "LAY-6")
@pytest.mark.parametrize("initialiser", COPYING)
@pytest.mark.parametrize("P", [1, 3])
def test_heads_of_a_group_share_their_keys(P: int, initialiser: Any) -> None:
    config = LayerConfig(model_width=8, num_heads=4, num_kv_heads=2, num_pseudo_heads=P)
    found = starts(config, initialiser)
    kept = np.eye(P)[0] if initialiser == "zero-pseudo-keys" else np.ones(P)
    for name in ("alpha_k", "alpha_v"):
        np.testing.assert_array_equal(found[name].mean, GROUPED_KEYS * kept)
    np.testing.assert_array_equal(found["alpha_q"].mean, np.eye(4)[:, :, None] * np.ones(P))


@pytest.mark.requirement("LAY-6")
def test_fixed_mixing_of_plain_heads() -> None:
    config = LayerConfig(kind="mha", model_width=8, num_heads=4, num_kv_heads=2)
    found = fixed_mixing(config)
    assert list(found) == list(MIXING)
    np.testing.assert_array_equal(found["alpha_q"], np.eye(4)[:, :, None])
    np.testing.assert_array_equal(found["alpha_k"], GROUPED_KEYS)
    np.testing.assert_array_equal(found["alpha_v"], GROUPED_KEYS)
    np.testing.assert_array_equal(found["collapse"], np.eye(4)[:, :, None])


def test_arrays_are_not_shared() -> None:
    config = LayerConfig(model_width=4, num_heads=2, collapse="per_head")
    found = one_hot_mixing(config)
    found["alpha_k"][:] = 7
    assert not np.any(found["alpha_v"] == 7)
    first, second = (starts(config, "replicated-average") for _ in range(2))
    for name, start in first.items():
        start.mean[:] = 7  # also: it may be written to
        assert not np.any(second[name].mean == 7)


@pytest.mark.requirement("INIT-1", "INIT-3", "INIT-4")
@pytest.mark.parametrize(
    ("collapse", "terms"), [("global", 6 * 5), ("per_head", 5)], ids=["global", "per_head"]
)
def test_deviations_are_by_the_number_of_terms(collapse: Any, terms: int) -> None:
    H, G, P, D, e = 6, 3, 5, 10, 7
    config = LayerConfig(
        model_width=D,
        num_heads=H,
        head_width=4,
        num_kv_heads=G,
        num_pseudo_heads=P,
        value_width=e,
        bias=True,
        qk_norm=True,
        collapse=collapse,
    )
    for initialiser in INITIALISERS:
        found = starts(config, initialiser)
        assert list(found) == list(config.parameter_shapes())
        for name, shape in config.parameter_shapes().items():
            assert found[name].mean.shape == shape
        part = {"noisy-average": 0.1, "random": 1.0}.get(initialiser, 0.0)
        assert {name: found[name].deviation for name in MIXING} == pytest.approx(
            {
                "alpha_q": part / math.sqrt(H),
                "alpha_k": part / math.sqrt(G),
                "alpha_v": part / math.sqrt(G),
                "collapse": part / math.sqrt(terms),
            }
        )
        for letter in "qkv":
            assert found[f"{letter}_proj.weight"].deviation == pytest.approx(1 / math.sqrt(D))
        assert found["o_proj.weight"].deviation == pytest.approx(1 / math.sqrt(H * e))
        for letter in "qkvo":
            assert np.all(found[f"{letter}_proj.weight"].mean == 0)
            assert np.all(found[f"{letter}_proj.bias"].mean == 0)
            assert found[f"{letter}_proj.bias"].deviation == 0
        for letter in "qk":
            assert np.all(found[f"{letter}_norm.weight"].mean == 1)
            assert found[f"{letter}_norm.weight"].deviation == 0


@pytest.mark.requirement("LAY-6", "INIT-1")
def test_plain_layers_have_no_mixing_to_start() -> None:
    config = LayerConfig(kind="mha", model_width=8, num_heads=4, num_kv_heads=2)
    for initialiser in INITIALISERS:
        assert list(starts(config, initialiser)) == [f"{letter}_proj.weight" for letter in "qkvo"]


@pytest.mark.requirement("INIT-1", "INIT-3", "INIT-4")
@pytest.mark.parametrize("initialiser", INITIALISERS)
@pytest.mark.parametrize("collapse", ["global", "per_head"])
def test_samples_have_their_means_and_deviations(collapse: Any, initialiser: Any) -> None:
    config = LayerConfig(
        model_width=96, num_heads=12, num_kv_heads=6, num_pseudo_heads=40, qk_norm=True, collapse=collapse
    )
    found = sample(config, initialiser, seed=5)
    assert {name: tensor.shape for name, tensor in found.items()} == config.parameter_shapes()
    for name, start in starts(config, initialiser).items():
        assert found[name].dtype == np.float64
        noise = found[name] - start.mean
        if not start.deviation:
            assert np.all(noise == 0), name
            continue
        sizes = noise.ravel() / start.deviation
        # six deviations of the mean, of the variance and of the part within one deviation
        assert abs(sizes.mean()) <= 6 / math.sqrt(sizes.size), name
        assert abs(sizes.var() - 1) <= 6 * math.sqrt(2 / sizes.size), name
        within = math.erf(math.sqrt(0.5))
        assert abs(np.mean(np.abs(sizes) < 1) - within) <= 6 * math.sqrt(within * (1 - within) / sizes.size)
        assert abs(np.mean(sizes[1:] * sizes[:-1])) <= 6 / math.sqrt(sizes.size - 1), name
        assert np.unique(sizes).size == sizes.size, name


@pytest.mark.requirement("INIT-1")
def test_the_seed_decides_the_sample() -> None:
    config = LayerConfig(model_width=12, num_heads=3)
    first, again, other = (sample(config, seed=seed) for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert np.array_equal(tensor, again[name])
        assert not np.any(tensor == other[name])
    assert not np.any(first["alpha_q"] - starts(config)["alpha_q"].mean == first["alpha_k"])
    default, named = sample(config), sample(config, "noisy-average", seed=0)
    assert all(np.array_equal(default[name], named[name]) for name in named)


@pytest.mark.requirement("ERR-1", "INIT-2")
@pytest.mark.parametrize(
    ("value", "error"),
    [("xavier", ConfigError), ("", ConfigError), (None, iha_core.ArgumentTypeError), (0, TypeError)],
)
def test_an_unknown_initialiser_is_refused(value: Any, error: type[Exception]) -> None:
    config = LayerConfig(model_width=12, num_heads=3)
    for call in (
        lambda: starts(config, value),
        lambda: sample(config, value),
        lambda: difference_from_mha(AttentionConfig(), value, num_pseudo_heads=2),
    ):
        with pytest.raises(error, match=r"^`initialiser`: expected one of 'noisy-average', ") as caught:
            call()
        assert isinstance(caught.value, IHAError)


@pytest.mark.requirement("INIT-2", "ERR-1")
@pytest.mark.parametrize("G", [2, 6])
def test_heads_are_copied_only_from_a_head_of_their_own(G: int) -> None:
    config = LayerConfig(model_width=12, num_heads=3, num_kv_heads=G)
    for initialiser in INITIALISERS:
        if initialiser in COPYING:
            with pytest.raises(ConfigError) as caught:
                starts(config, initialiser)
            expected = "`num_kv_heads`: expected a divisor of num_heads=3, to copy heads"
            assert str(caught.value) == f"{expected} (initialiser 'random' copies none), got {G}"
        else:
            assert starts(config, initialiser)["alpha_k"].mean.shape == (G, 3, 3)


# Which start is multi-head attention

WINDOWS = [(None, "virtual"), *itertools.product((1, 2, 3, 9), ("virtual", "token"))]
N = 7


def distance(attention: AttentionConfig, initialiser: Any, P: int, G: int, collapse: Any) -> float:
    """Largest difference of the start of a layer from the layer of plain heads with the same projections.

    As a part of the largest element.
    """
    sizes: dict[str, Any] = {
        "model_width": 8,
        "num_heads": 4,
        "head_width": 4,
        "num_kv_heads": G,
        "value_width": 3,
        "bias": True,
        "attention": attention,
    }
    config = LayerConfig(num_pseudo_heads=P, collapse=collapse, **sizes)
    plain = LayerConfig(kind="mha", **sizes)
    parameters = sample(config, initialiser, seed=3)
    parameters |= {name: x + 0.5 for name, x in parameters.items() if name.endswith("bias")}
    x = np.random.default_rng(4).standard_normal((2, N, 8))
    expected = iha_core.layer(
        {name: t for name, t in parameters.items() if name not in MIXING}, x, config=plain
    )
    return float(
        np.abs(iha_core.layer(parameters, x, config=config) - expected).max() / np.abs(expected).max()
    )


def coincides(attention: AttentionConfig, initialiser: Any, P: int) -> bool:
    """Whether a start may be multi-head attention although its initialiser is not in general ([INIT-6])."""
    if attention.window is not None and attention.window >= N:  # hides nothing
        unlimited = dataclasses.replace(attention, window=None)
        return difference_from_mha(unlimited, initialiser, num_pseudo_heads=P) is None or coincides(
            unlimited, initialiser, P
        )
    if attention.window == 1:  # hides all but the own token
        return initialiser in (*REPLICATED, "zero-pseudo-keys")
    # Keys of logit 0 and value 0 add nothing without softmax, and with P = 1 there are none.
    return initialiser == "zero-pseudo-keys" and (P == 1 or attention.normalisation == "none")


@pytest.mark.requirement("INIT-6")
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize(("window", "unit"), WINDOWS)
@pytest.mark.parametrize("rope", ["virtual", "token", "none"])
@pytest.mark.parametrize("causal", ["virtual", "token", "none"])
def test_what_is_multi_head_attention_and_what_is_not(
    causal: Any, rope: Any, window: int | None, unit: Any, normalisation: Any
) -> None:
    attention = AttentionConfig(
        causal=causal, rope=rope, window=window, window_unit=unit, normalisation=normalisation
    )
    for initialiser, P in itertools.product(INITIALISERS, (1, 2, 3)):
        reason = difference_from_mha(attention, initialiser, num_pseudo_heads=P)
        for G, collapse in ((4, "global"), (2, "per_head")):
            found = distance(attention, initialiser, P, G, collapse)
            if reason is None:
                assert found <= SAME_FUNCTION, (initialiser, P, G)
            elif not coincides(attention, initialiser, P):
                assert found > 1e-3, (initialiser, P, G, reason)


@pytest.mark.requirement("INIT-6")
@pytest.mark.parametrize(
    ("fields", "initialiser", "P"),
    [
        ({"causal": "virtual", "rope": "token", "window": N}, "replicated-last", 3),
        ({"causal": "none", "rope": "none", "window": N}, "replicated-average", 3),
        (
            {"causal": "token", "rope": "virtual", "window": 1, "window_unit": "token"},
            "replicated-average",
            3,
        ),
        ({}, "zero-pseudo-keys", 1),
        ({"rope": "token", "normalisation": "none"}, "zero-pseudo-keys", 3),
    ],
)
def test_coincidences_do_happen(fields: dict[str, Any], initialiser: Any, P: int) -> None:
    """Not because of the initialiser, but of what there is nothing of."""
    for G, collapse in ((4, "global"), (2, "per_head")):
        assert distance(AttentionConfig(**fields), initialiser, P, G, collapse) <= SAME_FUNCTION


@pytest.mark.requirement("INIT-6", "PROF-2")
def test_the_table_of_the_specification() -> None:
    """Row by row, as it is printed."""
    everything = [(None, "virtual"), (None, "token"), (3, "virtual"), (3, "token")]
    rows: list[tuple[str, tuple[str, ...], list[tuple[int | None, str]], tuple[bool, bool, bool]]] = [
        ("virtual", ("virtual",), everything, (False, False, False)),
        ("virtual", ("token", "none"), everything, (False, False, True)),
        ("token", ("virtual",), everything, (False, False, False)),
        ("token", ("token", "none"), [(None, "virtual"), (None, "token"), (3, "token")], (True, True, True)),
        ("token", ("token", "none"), [(3, "virtual")], (False, False, True)),
        ("none", ("virtual",), everything, (False, False, False)),
        ("none", ("token", "none"), [(None, "virtual"), (None, "token"), (3, "token")], (True, True, True)),
        ("none", ("token", "none"), [(3, "virtual")], (False, False, False)),
    ]
    seen = set()
    for causal, ropes, windows, equal in rows:
        for rope, (window, unit) in itertools.product(ropes, windows):
            seen.add((causal, rope, window, unit))
            fields = {"causal": causal, "rope": rope, "window": window, "window_unit": unit}
            attention = AttentionConfig.from_dict(fields)
            for initialiser, same in zip(REPLICATED, equal, strict=True):
                for P in (2, 5):
                    reason = difference_from_mha(attention, initialiser, num_pseudo_heads=P)
                    assert (reason is None) is same, (causal, rope, window, unit, initialiser)
                assert difference_from_mha(attention, initialiser, num_pseudo_heads=1) is None
    assert len(seen) == 3 * 3 * 4


@pytest.mark.requirement("INIT-6")
@pytest.mark.parametrize(
    ("fields", "initialiser", "words"),
    [
        ({}, "noisy-average", ("initialiser", "noisy-average", "replicated")),
        ({}, "zero-mixing", ("initialiser", "zero-mixing", "does not copy")),
        ({"normalisation": "none"}, "replicated-last", ("normalisation", "none", "softmax")),
        ({}, "replicated-last", ("rope", "virtual", "use 'token'")),
        ({"rope": "token"}, "replicated-first", ("causal", "virtual", "replicated-last")),
        (
            {"rope": "none", "causal": "none", "window": 3},
            "replicated-last",
            ("window_unit", "virtual", "use 'token'"),
        ),
        (
            {"rope": "none", "causal": "token", "window": 3},
            "replicated-average",
            ("window_unit", "virtual", "replicated-last"),
        ),
    ],
)
def test_reasons_name_what_to_change(
    fields: dict[str, Any], initialiser: Any, words: tuple[str, str, str]
) -> None:
    difference = difference_from_mha(AttentionConfig(**fields), initialiser, num_pseudo_heads=2)
    assert difference is not None
    field, found, word = words
    assert (difference.field, difference.found) == (field, found)
    assert "\n" not in difference.reason
    assert word in difference.reason


# What the specification says of two starts found in ports


@pytest.mark.requirement("INIT-5")
def test_zero_mixing_never_learns_where_to_look() -> None:
    """Neither what forms queries nor what forms keys moves the output, whatever the values are."""
    config = LayerConfig(model_width=8, num_heads=2, num_pseudo_heads=3)
    parameters = sample(config, "zero-mixing")
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, 5, 8))
    assert np.all(iha_core.layer(parameters, x, config=config) == 0)
    parameters["alpha_v"] = rng.standard_normal((2, 2, 3))
    output = iha_core.layer(parameters, x, config=config)
    assert np.abs(output).max() > 0.1
    for name in ("alpha_q", "alpha_k", "q_proj.weight", "k_proj.weight"):
        moved = {**parameters, name: parameters[name] + rng.standard_normal(parameters[name].shape)}
        np.testing.assert_array_equal(iha_core.layer(moved, x, config=config), output, err_msg=name)


@pytest.mark.requirement("INIT-5")
@pytest.mark.parametrize("P", [2, 5])
def test_zero_pseudo_keys_dilute_the_output(P: int) -> None:
    """All logits are 0: of each token's P weights, which are equal, one is a value's."""
    sizes: dict[str, Any] = {"model_width": 8, "num_heads": 2, "attention": AttentionConfig(causal="none")}
    config = LayerConfig(num_pseudo_heads=P, **sizes)
    parameters = sample(config, "zero-pseudo-keys")
    parameters["q_proj.weight"] *= 0
    x = np.random.default_rng(6).standard_normal((2, 5, 8))
    plain = {name: t for name, t in parameters.items() if name not in MIXING}
    expected = iha_core.layer(plain, x, config=LayerConfig(kind="mha", **sizes))
    assert_same(iha_core.layer(parameters, x, config=config), expected / P, SAME_FUNCTION)


# The examples that layers are tested with


def swapped(x: Any, axis: int = 0) -> Any:
    """The first two of an axis changed for each other."""
    order = np.arange(x.shape[axis])
    order[:2] = 1, 0
    return np.take(x, order, axis)


def planted_faults(
    config: LayerConfig, parameters: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], LayerConfig]]:
    """By name: parameters and configuration of what a wrong layer computes."""

    def attention(**fields: Any) -> LayerConfig:
        return dataclasses.replace(config, attention=dataclasses.replace(config.attention, **fields))

    v = parameters["v_proj.weight"]
    heads = swapped(v.reshape(config.num_kv_heads, config.value_width, -1)).reshape(v.shape)
    changed: dict[str, dict[str, Any]] = {
        "rows of q_proj swapped": {"q_proj.weight": swapped(parameters["q_proj.weight"])},
        "heads of v_proj swapped": {"v_proj.weight": heads},
    }
    if config.bias:
        changed["no bias of k_proj"] = {"k_proj.bias": 0 * parameters["k_proj.bias"]}
    if config.kind == "iha":
        changed["alpha_q transposed"] = {"alpha_q": parameters["alpha_q"].swapaxes(0, 1)}
        changed["alpha_k of another pseudo-head"] = {"alpha_k": np.roll(parameters["alpha_k"], 1, axis=-1)}
        changed["collapse transposed"] = {"collapse": parameters["collapse"].swapaxes(0, 1)}
    if config.qk_norm:
        q, k = (parameters[f"{side}_norm.weight"] for side in "qk")
        changed["norms exchanged"] = {"q_norm.weight": k, "k_norm.weight": q}
    faults = {name: (parameters | change, config) for name, change in changed.items()}
    faults["no rotation"] = parameters, attention(rope="none")
    if config.attention.window is not None:
        for step in (-1, 1):
            faults[f"window {step:+}"] = parameters, attention(window=config.attention.window + step)
    return faults


@pytest.mark.requirement("LAY-7")
@pytest.mark.parametrize(("dtype", "part"), [("bfloat16", 0.3), ("float16", 0.05)])
@pytest.mark.parametrize("name", CONFIGS)
def test_sharp_examples_show_faults(name: str, dtype: str, part: float) -> None:
    """In 16 bits, too, where the limits of the other examples are larger than their outputs."""
    config = CONFIGS[name]
    parameters, x = sharp_example(config, dtype)
    exact, limit = derive_layer_limits(parameters, x, config=config, storage=dtype)
    assert np.sqrt(np.mean(limit**2)) < part * np.sqrt(np.mean(exact**2))
    assert_within_limits(cast(exact, dtype), parameters, x, config=config, storage=dtype)
    unseen = []
    for fault, (wrong, as_config) in planted_faults(config, parameters).items():
        found = cast(iha_core.layer(wrong, x, config=as_config), dtype)
        try:
            assert_within_limits(found, parameters, x, config=config, storage=dtype)
        except AssertionError:
            continue
        unseen.append(fault)
    assert not unseen


def test_layers_are_judged_by_their_dtype_and_shape() -> None:
    config = CONFIGS["paper"]
    parameters, x = sharp_example(config, "bfloat16")
    found = cast(iha_core.layer(parameters, x, config=config), "bfloat16")
    for wrong in (found.astype(np.float32), found.astype(np.float64), found[:1], found * np.nan):
        with pytest.raises(AssertionError):
            assert_within_limits(wrong, parameters, x, config=config, storage="bfloat16")
