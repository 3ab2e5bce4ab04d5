"""What a self-test finds, and what speaks against the suite in it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from iha_conformance.power.must_bind import FACTOR, Bound

HALF = 0.5
"""Largest ratio, of an error to its limit, that anything honest may have."""

CAUGHT = 2.0
"""Least ratio that every mutant has to reach in some case."""

SEPARATION = 4.0
"""Least quotient of the smallest mutant maximum and the largest honest maximum."""

FEWEST_HONEST = 12
"""Honest implementations with pairwise different bits, in every dtype."""

FEWEST_MUTANTS = 80

Digests = Mapping[str, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found of one implementation in one dtype, over some cases.

    Attributes:
        ratios: largest error divided by its limit, by family.
        digests: of the output's bits, by case, for honest implementations.
    """

    ratios: Mapping[str, float]
    digests: Digests = dataclasses.field(default_factory=dict)

    @property
    def largest(self) -> float:
        """Over all families."""
        return max(self.ratios.values(), default=0.0)

    def with_more(self, other: Measured) -> Measured:
        """Both, of different cases."""
        keys = {*self.ratios, *other.ratios}
        ratios = {key: max(self.ratios.get(key, 0.0), other.ratios.get(key, 0.0)) for key in keys}
        return Measured(ratios=ratios, digests={**self.digests, **other.digests})


Table = Mapping[str, Mapping[str, Measured]]
"""By name of the implementation, then by dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a self-test finds.

    Attributes:
        dtypes: those that were run, in the order of reports.
        honest, mutants: what was measured. A mutant's ratio in a family is that of the rounding that hides it
            better, if both reach `CAUGHT`, else of one that does not.
        must_bind: by dtype.
    """

    dtypes: tuple[str, ...]
    honest: Table
    mutants: Table
    must_bind: Mapping[str, Bound]

    def honest_max(self, dtype: str) -> float:
        """The largest ratio of an honest implementation."""
        return max((of[dtype].largest for of in self.honest.values() if dtype in of), default=math.inf)

    def mutant_min(self, dtype: str) -> float:
        """The smallest of the mutants' largest ratios."""
        return min((of[dtype].largest for of in self.mutants.values() if dtype in of), default=0.0)

    def separation(self, dtype: str) -> float:
        """Smallest mutant maximum divided by largest honest maximum."""
        honest = self.honest_max(dtype)
        return self.mutant_min(dtype) / honest if honest else math.inf

    def survivors(self, dtype: str) -> list[str]:
        """Mutants that no case catches."""
        return [name for name, of in self.mutants.items() if dtype in of and not of[dtype].largest >= CAUGHT]

    def distinct(self, dtype: str) -> int:
        """How many honest implementations differ from all before them in the bits of some output."""
        kept: list[Digests] = []
        for of in self.honest.values():
            if dtype in of and all(_differ(of[dtype].digests, other) for other in kept):
                kept.append(of[dtype].digests)
        return len(kept)

    def faults(self) -> Iterator[str]:
        """What speaks against the suite, a line each; nothing if it is as it should be."""
        for dtype in self.dtypes:
            for name, of in self.honest.items():
                if dtype in of and not of[dtype].largest <= HALF:
                    largest = of[dtype].largest
                    yield f"{dtype}: honest {name!r} reaches {largest:.3g} of a limit, over {HALF:g}"
            for name in self.survivors(dtype):
                largest = self.mutants[name][dtype].largest
                yield f"{dtype}: mutant {name!r} survives, {largest:.3g} of a limit at most, under {CAUGHT:g}"
            if not self.separation(dtype) >= SEPARATION:
                yield f"{dtype}: separation {self.separation(dtype):.3g}, expected at least {SEPARATION:g}"
            if self.distinct(dtype) < FEWEST_HONEST:
                yield (
                    f"{dtype}: expected at least {FEWEST_HONEST} honest implementations with different bits,"
                    f" found {self.distinct(dtype)}"
                )
            for item in self.must_bind[dtype].unbound:
                yield f"{dtype}: {item} moves no output by {FACTOR:g} limits"
        if len(self.mutants) < FEWEST_MUTANTS:
            yield f"expected at least {FEWEST_MUTANTS} mutants, found {len(self.mutants)}"


def digest(output: np.ndarray[Any, Any]) -> bytes:
    """Of the bits of an output."""
    return hashlib.sha256(output.tobytes()).digest()


def _differ(ours: Digests, theirs: Digests) -> bool:
    return any(digest != theirs[key] for key, digest in ours.items() if key in theirs)
