"""Calls to a target, and what it answered: the only way in which a diagnosis sees a port."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import cast
from iha_conformance.diagnose.allowance import limit
from iha_conformance.diagnose.dialect import Dialect
from iha_conformance.diagnose.model import Call, UnreadableError, carried_out, read
from iha_conformance.protocol import Job, Target
from iha_core import STAGES
from iha_core.bounds import Arithmetic, arithmetic

Array = NDArray[np.float64]

NARROW = ("float16", "bfloat16")

SLACK, NARROW_SLACK = 0.01, 0.04
"""Relative difference of outputs up to which a probe holds two alike, in wide and in narrow dtypes. Values on
the axes that a probe is for are farther apart; what passes is confirmed by derived limits in the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """One call to make.

    Attributes:
        name: unlike for any two calls that differ.
        inputs: arguments in float64 (masks in bool).
        config: all fields of the configuration.
        about: what is refused if this call is, in the words of a report.
    """

    name: str
    inputs: Mapping[str, Any]
    config: Mapping[str, Any]
    about: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a target gave for a probe.

    Attributes:
        probe: the call, its inputs as they were handed over.
        stages: arrays by name, `output` among them; empty if there was no usable output.
        reason: why not.
        refused: whether the target said that it does not offer this.
        gone: whether it crashed or hung.
        repeats: whether a second run gave the same but for rounding.
    """

    probe: Probe
    stages: Mapping[str, NDArray[Any]]
    reason: str | None = None
    refused: bool = False
    gone: bool = False
    repeats: bool = True

    @property
    def answered(self) -> bool:
        """Whether there is an output."""
        return bool(self.stages)

    @property
    def output(self) -> Array:
        """The output in float64."""
        return np.asarray(self.stages["output"], np.float64)


class Asker:
    """Asks a target, and compares its answers with dialects.

    Args:
        target: whom to ask.
        dtype: storage dtype of the inputs.
        precision: precision class of the target's products, as declared for it.
    """

    def __init__(self, target: Target, dtype: str, precision: str) -> None:
        self._target = target
        self.dtype = dtype
        # Which function it is, not how accurate: a port that computes in float32 is told the same in float64.
        self.rules: Arithmetic = arithmetic("float32" if dtype == "float64" else dtype, precision)
        self.slack = NARROW_SLACK if dtype in NARROW else SLACK
        self.answers: dict[str, Answer] = {}

    def ask(self, probes: Iterable[Probe]) -> None:
        """Put all these calls at once; the answers are kept by name."""
        asked = [dataclasses.replace(probe, inputs=self._stored(probe.inputs)) for probe in probes]
        jobs = [
            Job(
                case_id=f"diagnose/{probe.name}",
                dtype=self.dtype,
                inputs=probe.inputs,
                config=dict(probe.config),
                wanted=STAGES,
            )
            for probe in asked
        ]
        for probe, result in zip(asked, self._target.evaluate(jobs), strict=True):
            reason, stages = result.reason, dict(result.arrays) if result.kind == "arrays" else {}
            stages = {name: x for name, x in stages.items() if x.dtype.kind != "c" or name == "output"}
            if stages and (wrong := _wrong(stages["output"], probe)):
                reason, stages = wrong, {}
            repeats = True
            if stages and result.rerun is not None:
                again = np.asarray(result.rerun["output"], np.float64)
                repeats = _apart(again, np.asarray(stages["output"], np.float64)) <= self.slack
            self.answers[probe.name] = Answer(
                probe=probe,
                stages=stages,
                reason=reason,
                refused=result.kind == "refused",
                gone=result.failure in ("crashed", "hung"),
                repeats=repeats,
            )

    def answered(self, names: Iterable[str]) -> list[Answer]:
        """The answers of these probes that have an output."""
        return [self.answers[name] for name in names if self.answers[name].answered]

    def error(self, dialect: Dialect, answer: Answer, *, any_factor: bool = False) -> float:
        """Largest difference between answer and dialect, relative to the largest output; inf beyond any.

        With `any_factor` the dialect's output is first multiplied by what fits best.
        """
        try:
            call = read(dialect, answer.probe.inputs, answer.probe.config)
        except UnreadableError:
            return np.inf
        expected, found = carried_out(call)["output"], answer.output
        if expected.shape != found.shape:
            return np.inf
        seeing = _seeing(call)
        if not np.any(seeing):  # nothing is left that could speak for the dialect
            return np.inf
        expected, found = expected[:, seeing], found[:, seeing]
        if any_factor and np.all(np.isfinite(found)):
            expected = expected * best_factor(expected, found)
        return _apart(found, expected)

    def explains(self, dialect: Dialect, answer: Answer) -> bool:
        """Whether every element of the answer is within its derived limit of the dialect."""
        try:
            call = read(dialect, answer.probe.inputs, answer.probe.config)
        except UnreadableError:
            return False
        said = carried_out(call)
        if said["output"].shape != answer.output.shape or not answer.repeats:
            return False
        seeing = _seeing(call)
        if not np.any(seeing):
            return False
        error = np.abs(answer.output - said["output"])[:, seeing]
        if not np.all(np.isfinite(error)):
            return False
        return bool(np.all(error <= limit(call, said, self.rules)[:, seeing]))

    def _stored(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: cast(value, self.dtype) if np.asarray(value).dtype == np.float64 else value
            for name, value in inputs.items()
        }


def _wrong(output: NDArray[Any], probe: Probe) -> str | None:
    """What is wrong with the shape of an output, if anything."""
    if output.dtype.kind == "c":
        return f"`output` dtype: expected real numbers, got {output.dtype}"
    B, N, H, _ = probe.inputs["q"].shape
    shape = (B, N, H, probe.inputs["v"].shape[3])
    return None if output.shape == shape else f"`output` shape: expected {shape}, got {output.shape}"


def best_factor(expected: Array, found: Array) -> float:
    """The factor by which one output comes nearest to the other."""
    power = float(np.sum(expected**2))
    return float(np.sum(expected * found)) / power if power else 0.0


def _seeing(call: Call) -> NDArray[np.bool_]:
    """Query tokens all of whose virtual rows see a key, (N,): what else gives is no matter of dialects."""
    sees = np.ones(call.q.shape[1], np.bool_)
    blind = ~call.visible.any(axis=2).all(axis=0)
    sees[call.queries.token[blind] - call.queries.token[:1]] = False
    return sees


def _apart(found: Array, expected: Array) -> float:
    """Largest difference relative to the largest value of either."""
    if not np.all(np.isfinite(found)) or not np.all(np.isfinite(expected)):
        return float(np.inf)
    largest = max(np.max(np.abs(expected), initial=0.0), np.max(np.abs(found), initial=0.0))
    return float(np.max(np.abs(found - expected), initial=0.0) / largest) if largest else 0.0
