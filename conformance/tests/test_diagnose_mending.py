"""Weights that make up for a dialect, held to the reference by a port that speaks it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from dialects import speaker

from iha_conformance.diagnose.diagnosis import Diagnosis, Nearest, Refusal
from iha_conformance.diagnose.dialect import AXES, NUMBERS, Dialect, Scale
from iha_conformance.diagnose.mending import APPLIED, Plan, plan
from iha_conformance.diagnose.wording import describe_value
from iha_conformance.protocol import TargetInfo
from iha_core import AttentionConfig, attention

INFO = TargetInfo(name="port:f", framework="function", version="0", device="cpu", precision="undeclared")
CUBE = {"B": 2, "N": 3, "M": 5, "H": 3, "G": 3, "P": 3, "d": 6, "e": 2}
ODD = {"B": 2, "N": 4, "M": 6, "H": 3, "G": 2, "P": 4, "d": 8, "e": 5}
SIZES = pytest.mark.parametrize("sizes", [CUBE, ODD], ids=["cube", "odd"])
CLOSE = 1e-10


def make_inputs(sizes: dict[str, int], *, per_head: bool = False, seed: int = 1) -> dict[str, Any]:
    draw = np.random.default_rng(seed).standard_normal
    B, N, M, H, G, P, d, e = (sizes[name] for name in ("B", "N", "M", "H", "G", "P", "d", "e"))
    return {
        "q": draw((B, N, H, d)),
        "k": draw((B, M, G, d)),
        "v": draw((B, M, G, e)),
        "alpha_q": draw((H, H, P)),
        "alpha_k": draw((G, H, P)),
        "alpha_v": draw((G, H, P)),
        "collapse": draw((H, P) if per_head else (H, H, P)),
    }


def speak(dialect: Dialect, inputs: dict[str, Any], *, window: int | None = None) -> np.ndarray:
    """What a port in a dialect gives, (B, N, H, e); a ValueError where it cannot read a tensor."""
    axes = dialect.axes() | {"scale": dialect.scale.at(inputs["q"].shape[-1])}
    return speaker(**axes)(inputs, AttentionConfig(window=window).to_dict())


def diagnosed(found: Dialect, asked: Dialect | None = None, **fields: Any) -> Diagnosis:
    """A diagnosis in which every axis is certain."""
    return Diagnosis(
        info=INFO,
        dtype="float64",
        config=dataclasses.asdict(AttentionConfig()),
        asked=asked or Dialect(),
        P=3,
        per_head=False,
        found=found,
        **{"matched": True, "certain": found.axes(), "possible": {}} | fields,
    )


def plan_for(asked: Dialect | None = None, **values: Any) -> Plan:
    return plan(diagnosed((asked or Dialect()).having(**values), asked))


def canonical(inputs: dict[str, Any], **config: Any) -> np.ndarray:
    return attention(**inputs, config=AttentionConfig(**config))


def run_lines(lines: tuple[str, ...], sizes: dict[str, int], **variables: Any) -> dict[str, Any]:
    names = {**variables, "np": np, **{name: sizes[name] for name in "HGPd"}}
    exec("\n".join(lines), names)
    return names


def swap(*order: str) -> str:
    return ",".join(order)


# What makes up for a dialect

MENDABLE: list[dict[str, Any]] = [
    *({f"alpha_{side}_axes": order} for side in "qkv" for order in AXES[f"alpha_{side}_axes"].values[1:]),
    *({"collapse_axes": order} for order in AXES["collapse_axes"].values[1:]),
    {"order": "reshaped"},
    {"rope_sign": -1},
    {"rope_pairing": "adjacent"},
    {"scale": Scale(1.0, 0.0)},
    {"scale": Scale(1.3, -0.5)},
    {"scale": Scale(1.0, -1.0)},
    {"key_mask": "drop"},
    {"alignment": "first"},
    {"rope_pairing": "adjacent", "rope_sign": -1},
    {"order": "reshaped", "rope_pairing": "adjacent", "rope_sign": -1, "scale": Scale(0.35, 0.0)},
    {
        "order": "reshaped",
        "alpha_q_axes": swap("pseudo", "target", "source"),
        "alpha_k_axes": swap("target", "pseudo", "source"),
        "alpha_v_axes": swap("source", "pseudo", "target"),
        "collapse_axes": swap("pseudo", "out", "source"),
    },
    {"scale": Scale(2.0, -1.0), "alpha_q_axes": swap("target", "pseudo", "source")},
    {"alignment": "first", "key_mask": "drop", "rope_sign": -1, "order": "reshaped"},
]


@SIZES
@pytest.mark.parametrize("values", MENDABLE, ids=lambda values: "+".join(values))
def test_a_port_that_is_given_other_weights_is_canonical(values, sizes):
    inputs = make_inputs(sizes)
    if "key_mask" in values:
        inputs["key_mask"] = np.random.default_rng(2).random((sizes["B"], sizes["M"])) < 0.7
    kept = {name: np.copy(value) for name, value in inputs.items()}
    mending = plan_for(**values)
    found, wanted = Dialect(**values), canonical(inputs)
    assert {step.axis for step in mending.steps} == set(values)
    assert mending.complete == ("alignment" not in values)  # no port was asked for query_offset
    assert mending.without == ()
    given = mending.apply(inputs)
    assert np.max(np.abs(speak(found, given) - wanted)) < CLOSE
    assert all(np.array_equal(inputs[name], kept[name]) for name in kept)
    try:
        unmended = speak(found, inputs)
    except ValueError:  # it cannot even read them
        assert sizes is not CUBE
    else:
        assert np.max(np.abs(unmended - wanted)) > 1e-3


@SIZES
@pytest.mark.parametrize("values", MENDABLE, ids=lambda values: "+".join(values))
def test_every_step_is_needed_and_their_order_is_right(values, sizes):
    """Left out or exchanged where it matters, the port is not canonical."""
    inputs = make_inputs(sizes)
    inputs["key_mask"] = np.random.default_rng(2).random((sizes["B"], sizes["M"])) < 0.7
    mending = plan_for(**values)
    for step in mending.steps:
        fewer = dataclasses.replace(mending, steps=tuple(s for s in mending.steps if s is not step))
        try:
            found = speak(Dialect(**values), fewer.apply(inputs))
        except ValueError:
            continue
        assert np.max(np.abs(found - canonical(inputs))) > 1e-3, step.axis


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("sign", [1, -1])
@SIZES
def test_lanes_are_those_of_the_pairing_that_the_port_has(pairing, sign, sizes):
    """Whichever is asked for."""
    inputs = make_inputs(sizes)
    for asked in ("half", "adjacent"):
        mending = plan_for(Dialect(rope_pairing=asked), rope_pairing=pairing, rope_sign=sign)
        found = speak(Dialect(rope_pairing=pairing, rope_sign=sign), mending.apply(inputs))
        assert np.max(np.abs(found - canonical(inputs, rope_pairing=asked))) < CLOSE


@SIZES
@pytest.mark.parametrize("scale", [None, 0.7])
def test_scale_that_is_asked_for(scale, sizes):
    asked = Dialect.of(AttentionConfig(scale=scale))
    mending = plan_for(asked, scale=Scale(3.0, -0.25))
    inputs = make_inputs(sizes)
    found = speak(Dialect(scale=Scale(3.0, -0.25)), mending.apply(inputs))
    assert np.max(np.abs(found - canonical(inputs, scale=scale))) < CLOSE


@SIZES
@pytest.mark.parametrize("axes", [swap("pseudo", "out", "source"), swap("out", "pseudo", "source")])
def test_per_head_collapse_is_transposed_where_pseudo_is_read_first(axes, sizes):
    asked = Dialect(collapse_kind="per_head")
    mending = plan_for(asked, collapse_axes=axes)
    inputs = make_inputs(sizes, per_head=True)
    given = mending.apply(inputs)
    assert given["collapse"].shape == (sizes["P"], sizes["H"])
    found = speak(asked.having(collapse_axes=axes), given)
    assert np.max(np.abs(found - canonical(inputs))) < CLOSE
    none = plan_for(asked, collapse_axes=swap("source", "out", "pseudo"))
    assert none.steps == ()


@SIZES
@pytest.mark.parametrize("values", MENDABLE, ids=lambda values: "+".join(values))
def test_printed_lines_do_what_apply_does(values, sizes):
    inputs = make_inputs(sizes)
    inputs["key_mask"] = np.random.default_rng(2).random((sizes["B"], sizes["M"])) < 0.7
    mending = plan_for(**values)
    lines = tuple(line for step in mending.steps for line in step.numpy)
    names = run_lines(lines, sizes, **inputs)
    for name, value in mending.apply(inputs).items():
        np.testing.assert_allclose(names[name], value, rtol=1e-15, err_msg=name)


@SIZES
@pytest.mark.parametrize("values", MENDABLE, ids=lambda values: "+".join(values))
def test_lines_for_a_checkpoint_do_the_same(values, sizes):
    """Projected by the changed rows, hidden states give the changed arguments."""
    inputs = make_inputs(sizes)
    draw = np.random.default_rng(3).standard_normal
    D, d = 7, sizes["d"]
    weights = {f"{x}_proj.weight": draw((sizes[heads] * d, D)) for x, heads in (("q", "H"), ("k", "G"))}
    states = {"q": draw((2, sizes["N"], D)), "k": draw((2, sizes["M"], D))}

    def project(weights):
        return {
            x: (states[x] @ weights[f"{x}_proj.weight"].T).reshape(*states[x].shape[:2], -1, d) for x in "qk"
        }

    inputs |= project(weights)
    weights |= {name: inputs[name] for name in ("alpha_q", "alpha_k", "alpha_v", "collapse")}
    mending = plan_for(**values)
    lines = tuple(line for step in mending.steps for line in step.checkpoint)
    changed = run_lines(lines, sizes, weights=dict(weights))["weights"]
    assert set(changed) == set(weights)
    given = mending.apply(inputs)
    for name, value in project(changed).items():
        np.testing.assert_allclose(value, given[name], rtol=1e-12, atol=1e-12)
    for name in ("alpha_q", "alpha_k", "alpha_v", "collapse"):
        np.testing.assert_allclose(changed[name], given[name], rtol=1e-15)
    assert all(step.checkpoint for step in mending.steps if step.axis not in ("key_mask", "alignment"))


@pytest.mark.parametrize("values", MENDABLE, ids=lambda values: "+".join(values))
def test_dtypes_stay(values):
    inputs = {name: value.astype(np.float32) for name, value in make_inputs(CUBE).items()}
    for name, value in plan_for(**values).apply(inputs).items():
        assert name == "query_offset" or value.dtype == np.float32, name


def test_scale_under_a_norm_before_mixing_is_made_up_for_in_part():
    """Each step brings the port to the dialect that deviates on the other axes alone."""
    sizes, inputs = CUBE, make_inputs(CUBE)
    values = {"qk_norm": "before_mix", "qk_multiplier": 1.2, "scale": Scale(0.5, 0.0), "causal": "token"}
    mending = plan_for(**values)
    assert [step.axis for step in mending.steps] == ["scale", "qk_multiplier"]
    assert set(mending.without) == {"qk_norm", "causal"}
    assert not mending.complete
    left = Dialect(qk_norm="before_mix", causal="token")
    found = speak(Dialect(**values), mending.apply(inputs))
    assert np.max(np.abs(found - speak(left, inputs))) < CLOSE
    lines = tuple(line for step in mending.steps for line in step.numpy)
    names = run_lines(lines, sizes, **inputs)
    np.testing.assert_allclose(names["alpha_k"], inputs["alpha_k"] / 1.2, rtol=1e-14)


@SIZES
@pytest.mark.parametrize("order", ["pseudo_major", "extra_heads"])
def test_steps_hold_beside_axes_that_have_none(order, sizes):
    inputs = make_inputs(sizes)
    values = {
        "order": order,
        "causal": "token",
        "rope_sign": -1,
        "alpha_k_axes": swap("pseudo", "source", "target"),
    }
    mending = plan_for(**values)
    assert set(mending.without) == {"order", "causal"}
    found = speak(Dialect(**values), mending.apply(inputs))
    assert np.max(np.abs(found - speak(Dialect(order=order, causal="token"), inputs))) < CLOSE


# What has none

HOPELESS: list[dict[str, Any]] = [
    {"order": "pseudo_major"},
    {"order": "extra_heads"},
    {"order": "reshaped", "collapse_kind": "mean"},
    {"order": "reshaped", "collapse_kind": "per_head"},
    {"order": "reshaped", "values": "unmixed"},
    *({"collapse_kind": kind} for kind in ("per_head", "mean", "first", "last", "sum")),
    {"causal": "token"},
    {"causal": "none"},
    {"window_unit": "token"},
    {"window_bound": "inclusive"},
    {"rope": "token"},
    {"rope": "none"},
    {"rope_theta": 10000.0},
    {"normalisation": "none"},
    {"rope_when": "before"},
    {"qk_norm": "before_mix"},
    {"qk_norm": "after_mix", "qk_multiplier": 1.2},
    {"qk_norm": "after_mix", "scale": Scale(1.0, 0.0)},
    {"values": "unmixed"},
    {"key_mask": "ignored"},
]


@pytest.mark.parametrize("values", HOPELESS, ids=lambda values: "+".join(map(str, values.values())))
def test_what_has_none_says_so(values):
    mending = plan_for(**values)
    assert set(mending.without) == set(values)
    assert mending.steps == ()
    assert not mending.complete
    inputs = make_inputs(CUBE)
    assert mending.apply(inputs) == inputs


def test_reshaping_a_collapse_per_head_has_no_remedy():
    """The tensors of the remedy leave heads mixed up where the collapse cannot sort them."""
    asked = Dialect(collapse_kind="per_head")
    assert plan_for(asked, order="reshaped").without == ("order",)
    inputs = make_inputs(ODD, per_head=True)
    refill = {
        name: inputs[name].transpose(0, 2, 1).reshape(inputs[name].shape)
        for name in ("alpha_q", "alpha_k", "alpha_v")
    }
    for r in (inputs["collapse"], inputs["collapse"].T.reshape(inputs["collapse"].shape)):
        found = speak(asked.having(order="reshaped"), {**inputs, **refill, "collapse": r})
        assert np.max(np.abs(found - canonical(inputs))) > 1e-3


@pytest.mark.parametrize(
    "fields",
    [{"ignores": ("query_offset",)}, {"refuses": (Refusal(what="query_offset", reason="no", said=True),)}],
)
def test_alignment_needs_a_port_that_takes_query_offset(fields):
    found = Dialect(alignment="first")
    assert plan(diagnosed(found, **fields)).without == ("alignment",)
    assert plan(diagnosed(found)).without == ()
    inputs = make_inputs(CUBE) | {"query_offset": 1}
    assert plan(diagnosed(found)).apply(inputs)["query_offset"] == 1


def test_an_absent_key_mask_stays_absent():
    assert "key_mask" not in plan_for(key_mask="drop").apply(make_inputs(CUBE))


def test_ambiguous_axes_do_not_count():
    found = Dialect(rope_sign=-1, causal="token")
    certain = {name: value for name, value in found.axes().items() if name != "causal"}
    mending = plan(diagnosed(found, certain=certain))
    assert [step.axis for step in mending.steps] == ["rope_sign"]
    assert mending.without == ()


def test_where_nothing_matches_certain_axes_are_mended_and_nothing_is_complete():
    near = Nearest(dialect=Dialect(rope_pairing="adjacent"), error=0.1, agrees=3, answered=9)
    certain = {"rope_pairing": "adjacent", "rope_sign": -1, "scale": 0.5}
    diagnosis = dataclasses.replace(
        diagnosed(Dialect(), certain=certain, matched=False), found=None, nearest=near
    )
    mending = plan(diagnosis)
    assert [step.axis for step in mending.steps] == ["scale", "rope_pairing", "rope_sign"]
    assert not mending.complete
    assert mending.steps[0].numpy == ("alpha_q = alpha_q * 2.0 * d**-0.5",)
    assert mending.steps[2].numpy[1] == "sign[1::2] = -1"
    without = plan(dataclasses.replace(diagnosis, nearest=None))
    assert [step.axis for step in without.steps] == ["scale", "rope_pairing", "rope_sign"]


def test_a_canonical_port_needs_nothing():
    mending = plan_for()
    assert (mending.mendings, mending.steps, mending.without) == ((), (), ())
    assert mending.complete


# Words


def other_values(axis: str) -> list[Any]:
    if axis in NUMBERS:
        return [Scale(1.0, 0.0), Scale(2.0, -0.5)] if axis == "scale" else [1.25]
    return [value for value in AXES[axis].values if value != getattr(Dialect(), axis)]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_every_value_of_every_axis_has_words(axis, per_head):
    asked = Dialect(collapse_kind="per_head" if per_head else "global")
    for value in other_values(axis):
        if value == asked.collapse_kind:
            continue
        mendings = plan_for(asked, **{axis: value}).mendings
        (mending,) = mendings
        assert mending.axis == axis
        read_apart = axis != "collapse_axes" or not per_head or value.endswith("pseudo,source")
        assert (mending.does != mending.required) or not read_apart
        for text in (mending.does, mending.required, mending.weights, mending.mend):
            assert text.isascii()
            assert "\n" not in text
            assert len(text) > 10
        assert mending.mend.endswith(".")


def test_axes_of_choices_have_all_their_words():
    for name, axis in AXES.items():
        texts = [describe_value(name, Dialect(**{name: value}), per_head=False) for value in axis.values]
        assert len(set(texts)) == len(axis.values), name


def test_steps_are_of_known_axes():
    assert set(APPLIED) < set(AXES)
    assert {axis for values in MENDABLE for axis in values} | {"qk_multiplier"} == set(APPLIED)


# What the words say of weights that have no step


@SIZES
@pytest.mark.parametrize("kind", ["mean", "first", "last", "sum"])
def test_a_port_without_collapse_is_canonical_with_that_r(kind, sizes):
    inputs, H, P = make_inputs(sizes), sizes["H"], sizes["P"]
    r = {"mean": np.full(P, 1 / P), "first": np.eye(P)[0], "last": np.eye(P)[-1], "sum": np.ones(P)}[kind]
    found = speak(Dialect(collapse_kind=kind), inputs)
    assert np.max(np.abs(found - canonical(inputs | {"collapse": np.tile(r, (H, 1))}))) < CLOSE


def test_collapse_per_head_is_the_diagonal():
    inputs = make_inputs(ODD)
    R = inputs["collapse"] * np.eye(ODD["H"])[:, :, None]
    found = speak(Dialect(collapse_kind="per_head"), inputs)
    assert np.max(np.abs(found - canonical(inputs | {"collapse": R}))) < CLOSE


def test_unmixed_values_are_an_alpha_of_ones():
    inputs = make_inputs(CUBE)
    one = np.repeat(np.eye(CUBE["H"])[:, :, None], CUBE["P"], axis=2)
    found = speak(Dialect(values="unmixed"), inputs)
    assert np.max(np.abs(found - canonical(inputs | {"alpha_v": one}))) < CLOSE


@SIZES
def test_rotating_before_mixing_is_token_rope_at_multiples_of_P(sizes):
    inputs, (B, N, M, P) = make_inputs(sizes), (sizes[name] for name in ("B", "N", "M", "P"))
    keys = np.tile(np.arange(M) * P, (B, 1))
    positions = {"positions": keys[:, M - N :], "kv_positions": keys}
    found = speak(Dialect(rope_when="before"), inputs)
    assert np.max(np.abs(found - canonical(inputs | positions, rope="token"))) < CLOSE


@SIZES
@pytest.mark.parametrize(
    ("values", "config"),
    [
        ({"causal": "token"}, {"causal": "token"}),
        ({"rope": "token"}, {"rope": "token"}),
        ({"rope_theta": 1e4}, {"rope_theta": 1e4}),
        ({"rope_pairing": "adjacent"}, {"rope_pairing": "adjacent"}),
        ({"scale": Scale(0.5, 0.0)}, {"scale": 0.5}),
        ({"normalisation": "none"}, {"normalisation": "none"}),
        ({"window_unit": "token"}, {"window": 2, "window_unit": "token"}),
        ({"window_unit": "token", "window_bound": "inclusive"}, {"window": 3, "window_unit": "token"}),
    ],
)
def test_fields_of_the_configuration_are_canonical_under_another_one(values, config, sizes):
    inputs = make_inputs(sizes)
    window = 2 if "window" in config else None
    found = speak(Dialect(**values), inputs, window=window)
    assert np.max(np.abs(found - canonical(inputs, **config))) < CLOSE
    texts = [mending.weights for mending in plan_for(**values).mendings]
    assert all(text.startswith("canonical under another configuration") for text in texts), texts


def test_the_double_speaks_the_canonical_dialect():
    for sizes, config in itertools.product((CUBE, ODD), ({}, {"window": 2}, {"causal": "none", "window": 1})):
        dialect = Dialect.of(AttentionConfig(**config))
        found = speak(dialect, make_inputs(sizes), window=config.get("window"))
        assert np.max(np.abs(found - canonical(make_inputs(sizes), **config))) < CLOSE
