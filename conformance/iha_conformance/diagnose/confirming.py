"""From what a search has left to a diagnosis: everything confirmed, nothing claimed beyond that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from iha_conformance.diagnose.asking import Answer, Asker
from iha_conformance.diagnose.diagnosis import Diagnosis, Nearest, Refusal
from iha_conformance.diagnose.dialect import AXES, HEAD_WIDTH, NUMBERS, Dialect, Scale, Value, Window
from iha_conformance.diagnose.fitting import doubts
from iha_conformance.diagnose.model import UnreadableError, speak
from iha_conformance.diagnose.probes import Amplitude, Setting, config_probes
from iha_conformance.diagnose.stages import FAR, first_bad_stage, is_square
from iha_conformance.protocol import TargetInfo
from iha_core import AttentionConfig

SCOPES = ("width", "value-width", "grouped", "collapse")
"""Calls at other sizes, that a dialect need not explain to be the one that the port speaks."""

USUAL = ("confirm-1", "confirm-2", "confirm-3")
"""Calls without anything special."""

SAME = 1e-11
"""Relative difference below which two dialects are one function."""

UNCERTAIN = 0.25
"""By how much a number may be off, relatively, and still be claimed."""

PASSES = 3
"""How often all axes are gone through in search of something nearer."""


def confirm(asker: Asker, setting: Setting, left: Sequence[Dialect], info: TargetInfo) -> Diagnosis:
    """The diagnosis, from what is left after all questions and from all answers.

    Args:
        asker: has all the answers.
        setting: how the target was asked.
        left: dialects that come near, at least one.
        info: who was asked.
    """
    asked = Dialect.of(AttentionConfig(**setting.config))
    given = [answer for name, answer in asker.answers.items() if answer.answered and not _is_aside(name)]
    core = [answer for answer in given if answer.probe.name not in SCOPES]
    evidence = _Evidence(asker, core)
    # Which of the two is told by a collapse (H, P) alone.
    left = [*left, *(dialect.exchanged() for dialect in left if dialect.collapse_kind == "per_head")]
    alike = _likeliest(evidence, left, [answer for answer in given if answer not in core])
    # Of several names of one function the one that deviates least.
    alike.sort(key=lambda dialect: (_deviations(dialect, asked), dialect.order != asked.order))
    best = alike[0] if alike else _nearest(evidence, [asked, *left])
    explained = [answer for answer in given if evidence.explains(best, answer)]
    possible = _possible(evidence, setting, alike or [best], explained)
    named = _named(best)
    certain = {name: value for name, value in named.axes().items() if name not in possible}
    matched = evidence.explains_all(best)
    bad = None
    if not matched:
        certain = {name: value for name, value in certain.items() if name in _provable(explained)}
        bad = first_bad_stage(asker, best, asked, given, explained)
    if bad is not None:
        certain |= bad.certain
        best = bad.assumed  # the one that its stages speak for
        named = _named(best)
        explained = [answer for answer in given if evidence.explains(best, answer)]
    fields = _config_fields(evidence, setting, asked, best)
    nearest = Nearest(dialect=named, error=evidence.error(best), agrees=len(explained), answered=len(given))
    return Diagnosis(
        info=info,
        dtype=asker.dtype,
        config=dict(setting.config),
        asked=asked,
        P=setting.P,
        per_head=setting.per_head,
        matched=matched,
        found=named if matched else None,
        certain={name: certain[name] for name in AXES if name in certain},
        possible={name: values for name, values in possible.items() if values and name not in certain},
        first_bad_stage=None if bad is None else bad.stage,
        example=None if bad is None else bad.example,
        nearest=None if matched else nearest,
        follows=tuple(name for name, outcome in fields.items() if outcome == "followed"),
        ignores=tuple(
            [name for name, outcome in fields.items() if outcome == "ignored"]
            + [name for name in ("window", "key_mask") if matched and _ignored(best, name, asker)]
        ),
        refuses=tuple(_refusals(asker, setting)),
        unexplained=tuple(_unexplained(given, explained, fields)),
        calls=sum(answer.answered for answer in asker.answers.values()),
        notes=tuple(_notes(best, core, matched=matched)),
    )


def _likeliest(evidence: _Evidence, left: Sequence[Dialect], scopes: Sequence[Answer]) -> list[Dialect]:
    """The dialects that explain all the evidence, and as many calls at other sizes as any of them."""
    count = {
        dialect: sum(evidence.explains(dialect, answer) for answer in scopes)
        for dialect in left
        if evidence.explains_all(dialect)
    }
    return [dialect for dialect in count if count[dialect] == max(count.values())]


def _is_plain(answer: Answer) -> bool:
    """Whether a call is made to show little, and not everything at random."""
    return answer.probe.name.startswith(
        ("equal-", "generic-", "order-", "reach-", "scale", "rope", "alpha-", "far")
    )


def _is_aside(name: str) -> bool:
    """Whether a call has another configuration than the usual ones."""
    return name.startswith(("config-", "setting-"))


def _unexplained(
    given: Sequence[Answer], explained: Sequence[Answer], fields: Mapping[str, str]
) -> Iterator[str]:
    """What is answered in a way of its own, where the usual calls are not."""
    usual = [answer for answer in given if answer.probe.name in USUAL]
    if all(answer in explained for answer in usual):
        names = [a.probe.about for a in given if a not in explained and a.probe.about]
        yield from dict.fromkeys(names)
        yield from (name for name, outcome in fields.items() if outcome == "unexplained")


def _nearest(evidence: _Evidence, left: Sequence[Dialect]) -> Dialect:
    """The dialect with the smallest mean error that is found by changing one axis at a time."""
    best = min([*left, *(dialect.having(window=Window()) for dialect in left)], key=evidence.mean_error)
    error = evidence.mean_error(best)
    for _ in range(PASSES):
        before = best
        for axis in AXES:
            for other in best.neighbours(axis) if axis not in NUMBERS else ():
                found = evidence.mean_error(other)
                if found < error * (1 - SAME):
                    best, error = other, found
        if best == before:
            break
    return best


def _deviations(dialect: Dialect, asked: Dialect) -> int:
    """On how many axes two dialects differ."""
    theirs = asked.axes()
    return sum(value != theirs[name] for name, value in dialect.axes().items())


def _possible(
    evidence: _Evidence, setting: Setting, alike: Sequence[Dialect], explained: Sequence[Answer]
) -> dict[str, tuple[Value, ...]]:
    """For each axis that is open the values that explain the same answers; none for a number."""
    possible: dict[str, tuple[Value, ...]] = {}
    best = alike[0]
    scale, theta = doubts(best, explained) if explained else (math.inf, math.inf)
    doubt = {"scale": scale, "rope_theta": theta, "qk_multiplier": scale}
    if best.qk_norm == "none":
        doubt["qk_multiplier"] = 0.0  # it counts as scale
    for name in AXES:
        if name in NUMBERS:
            possible |= {name: ()} if doubt[name] > UNCERTAIN else {}
            continue
        values = set()
        for dialect in alike:
            values.add(dialect.axes()[name])
            for other in dialect.neighbours(name):
                if other.collapse_kind == "global" and setting.per_head:
                    continue  # it does not take the tensor of that
                if other.axes()[name] not in values and evidence.same(dialect, other, explained):
                    values.add(other.axes()[name])
        if len(values) > 1:
            possible[name] = tuple(value for value in AXES[name].values if value in values)
    if best.key_mask == "ignored":
        possible["key_mask"] = ()
    if best.window.kind == "half":
        possible.pop("window_bound", None)
    return possible


def _named(dialect: Dialect) -> Dialect:
    """The same function by the names that reports use.

    Of scale and multiplier of the norm only a product is seen. Where it goes with the head width as the
    canonical scale does, the rest of it is the multiplier.
    """
    if dialect.window.kind == "half":  # one key more than the N / (2 P) virtual keys of the paper
        dialect = dialect.having(window_bound="inclusive")
    if dialect.qk_norm == "none" or dialect.scale.power == 0.0:
        return dialect
    multiplier = math.sqrt(dialect.scale.at(HEAD_WIDTH) / Scale().at(HEAD_WIDTH))
    return dialect.having(scale=Scale(), qk_multiplier=float(f"{multiplier:.9g}"))


def _config_fields(evidence: _Evidence, setting: Setting, asked: Dialect, best: Dialect) -> dict[str, str]:
    """What becomes of each field of the configuration that another value was given of, where that shows."""
    outcomes: dict[str, list[str]] = {}
    for field, value, probe in config_probes(setting, Amplitude()):
        answer = evidence.asker.answers.get(probe.name)
        if answer is None or not answer.answered:
            continue
        heeding = _named(best).having(**{field: Scale(value, 0.0) if field == "scale" else value})
        if _identical(best, heeding, answer):
            # It does what is asked for now; not because of that, if it did so before.
            if _named(best).axes()[field] != asked.axes()[field] and evidence.explains(best, answer):
                outcomes.setdefault(field, []).append("ignored")
            continue
        heeds, ignores = (evidence.explains(dialect, answer) for dialect in (heeding, best))
        if heeds != ignores:
            outcomes.setdefault(field, []).append("followed" if heeds else "ignored")
        elif not heeds:
            outcomes.setdefault(field, []).append("unexplained")
    worst_first = ("unexplained", "ignored", "followed")
    return {field: min(found, key=worst_first.index) for field, found in outcomes.items()}


def _ignored(best: Dialect, name: str, asker: Asker) -> bool:
    """Whether a window or a key mask was taken and had no effect."""
    given = any(a.answered for key, a in asker.answers.items() if key.startswith(name.replace("_", "-")))
    return given and (best.window.kind != "config" if name == "window" else best.key_mask == "ignored")


def _refusals(asker: Asker, setting: Setting) -> list[Refusal]:
    """What was not taken, each thing once."""
    first = [answer for name, answer in asker.answers.items() if name.startswith("setting-")]
    found: dict[str, Answer] = {}
    if setting.config != AttentionConfig().to_dict():
        found["the default configuration"] = first[0]
    if setting.P == 1:
        found["P > 1"] = first[0]
    if setting.per_head:
        found["a collapse of shape (H, H, P)"] = first[0]
    for name, answer in asker.answers.items():
        if not answer.answered and answer.probe.about and not name.startswith("setting-"):
            found.setdefault(answer.probe.about, answer)
    return [
        Refusal(what=what, reason=answer.reason or "no output", said=answer.refused)
        for what, answer in found.items()
    ]


def _notes(best: Dialect, answers: Iterable[Answer], *, matched: bool) -> Iterator[str]:
    unlike = [answer.probe.name for answer in answers if not answer.repeats]
    if unlike:
        yield f"the same call gave something else the second time, {len(unlike)} times: it is no function"
    if best.window.kind not in ("half", "fixed") or not matched:
        return
    unit = "virtual tokens" if best.window_unit == "virtual" else "tokens"
    reach = "N // (2*P)" if best.window.kind == "half" else best.window.reach
    yield f"it keeps to a window of its own, whatever it is given: {reach} {unit} back"


def _provable(explained: Sequence[Answer]) -> set[str]:
    """Axes of which some calls may say something, where not all are explained.

    Answers of zeros say nothing, since many a fault has them; nor do those to plain questions, in which one
    fault looks like another.
    """
    telling = [answer for answer in explained if np.any(answer.output) and not _is_plain(answer)]
    names = set(AXES) - set(NUMBERS) if telling else set()
    if all(is_square(answer) for answer in telling):
        names -= {"alpha_q_axes", "alpha_k_axes", "alpha_v_axes", "collapse_axes", "order"}
    return names


class _Evidence:
    """All answers, and what dialects make of them; remembers what it has compared."""

    def __init__(self, asker: Asker, answers: Sequence[Answer]) -> None:
        self.asker = asker
        self.answers = answers
        self._explained: dict[tuple[Dialect, str], bool] = {}

    def explains(self, dialect: Dialect, answer: Answer) -> bool:
        key = (dialect, answer.probe.name)
        if key not in self._explained:
            near = self.asker.error(dialect, answer) <= FAR
            self._explained[key] = near and self.asker.explains(dialect, answer)
        return self._explained[key]

    def explains_all(self, dialect: Dialect) -> bool:
        return all(self.explains(dialect, answer) for answer in self.answers)

    def error(self, dialect: Dialect) -> float:
        """Largest relative difference from any answer."""
        return max((self.asker.error(dialect, answer) for answer in self.answers), default=0.0)

    def mean_error(self, dialect: Dialect) -> float:
        """Mean relative difference; what cannot be compared counts 2, as much as opposite outputs."""
        errors = [min(self.asker.error(dialect, answer), 2.0) for answer in self.answers]
        return sum(errors) / len(errors) if errors else 0.0

    def same(self, dialect: Dialect, other: Dialect, answers: Iterable[Answer]) -> bool:
        """Whether no answer tells two dialects apart, the first of which explains these."""
        return all(_identical(dialect, other, answer) or self.explains(other, answer) for answer in answers)


def _identical(dialect: Dialect, other: Dialect, answer: Answer) -> bool:
    try:
        first, second = (
            speak(x, answer.probe.inputs, answer.probe.config)["output"] for x in (dialect, other)
        )
    except UnreadableError:
        return False
    if first.shape != second.shape:
        return False
    return bool(np.max(np.abs(first - second), initial=0.0) <= SAME * np.max(np.abs(first), initial=0.0))
