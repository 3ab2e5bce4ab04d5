"""Error of a sum of products of two quantities that may both be off: the step that all others are made of.

SPEC.md 6.2 and 9.2, in the form of `worst`: exact values and bounds of their errors in, the same out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from iha_core.bounds.formats import NO_GRID, Arithmetic, Array, Format, grid, sum_is_exact, tolerances
from iha_core.bounds.worst import Operand, Quantity, kept, root_is_power_of_two

LARGEST_STEP = 2**22
"""Numbers in memory at once while the least grid of a sum is found."""


def contracted(
    equation: str,
    x: Operand,
    y: Operand,
    value: Array,
    arithmetic: Arithmetic,
    *,
    scale: float = 1.0,
    addend: Array | None = None,
    further: Array | float = 0.0,
    storage: Format | None = None,
) -> Quantity:
    """A sum of products formed in the accumulator and rounded once.

    Args:
        equation: as of einsum, with two operands and no broadcasting.
        x, y: the operands.
        value: the exact sum.
        arithmetic: formats.
        scale: factor of the sum, with the two roundings of (16) where there is one.
        addend: an exact further term, broadcast to `value`; a bias.
        further: error of the sum beside that of its operands and of its own additions.
        storage: format that the sum is rounded to; None for the storage format.

    Returns:
        The sum with its error, of the shape that the equation gives.
    """
    magnitude = scale * np.einsum(equation, x.absolute, y.absolute)
    terms = np.einsum(equation, x.count, y.count)
    propagated = scale * (
        np.einsum(equation, x.absolute, y.error) + np.einsum(equation, x.error, y.absolute + y.error)
    )
    propagated = propagated + further
    term_grid = least_grid(equation, x.grid, y.grid)
    if addend is not None:
        magnitude = magnitude + np.abs(addend)
        terms = terms + (addend != 0)
        term_grid = np.minimum(term_grid, grid(addend))
    exact = sum_is_exact(term_grid, magnitude / scale, arithmetic.accumulator)
    exact &= root_is_power_of_two(scale) | (magnitude == 0)
    scaling = 0.0 if scale == 1.0 else tolerances()["operations"]["logit_scaling"] * np.abs(value)
    # Terms that are off lie on no grid, so their sum is rounded even where the exact one would not be.
    spared = exact & (propagated == 0)
    summed = np.where(spared, 0.0, arithmetic.A * (terms * magnitude + scaling))
    if storage is not None:
        arithmetic = dataclasses.replace(arithmetic, storage=storage)
    return kept(value, propagated, summed, exact, magnitude, terms, arithmetic)


def least_grid(equation: str, x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Finest grid of the terms of each sum: what einsum is with (min, +) in place of (+, ·)."""
    inputs, result = equation.split("->")
    of_x, of_y = inputs.split(",")
    axes = "".join(dict.fromkeys(result + of_x + of_y))  # those that are summed come last
    sizes = dict(zip(of_x, x.shape, strict=True)) | dict(zip(of_y, y.shape, strict=True))
    least = np.full([sizes[axis] for axis in result], NO_GRID)
    if 0 in sizes.values():
        return least
    x, y = _aligned(x, of_x, axes), _aligned(y, of_y, axes)
    rows = sizes[axes[0]]
    step = max(1, LARGEST_STEP * rows // math.prod(sizes.values()))
    for start in range(0, rows, step):  # a few rows of the first axis at a time
        part = slice(start, start + step)
        both = (x if len(x) == 1 else x[part]) + (y if len(y) == 1 else y[part])
        least[part] = np.min(both, axis=tuple(range(len(result), len(axes))))
    return least


def _aligned(x: NDArray[np.int64], of_x: str, axes: str) -> NDArray[np.int64]:
    """x with its axes in a given order, and of length 1 along those that it lacks."""
    present = [axis for axis in axes if axis in of_x]
    x = np.transpose(x, [of_x.index(axis) for axis in present])
    return np.expand_dims(x, [i for i, axis in enumerate(axes) if axis not in of_x])
