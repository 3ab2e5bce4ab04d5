"""The numbers of a dialect, read from answers: the scale of the logits and the base of the rotation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from iha_conformance.diagnose.asking import Answer, Asker, best_factor
from iha_conformance.diagnose.dialect import Dialect, Scale
from iha_conformance.diagnose.model import UnreadableError, speak

SCALES = np.geomspace(1e-5, 1e2, 85)
THETAS = np.geomspace(1.5, 1e9, 48)
"""Numbers tried before the best of them is refined."""

GOLDEN = (math.sqrt(5) - 1) / 2

MOST_DIGITS = 6
"""A number of fewer digits is taken for the one meant, where it is within what can be told."""

DOUBT = 8.0
"""Standard deviations within which a number may be another one."""


NORM_DOUBT = 1e-4
"""What a norm leaves open of the scale: it may add a little to the mean square."""

UNFELT = 1e-9
"""Derivative of the outputs by the logarithm of a number that has no effect."""


def fit_scale(asker: Asker, dialect: Dialect, answers: Sequence[Answer]) -> Dialect:
    """The dialect with the scale that fits the answers best."""
    if dialect.normalisation == "none":  # outputs are proportional to it
        dialect = dialect.having(scale=Scale(1.0, 0.0))
        expected = np.concatenate([_output(dialect, answer) for answer in answers])
        found = np.concatenate([answer.output.ravel() for answer in answers])
        factor = best_factor(expected, found)
        return dialect.having(scale=Scale(factor if math.isfinite(factor) and factor > 0 else 1.0, 0.0))
    return _best(asker, lambda s: dialect.having(scale=Scale(s, 0.0)), SCALES, answers)


def fit_theta(asker: Asker, dialect: Dialect, answers: Sequence[Answer]) -> Dialect:
    """The dialect with the base of the rotation that fits the answers best."""
    return _best(asker, lambda theta: dialect.having(rope_theta=theta), THETAS, answers)


def _best(
    asker: Asker, having: Callable[[float], Dialect], numbers: Any, answers: Sequence[Answer]
) -> Dialect:
    """The best of the numbers, refined by golden sections between its neighbours."""
    if not any(np.any(answer.output) for answer in answers):  # zeros fit none better than another
        return having(float(numbers[len(numbers) // 2]))

    def error(number: float) -> float:
        return max(asker.error(having(number), answer) for answer in answers)

    errors = [error(float(number)) for number in numbers]
    best = int(np.argmin(errors))
    low, high = (math.log(numbers[i]) for i in (max(best - 1, 0), min(best + 1, len(numbers) - 1)))
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = error(math.exp(left)), error(math.exp(right))
    while high - low > 1e-3:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = error(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = error(math.exp(right))
    return having(math.exp((low + high) / 2))


def refine(asker: Asker, dialect: Dialect, answers: Sequence[Answer], meant: Dialect) -> Dialect:
    """Scale and base of the rotation by least squares over all these answers, as plain numbers.

    Args:
        asker: whose answers they are.
        dialect: right on every other axis.
        answers: all with outputs.
        meant: the dialect whose numbers are preferred wherever the answers leave them open.
    """
    dialect = polished(dialect, answers)
    least = max(4 * asker.rules.u, 0.0 if dialect.qk_norm == "none" else NORM_DOUBT)
    scale, theta = (max(x, least) for x in doubts(dialect, answers))
    factor = _meant(dialect.scale.factor, scale, _factor(meant, dialect.scale.power))
    return dialect.having(
        scale=Scale(factor, dialect.scale.power),
        rope_theta=_meant(dialect.rope_theta, theta, meant.rope_theta),
    )


def polished(dialect: Dialect, answers: Sequence[Answer]) -> Dialect:
    """The dialect with both numbers moved to where these answers fit best, from a start near that."""
    for _ in range(6):
        found = _step(dialect, answers)
        if found is None:
            return dialect
        dialect = _moved(dialect, found[0])
        if np.max(np.abs(found[0])) < 1e-13:
            break
    return dialect


def doubts(dialect: Dialect, answers: Sequence[Answer]) -> tuple[float, float]:
    """By which factor, less 1, scale and base of the rotation may be others; inf where nothing says."""
    found = _step(dialect, answers)
    if found is None:
        return math.inf, math.inf
    scale, theta = (DOUBT * float(x) if math.isfinite(x) else math.inf for x in found[1])
    return scale, theta


def _factor(meant: Dialect, power: float) -> float | None:
    return meant.scale.factor if meant.scale.power == power else None


def _moved(dialect: Dialect, move: Any) -> Dialect:
    scale = dialect.scale
    factor, theta = (math.exp(min(max(float(x), -1.0), 1.0)) for x in move)
    return dialect.having(
        scale=dataclasses.replace(scale, factor=scale.factor * factor),
        rope_theta=min(max(dialect.rope_theta * theta, 1e-3), 1e15),
    )


def _step(dialect: Dialect, answers: Sequence[Answer]) -> tuple[Any, Any] | None:
    """One step of Gauss and Newton in the logarithms of both numbers, and what they are uncertain by."""
    h = 1e-5
    now = _outputs(dialect, answers)
    if now is None:
        return None
    found = np.concatenate([_relative(answer.output, answer) for answer in answers])
    columns = []
    for move in ((h, 0.0), (0.0, h)):
        ahead, behind = (_outputs(_moved(dialect, np.multiply(move, way)), answers) for way in (1, -1))
        if ahead is None or behind is None:
            return None
        columns.append((ahead - behind) / (2 * h))
    slopes, rest = np.stack(columns, axis=1), found - now
    if not np.all(np.isfinite(slopes)) or not np.all(np.isfinite(rest)):
        return None
    felt = np.sqrt(np.sum(slopes**2, axis=0))
    without = felt <= UNFELT  # a number without effect stays as it is
    felt = np.where(without, np.inf, felt)
    move = np.linalg.lstsq(slopes / felt, rest, rcond=None)[0] / felt
    noise = float(np.sqrt(np.mean((rest - slopes @ move) ** 2)))
    return move, np.where(without, np.inf, noise / felt)


def _outputs(dialect: Dialect, answers: Sequence[Answer]) -> Any | None:
    try:
        return np.concatenate([_relative(_output(dialect, answer), answer) for answer in answers])
    except UnreadableError:
        return None


def _output(dialect: Dialect, answer: Answer) -> Any:
    return speak(dialect, answer.probe.inputs, answer.probe.config)["output"].ravel()


def _relative(output: Any, answer: Answer) -> Any:
    return np.ravel(output) / max(float(np.max(np.abs(answer.output), initial=0.0)), 1e-30)


def _meant(number: float, doubt: float, preferred: float | None) -> float:
    """The preferred number, or the one of fewest digits, that is this one within the doubt."""
    plain = [float(f"{number:.{digits}g}") for digits in range(1, MOST_DIGITS + 1)]
    for candidate in ([] if preferred is None else [preferred]) + plain:
        if abs(candidate / number - 1) <= doubt:
            return candidate
    return number
