"""What a diagnosis says; `report.diagnosis` prints it and writes it as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.diagnose.dialect import AXES, Dialect, Value
from iha_conformance.protocol import TargetInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
    """The dialect that comes nearest to a port that speaks none.

    Attributes:
        dialect: a value on every axis.
        error: largest error of the port's outputs against it, relative to the largest output of the call.
        agrees, answered: calls whose outputs it explains, of those that were answered.
    """

    dialect: Dialect
    error: float
    agrees: int
    answered: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A small input on which a stage leaves every dialect.

    Attributes:
        stage: the stage that is wrong.
        inputs: arguments by name.
        config: all fields of the configuration.
        expected: the stage as the nearest dialect has it, formed from what the port gave before it.
        found: the stage as the port gave it.
    """

    stage: str
    inputs: Mapping[str, NDArray[Any]]
    config: Mapping[str, Any]
    expected: NDArray[np.float64]
    found: NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that a port does not take.

    Attributes:
        what: "window", "G < H", "P > 1" ...
        reason: what it said, or what was wrong with what it gave.
        said: whether it said so as a port may ([ERR-2]), and did not just fail.
    """

    what: str
    reason: str
    said: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Which dialect a port speaks.

    Attributes:
        info: who it is.
        dtype: storage dtype of the calls.
        config: the configuration that it was asked with, all fields; what is canonical follows from it.
        asked: the canonical dialect under that configuration.
        P: pseudo-heads of most calls.
        per_head: whether the collapse had the shape (H, P), in all calls but one.
        matched: whether one dialect explains every call that was answered.
        found: that dialect; None where none does.
        certain: the value on each axis that is confirmed. Where nothing is matched, those that some call
            proves nevertheless.
        possible: for each other axis the values that are left, at least two; none where nothing is known.
        first_bad_stage: the first stage that leaves every dialect; None where that is unknown or none does.
        example: a small input that shows it, or None.
        nearest: the nearest dialect, where none matches.
        follows: fields of the configuration that it heeds.
        ignores: fields and arguments that were given and had no effect where they should have.
        refuses: what it does not take.
        unexplained: what it answered in a way that no dialect has: "window", "alignment", "G < H" ...
        calls: how many calls were answered.
        notes: further lines, such as a second run that gave something else.
    """

    info: TargetInfo
    dtype: str
    config: Mapping[str, Any]
    asked: Dialect
    P: int
    per_head: bool
    matched: bool
    found: Dialect | None
    certain: Mapping[str, Value]
    possible: Mapping[str, tuple[Value, ...]]
    first_bad_stage: str | None = None
    example: Example | None = None
    nearest: Nearest | None = None
    follows: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    refuses: tuple[Refusal, ...] = ()
    unexplained: tuple[str, ...] = ()
    calls: int = 0
    notes: tuple[str, ...] = ()

    @property
    def deviates(self) -> tuple[str, ...]:
        """Axes whose certain value is not the canonical one."""
        canonical = self.asked.axes()
        names = {name for name, value in self.certain.items() if value != canonical[name]}
        # Two scales may be one number at a head width, and another at every other one.
        if self.found is not None and "scale" in self.certain and self.found.scale != self.asked.scale:
            names.add("scale")
        return tuple(name for name in AXES if name in names)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Axes without a certain value, none of whose possible ones is canonical, if a dialect matches."""
        canonical = self.asked.axes()
        if not self.matched:
            return ()
        return tuple(name for name, values in self.possible.items() if canonical[name] not in values)

    @property
    def canonical(self) -> bool:
        """Whether it speaks the canonical dialect, as far as it could be asked.

        Under the configuration that it was asked with: what it ignores of another one does not count.
        """
        wrong = self.deviates or self.excluded or self.unexplained or "key_mask" in self.ignores
        return self.matched and not wrong

    @property
    def ambiguous(self) -> tuple[str, ...]:
        """Axes without a certain value."""
        return tuple(name for name in AXES if name not in self.certain)
