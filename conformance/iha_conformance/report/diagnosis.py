"""What `iha diagnose` prints and writes; the schema of its JSON is spec/schemas/diagnose.schema.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np
from rich.text import Text

from iha_conformance.diagnose.diagnosis import Diagnosis, Example, Nearest
from iha_conformance.diagnose.dialect import AXES, NUMBERS, ROPE_DETAILS, WITHOUT_COLLAPSE, Dialect, Value
from iha_conformance.diagnose.mending import Plan, plan, spoken
from iha_conformance.report.output import console
from iha_conformance.report.terminal import OFFER_STAGES
from iha_conformance.show import array_as_json, as_plain, render_array

ALIKE_FOR_ONE = ("order", "causal", "window_unit", "rope", "rope_when", "collapse_kind", "collapse_axes")
"""Axes whose values may be the same function where P = 1."""

NEEDED = {"window_unit": "window", "window_bound": "window", "alignment": "N < M", "key_mask": "key_mask"}
"""What a port has to take for an axis to show."""

OF_STAGE: Mapping[str, tuple[str, ...]] = {
    "mixed_q": ("MIX-1", "MIX-4"),
    "mixed_k": ("MIX-2", "MIX-4"),
    "mixed_v": ("MIX-3", "MIX-4"),
    "rotated_q": ("ROPE-1", "POS-1", "POS-2"),
    "rotated_k": ("ROPE-1", "POS-1", "POS-2"),
    "logits": ("LOG-1", "LOG-2", "LOG-3"),
    "lse": ("SOFT-3",),
    "virtual_out": ("SOFT-1", "LIN-1", "OUT-1"),
    "output": ("COL-1", "COL-2"),
}
"""Requirements that a stage follows from, given the ones before it."""


# JSON


def as_json(diagnosis: Diagnosis, *, spec_version: str) -> dict[str, Any]:
    """The diagnosis as plain JSON values; every key is always there."""
    return {
        "spec_version": spec_version,
        "target": dataclasses.asdict(diagnosis.info),
        "dtype": diagnosis.dtype,
        "config": as_plain(dict(diagnosis.config)),
        "matched": diagnosis.matched,
        "canonical": diagnosis.canonical,
        "dialect": {name: _axis_value(name, diagnosis.certain.get(name)) for name in AXES},
        "ambiguous": list(diagnosis.ambiguous),
        "possible": {
            name: [_axis_value(name, value) for value in diagnosis.possible[name]]
            for name in diagnosis.ambiguous
            if len(diagnosis.possible.get(name, ())) > 1
        },
        "first_bad_stage": diagnosis.first_bad_stage,
        "nearest": None if diagnosis.nearest is None else _nearest(diagnosis.nearest),
        "follows": list(diagnosis.follows),
        "ignores": list(diagnosis.ignores),
        "refuses": [dataclasses.asdict(refusal) for refusal in diagnosis.refuses],
        "unexplained": list(diagnosis.unexplained),
        "example": None if diagnosis.example is None else _example(diagnosis.example),
        "calls": diagnosis.calls,
        "notes": list(diagnosis.notes),
        "fix": _fix(plan(diagnosis)),
    }


def _axis_value(axis: str, value: Value | None) -> Value | None:
    """A value as JSON; None for one that the axis does not list, such as a key mask that is ignored."""
    if value is None:
        return None
    if axis in NUMBERS:
        return float(value) if math.isfinite(float(value)) else None
    return value if value in AXES[axis].values else None


def _nearest(nearest: Nearest) -> dict[str, Any]:
    return {
        "dialect": {name: _axis_value(name, value) for name, value in nearest.dialect.axes().items()},
        "error": float(nearest.error) if math.isfinite(nearest.error) else None,
        "agrees": int(nearest.agrees),
        "answered": int(nearest.answered),
    }


def _example(example: Example) -> dict[str, Any]:
    return {
        "stage": example.stage,
        "inputs": {name: array_as_json(_held(value)) for name, value in example.inputs.items()},
        "config": as_plain(dict(example.config)),
        "expected": array_as_json(np.asarray(example.expected)),
        "found": array_as_json(np.asarray(example.found)),
    }


def _held(value: Any) -> Any:
    """An argument as an array or a plain int: an offset may be a number of NumPy."""
    return value if isinstance(value, np.ndarray) and value.ndim else np.asarray(value).item()


def _fix(mending: Plan) -> dict[str, Any] | None:
    if not mending.mendings:
        return None
    return {
        "complete": mending.complete,
        "steps": [
            {"axis": step.axis, "numpy": list(step.numpy), "checkpoint": list(step.checkpoint)}
            for step in mending.steps
        ],
        "without": list(mending.without),
    }


# Text


def print_diagnosis(stream: TextIO | None, diagnosis: Diagnosis, *, spec_version: str, fix: bool) -> None:
    """Print the diagnosis as a review of the port.

    Args:
        stream: where to; normally standard output.
        diagnosis: what was found.
        spec_version: version of the specification.
        fix: whether to print how weights are changed for the port.
    """
    out = console(stream)
    for line in _lines(diagnosis, spec_version, fix):
        out.print(Text(line), soft_wrap=True)


def _lines(diagnosis: Diagnosis, spec_version: str, fix: bool) -> Iterator[str]:
    mending = plan(diagnosis)
    yield from _head(diagnosis, spec_version)
    yield from _agreement(diagnosis)
    yield from _deviations(mending)
    if not diagnosis.matched:
        yield from _astray(diagnosis)
    yield from _ambiguities(diagnosis)
    yield from _manners(diagnosis)
    if fix:
        yield from _fix_lines(mending, diagnosis.matched)
    if diagnosis.notes:
        yield ""
        yield from (f"NOTE {note}" for note in diagnosis.notes)
    yield ""
    yield f"IHA {spec_version}, diagnose: {_verdict(diagnosis)}"


def _head(diagnosis: Diagnosis, spec_version: str) -> Iterator[str]:
    info = diagnosis.info
    yield f"{info.name}: {info.framework} {info.version}, {info.device}, precision {info.precision}"
    config = ", ".join(f"{field}={value!r}" for field, value in diagnosis.config.items())
    collapse = "(H, P)" if diagnosis.per_head else "(H, H, P)"
    yield f"asked in {diagnosis.dtype}, {_calls(diagnosis.calls)} answered; {config}"
    yield f"P = {diagnosis.P} and a collapse of shape {collapse} unless said otherwise"
    yield ""
    yield _summary(diagnosis, spec_version)


def _summary(diagnosis: Diagnosis, spec_version: str) -> str:
    """The verdict in one sentence."""
    if not diagnosis.matched:
        stage = diagnosis.first_bad_stage
        where = "" if stage is None else f": the first stage that is wrong under every one of them is {stage}"
        return f"No dialect of the operation explains what it answers{where}."
    if diagnosis.deviates:
        names = _joined(diagnosis.deviates)
        axes = f"{len(diagnosis.deviates)} of {len(AXES)} axes"
        return (
            f"It speaks a dialect of the operation that deviates from IHA {spec_version} on {axes}: {names}."
        )
    if not diagnosis.canonical:
        return (
            f"It speaks a dialect of the operation that is not that of IHA {spec_version}, in"
            f" {_joined([*diagnosis.excluded, *diagnosis.unexplained] or ['key_mask'])}, though no axis is"
            " sure to deviate."
        )
    left = len(diagnosis.ambiguous)
    told = "all axes are" if not left else f"all {len(AXES) - left} axes that could be told are"
    if diagnosis.ignores:
        return (
            f"It speaks the canonical dialect under the configuration that it was asked with, {told} as IHA"
            f" {spec_version} has them. Otherwise it is wrong, since it ignores {_joined(diagnosis.ignores)}."
        )
    return (
        f"It speaks the canonical dialect: {told} as IHA {spec_version} has them. That is no pass: `iha run`"
        " asks for much more, such as segments, positions, offsets, bad input and accuracy."
    )


def _agreement(diagnosis: Diagnosis) -> Iterator[str]:
    """Axes on which the port is certainly canonical, and fields that it follows."""
    names = [name for name in AXES if name in diagnosis.certain and name not in diagnosis.deviates]
    if names:
        certainly = "" if diagnosis.matched else "certainly "
        yield f"It {certainly}agrees on {', '.join(names)}."
    if diagnosis.follows:
        yield f"It follows the configuration in {', '.join(diagnosis.follows)}."


def _deviations(mending: Plan) -> Iterator[str]:
    """A paragraph for each axis."""
    for one in mending.mendings:
        ids = "".join(f" [{name}]" for name in AXES[one.axis].requirements)
        yield ""
        yield f"DEVIATES {one.axis}{ids}"
        yield f"  port     {one.does}"
        yield f"  SPEC.md  {one.required}"
        yield f"  weights  {one.weights}"
        yield f"  mend     {one.mend}"


def _astray(diagnosis: Diagnosis) -> Iterator[str]:
    """Where nothing matches: what comes nearest, and where the port leaves it."""
    yield ""
    if (near := diagnosis.nearest) is not None:
        canonical = diagnosis.asked.axes()
        differs = [
            f"{name} {_shown(value)}"
            for name, value in near.dialect.axes().items()
            if value != canonical[name]
        ]
        yield f"NEAREST the canonical dialect{' with ' + ', '.join(differs) if differs else ''}"
        error = (
            f"{near.error:.3g} x"
            if math.isfinite(near.error)
            else "beyond any number, by NaN or infinity, for"
        )
        yield (
            f"  it explains {near.agrees} of {near.answered} calls; the largest error is {error} the largest"
            " output of its call"
        )
    if (stage := diagnosis.first_bad_stage) is None:
        yield f"FIRST BAD STAGE unknown: {OFFER_STAGES}"
    else:
        ids = "".join(f" [{name}]" for name in OF_STAGE.get(stage, ()))
        yield f"FIRST BAD STAGE {stage}{ids}"
    if (example := diagnosis.example) is not None:
        yield f"EXAMPLE of {example.stage}, to be checked by hand"
        yield "  " + ", ".join(f"{field}={value!r}" for field, value in example.config.items())
        for name, value in example.inputs.items():
            yield from render_array(name, _held(value)).splitlines()
        yield from render_array(f"expected {example.stage}", np.asarray(example.expected)).splitlines()
        yield from render_array(f"found {example.stage}", np.asarray(example.found)).splitlines()


def _ambiguities(diagnosis: Diagnosis) -> Iterator[str]:
    """Axes without a value, those of one reason on one line."""
    reasons: dict[str, list[str]] = {}
    for name in diagnosis.ambiguous:
        values = diagnosis.possible.get(name, ())
        left = "any" if set(values) == set(AXES[name].values) else " or ".join(map(_shown, values))
        left += ", none of which is canonical" if name in diagnosis.excluded else ""
        reasons.setdefault(_why(name, diagnosis), []).append(f"{name} ({left})" if len(values) > 1 else name)
    if reasons:
        yield ""
    for reason, names in reasons.items():
        yield f"AMBIGUOUS {', '.join(names)}: {reason}"


def _why(axis: str, diagnosis: Diagnosis) -> str:
    """Why an axis has no value; only where a dialect explains all that was asked is that harmless."""
    refused = {refusal.what for refusal in diagnosis.refuses}
    if not diagnosis.matched:
        return "not settled by what it answers"
    if axis in diagnosis.excluded:
        return "it is one of these, and no call that it answered tells which"
    if reason := _no_effect(axis, spoken(diagnosis)):
        return f"{reason}, so every value gives the same results"
    needed = NEEDED.get(axis, "")
    if needed in refused or needed in diagnosis.ignores:
        return f"it {'refuses' if needed in refused else 'ignores'} {needed}, so there is nothing to tell"
    if axis in ALIKE_FOR_ONE and "P > 1" in refused:
        return "with P = 1, which is all that it takes, values give the same results"
    return "no call that it answered tells these apart, so the same outputs come either way"


def _no_effect(axis: str, found: Dialect) -> str | None:
    """Why no value of the axis has an effect in the dialect, if so."""
    if axis in ROPE_DETAILS and found.rope == "none":
        return "nothing is rotated"
    if axis == "rope_when" and found.rope == "token":
        return "rotating all pseudo-heads of a token alike commutes with mixing"
    if axis == "collapse_axes" and found.collapse_kind in WITHOUT_COLLAPSE:
        return "no collapse is read"
    if axis == "alpha_v_axes" and found.values == "unmixed":
        return "alpha_v is not read"
    if axis == "qk_multiplier" and found.qk_norm == "none":
        return "without a QK norm a multiplier counts as scale"
    return None


def _manners(diagnosis: Diagnosis) -> Iterator[str]:
    """What the port refuses, which it may, and what it ignores or fails at, which it may not."""
    if diagnosis.ignores or diagnosis.refuses or diagnosis.unexplained:
        yield ""
    if diagnosis.ignores:
        yield (
            f"IGNORES {', '.join(diagnosis.ignores)}: given, without effect; follow or raise"
            " NotImplementedError [ERR-2], since nobody sees that what is ignored makes the answer wrong"
        )
    if diagnosis.unexplained:
        yield (
            f"UNEXPLAINED {', '.join(diagnosis.unexplained)}: it reacts, but as no dialect does; follow"
            " SPEC.md or raise NotImplementedError"
        )
    for refusal in diagnosis.refuses:
        reason = refusal.reason or "no reason given"
        if refusal.said:
            yield f"REFUSES {refusal.what}, as a port may [ERR-2]: {reason}"
        else:
            yield f"FAILS at {refusal.what}, where a port may raise NotImplementedError [ERR-2]: {reason}"


def _fix_lines(mending: Plan, matched: bool) -> Iterator[str]:
    """Lines of NumPy, in the order of application."""
    yield ""
    if not mending.mendings:
        none = "none needed: canonical weights can be used as they are"
        yield f"FIX {none if matched else 'none: no axis is certain to deviate'}."
        return
    if not mending.steps:
        yield f"FIX none: no weights make up for {_joined(mending.without)}; mend the port."
        return
    if mending.complete:
        yield "FIX for the arguments: after these lines, in this order, the port gives the canonical output"
    elif needed := _needed(mending):
        yield (
            "FIX for the arguments: after these lines, in this order, the port gives the canonical output if"
            f" it takes {needed}, which was not tried"
        )
    elif mending.without:
        yield (
            f"FIX for the arguments, in part: nothing makes up for {_joined(mending.without)}; this, in this"
            " order, does for the other axes"
        )
    else:
        yield "FIX for the arguments, in part: for the axes that are certain, in this order"
    yield "  # NumPy, variables by the names of the arguments, letters as in SPEC.md chapter 1"
    for step in mending.steps:
        yield f"  # {step.axis}"
        yield from (f"  {line}" for line in step.numpy)
    if not any(step.checkpoint for step in mending.steps):
        yield "FIX for a checkpoint: none, only arguments change."
        return
    yield "FIX for a checkpoint of canonical weights, the same; arguments that are no weights are as above"
    yield "  # weights: a dict of arrays, q_proj.weight (H*d, D), k_proj.weight (G*d, D), alpha_q ... by name"
    for step in mending.steps:
        if step.checkpoint:
            yield f"  # {step.axis}"
            yield from (f"  {line}" for line in step.checkpoint)


def _needed(mending: Plan) -> str:
    """What the port has to take besides, where steps make up for every axis, or ""."""
    needs = [step.needs for step in mending.steps if step.needs]
    return _joined(needs) if needs and not mending.without else ""


def _verdict(diagnosis: Diagnosis) -> str:
    """The end of the last line."""
    if not diagnosis.matched:
        stage = diagnosis.first_bad_stage or "unknown, only the output is known to be wrong"
        verdict = f"no dialect: first bad stage {stage}"
    elif not diagnosis.canonical:
        wrong = [*diagnosis.deviates, *diagnosis.excluded]
        verdict = f"a dialect: deviates in {', '.join(wrong)}" if wrong else "no canonical one"
    else:
        verdict = "canonical"
    if diagnosis.ignores:
        verdict += f"; ignores {', '.join(diagnosis.ignores)}"
    if diagnosis.matched and diagnosis.unexplained:
        verdict += f"; unexplained: {', '.join(diagnosis.unexplained)}"
    return verdict


def _joined(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _shown(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _calls(count: int) -> str:
    return f"{count} call" + ("" if count == 1 else "s")
