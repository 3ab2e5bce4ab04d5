"""`iha diagnose` names what a port speaks, axis by axis, and refuses what is no dialect."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from dialects import (
    CANONICAL,
    DIALECTS,
    FAULTS,
    FIELDS,
    ONLY_WITHOUT_CAUSALITY,
    PER_HEAD,
    VALUES,
    Axes,
    InProcess,
    answer,
    calls,
    jointly_open,
    same,
    silent,
    speaker,
)

from iha_conformance.diagnose import search
from iha_conformance.errors import CommandError
from iha_conformance.targets import backends
from iha_core import AttentionConfig, attention, attention_stages

HEAD_WIDTH = 16
"""Width at which a scale of 1/sqrt(d) is reported."""

NUMBERS = ("rope_theta", "scale", "qk_multiplier")


def diagnose(port: Any, **options: Any) -> Any:
    return search.diagnose(InProcess(port), **options)


def reported(axes: Axes) -> dict[str, Any]:
    """The value to be named on each axis: what can be seen of scale and multiplier is less than both."""
    value = CANONICAL | axes
    seen, multiplier = value["scale"], value["qk_multiplier"]
    if seen is None:
        seen = HEAD_WIDTH**-0.5
    if value["qk_norm"] == "none" or value["scale"] is not None:
        seen, multiplier = seen * multiplier**2, 1.0
    return value | {"scale": seen, "qk_multiplier": multiplier}


def named(found: Any, axes: Axes) -> dict[str, Any]:
    return {axis: found.certain.get(axis) for axis in axes}


def ignored(found: Any) -> set[str]:
    return set(found.ignores)


def assert_names(
    found: Any,
    axes: Axes,
    unknown: frozenset[str] | None = None,
    either: frozenset[str] = frozenset(),
    rel: float = 1e-4,
) -> None:
    """The value of every axis, or none for those that are unknown; the values left there include it."""
    if unknown is None:
        unknown = silent(axes) - either
        # Several axes may be open together, though no single one is.
        suspects = {*found.possible} - unknown - either
        unknown |= {axis for axis in suspects if jointly_open(axes, axis, found.possible)}
    want = reported(axes)
    for axis in either - {*found.certain}:
        unknown |= {axis}
    expected = {
        axis: None if axis in unknown else pytest.approx(value, rel=rel) if axis in NUMBERS else value
        for axis, value in want.items()
    }
    assert found.matched, (found.first_bad_stage, found.nearest)
    assert found.found is not None
    assert named(found, want) == expected
    assert set(found.ambiguous) == unknown
    for axis in unknown & {*found.possible}:
        assert axis in NUMBERS or not found.possible[axis] or want[axis] in found.possible[axis]
    canonical = reported({})
    assert set(found.deviates) == {axis for axis in want if want[axis] != canonical[axis]} - unknown
    assert found.canonical is not bool(found.deviates)
    assert found.first_bad_stage is None


def honest(inputs: dict[str, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    return attention(**inputs, config=AttentionConfig.from_dict(config))


def honest_stages(inputs: dict[str, Any], config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return attention_stages(**inputs, config=AttentionConfig.from_dict(config))


# The doubles themselves


CONFIGS = [
    AttentionConfig(
        causal=causal,
        window_unit=unit,
        rope=rope,
        rope_pairing=pairing,
        normalisation=normalisation,
        rope_theta=100.0,
        scale=scale,
    )
    for causal, unit, rope, pairing, normalisation, scale in itertools.product(
        ("virtual", "token", "none"),
        ("virtual", "token"),
        ("virtual", "token", "none"),
        ("half", "adjacent"),
        ("softmax", "none"),
        (None, 0.7),
    )
]


@pytest.mark.parametrize("config", CONFIGS[::5], ids=str)
def test_the_speaker_is_canonical_where_its_axes_are(config):
    fields = config.to_dict()
    by_axes = speaker(stages=True, **{field: fields[field] for field in FIELDS})
    by_config = speaker(stages=True, heeds=FIELDS)
    for inputs, window in calls():
        asked = fields | {"window": window}
        for query_offset in (None, 1):
            expected = honest_stages(inputs | {"query_offset": query_offset}, asked)
            for port in (by_axes, by_config):
                given = port(inputs | {"query_offset": query_offset}, asked)
                assert set(given) == set(expected)
                for stage in expected:
                    assert np.allclose(given[stage], expected[stage], rtol=1e-9, atol=1e-9), stage


@pytest.mark.parametrize(
    "axis", ["alpha_q_axes", "alpha_k_axes", "alpha_v_axes", "collapse_axes"], ids=lambda axis: axis[:-5]
)
def test_a_tensor_stored_in_the_order_in_which_it_is_read_changes_nothing(axis):
    tensor = axis.removesuffix("_axes")
    for order in VALUES[axis]:
        port = speaker(**{axis: order})
        for inputs, window in calls():
            if inputs[tensor].ndim == 2:
                continue
            canonical = VALUES[axis][0].split(",")
            stored = inputs[tensor].transpose([canonical.index(name) for name in order.split(",")])
            expected = answer(speaker(), inputs, window)
            assert same(answer(port, inputs | {tensor: stored}, window), expected)


@pytest.mark.parametrize("letter", [letter for letter in DIALECTS if letter != "D-own"])
def test_each_double_is_the_speaker_of_its_axes(letter):
    double = DIALECTS[letter]
    port = speaker(**double.axes, **double.traits)
    answered = 0
    for call in calls(double.axes):
        given = answer(double.port, *call)
        assert same(given, answer(port, *call))
        answered += given is not None
    assert answered >= 9
    assert silent(double.axes, **double.traits) - double.either == double.silent


def test_every_axis_matters_to_the_canonical_port():
    assert silent({}) == frozenset()


def test_each_fault_is_first_seen_where_it_is_said_to_be():
    for fault, stage in FAULTS.items():
        port, right = (speaker(causal="none", stages=True, fault=name) for name in (fault, None))
        differing = []
        for inputs, window in calls():
            try:
                given = port(inputs, {"window": window})
            except ValueError:
                continue
            expected = right(inputs, {"window": window})
            differing += [name for name in expected if not same(given[name], expected[name])][:1]
        assert set(differing) == {stage}, fault


# Dialects


@pytest.mark.parametrize("letter", DIALECTS)
def test_doubles_of_public_ports_are_named(letter):
    double = DIALECTS[letter]
    assert_names(diagnose(double.port), double.axes, double.silent, double.either)


SINGLE = [{axis: value} for axis, values in VALUES.items() for value in values[1:] if axis != "qk_multiplier"]
SINGLE += [{"qk_norm": norm, "qk_multiplier": 1.2} for norm in VALUES["qk_norm"]]
SINGLE += [{"qk_norm": "after_mix", "qk_multiplier": 1.2, "scale": 0.5}]


@pytest.mark.parametrize("axes", SINGLE, ids=lambda axes: ",".join(map(str, axes.values())))
def test_one_deviation_is_named(axes):
    assert_names(diagnose(speaker(**axes)), axes)


def combination(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {axis: draw.choice(values) for axis, values in VALUES.items()}


@pytest.mark.parametrize("seed", range(40))
def test_many_deviations_at_once_are_named(seed):
    axes = combination(seed)
    assert_names(diagnose(speaker(**axes)), axes)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"order": "pseudo_major"},
        {"order": "reshaped", "rope_sign": -1},
        {"order": "extra_heads", "alpha_k_axes": "target,source,pseudo"},
        {"causal": "none", "qk_norm": "after_mix", "normalisation": "none"},
        {"rope_when": "before", "values": "unmixed", "collapse_kind": "mean"},
    ],
    ids=str,
)
def test_stages_of_a_dialect_do_not_mislead(axes):
    assert_names(diagnose(speaker(stages=True, **axes)), axes)


# The canonical one


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_canonical_dialect_is_named_in_every_dtype(dtype):
    rel = 1e-4 if dtype in ("float64", "float32") else 0.02
    found = diagnose(speaker(), dtype=dtype)
    assert_names(found, {}, rel=rel)
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_one_deviation_is_named_in_every_dtype(dtype):
    axes = {"causal": "token", "window_bound": "inclusive", "rope_sign": -1}
    rel = 1e-4 if dtype in ("float64", "float32") else 0.02
    assert_names(diagnose(speaker(**axes), dtype=dtype), axes, rel=rel)


@pytest.mark.parametrize(
    "port", [honest, honest_stages, lambda *call: honest_stages(*call)["output"].astype(np.float64)]
)
def test_the_reference_is_canonical_and_follows_its_configuration(port):
    found = diagnose(port)
    assert_names(found, {})
    assert set(found.follows) >= {*FIELDS}
    assert not found.ignores
    assert not found.refuses
    assert not found.unexplained


def test_the_array_api_backend_is_canonical():
    pytest.importorskip("array_api_compat")
    found = diagnose(backends.load("array-api:numpy"))
    assert_names(found, {})
    assert found.info.name == "array-api:numpy"


def test_a_port_that_ignores_the_configuration_may_be_canonical():
    found = diagnose(speaker())
    assert_names(found, {})
    assert not {*found.follows} & {*FIELDS}
    assert {*FIELDS} <= ignored(found)


@pytest.mark.parametrize("fields", [("causal",), ("rope", "rope_theta"), ("scale", "normalisation")])
def test_the_fields_that_a_port_heeds_are_told_from_those_it_ignores(fields):
    found = diagnose(speaker(heeds=fields))
    assert_names(found, {})
    assert {*found.follows} & {*FIELDS} == {*fields}
    assert ignored(found) & {*FIELDS} == {*FIELDS} - {*fields}


# Ports that take less


STRICT = [
    {"causal": "none", "rope": "none"},
    {"causal": "token", "rope": "token", "window_unit": "token"},
    {"causal": "none", "rope": "token", "rope_pairing": "adjacent", "normalisation": "none"},
    {"rope_pairing": "adjacent", "window_unit": "token"},
]


@pytest.mark.parametrize("fields", STRICT, ids=str)
@pytest.mark.parametrize("deviation", [{}, {"order": "reshaped", "alpha_v_axes": "target,source,pseudo"}])
def test_a_port_with_one_configuration_is_asked_with_that(fields, deviation):
    """What is canonical goes by that configuration."""
    found = diagnose(speaker(strict=True, **fields, **deviation))
    assert found.matched
    unseen = silent(fields | deviation)
    assert named(found, fields | deviation) == {
        axis: None if axis in unseen else value for axis, value in (fields | deviation).items()
    }
    assert {*found.ambiguous} == unseen
    assert {field: found.config[field] for field in fields} == fields
    assert {*found.deviates} == {*deviation} - unseen
    assert found.canonical is not bool(deviation)


REFUSED = ("G != H", "P > 1", "3-D collapse", "2-D collapse", "key_mask", "window", "N != M")


@pytest.mark.parametrize("refused", [(what,) for what in REFUSED] + [REFUSED[:1] + REFUSED[4:]], ids=str)
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"rope_sign": -1, "alpha_q_axes": "target,source,pseudo", "window_bound": "inclusive"},
        {"collapse_kind": "per_head", "causal": "token", "rope": "none", "scale": 0.5},
    ],
    ids=str,
)
def test_what_a_port_refuses_is_told_and_the_rest_named(refused, axes):
    found = diagnose(speaker(refuses=refused, **axes))
    either = PER_HEAD if "3-D collapse" in refused else frozenset()
    unknown = silent(axes, refuses=refused) - either
    if "3-D collapse" in refused:
        # That it takes (H, P) alone may be told as what it is: per head.
        axes = axes | {"collapse_kind": "per_head"}
    assert_names(found, axes, unknown, either)
    reasons = " ".join(refusal.reason for refusal in found.refuses)
    for what in refused:
        assert f"does not take: {what}" in reasons


@pytest.mark.parametrize("argument", ["window", "key_mask"])
def test_an_argument_without_effect_is_ignored(argument):
    axes = {"causal": "token"}
    found = diagnose(speaker(deaf=(argument,), **axes))
    assert_names(found, axes, silent(axes, deaf=(argument,)))
    assert argument in ignored(found)


def test_a_scale_that_is_right_at_one_head_width_alone_deviates():
    found = diagnose(speaker(scale=HEAD_WIDTH**-0.5))
    assert found.certain["scale"] == HEAD_WIDTH**-0.5
    assert (found.deviates, found.canonical) == (("scale",), False)


def test_a_scale_is_taken_to_go_with_the_head_width_where_only_one_is_taken():
    def port(inputs, config):
        if inputs["q"].shape[-1] != HEAD_WIDTH:
            raise NotImplementedError("one head width")
        return honest(inputs, config)

    found = diagnose(port)
    assert found.canonical
    assert [(refusal.what, refusal.said) for refusal in found.refuses] == [("d = 8", True)]


def test_a_port_that_heeds_all_but_one_field_is_asked_with_what_it_takes():
    def port(inputs, config):
        if config["causal"] != "token":
            raise NotImplementedError("token-causal only")
        return honest(inputs, config)

    found = diagnose(port)
    assert (found.canonical, found.unexplained) == (True, ())
    assert found.config["causal"] == "token"
    assert "rope" in found.follows


def test_failing_is_told_from_refusing():
    def port(inputs, config):
        if inputs["k"].shape[2] != inputs["q"].shape[2]:
            raise ValueError("operands could not be broadcast together")
        return honest(inputs, config)

    (refusal,) = diagnose(port).refuses
    assert (refusal.what, refusal.said) == ("G < H", False)


def test_what_is_done_whatever_is_asked_is_ignored():
    found = diagnose(speaker(rope_pairing="adjacent", causal="token", heeds=("rope_theta",)))
    assert {"rope_pairing", "causal", "rope"} <= ignored(found)
    assert "rope_theta" in found.follows


# No dialect


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "axes",
    [{}, {"rope_sign": -1, "qk_norm": "after_mix", "alpha_k_axes": "target,source,pseudo"}],
    ids=["canonical", "deviating"],
)
@pytest.mark.parametrize("stages", [True, False], ids=["stages", "output"])
def test_a_fault_is_no_dialect(fault, axes, stages):
    if axes.get("qk_norm") == "after_mix" and fault in ("two percent mixed_q", "two percent mixed_k"):
        pytest.skip("a norm after mixing undoes it")
    if fault in ONLY_WITHOUT_CAUSALITY:
        axes = axes | {"causal": "none"}
    found = diagnose(speaker(fault=fault, stages=stages, **axes))
    assert not found.matched
    assert not found.canonical
    assert found.found is None
    assert found.first_bad_stage == (FAULTS[fault] if stages else None)
    assert found.nearest is not None
    if stages:
        assert found.example.stage == found.first_bad_stage
    # What is certain nevertheless has to be so.
    truth = reported(axes)
    assert {*found.certain.items()} <= {
        (axis, value)
        for axis, value in found.certain.items()
        if value == (pytest.approx(truth[axis], rel=1e-4) if axis in NUMBERS else truth[axis])
    }


def test_nothing_is_claimed_from_calls_that_show_little():
    """With equal sources softmaxed mixing looks like none at all."""
    found = diagnose(speaker(fault="softmaxed alpha_v"))
    assert (found.matched, found.deviates, found.excluded) == (False, (), ())


def test_a_key_mask_without_effect_is_not_canonical():
    assert not diagnose(speaker(deaf=("key_mask",))).canonical
    assert diagnose(speaker(deaf=("window",))).canonical


def test_numbers_that_are_not_real_are_no_output():
    with pytest.raises(CommandError, match="expected real numbers, got complex128"):
        diagnose(lambda inputs, config: honest(inputs, config) + 1j)


def test_a_target_that_is_gone_is_not_asked_for_ever():
    calls = []

    def port(inputs, config):
        calls.append(inputs)
        raise SystemExit(3)

    with pytest.raises(CommandError, match="but all 4 failed"):
        diagnose(port)
    assert len(calls) == 4
