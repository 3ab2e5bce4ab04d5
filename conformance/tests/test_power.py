"""The limits judge well in both directions: honest ports stay at half of them, faulty ones exceed twice.

Both bounds hold in every dtype. A fault is run until one case shows it clearly; cases that have shown
faults before are tried first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from doubles.faults import FAULTS, IN_STAGES, ONLY_IN
from doubles.honest import HONEST
from doubles.port import Port
from iha_conformance.corpus import Case, build_inputs, load_cases
from iha_conformance.judge import Expectation, expect, judge
from iha_conformance.protocol import DTYPES, Result, Verdict

CASES = {case.id: case for case in load_cases() if case.invalid is None}
HALF, CAUGHT, CLEARLY = 0.5, 2.0, 4.0
ROUNDINGS = ("once", "stages")

shown: Counter[str] = Counter()
"""How often each case was the first to show a fault."""


@cache
def problem(case_id: str, dtype: str) -> tuple[dict[str, Any], Expectation]:
    """Inputs and expectation of a case."""
    inputs = build_inputs(CASES[case_id], dtype)
    expectation = expect(CASES[case_id], dtype, inputs)
    assert expectation is not None
    return inputs, expectation


def verdict(port: Port, case: Case, dtype: str) -> Verdict:
    inputs, expectation = problem(case.id, dtype)
    found = port(inputs, case.config)
    arrays = found if isinstance(found, dict) else {"output": found}
    result = Result(case_id=case.id, dtype=dtype, kind="arrays", arrays=arrays)
    return judge(case, dtype, expectation, result)


def excess(found: Verdict) -> float:
    """The ratio of a verdict; infinite where something is not finite that has to be."""
    if found.ratio is None:
        return math.inf if found.status == "failed" else 0.0
    return found.ratio


@pytest.mark.requirement("NUM-1", "NUM-2", "NUM-3", "NUM-4", "NUM-6", "STG-1", "STG-2")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HONEST)
def test_honest_ports_stay_at_half_of_every_limit(name: str, dtype: str, rounding: str) -> None:
    for case in CASES.values():
        if dtype in case.dtypes:
            found = verdict(HONEST[name](rounding, stages=True), case, dtype)
            assert found.status == "passed", (case.id, found)
            assert excess(found) <= HALF, (case.id, found)


@pytest.mark.requirement("NUM-4", "NUM-5", "NUM-6", "NUM-8")
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_in_every_dtype(name: str) -> None:
    """A fault must reach twice a limit in at least one case, however its port rounds.

    Rounding the operands, as the precision classes below `highest` do, is one.
    """
    order = [case_id for case_id, _ in shown.most_common()]
    order += [case_id for case_id in CASES if case_id not in shown]
    for rounding, dtype in itertools.product(ROUNDINGS, ONLY_IN.get(name, DTYPES)):
        port = FAULTS[name](rounding, stages=name in IN_STAGES)
        most = 0.0
        for case_id in list(order):
            if dtype not in CASES[case_id].dtypes:
                continue
            most = max(most, excess(verdict(port, CASES[case_id], dtype)))
            if most > CLEARLY:
                shown[case_id] += 1
                order.remove(case_id)
                order.insert(0, case_id)
                break
        assert most >= CAUGHT, f"{name}, rounded {rounding}, {dtype}: the worst ratio is {most:.3g}"


@pytest.mark.requirement("ROPE-5", "NUM-6")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("share", [-0.95, 0.5, 0.95])
def test_angles_may_use_all_that_they_are_allowed(dtype: str, share: float) -> None:
    """Every angle off in the same way, as a rounded frequency or reduction makes them."""

    class Turned(Port):
        def angles(self, position: Any, dims: Any, config: Any) -> Any:
            angles = super().angles(position, dims, config)
            return None if angles is None else angles * (1 + share * 4 * 2.0**-53)

    for case in CASES.values():
        if case.config["rope"] != "none" and dtype in case.dtypes:
            found = verdict(Turned("once", stages=True), case, dtype)
            assert excess(found) <= HALF, (case.id, found)
