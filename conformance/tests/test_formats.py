"""Formats against ml_dtypes, grids against fractions, and exact sums against every order of summation."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iha_conformance.corpus.streams import cast
from iha_core.bounds import Format, arithmetic
from iha_core.bounds.formats import NO_GRID, grid, sum_is_exact

DTYPES = ("float64", "float32", "float16", "bfloat16")
FLUSHED = ("float32", "bfloat16")
"""Formats whose subnormal numbers an implementation may flush to zero."""

Array = npt.NDArray[np.float64]


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name).type


def storage(name: str) -> Format:
    return arithmetic(name).storage


def every_number(name: str) -> Array:
    """All finite numbers of a 16-bit format."""
    largest = int(np.array(ml_dtypes.finfo(numpy_dtype(name)).max).view(np.uint16))
    positive = np.arange(largest + 1, dtype=np.uint16).view(numpy_dtype(name)).astype(np.float64)
    return np.concatenate([-positive[:0:-1], positive])


@st.composite
def numbers(draw: st.DrawFn, name: str) -> float:
    """Finite float64 numbers, many of them in or near a format."""
    form = storage(name)
    if draw(st.booleans()):
        return draw(st.floats(allow_nan=False, allow_infinity=False))
    # A few more bits than the format has, at any exponent of it or just outside.
    whole = draw(st.integers(-(2 ** min(53, form.bits + 2)), 2 ** min(53, form.bits + 2)))
    low, high = form.min_exponent - form.bits - 1, form.max_exponent - form.bits + 1
    return math.ldexp(whole, draw(st.integers(low, min(high, 1023 - 53))))


# Constants


@pytest.mark.parametrize("name", DTYPES)
def test_constants_are_those_of_the_dtype(name: str) -> None:
    info, form = ml_dtypes.finfo(numpy_dtype(name)), storage(name)
    assert form.bits == info.nmant + 1
    assert form.u == float(info.eps) / 2
    assert form.min_exponent == info.minexp
    assert form.largest == float(info.max)
    smallest = float(info.smallest_normal) if name in FLUSHED else float(info.smallest_subnormal)
    # Half of float64's smallest number is no number of float64.
    assert form.eta == (smallest if name in FLUSHED else max(smallest / 2, 5e-324))
    assert form.gradual_underflow == (name not in FLUSHED)


@pytest.mark.requirement("NUM-1")
@pytest.mark.parametrize("name", DTYPES)
def test_accumulator_is_float32_or_wider(name: str) -> None:
    rules = arithmetic(name)
    assert rules.accumulator.name == ("float64" if name == "float64" else "float32")
    assert rules.accumulator.u == rules.A
    assert rules.accumulator.bits == (53 if name == "float64" else 24)
    assert rules.u == storage(name).u


# Spacing and representability


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_spacing_is_the_gap_to_the_next_number(name: str) -> None:
    values = every_number(name)
    gaps = np.diff(values)
    positive = values[:-1] >= 0
    np.testing.assert_array_equal(storage(name).spacing(values[:-1])[positive], gaps[positive])
    np.testing.assert_array_equal(storage(name).spacing(-values), storage(name).spacing(values))


@settings(deadline=None)
@given(x=st.floats(allow_nan=False, allow_infinity=False, width=32))
@pytest.mark.parametrize("name", ["float64", "float32"])
def test_spacing_is_that_of_numpy(name: str, x: float) -> None:
    if abs(x) < storage(name).largest:  # the next number is finite
        assert storage(name).spacing(np.array(x)) == np.spacing(np.abs(numpy_dtype(name)(x)))


@pytest.mark.parametrize("name", DTYPES)
def test_represents_exactly_what_casting_keeps(name: str) -> None:
    @settings(max_examples=400, deadline=None)
    @given(numbers(name))
    def check(x: float) -> None:
        with np.errstate(over="ignore", under="ignore"):
            kept = float(cast(x, name)) == x
        # A subnormal number that may be flushed is not kept by every implementation.
        subnormal = 0 < abs(x) < 2.0 ** storage(name).min_exponent
        assert storage(name).represents(np.array(x)) == (kept and not (subnormal and name in FLUSHED))

    check()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_represents_every_number_and_no_midpoint(name: str) -> None:
    form, values = storage(name), every_number(name)
    subnormal = (values != 0) & (np.abs(values) < 2.0**form.min_exponent)
    np.testing.assert_array_equal(form.represents(values), ~subnormal | form.gradual_underflow)
    assert not np.any(form.represents((values[1:] + values[:-1]) / 2)[values[1:] > 0])


@pytest.mark.parametrize("name", DTYPES)
def test_nothing_beyond_the_largest_is_represented(name: str) -> None:
    largest = storage(name).largest
    inside = np.array([largest, -largest, 0.0, -0.0])
    outside = np.array([np.inf, -np.inf, np.nan])
    assert storage(name).represents(inside).all()
    assert not storage(name).represents(outside).any()
    if name != "float64":
        assert not storage(name).represents(np.array(2 * largest))


# Grids


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_grid_is_the_lowest_set_bit(x: float) -> None:
    exponent = int(grid(np.array([x]))[0])
    if x == 0:
        assert exponent == NO_GRID
        return
    units = Fraction(x) / Fraction(2) ** exponent
    assert units.denominator == 1
    assert units.numerator % 2 == 1


def test_grid_of_what_is_not_finite_is_that_of_zero() -> None:
    assert np.all(grid(np.array([np.nan, np.inf, -np.inf])) == NO_GRID)


# Exact sums


def in_float32(terms: Array) -> np.float32:
    total = np.float32(0)
    for term in terms.astype(np.float32):
        total = np.float32(total + term)
    return total


def says_exact(terms: Array) -> bool:
    return bool(sum_is_exact(grid(terms).min(), np.abs(terms).sum(), storage("float32")))


@pytest.mark.requirement("NUM-5")
@settings(max_examples=300, deadline=None)
@given(
    whole=st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=9),
    shrink=st.integers(0, 5),
    exponent=st.integers(-40, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sum_said_to_be_exact_is_so_in_every_order(
    whole: list[int], shrink: int, exponent: int, seed: int
) -> None:
    terms = np.array([math.ldexp(number >> shrink, exponent) for number in whole])
    if not says_exact(terms):
        return
    exact = sum(map(Fraction, terms), Fraction(0))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        assert Fraction(float(in_float32(rng.permutation(terms)))) == exact


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_sums_that_depend_on_the_order_are_never_said_to_be_exact(count: int) -> None:
    rng = np.random.default_rng(count)
    said, order_matters = [], []
    for _ in range(600):
        size = 2.0 ** rng.integers(14, 25)
        terms = np.rint(rng.uniform(-size, size, count)).astype(np.float32).astype(np.float64)
        exact = math.fsum(terms)
        sums = [float(in_float32(rng.permutation(terms))) for _ in range(12)]
        said.append(says_exact(terms))
        order_matters.append(any(found != exact for found in sums))
    assert not np.any(np.array(said) & np.array(order_matters))
    assert np.any(order_matters)
    assert np.any(said)


@pytest.mark.requirement("NUM-5")
def test_the_limit_of_an_exact_sum() -> None:
    """2**24 units fit and one more does not: 2**24 + 1 is no float32."""
    assert says_exact(np.array([2.0**24 - 1, 1.0]))
    assert not says_exact(np.array([2.0**24, 1.0]))
    # Partial sums count, not only the result.
    assert not says_exact(np.array([2.0**24, 1.0, -(2.0**24)]))
    assert says_exact(np.array([0.0, 0.0]))
    assert says_exact(np.array([2.0**-30]))
