"""What a mutant is, and the list of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from iha_conformance.power.backward import BACKWARD_STEPS, BackwardPort
from iha_conformance.power.port import STEPS, Port
from iha_conformance.power.steps import Replacement, Rounding, Steps, Trace
from iha_conformance.protocol import DTYPES, Operation
from iha_core.bounds import HIGHEST

F = TypeVar("F", bound=Replacement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A known-wrong implementation: a port, of the operation or of the backward pass, with one step replaced.

    Attributes:
        name: what it gets wrong, in a few words.
        requirements: ids of SPEC.md that it breaks.
        step: the step that is replaced (`port.STEPS`, `backward.BACKWARD_STEPS`).
        function: what it is replaced by.
        dtypes: storage dtypes in which it must be caught: all, unless `because` says why not.
        because: why other dtypes cannot show it: it does not exist there, or is below the rounding of the
            output, with the derivation.
        shown_by: "output", or the one stage that shows it; such a fault needs a port that offers stages.
    """

    name: str
    requirements: tuple[str, ...]
    step: str
    function: Replacement
    dtypes: tuple[str, ...] = DTYPES
    because: str | None = None
    shown_by: str = "output"

    @property
    def operation(self) -> Operation:
        """What it gets wrong."""
        return "gradient" if self.step in BACKWARD_STEPS else "attention"

    def port(self, rounding: Rounding, *, precision: str = HIGHEST, known: Trace | None = None) -> Steps:
        """The port that has this fault; `known` as in `Steps`."""
        return PORTS[self.operation](
            rounding,
            stages=self.shown_by != "output",
            precision=precision,
            replace={self.step: self.function},
            known=known,
        )


PORTS: Mapping[Operation, type[Steps]] = {"attention": Port, "gradient": BackwardPort}
"""The port without a fault, by what it is asked for."""

_MUTANTS: dict[str, Mutant] = {}


def add(
    name: str,
    *requirements: str,
    step: str,
    function: Replacement,
    dtypes: tuple[str, ...] = DTYPES,
    because: str | None = None,
    shown_by: str = "output",
) -> None:
    """Put a mutant on the list.

    Raises:
        ValueError: a name that is taken, no requirement, an unknown step, or dtypes without a reason.
    """
    if name in _MUTANTS:
        raise ValueError(f"mutant {name!r}: expected a new name, found it taken")
    if not requirements:
        raise ValueError(f"mutant {name!r}: expected a requirement that it breaks, got none")
    steps = (*STEPS, *BACKWARD_STEPS)
    if step not in steps:
        raise ValueError(f"mutant {name!r}: expected a step among {', '.join(steps)}, got {step!r}")
    if (set(dtypes) != set(DTYPES)) != (because is not None):
        raise ValueError(
            f"mutant {name!r}: expected a reason for some dtypes and none for all, got {because}"
        )
    _MUTANTS[name] = Mutant(
        name=name,
        requirements=requirements,
        step=step,
        function=function,
        dtypes=dtypes,
        because=because,
        shown_by=shown_by,
    )


def mutant(
    name: str,
    *requirements: str,
    step: str,
    dtypes: tuple[str, ...] = DTYPES,
    because: str | None = None,
    shown_by: str = "output",
) -> Callable[[F], F]:
    """Decorator for the function that replaces a step; see `Mutant`."""

    def register(function: F) -> F:
        add(
            name,
            *requirements,
            step=step,
            function=function,
            dtypes=dtypes,
            because=because,
            shown_by=shown_by,
        )
        return function

    return register


def registered() -> Mapping[str, Mutant]:
    """The mutants so far, by name, in the order of their definition."""
    return _MUTANTS
