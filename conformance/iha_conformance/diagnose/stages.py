"""Where a port that speaks no dialect leaves them all: the first of its stages that none explains.

A stage is judged from what the port itself gave before it, so that one fault shows once. Each may be
explained by other values on its own axes than the nearest dialect has; the order of the virtual tokens is one
for all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.diagnose import allowance, model
from iha_conformance.diagnose.asking import Answer, Asker, best_factor
from iha_conformance.diagnose.diagnosis import Example
from iha_conformance.diagnose.dialect import AXES, Dialect, Scale, Value, Window
from iha_conformance.diagnose.fitting import THETAS
from iha_conformance.diagnose.model import Call, UnreadableError
from iha_conformance.diagnose.smallest import Draft, candidates, simpler
from iha_core import STAGES, reference
from iha_core.bounds import Arithmetic

Array = NDArray[np.float64]

OWN_AXES: Mapping[str, tuple[str, ...]] = {
    "mixed_q": ("alpha_q_axes", "qk_norm"),
    "mixed_k": ("alpha_k_axes", "qk_norm"),
    "mixed_v": ("alpha_v_axes", "values"),
    "rotated_q": ("rope", "rope_pairing", "rope_sign", "rope_when", "qk_norm"),
    "rotated_k": ("rope", "rope_pairing", "rope_sign", "rope_when", "qk_norm"),
    "logits": ("normalisation", "causal", "window_unit", "window_bound", "alignment", "key_mask"),
    "lse": (),
    "virtual_out": ("normalisation",),
    "output": ("collapse_kind", "collapse_axes"),
}
"""Axes on which a stage depends directly, but for the order of virtual tokens and for numbers."""

FORMED_FROM: Mapping[str, tuple[str, ...]] = {
    "rotated_q": ("mixed_q",),
    "rotated_k": ("mixed_k",),
    "logits": ("rotated_q", "rotated_k"),
    "lse": ("logits",),
    "virtual_out": ("logits", "mixed_v"),
    "output": ("virtual_out",),
}
"""The stages that each is formed from; the first ones from the arguments alone."""

HIDDEN = -1e4
"""Logits below this count as hidden; whether they are -inf is no matter of dialects."""

TURNED = 0.02
"""Relative difference up to which a stage is taken for the rotated one."""

FAR = 0.3
"""Relative difference that no rounding makes."""

MOST_CALLS, FEW_CALLS = 12, 3
"""Calls whose stages are looked at, of those whose outputs are unexplained and of others."""

MOST_ROUNDS = 5
"""How often an example is made simpler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bad:
    """What is known of a port by its stages.

    Attributes:
        stage: the first that leaves every dialect.
        assumed: a dialect that explains the other stages, and this one as often as any.
        example: a small input that shows it, or None.
        certain: values on the axes of the stages that are explained.
    """

    stage: str
    assumed: Dialect
    example: Example | None
    certain: Mapping[str, Value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """What one order of the virtual tokens explains.

    Attributes:
        assumed: a dialect that explains every stage but the bad ones, and these as often as any.
        explained: the dialects that explain each stage, none for a bad one.
    """

    assumed: Dialect
    explained: Mapping[str, tuple[Dialect, ...]]

    @property
    def bad(self) -> list[str]:
        return [stage for stage, dialects in self.explained.items() if not dialects]


def first_bad_stage(
    asker: Asker, best: Dialect, asked: Dialect, answers: Sequence[Answer], explained: Sequence[Answer]
) -> Bad | None:
    """The first stage that leaves every dialect, None if no stages are offered or all can be explained.

    Args:
        asker: asks for the example.
        best: the nearest dialect.
        asked: the canonical one, which is assumed where nothing speaks for another.
        answers: all that have outputs.
        explained: those of them that the nearest dialect explains.
    """
    several = [answer for answer in answers if len(answer.stages) > 1]
    if not several:
        return None
    # The smallest calls first, as they refute most; any that are unexplained, or tell axes apart.
    several.sort(key=lambda answer: answer.output.size)
    chosen = [answer for answer in several if answer not in explained][:MOST_CALLS]
    chosen += [answer for answer in several if not is_square(answer) and answer not in chosen]
    chosen += [answer for answer in several if answer in explained and answer not in chosen][-FEW_CALLS:]
    orders = [best.order, *(order for order in AXES["order"].values if order != best.order)]
    readings = [_read(str(order), best, asked, chosen, asker.rules) for order in orders]
    reading = min(readings, key=lambda reading: len(reading.bad))
    if not reading.bad:
        return None
    stage = reading.bad[0]
    rivals = [other for other in readings if len(other.bad) == len(reading.bad)]
    return Bad(
        stage=stage,
        assumed=reading.assumed,
        example=_smallest(asker, stage, reading.assumed, asked, several[0]),
        certain=_certain(rivals),
    )


def is_square(answer: Answer) -> bool:
    """Whether tensors can be read in any order; in such calls an exchange of axes may be something else."""
    sources, targets, pseudos = answer.probe.inputs["alpha_k"].shape
    return bool(sources == targets == pseudos)


def _read(
    order: str, best: Dialect, asked: Dialect, answers: Sequence[Answer], rules: Arithmetic
) -> _Reading:
    """What explains each stage, the virtual tokens being in this order."""
    offered = [stage for stage in STAGES if any(stage in answer.stages for answer in answers)]
    near = best.having(order=order)
    for stage in offered:  # a tensor whose own stage is not looked at yet must not make a call unreadable
        tensors = [name for name in OWN_AXES[stage] if name.endswith("_axes") or name == "values"]
        near = near.having(**{name: AXES[name].values[0] for name in tensors})
    explained: dict[str, tuple[Dialect, ...]] = {}
    for stage in offered:
        having = [answer for answer in answers if stage in answer.stages]
        usual = _adopted(near, stage, asked)

        def often(dialect: Dialect, stage: str = stage, having: Sequence[Answer] = having) -> int:
            return sum(_explains(dialect, stage, answer, rules) for answer in having)

        for fitted in (False, True):  # numbers are only fitted where none that is known will do
            tried = dict.fromkeys(
                dialect
                for start in (usual, near)
                for dialect in _variations(stage, start, having, fitted=fitted)
            )
            explained[stage] = tuple(
                dialect
                for dialect in tried
                if all(_explains(dialect, stage, answer, rules) for answer in having)
            )
            if explained[stage]:
                near = _adopted(near, stage, explained[stage][0])
                break
        else:
            # Axes of a tensor that explain some calls alone would make others unreadable.
            near = usual if stage.startswith("mixed") else max(usual, near, key=often)
    if explained.get("rotated_q") and explained.get("rotated_k"):
        both = {_rotation(d) for d in explained["rotated_q"]} & {_rotation(d) for d in explained["rotated_k"]}
        if not both:  # each may be right, and not both
            odd = max(("rotated_k", "rotated_q"), key=lambda stage: _oddness(explained[stage], asked))
            explained[odd] = ()
            other = "rotated_k" if odd == "rotated_q" else "rotated_q"
            near = _adopted(near, other, explained[other][0])
        else:
            for stage in ("rotated_q", "rotated_k"):
                explained[stage] = tuple(d for d in explained[stage] if _rotation(d) in both)
    return _Reading(assumed=near, explained=explained)


def _oddness(explaining: Sequence[Dialect], asked: Dialect) -> tuple[int, bool]:
    """How far a stage is from the usual rotation: on how many axes, and whether it is not rotated at all."""
    usual = _rotation(asked)
    far = min(sum(a != b for a, b in zip(_rotation(d), usual, strict=True)) for d in explaining)
    return far, all(dialect.rope == "none" for dialect in explaining)


def _rotation(dialect: Dialect) -> tuple[Any, ...]:
    return tuple(getattr(dialect, name) for name in (*OWN_AXES["rotated_q"], "rope_theta"))


def _variations(stage: str, best: Dialect, answers: Sequence[Answer], *, fitted: bool) -> Iterator[Dialect]:
    """The nearest dialect, then those with other values on the stage's own axes."""
    seen = set()
    values = [
        [getattr(best, name), *(v for v in AXES[name].values if v != getattr(best, name))]
        if not (fitted and name == "qk_norm")
        else [getattr(best, name)]
        for name in OWN_AXES[stage]
    ]
    for combination in itertools.product(*values):
        dialect = best.having(**dict(zip(OWN_AXES[stage], combination, strict=True)))
        if stage.startswith("rotated"):
            dialect = dialect.settled(0)
        for varied in _with_numbers(stage, dialect, answers, fitted=fitted):
            if varied not in seen:
                seen.add(varied)
                yield varied


def _with_numbers(
    stage: str, dialect: Dialect, answers: Sequence[Answer], *, fitted: bool
) -> Iterator[Dialect]:
    """The dialect with numbers that may explain its stage: its own and canonical ones, or what fits."""
    if stage.startswith("rotated") and dialect.rope != "none":
        if fitted:
            yield _with_theta(stage, dialect, answers[-1])
        else:
            yield from (dialect, dialect.having(rope_theta=Dialect().rope_theta))
    elif stage == "logits":
        factor = _scale_factor(dialect, answers) if fitted else None
        if factor is not None:
            yield dialect.having(scale=Scale(dialect.scale.factor * factor, dialect.scale.power))
        elif not fitted:
            for window in dict.fromkeys((dialect.window, Window(), Window("none"))):
                yield from (dialect.having(window=window), dialect.having(window=window, scale=Scale()))
    elif not fitted:
        yield dialect


def _with_theta(stage: str, dialect: Dialect, answer: Answer) -> Dialect:
    """The base of the rotation that comes nearest to a stage."""
    best, numbers = dialect, THETAS
    for factor in (1.6, 1.03, 1.002, 1.0001):  # ever closer around the best so far
        tried = [dialect.having(rope_theta=float(theta)) for theta in numbers]
        best = min(tried, key=lambda candidate: _distance(candidate, stage, answer))
        numbers = best.rope_theta * np.geomspace(1 / factor, factor, 41)
    return best


def _distance(dialect: Dialect, stage: str, answer: Answer) -> float:
    try:
        call = model.read(dialect, answer.probe.inputs, answer.probe.config)
        forms = _expected(call, stage, _before(call, stage, answer.stages))
    except (UnreadableError, ValueError):
        return np.inf
    found = np.asarray(answer.stages[stage], np.float64)
    return min(
        (float(np.max(np.abs(form - found), initial=0.0)) for form in forms if form.shape == found.shape),
        default=np.inf,
    )


def _scale_factor(dialect: Dialect, answers: Sequence[Answer]) -> float | None:
    """By what the visible logits are larger than the dialect's."""
    for answer in answers:
        try:
            call = model.read(dialect, answer.probe.inputs, answer.probe.config)
            expected = _expected(call, "logits", _before(call, "logits", answer.stages))[0]
        except (UnreadableError, ValueError, KeyError):
            continue
        found = np.asarray(answer.stages.get("logits", np.nan), np.float64)
        if found.shape == expected.shape:
            both = (expected > HIDDEN) & (found > HIDDEN) & np.isfinite(found)
            factor = best_factor(expected[both], found[both])
            if factor > 0:
                return factor
    return None


def _before(call: Call, stage: str, given: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
    """The stages that a stage is formed from: as given where their shape is right, else formed themselves.

    Raises:
        ValueError: some have shapes that do not go together.
    """
    found: dict[str, Array] = {}
    for name in FORMED_FROM.get(stage, ()):
        array = given.get(name)
        if array is not None and array.shape == _shape(call, name):
            found[name] = np.asarray(array, np.float64)
        else:
            found[name] = _expected(call, name, _before(call, name, given))[0]
    return found


def _shape(call: Call, stage: str) -> tuple[int, ...]:
    """Shape of a stage before the output."""
    B, H = len(call.q), call.alpha_q.shape[1]
    T, S = call.visible.shape[1:]
    if stage == "logits":
        return (B, H, T, S)
    width = (call.v if stage in ("mixed_v", "virtual_out") else call.q).shape[3]
    return (B, T if stage.endswith(("_q", "_out")) else S, H, width)


def _expected(call: Call, stage: str, before: Mapping[str, Array]) -> list[Array]:
    """The stage as formed from those before it; several where a port may mean another moment by the name."""
    side = stage[-1]
    dialect = call.dialect
    if stage.startswith("mixed"):
        plain = model.mixed(call, side)
        forms = [plain]
        if side != "v" and dialect.qk_norm == "after_mix":
            forms.append(model.normalised(plain, dialect.qk_multiplier))
        if side != "v" and dialect.rope_when == "before":
            forms.append(model.rotated(call, side, plain))
        return forms
    if stage.startswith("rotated"):
        mixed = before[f"mixed_{side}"]
        turn = call.turn_q if side == "q" else call.turn_k
        forms = [model.rotated(call, side, mixed)]
        if dialect.qk_norm == "after_mix":  # which the mixed ones may have been already
            forms.append(reference.rotate(mixed, turn, call.config))
        if dialect.rope_when == "before" and _is_turned(call, side, mixed):
            forms.append(mixed)
        return forms
    if stage == "logits":
        return [model.logits(call, before["rotated_q"], before["rotated_k"])]
    if stage == "output":
        return [model.collapsed(call, before["virtual_out"])]
    logits = before["logits"]
    if stage == "lse":
        return [reference.softmax(logits)[1]]
    weights = reference.softmax(logits)[0] if dialect.normalisation == "softmax" else logits
    return [model.weighted_sum(weights, before["mixed_v"])]


def _is_turned(call: Call, side: str, mixed: Array) -> bool:
    """Whether mixed queries or keys are rotated already."""
    turned = model.rotated(call, side, model.mixed(call, side))
    return bool(np.allclose(mixed, turned, rtol=0, atol=TURNED * np.max(np.abs(turned), initial=0.0)))


def _explains(dialect: Dialect, stage: str, answer: Answer, rules: Arithmetic) -> bool:
    """Whether a stage of an answer is within its limits of what the dialect makes of those before it."""
    found = np.asarray(answer.stages[stage], np.float64)
    try:
        call = model.read(dialect, answer.probe.inputs, answer.probe.config)
        before = _before(call, stage, answer.stages)
        forms = _expected(call, stage, before)
    except (UnreadableError, ValueError):
        return False
    return any(_within(call, stage, found, form, before, rules) for form in forms)


def _within(
    call: Call, stage: str, found: Array, expected: Array, before: Mapping[str, Array], rules: Arithmetic
) -> bool:
    if found.shape != expected.shape:
        return False
    if stage in ("logits", "lse"):
        hidden = expected <= HIDDEN
        if np.any(hidden != (found <= HIDDEN)):
            return False
        found, expected = np.where(hidden, 0.0, found), np.where(hidden, 0.0, expected)
    error = np.abs(found - expected)
    if not np.all(np.isfinite(error)):
        return False
    if np.max(error, initial=0.0) > FAR * np.max(np.abs(expected), initial=1.0):
        return False
    limit = _limit(call, stage, expected, before, rules)
    return bool(np.all(np.isfinite(limit)) and np.all(error <= limit))


def _limit(call: Call, stage: str, expected: Array, before: Mapping[str, Array], rules: Arithmetic) -> Array:
    """Limit of a stage formed from given ones; the last rounding of those is allowed for."""
    side = stage[-1]
    if stage.startswith("mixed"):
        return allowance.allowed(allowance.mixed_bound(call, side, rules), rules)
    if stage.startswith("rotated"):
        given = allowance.given(before[f"mixed_{side}"], rules)
        return allowance.allowed(allowance.rotated_bound(call, side, given, expected, rules), rules)
    if stage == "logits":
        q, k = (allowance.given(before[f"rotated_{side}"], rules) for side in "qk")
        return allowance.allowed(allowance.logits_bound(call, q, k, expected, rules), rules)
    if stage == "output":
        out = allowance.given(before["virtual_out"], rules)
        return allowance.allowed(allowance.collapsed_bound(call, out, expected, rules), rules)
    logits = np.where(before["logits"] > HIDDEN, before["logits"], -np.inf)
    seen = np.where(np.isfinite(logits), logits, 0.0)
    score = dataclasses.replace(allowance.given(seen, rules), error=rules.A * np.abs(seen))
    if stage == "lse":
        largest = np.max(np.abs(seen), axis=-1, initial=0.0)
        # (19) of SPEC.md, with logits that are off by one rounding of the accumulator.
        return np.asarray(2 * rules.A * (logits.shape[-1] + 4 + 3 * largest + np.abs(expected)))
    values = allowance.given(before["mixed_v"], rules)
    seeing = dataclasses.replace(call, visible=np.asarray(np.isfinite(logits).any(axis=1)))
    return allowance.allowed(allowance.sum_bound(seeing, score, logits, values, expected, rules), rules)


def _adopted(dialect: Dialect, stage: str, other: Dialect) -> Dialect:
    """The dialect with what another one has on the axes of a stage."""
    names = (*OWN_AXES[stage], *_numbers(stage))
    return dialect.having(**{name: getattr(other, name) for name in names})


def _numbers(stage: str) -> tuple[str, ...]:
    if stage.startswith("rotated"):
        return ("rope_theta",)
    return ("scale", "window") if stage == "logits" else ()


def _certain(readings: Sequence[_Reading]) -> dict[str, Value]:
    """Values on which all readings, and all dialects that explain a stage, agree."""
    values: dict[str, set[Value]] = {}
    for reading in readings:
        for stage, dialects in reading.explained.items():
            for name in OWN_AXES[stage] if dialects else ():
                values.setdefault(name, set()).update(dialect.axes()[name] for dialect in dialects)
    values["order"] = {reading.assumed.order for reading in readings}
    return {name: found.pop() for name, found in values.items() if len(found) == 1}


def _smallest(
    asker: Asker, stage: str, assumed: Dialect, asked: Dialect, usual_answer: Answer
) -> Example | None:
    """A small input on which the stage is wrong, made simpler as long as it stays wrong."""
    config = usual_answer.probe.config
    per_head = usual_answer.probe.inputs["collapse"].ndim == 2
    usual = _adopted(assumed, stage, asked)

    def wrong(draft: Draft) -> bool:
        answer = asker.answers[draft.name]
        return stage in answer.stages and not any(
            _explains(dialect, stage, answer, asker.rules) for dialect in (assumed, usual)
        )

    def first_wrong(drafts: Sequence[Draft]) -> Draft | None:
        asker.ask(draft.probe(config) for draft in drafts)
        return next((draft for draft in drafts if wrong(draft)), None)

    draft = first_wrong(list(candidates(per_head=per_head)))
    if draft is None:
        return None
    for turn in range(MOST_ROUNDS):
        found = first_wrong(list(simpler(draft, turn)))
        if found is None:
            break
        draft = found
    answer = asker.answers[draft.name]
    call = model.read(assumed, answer.probe.inputs, answer.probe.config)
    return Example(
        stage=stage,
        inputs=answer.probe.inputs,
        config=answer.probe.config,
        expected=_expected(call, stage, _before(call, stage, answer.stages))[0],
        found=answer.stages[stage],
    )
