"""Floating-point formats as the bound needs them: roundoff, spacing, representability, grids.

Everything is computed in float64, of which every other format is a subset. SPEC.md [NUM-1], [NUM-4].
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_core.errors import ArgumentValueError
from iha_core.spec_files import load_toml

Array = NDArray[np.float64]

NO_GRID = np.int64(1 << 20)
"""Grid exponent of zero, which lies on every grid."""

HIGHEST = "highest"
"""The precision class whose products take their operands unrounded ([NUM-8])."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """One floating-point format.

    Attributes:
        name: dtype name.
        bits: bits of the significand, the implicit one included.
        min_exponent, max_exponent: smallest and largest exponent of a normal number.
        gradual_underflow: whether subnormal results must be kept.
    """

    name: str
    bits: int
    min_exponent: int
    max_exponent: int
    gradual_underflow: bool

    @property
    def u(self) -> float:
        """Unit roundoff: relative error of one rounding to nearest."""
        return 2.0**-self.bits

    @property
    def eta(self) -> float:
        """Absolute error of one rounding near zero.

        Half the smallest subnormal number; the smallest normal one where subnormals may be flushed.
        """
        if self.gradual_underflow:
            return max(2.0 ** (self.min_exponent - self.bits), 5e-324)
        return float(2.0**self.min_exponent)

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return (2.0 - 2.0 ** (1 - self.bits)) * 2.0**self.max_exponent

    def spacing(self, x: Array) -> Array:
        """Distance between neighbouring numbers of the format at |x|: one ulp."""
        exponent = np.frexp(x)[1] - 1
        exponent = np.where(x == 0, self.min_exponent, np.maximum(exponent, self.min_exponent))
        return np.asarray(np.ldexp(1.0, exponent - (self.bits - 1)))

    def represents(self, x: Array) -> NDArray[np.bool_]:
        """Whether x is a number of the format that every implementation keeps."""
        with np.errstate(invalid="ignore"):
            fits = (np.abs(x) <= self.largest) & (np.fmod(x, self.spacing(x)) == 0)
        if not self.gradual_underflow:
            fits &= (x == 0) | (np.abs(x) >= 2.0**self.min_exponent)
        return np.asarray(fits)


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What a precision class does to the operands of a sum of products ([NUM-8]).

    Attributes:
        format: its numbers are taken as they are.
        c: roundoff of any other operand.
        parts: how many numbers such an operand is split into.
    """

    format: Format
    c: float
    parts: int

    def hold(self, storage: Format) -> bool:
        """Whether every number of a storage format is taken as it is."""
        ours = self.format
        return (
            ours.bits >= storage.bits
            and ours.max_exponent >= storage.max_exponent
            # The least number of gradual underflow has to be a normal one here.
            and ours.min_exponent <= storage.min_exponent - (storage.bits - 1) * storage.gradual_underflow
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Arithmetic:
    """A storage format, the format that sums are formed in ([NUM-1]), and what products do ([NUM-8]).

    Attributes:
        storage, accumulator: the formats.
        operands: the rounding of operands; None where they are taken as they are.
    """

    storage: Format
    accumulator: Format
    operands: Operands | None = None

    @property
    def u(self) -> float:
        """Unit roundoff of the storage format."""
        return self.storage.u

    @property
    def A(self) -> float:
        """Unit roundoff of the accumulator."""
        return self.accumulator.u


@cache
def tolerances() -> dict[str, Any]:
    """The constants of the bound, from tolerances.toml."""
    return load_toml("tolerances.toml")


def precision_classes() -> tuple[str, ...]:
    """Names of the precision classes ([NUM-8]), the highest first."""
    return (HIGHEST, *tolerances()["precision"])


def arithmetic(dtype: str, precision: str = HIGHEST) -> Arithmetic:
    """The arithmetic of a storage dtype ("float64", "float32", "float16", "bfloat16") in a class.

    Raises:
        ArgumentValueError: no such dtype, or no such precision class.
    """
    known = (
        ("storage", dtype, tuple(tolerances()["formats"])),
        ("precision", precision, precision_classes()),
    )
    for argument, found, names in known:
        if found not in names:
            expected = "one of " + ", ".join(names)
            raise ArgumentValueError(argument, "", expected=expected, found=repr(found))
    return _arithmetic(dtype, precision)


@cache
def _arithmetic(dtype: str, precision: str) -> Arithmetic:
    formats = tolerances()["formats"]
    operands = None
    if precision != HIGHEST and dtype != "float64":  # float64 is multiplied unrounded in every class
        entry = tolerances()["precision"][precision]
        operands = Operands(
            format=_format(precision, entry), c=entry["operand_roundoff"], parts=entry["parts"]
        )
    return Arithmetic(
        storage=_format(dtype, formats[dtype]),
        accumulator=_format(formats[dtype]["accumulator"], formats[formats[dtype]["accumulator"]]),
        operands=operands,
    )


def _format(name: str, entry: dict[str, Any]) -> Format:
    return Format(
        name=name,
        bits=entry["significand_bits"],
        min_exponent=entry["min_exponent"],
        max_exponent=entry["max_exponent"],
        gradual_underflow=entry["gradual_underflow"],
    )


def grid(x: Array) -> NDArray[np.int64]:
    """Exponent of the lowest set bit of x: x is a whole multiple of 2**grid, `NO_GRID` for zero."""
    finite = np.where(np.isfinite(x), x, 0.0)
    significand, exponent = np.frexp(finite)
    integer = np.ldexp(significand, 53).astype(np.int64)
    lowest = np.frexp((integer & -integer).astype(np.float64))[1] - 1
    return np.where(integer == 0, NO_GRID, exponent.astype(np.int64) - 53 + lowest)


def sum_is_exact(term_grid: NDArray[np.int64], magnitude: Array, accumulator: Format) -> NDArray[np.bool_]:
    """Whether a sum comes out exact in any order of summation.

    All terms are multiples of 2**term_grid, and the sum of their absolute values is at most
    2**bits of those units, so every partial sum is a number of the accumulator ([NUM-5]).
    """
    no_terms = term_grid >= NO_GRID
    with np.errstate(invalid="ignore", over="ignore"):
        unit = np.ldexp(1.0, term_grid.astype(np.int32))
        fits = magnitude <= unit * 2.0**accumulator.bits
    return np.asarray(no_terms | fits)
