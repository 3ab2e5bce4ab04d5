"""The model of dialects that `iha diagnose` compares with, against ports that share no code with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from dialects import VALUES, calls, speaker

from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.diagnose.allowance import limit
from iha_conformance.diagnose.asking import Asker, Probe
from iha_conformance.diagnose.dialect import AXES, Dialect, Scale
from iha_conformance.diagnose.model import UnreadableError, carried_out, read, speak
from iha_conformance.diagnose.probes import Amplitude, Setting, confirming_probes, even_probes, far_probe
from iha_conformance.diagnose.smallest import Draft, simpler
from iha_core import AttentionConfig
from iha_core.bounds import arithmetic, derive_limits

SINGLE = [{axis: value} for axis, values in VALUES.items() for value in values[1:]]


def dialect(axes):
    """The dialect of the model with these values; without a norm a multiplier counts as scale."""
    values = dict(axes)
    scale, multiplier = values.pop("scale", None), values.get("qk_multiplier", 1.0)
    found = Dialect(**values, scale=Scale() if scale is None else Scale(scale, 0.0))
    if found.qk_norm == "none":
        found = found.having(scale=Scale(found.scale.factor * multiplier**2, found.scale.power))
    return found


def combination(seed):
    draw = random.Random(seed)
    return {axis: draw.choice(values) for axis, values in VALUES.items()}


@pytest.mark.parametrize("axes", [*SINGLE, *(combination(seed) for seed in range(1000, 1030))], ids=str)
def test_every_stage_is_what_a_port_of_that_dialect_gives(axes):
    port, compared = speaker(stages=True, **axes), 0
    normed = dialect(axes).qk_norm != "none"
    for inputs, window in calls(axes):
        config = AttentionConfig(window=window).to_dict()
        if inputs["q"].shape[1] > inputs["k"].shape[1]:
            continue  # rows that see nothing, which no dialect is about
        try:
            said = speak(dialect(axes), inputs, config)
        except UnreadableError:
            continue
        given = port(inputs, config)
        for stage in ("mixed_v", "virtual_out", "output"):
            # Ports add a little to the mean square.
            tolerance = 1e-4 if normed else 1e-9
            assert np.allclose(said[stage], given[stage], rtol=tolerance, atol=tolerance), stage
            compared += 1
    assert compared


def test_the_canonical_dialect_has_the_limits_of_the_specification():
    configs = [AttentionConfig(), AttentionConfig(causal="token", rope="token", window=2, scale=0.3)]
    for config in [*configs, AttentionConfig(causal="none", normalisation="none", rope_pairing="adjacent")]:
        inputs = Setting(config=config.to_dict()).inputs("limits", B=2, N=4)
        for dtype in ("float32", "bfloat16"):
            call = read(Dialect.of(config), inputs, config.to_dict())
            ours = limit(call, carried_out(call), arithmetic(dtype))
            assert np.allclose(ours, derive_limits(**inputs, config=config, storage=dtype).limits["output"])


def test_a_canonical_case_of_the_corpus_is_explained_and_a_wrong_one_is_not():
    case = next(case for case in load_cases() if case.id == "core/paper")
    inputs = build_inputs(case, "float32")
    config = AttentionConfig(**case.config)
    call = read(Dialect.of(config), inputs, case.config)
    exact = carried_out(call)["output"]
    allowed = limit(call, carried_out(call), arithmetic("float32"))
    assert np.all(np.abs(exact.astype(np.float32) - exact) <= allowed / 2)
    assert not np.all(np.abs(exact * 1.02 - exact) <= allowed)


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_a_dialect_is_settled_without_becoming_another_function(P, seed):
    """At sizes at which tensors can be read in any order."""
    draw = random.Random(seed)
    found = Dialect(**{name: draw.choice(axis.values) for name, axis in AXES.items() if axis.values})
    setting = Setting(config=AttentionConfig().to_dict(), P=P)
    for probe in [*confirming_probes(setting, Amplitude()), far_probe(setting, Amplitude())]:
        for window in (None, 2):
            config = {**probe.config, "window": window}
            try:
                outputs = [speak(x, probe.inputs, config)["output"] for x in (found, found.settled(P))]
            except UnreadableError:
                continue
            assert np.allclose(*outputs, rtol=1e-9, atol=1e-9)


ABOUT_LOGITS = ("alpha_q_axes", "alpha_k_axes", "rope", "rope_pairing", "rope_sign", "rope_when")
ABOUT_VALUES = ("alpha_v_axes", "collapse_axes", "collapse_kind", "order", "causal", "values")


@pytest.mark.parametrize("name", ABOUT_LOGITS + ABOUT_VALUES)
def test_probes_of_values_do_not_depend_on_queries_and_keys(name):
    """All keys weigh alike, whatever is found of rotation and the mixing of queries and keys later."""
    setting = Setting(config=AttentionConfig().to_dict())
    probes = [probe for probe in even_probes(setting) if probe.name.endswith("softmax")]
    moved = 0.0
    for probe in probes:
        usual = speak(Dialect(), probe.inputs, probe.config)["output"]
        for other in Dialect().neighbours(name):
            moved = max(moved, np.max(np.abs(speak(other, probe.inputs, probe.config)["output"] - usual)))
    assert moved < 1e-12 if name in ABOUT_LOGITS else moved > 0.1


class Echo:
    """A target that gives what the canonical dialect says, times a factor."""

    capabilities = frozenset()
    takes_all = False

    def __init__(self, factor):
        self.factor = factor

    def evaluate(self, jobs):
        from iha_conformance.protocol import Result

        for job in jobs:
            output = speak(Dialect(), job.inputs, job.config)["output"] * self.factor
            yield Result(
                case_id=job.case_id,
                dtype=job.dtype,
                kind="arrays",
                arrays={"output": output.astype(np.float32)},
            )


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_an_answer_is_explained_only_within_its_limits(factor):
    setting = Setting(config=AttentionConfig().to_dict())
    asker = Asker(Echo(factor), "float32", "highest")
    asker.ask([setting.probe("one", setting.inputs("one", N=3))])
    answer = asker.answers["one"]
    assert asker.error(Dialect(), answer) == pytest.approx(factor - 1, abs=1e-6)
    assert asker.explains(Dialect(), answer) is (factor == 1.0)
    assert asker.error(Dialect(causal="none"), answer) > 0.01


def test_a_draft_is_made_simpler_one_tensor_at_a_time():
    draft = Draft("x", {"q": np.array([[2.0, -1.0]]), "v": np.array([[0.0, 0.0]])})
    plain = {
        name: [array.tolist() for array in map(np.asarray, [d.inputs["q"], d.inputs["v"]])]
        for name, d in ((d.name, d) for d in simpler(draft, 0))
    }
    assert plain == {
        "x-0-q-zeros": [[[0.0, 0.0]], [[0.0, 0.0]]],
        "x-0-q-ones": [[[1.0, 1.0]], [[0.0, 0.0]]],
        "x-0-q-one": [[[2.0, 0.0]], [[0.0, 0.0]]],
    }
    assert isinstance(next(simpler(draft, 1)).probe({}), Probe)
