"""From a result to a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.cases import Case
from iha_conformance.judge.comparator import Comparison, compare
from iha_conformance.judge.expectation import Expectation
from iha_conformance.protocol import DIFFERS, Result, Verdict
from iha_core.bounds import Companion
from iha_core.gradient import GRADIENTS
from iha_core.reference import STAGES
from iha_core.validation import FLOAT_DTYPES, dtype_name


def judge(case: Case, dtype: str, expectation: Expectation | None, result: Result) -> Verdict:
    """Say what a result is worth.

    Args:
        case: the case that was run.
        dtype: the storage dtype it was run in.
        expectation: what `expect` says of it.
        result: what the target gave.

    Returns:
        The verdict. Its stage is the first one that is wrong, in the order of SPEC.md chapter 4, so that a
        fault is named where it starts; its ratio is the worst of all that was compared.
    """
    if result.kind == "refused":
        return Verdict(status="refused", reason=result.reason)
    if result.kind == "not_applicable":
        return Verdict(status="not_applicable", reason=result.reason)
    if case.invalid is not None:
        return _refusal(case, result)
    if result.kind == "failed":
        return Verdict(status="failed", reason=f"{result.failure}: {result.reason}")
    assert expectation is not None  # only cases of bad input have none
    return _values(case, dtype, expectation, result)


def _values(case: Case, dtype: str, expectation: Expectation, result: Result) -> Verdict:
    is_gradient = case.operation == "gradient"
    known = GRADIENTS if is_gradient else STAGES
    unknown = sorted(set(result.arrays) - set(known))
    if unknown:
        what = "gradient" if is_gradient else "stage"
        return Verdict(
            status="failed",
            reason=f"unknown {what} {unknown[0]!r}: expected names among {', '.join(known)}",
        )
    for name in known if is_gradient else ("output",):
        if name not in result.arrays:
            label = _label(case, name)
            return Verdict(status="failed", stage=label, reason=f"missing: no `{label}` among the results")
    compared = list(_comparisons(case, dtype, expectation, result))
    finite = [comparison.ratio for _, comparison in compared if comparison.ratio is not None]
    worst = max(finite) if len(finite) == len(compared) else None
    for stage, comparison in compared:
        if not comparison.passed:
            reason = f"{comparison.reason}{_worse_elsewhere(comparison, compared)}"
            if is_gradient:
                reason += _which(stage, compared)
            return Verdict(status="failed", ratio=worst, stage=stage, reason=reason)
    note = DIFFERS if result.repeatable is False else None
    return Verdict(status="passed", ratio=worst, reason=note)


def _worse_elsewhere(first: Comparison, compared: Sequence[tuple[str, Comparison]]) -> str:
    """Where the worst ratio is, if not where the first fault is: the reason gives the ratio there."""
    if first.ratio is None:
        return ""
    for stage, comparison in compared:
        if comparison.ratio is None:
            return f"; `{stage}` is wrong beyond any number"
    stage, worst = max(compared, key=lambda item: item[1].ratio or 0.0)
    if worst is first or worst.ratio == first.ratio:
        return ""
    return f"; the worst ratio, {worst.ratio:.3g}, is that of {worst.about or f'`{stage}`'}"


GRADIENT_OF = {
    **dict.fromkeys(("q", "k", "v"), "GRAD-6"),
    **dict.fromkeys(("alpha_q", "alpha_k", "alpha_v"), "GRAD-7"),
    "collapse": "GRAD-1",
}
"""Requirement that says what the gradient of an argument is."""


def _which(first: str, compared: Sequence[tuple[str, Comparison]]) -> str:
    """The requirement of the first wrong gradient, and which are wrong: where a fault is, these tell best."""
    name = {label: label.rpartition(" ")[2] for label, _ in compared}
    wrong = [name[label] for label, comparison in compared if not comparison.passed]
    right = [name[label] for label, comparison in compared if comparison.passed]
    requirement = GRADIENT_OF[name[first]]
    return f" [{requirement}]; wrong: {', '.join(wrong)}; right: {', '.join(right) or 'none'}"


def _label(case: Case, name: str) -> str:
    """Name of a result in a report: of a stage as it is; a gradient is not its argument."""
    return f"gradient of {name}" if case.operation == "gradient" else name


def _comparisons(
    case: Case, dtype: str, expectation: Expectation, result: Result
) -> Iterator[tuple[str, Comparison]]:
    limits = expectation.limits
    for name, limit in limits.limits.items():
        if name in result.arrays:
            label, storage = _label(case, name), expectation.dtypes.get(name, dtype)
            yield label, compare(label, result.arrays[name], limits.stages[name], limit, storage=storage)
    if not limits.companions:
        return
    output = result.arrays["output"]
    judged = output.shape == limits.stages["output"].shape and dtype_name(output) in FLOAT_DTYPES
    if judged:
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.asarray(output).astype(np.float64) - limits.stages["output"]
        if np.all(np.isfinite(error)):
            for companion in limits.companions:
                yield "output", _companion(companion, error)


def _companion(companion: Companion, error: NDArray[np.float64]) -> Comparison:
    measured = companion.measure(error)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(measured > 0, measured / companion.limit, 0.0)
    worst = float(np.max(ratio))
    about = f"the {companion.kind} of the output's error"
    if worst <= 1:
        return Comparison(True, worst, about=about)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    where = f"[b={int(index[0])}, h={int(index[1])}]" if index else ""
    reason = (
        f"`output` {companion.kind} of the error{where}: {measured[index]:.2g} is {worst:.3g} x its limit"
        f" {companion.limit[index]:.2g}; every element may be within its own"
    )
    return Comparison(False, worst if np.isfinite(worst) else None, reason, about)


def _refusal(case: Case, result: Result) -> Verdict:
    """Judge a case of bad input: the right class of error, and the argument by name ([ERR-1])."""
    assert case.invalid is not None
    error, argument = case.invalid.error, case.invalid.argument
    expected = f"expected a {error} that names `{argument}`"
    if result.kind != "failed":
        return Verdict(status="failed", reason=f"{expected}, but the input was accepted")
    found = f"{result.failure}: {result.reason}"
    if result.failure != "raised" or error not in result.error_types:
        return Verdict(status="failed", reason=f"{expected}, got {found}")
    if not re.search(rf"(?<![A-Za-z0-9_]){re.escape(argument)}(?![A-Za-z0-9_])", result.reason or ""):
        return Verdict(status="failed", reason=f"{expected}, got {found}")
    return Verdict(status="passed")
