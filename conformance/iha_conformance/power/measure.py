"""How far beyond its limit a port is on a case."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from iha_conformance.corpus import Case, build_inputs, load_cases
from iha_conformance.judge import Expectation, expect, judge
from iha_conformance.power.mutants import PORTS, Mutant
from iha_conformance.power.steps import Rounding, Trace
from iha_conformance.protocol import Inputs, Operation, Result, Verdict
from iha_core.bounds import HIGHEST


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A case in a dtype, with its inputs and what is expected of it."""

    case: Case
    dtype: str
    inputs: Inputs
    expectation: Expectation
    _honest: dict[tuple[Rounding, bool], tuple[Trace, float]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def honest(self, rounding: Rounding, stages: bool) -> tuple[Trace, float]:
        """What the steps of the port without a fault give, and its ratio; computed once."""
        key = rounding, stages
        if key not in self._honest:
            port = PORTS[self.case.operation](rounding, stages=stages)
            self._honest[key] = port.record(self.inputs, self.case.config), ratio(port, self)
        return self._honest[key]

    @classmethod
    def of(cls, case: Case, dtype: str, precision: str = HIGHEST) -> Problem:
        """Build the inputs and run the reference; not for cases of bad input."""
        inputs = build_inputs(case, dtype)
        expectation = expect(case, dtype, inputs, precision)
        assert expectation is not None  # only cases of bad input have none
        return cls(case, dtype, inputs, expectation)


def stages(port: Callable[..., Any], problem: Problem) -> Mapping[str, np.ndarray[Any, Any]]:
    """What a port gives, by stage name."""
    found = port(problem.inputs, problem.case.config)
    return found if isinstance(found, dict) else {"output": found}


def verdict(arrays: Mapping[str, np.ndarray[Any, Any]], problem: Problem) -> Verdict:
    """The judge's word on what a port gave."""
    result = Result(case_id=problem.case.id, dtype=problem.dtype, kind="arrays", arrays=arrays)
    return judge(problem.case, problem.dtype, problem.expectation, result)


def excess(found: Verdict) -> float:
    """The ratio of a verdict; infinite where something is not finite that has to be."""
    if found.ratio is None:
        return math.inf if found.status == "failed" else 0.0
    return found.ratio


def ratio(port: Callable[..., Any], problem: Problem) -> float:
    """Worst error divided by its limit, over all that the port gives."""
    return excess(verdict(stages(port, problem), problem))


def mutant_ratio(mutant: Mutant, rounding: Rounding, problem: Problem) -> float:
    """The ratio of a mutant; that of the port without its fault where the fault changes no step."""
    trace, honest_ratio = problem.honest(rounding, mutant.shown_by != "output")
    port = mutant.port(rounding, known=trace)
    found = stages(port, problem)
    return excess(verdict(found, problem)) if port.deviates else honest_ratio


def corpus(operation: Operation = "attention") -> tuple[Case, ...]:
    """The cases of an operation that have an answer."""
    return tuple(case for case in load_cases() if case.invalid is None and case.operation == operation)


def all_cases() -> tuple[Case, ...]:
    """Those of both operations."""
    return corpus("attention") + corpus("gradient")
