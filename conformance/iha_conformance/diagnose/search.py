"""Finds the dialect of a port axis by axis, and confirms it as a whole.

Each question is about few axes. Its calls are such that no other axis has a say, or only those that have
been found before; every value of the axes is tried on what is left from the questions before. What is left in
the end has to explain every answer within limits derived for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from iha_conformance.diagnose.asking import Answer, Asker
from iha_conformance.diagnose.confirming import confirm
from iha_conformance.diagnose.diagnosis import Diagnosis
from iha_conformance.diagnose.dialect import AXES, HEAD_WIDTH, Dialect, Ragged, Scale, Window
from iha_conformance.diagnose.fitting import fit_scale, fit_theta, polished, refine
from iha_conformance.diagnose.probes import (
    HEADS,
    Amplitude,
    Setting,
    config_probes,
    confirming_probes,
    even_probes,
    far_probe,
    logit_probes,
    own_probes,
    scale_probe,
    scope_probes,
)
from iha_conformance.errors import CommandError
from iha_conformance.protocol import Target
from iha_core import AttentionConfig
from iha_core.bounds import HIGHEST

DTYPE_ORDER = ("float32", "float64", "bfloat16", "float16")
"""Dtypes in the order in which they are tried."""

MOST_LEFT = 200
"""Dialects that are followed on from one question to the next."""

MOST_FITS = 4
"""How often the numbers of dialects that a fit sees alike are looked for."""

MOST_VAIN = 300
"""How many fits may explain nothing before a question has no more of them."""

FEW_LEFT = 6
"""And of those that explain no answer."""

POWERS = (-0.5, 0.0, -1.0, -1.5)
"""Powers of the head width that the scale may go with; -1.5 is that of heads normalised to length 1."""

MOST_LAYOUTS = 8
"""Layouts of tensors that are tried at sizes that differ."""

FARTHEST = 12 * HEADS
"""Virtual tokens that the longest window of a port's own that can be seen reaches back."""

LINEAR_SLACK = 10.0
"""Times the slack, for linear attention: as long as the rotation is unknown keys only nearly weigh alike."""

Fit = Callable[[Asker, Dialect, Sequence[Answer]], Dialect]


def diagnose(target: Target, *, dtype: str | None = None, precision: str | None = None) -> Diagnosis:
    """Find out which dialect a target speaks.

    Args:
        target: whom to ask; the caller closes it.
        dtype: storage dtype to ask in; by default the first that it takes of `DTYPE_ORDER`.
        precision: precision class declared for its products ([NUM-8]).

    Raises:
        CommandError: it answers nothing.
        TargetUnavailable: it cannot be launched.
    """
    info = target.info
    with np.errstate(all="ignore"):  # answers may hold anything, and it is looked at wherever it matters
        asker, setting = _begin(target, dtype, precision or HIGHEST)
        return confirm(asker, setting, _Search(asker, setting).run(), info)


def _begin(target: Target, dtype: str | None, precision: str) -> tuple[Asker, Setting]:
    """The first dtype and the first setting that the target takes."""
    reasons: list[str] = []
    dtypes = DTYPE_ORDER if dtype is None else (dtype,)
    for settings in (_settings(AttentionConfig()), _other_settings()):
        for name in dtypes:
            asker = Asker(target, name, precision)
            asked = {f"setting-{number}": setting for number, setting in enumerate(settings)}
            asker.ask(
                setting.probe(key, setting.inputs("setting", N=2), about=_about(setting))
                for key, setting in asked.items()
            )
            for key, setting in asked.items():
                if asker.answers[key].answered:
                    return asker, setting
            reasons += [asker.answers[key].reason or "no output" for key in asked]
            if all(asker.answers[key].gone for key in asked):  # no other call would do better
                raise _none_answered(reasons)
    raise _none_answered(reasons)


