"""The one comparator: an array against exact values and a limit for each element."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_core.bounds import arithmetic
from iha_core.validation import FLOAT_DTYPES, dtype_name

AXES = {
    "mixed_q": "bthd",
    "mixed_k": "bshd",
    "mixed_v": "bshe",
    "rotated_q": "bthd",
    "rotated_k": "bshd",
    "logits": "bhts",
    "lse": "bht",
    "virtual_out": "bthe",
    "output": "bnhe",
    "gradient of q": "bnhd",
    "gradient of k": "bmgd",
    "gradient of v": "bmge",
    "gradient of alpha_q": "ghp",
    "gradient of alpha_k": "ghp",
    "gradient of alpha_v": "ghp",
    "gradient of collapse": "ihp",
}
"""Axes of each stage, and of each gradient, in the letters of SPEC.md."""

FEWEST_DIGITS, MOST_DIGITS = 6, 17
"""Significant digits of a number in a reason; 17 tell any two float64 apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of one comparison.

    Attributes:
        passed: whether shape, dtype, finiteness and every value are as they must be.
        ratio: worst error divided by its limit; None where an error is not finite, or nothing could
            be compared.
        reason: one line about the worst element, None where all is well.
        about: what was compared, where that is not a stage by its elements.
    """

    passed: bool
    ratio: float | None
    reason: str | None = None
    about: str | None = None


def compare(
    stage: str, found: Any, exact: NDArray[np.float64], limit: NDArray[np.float64], *, storage: str
) -> Comparison:
    """Hold an array to exact values.

    Args:
        stage: name of the stage or gradient; it decides the names of the axes in the reason.
        found: the array to judge, of the storage dtype or a wider one.
        exact: values of the reference; NaN and infinities must be met as they are.
        limit: largest allowed error of each element; inf where nothing is compared.
        storage: storage dtype of the case.
    """
    if not isinstance(found, np.ndarray):
        return Comparison(False, None, f"`{stage}`: expected an array, got {type(found).__name__}")
    if found.shape != exact.shape:
        axes = ", ".join(_axes(stage, exact.ndim))
        return Comparison(
            False, None, f"`{stage}` shape: expected ({axes}) = {exact.shape}, got {found.shape}"
        )
    needed = "float32" if stage in ("logits", "lse") and storage != "float64" else storage
    if not _holds(dtype_name(found), needed):
        return Comparison(
            False, None, f"`{stage}` dtype: expected {needed} or wider, got {dtype_name(found)}"
        )

    values = found.astype(np.float64)
    compared = limit != np.inf  # NaN where the exact value is: it must be met
    finite = np.isfinite(exact)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(values - exact)
    same_special = np.where(np.isnan(exact), np.isnan(values), values == exact)
    right_kind = np.where(finite, np.isfinite(values), same_special)
    wrong_kind = compared & ~right_kind
    if np.any(wrong_kind):
        index = _first(wrong_kind)
        return Comparison(
            False,
            None,
            f"`{stage}`{_where(stage, index)}: {_both(exact[index], values[index])} ({_count(wrong_kind)})",
        )
    judged = compared & finite
    if not np.any(judged):
        return Comparison(True, 0.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(judged & (error > 0), error / limit, 0.0)
    worst = float(np.max(ratio))
    if worst <= 1:
        return Comparison(True, worst)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    reason = (
        f"`{stage}`{_where(stage, index)}: {_both(exact[index], values[index])};"
        f" the error {error[index]:.2g} is {worst:.3g} x its limit {limit[index]:.2g} ({_count(ratio > 1)})"
    )
    return Comparison(False, worst if np.isfinite(worst) else None, reason)


def _axes(stage: str, count: int) -> str:
    """Letters of the axes; a per-head collapse has one axis less, h in place of i and h."""
    axes = AXES[stage]
    return axes if len(axes) == count else axes[1:]


def _holds(dtype: str, needed: str) -> bool:
    """Whether every number of one dtype is a number of the other."""
    if dtype not in FLOAT_DTYPES:
        return False
    wide, narrow = arithmetic(dtype).storage, arithmetic(needed).storage
    return wide.bits >= narrow.bits and wide.max_exponent >= narrow.max_exponent


def _both(exact: float, found: float) -> str:
    """Two numbers that differ, with as many digits as it takes to see that they do."""
    for digits in range(FEWEST_DIGITS, MOST_DIGITS + 1):
        texts = f"{exact:.{digits}g}", f"{found:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return f"expected {texts[0]}, got {texts[1]}"


def _first(wrong: NDArray[np.bool_]) -> tuple[Any, ...]:
    return tuple(np.argwhere(wrong)[0])


def _where(stage: str, index: tuple[Any, ...]) -> str:
    return (
        "["
        + ", ".join(f"{axis}={int(i)}" for axis, i in zip(_axes(stage, len(index)), index, strict=True))
        + "]"
    )


def _count(wrong: NDArray[np.bool_]) -> str:
    return f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong"