def _none_answered(reasons: Sequence[str]) -> CommandError:
    return CommandError(
        f"expected a target that answers some call with B=1, N=M=2, H=G={HEADS}, P={HEADS} or 1 and"
        f" d=e={HEAD_WIDTH}, but all {len(reasons)} failed; the first: {reasons[0]}"
    )


def _about(setting: Setting) -> str:
    """What is refused if a first call with this setting is."""
    plain = AttentionConfig().to_dict()
    fields = [f"{name}={value!r}" for name, value in setting.config.items() if value != plain[name]]
    shape = "(H, P)" if setting.per_head else "(H, H, P)"
    return ", ".join([f"P = {setting.P} and a collapse of shape {shape}", *fields])


def _settings(*configs: AttentionConfig) -> list[Setting]:
    return [
        Setting(config=config.to_dict(), P=P, per_head=per_head)
        for P in (HEADS, 1)
        for per_head in (False, True)
        for config in configs
    ]


def _other_settings() -> list[Setting]:
    """All configurations, the default one first, for a port that refuses what it does not do."""
    choices = _values("causal", "rope", "window_unit", "rope_pairing", "normalisation")
    configs = [
        AttentionConfig(**dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]
    return _settings(*configs)


class _Search:
    """The state of one search: what is left, the likeliest first."""

    def __init__(self, asker: Asker, setting: Setting) -> None:
        self._asker = asker
        self._setting = setting
        self._asked = Dialect.of(AttentionConfig(**setting.config))
        self._left: list[Dialect] = [self._asked]

    def run(self) -> list[Dialect]:
        """What is left after all questions."""
        asker, setting = self._asker, self._setting
        asker.ask(even_probes(setting))
        self._even_questions()
        if any(dialect.window.kind == "half" for dialect in self._left):
            self._setting = setting = dataclasses.replace(setting, more=12)
        asker.ask([scale_probe(setting)])
        self._question(["scale"], {"qk_norm": AXES["qk_norm"].values}, fit=fit_scale)
        amplitude = _amplitude(self._left[0])
        asker.ask(
            [
                *logit_probes(setting, amplitude),
                *confirming_probes(setting, amplitude),
                far_probe(setting, amplitude),
                *scope_probes(setting, amplitude),
                *(probe for _, _, probe in config_probes(setting, amplitude)),
            ]
        )
        self._logit_questions()
        self._refine()
        self._scope_questions()
        if setting.P > 1 and not asker.answers["pseudo"].answered:
            self._ask_in_own_layouts(amplitude)
        return self._left

    def _even_questions(self) -> None:
        """What is found while all visible keys weigh alike: values, collapse, order, causality."""
        self._question(["equal-values-softmax"], _values("normalisation"))
        linear = self._left[0].normalisation == "none"
        kind = "linear" if linear else "softmax"
        orders = _values("order", "causal")
        tensors = _values("values", "collapse_kind", "collapse_axes")
        if self._setting.per_head:  # it does not take the other shape
            tensors["collapse_kind"] = tuple(set(tensors["collapse_kind"]) - {"global"})
        self._question([f"equal-values-{kind}"], tensors | orders, any_factor=linear)
        own = {"window": (Window(), Window("half"))}
        orders = _values("order", "causal") | own
        axes = _values("alpha_v_axes") | orders
        self._question([f"generic-values-{kind}"], axes, any_factor=linear)
        self._question([f"order-{kind}"], orders, any_factor=linear)
        if any(dialect.window.kind == "half" for dialect in self._left):
            self._question([f"reach-{kind}"], orders, any_factor=linear)
            answers = self._asker.answered([f"order-{kind}", f"reach-{kind}"])
            if min(self._error(d, answers, any_factor=linear) for d in self._left) > self._asker.slack:
                # No such window is there, and nothing else that is known; calls of many tokens cost much.
                self._left = [dialect.having(window=Window()) for dialect in self._left]

    def _logit_questions(self) -> None:
        """Rotation, while all heads are mixed alike; then the mixing of queries and of keys."""
        details = _values("rope", "rope_pairing", "rope_sign", "rope_when")
        self._question(["rope"], details, fit=_fit_rotation)
        self._question(["alpha-q"], _values("alpha_q_axes"))
        self._question(["alpha-k"], _values("alpha_k_axes"))
        self._question(["width"], {}, fit=_fit_power)
        if not self._asker.answers["width"].answered:  # then nothing speaks against the usual power
            self._left = [_with_power(dialect, self._asked.scale.power) for dialect in self._left]
        answers = self._asker.answered(["reach-softmax", "reach-linear"])
        if answers and min(self._error(d, answers) for d in self._left) > self._asker.slack:
            self._left = self._left[:FEW_LEFT]
            reaches = range(HEADS, FARTHEST)
            own = {"window": [Window(), *(Window("fixed", reach) for reach in reaches)]}
            self._question(["reach-softmax", "reach-linear"], own | _values("window_unit"))

    def _scope_questions(self) -> None:
        """What only some calls have: a window, fewer queries than keys, a key mask."""
        if all(dialect.window.kind == "config" for dialect in self._left):
            windows = {"window": (Window(), Window("none"))} | _values("window_unit", "window_bound")
            self._question(["window-1", "window-2", "window-3"], windows)
        self._question(["alignment", "alignment-window"], _values("alignment") | {"ragged": get_args(Ragged)})
        self._question(["key-mask"], {"key_mask": ("keep", "drop", "ignored")})

    def _ask_in_own_layouts(self, amplitude: Amplitude) -> None:
        """Calls whose sizes differ, for a port that cannot read canonical tensors then.

        With H = P a port that reads all tensors with target and pseudo index exchanged is the same as one
        that has pseudo-heads take the place of heads when it reshapes. With other sizes only one of them
        takes tensors that are stored in its own order.
        """
        layouts = list(dict.fromkeys(map(_layout, self._left)))[:MOST_LAYOUTS]
        probes = [
            list(own_probes(self._setting, number, dict(layout), amplitude))
            for number, layout in enumerate(layouts)
        ]
        self._asker.ask(itertools.chain(*probes))
        answers = {
            layout: self._asker.answered(probe.name for probe in of)
            for layout, of in zip(layouts, probes, strict=True)
        }

        def fits(dialect: Dialect) -> bool:
            own = answers.get(_layout(dialect), [])
            return bool(own) and self._error(dialect, own) <= self._asker.slack

        self._left = [dialect for dialect in self._left if fits(dialect)] or self._left

    def _question(
        self,
        names: Sequence[str],
        axes: Mapping[str, Sequence[Any]],
        *,
        fit: Fit | None = None,
        any_factor: bool = False,
    ) -> None:
        """Try all values of these axes on what is left, and keep what comes nearest to the answers.

        Args:
            names: the probes; those without an output do not count.
            axes: fields of `Dialect` and their values.
            fit: finds a number of each candidate before it is compared.
            any_factor: whether outputs are compared up to a factor.
        """
        answers = self._asker.answered(names)
        if not answers:
            return
        candidates = {
            dialect.having(**dict(zip(axes, values, strict=True))).settled(self._setting.P): None
            for dialect in self._left
            for values in itertools.product(*axes.values())
        }
        fitted = candidates if fit is None else self._fitted(candidates, fit, answers)
        errors = {dialect: self._error(dialect, answers, any_factor=any_factor) for dialect in fitted}
        best = min(errors.values())
        if math.isfinite(best):
            slack = self._asker.slack * (LINEAR_SLACK if any_factor else 1.0)
            near = [dialect for dialect in errors if errors[dialect] <= best + slack]
            most = MOST_LEFT if best <= slack else FEW_LEFT
            self._left = sorted(near, key=lambda dialect: errors[dialect])[:most]

    def _fitted(self, candidates: Iterable[Dialect], fit: Fit, answers: Sequence[Answer]) -> list[Dialect]:
        """The candidates with the numbers that fit them best; those that the fit sees alike share one."""
        found: dict[Dialect, list[Dialect]] = {}
        fitted, vain = [], 0
        for dialect in candidates:
            tried = found.setdefault(_as_seen_by(fit, dialect), [])
            good = tried and self._error(tried[-1], answers) <= self._asker.slack
            # One that is wrong in what the fit does not see may have spoilt it for the others.
            if not good and len(tried) < MOST_FITS and vain < MOST_VAIN:
                tried.append(fit(self._asker, dialect, answers))
                vain += self._error(tried[-1], answers) > self._asker.slack
            numbers = tried[-1] if tried else dialect
            having = dialect.having(rope_theta=numbers.rope_theta, scale=numbers.scale)
            # Under linear attention the scale depends on what the fit of the rotation does not see.
            again = fit is _fit_rotation and dialect.normalisation == "none"
            fitted.append(fit_scale(self._asker, having, answers) if again else having)
        return fitted

    def _error(self, dialect: Dialect, answers: Iterable[Answer], *, any_factor: bool = False) -> float:
        return max(self._asker.error(dialect, answer, any_factor=any_factor) for answer in answers)

    def _refine(self) -> None:
        """Numbers as exactly as they can be known."""
        answers = self._asker.answered(["rope", "alpha-q", "alpha-k", "confirm-1", "confirm-2", "confirm-3"])
        if answers:
            self._left = [refine(self._asker, dialect, answers, self._asked) for dialect in self._left]


def _layout(dialect: Dialect) -> tuple[tuple[str, str], ...]:
    """The order in which each tensor is read."""
    return tuple(
        (name, getattr(dialect, f"{name}_axes")) for name in ("alpha_q", "alpha_k", "alpha_v", "collapse")
    )


def _amplitude(dialect: Dialect) -> Amplitude:
    """What makes logits of about 1, powers of two."""
    scale = dialect.scale.at(HEAD_WIDTH)
    if dialect.qk_norm == "none":
        return Amplitude(size=2.0 ** round(math.log2(0.5 / scale) / 2))
    return Amplitude(ballast=2.0 ** round(math.log2(scale)) if scale > 1 else 0.0)


def _values(*names: str) -> dict[str, Sequence[Any]]:
    """Axes by name, with all their values."""
    return {name: AXES[name].values for name in names}


def _as_seen_by(fit: Fit, dialect: Dialect) -> Dialect:
    """What a fit depends on: dialects that are alike here get the same numbers."""
    if fit is fit_scale and dialect.normalisation == "none":
        return dialect
    plain = Dialect()
    names = ("alpha_v_axes", "collapse_axes", "collapse_kind", "values")
    alike = dialect.having(**{name: getattr(plain, name) for name in names})
    linear = dialect.normalisation == "none" and fit is _fit_rotation
    return alike.having(scale=plain.scale) if linear else alike


def _fit_rotation(asker: Asker, dialect: Dialect, answers: Sequence[Answer]) -> Dialect:
    """The base of the rotation, where there is one, and with it the scale."""
    return dialect if dialect.rope == "none" else polished(fit_theta(asker, dialect, answers), answers)


def _fit_power(asker: Asker, dialect: Dialect, answers: Sequence[Answer]) -> Dialect:
    """The power of the head width that the scale goes with, its value at `HEAD_WIDTH` being known."""
    tried = [_with_power(dialect, power) for power in POWERS]
    return min(tried, key=lambda candidate: max(asker.error(candidate, answer) for answer in answers))


def _with_power(dialect: Dialect, power: float) -> Dialect:
    """The dialect with the same scale at `HEAD_WIDTH`, going with another power of the head width."""
    return dialect.having(scale=Scale(dialect.scale.at(HEAD_WIDTH) / HEAD_WIDTH**power, power))
