"""What `iha self-test` does not run itself: honest ports the other way round, and what the mutants cover.

The self-test holds each honest port to the limits with one rounding, and catches every mutant; the tables
that it runs on are looked over here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from iha_conformance.power.backward import BACKWARD_STEPS
from iha_conformance.power.honest import HONEST
from iha_conformance.power.measure import Problem, corpus, excess, stages, verdict
from iha_conformance.power.mutants import MUTANTS
from iha_conformance.power.mutants.registry import add, registered
from iha_conformance.power.outcome import FEWEST_MUTANTS, HALF
from iha_conformance.power.port import STEPS, Port
from iha_conformance.power.steps import ROUNDINGS
from iha_conformance.protocol import DTYPES
from iha_core.reference import STAGES
from iha_core.spec_files import spec_path

CASES = {
    case.id: case
    for case in corpus()
    if case.family != "tiles" or "quick" in case.flags or case.id == "tiles/key-mask"
}
"""All but most of the long ones: they take half of the time, and two show what they all show."""


@cache
def problem(case_id: str, dtype: str) -> Problem:
    return Problem.of(CASES[case_id], dtype)


def assert_half(port: Port, case_id: str, dtype: str) -> None:
    """Hold a port to a case: it passes, and no error is over one half of a limit."""
    found = verdict(stages(port, problem(case_id, dtype)), problem(case_id, dtype))
    assert found.status == "passed", (case_id, found)
    assert excess(found) <= HALF, (case_id, found)


# Honest ports

OTHER_ROUNDING: dict[str, tuple[Callable[..., Port], Any]] = {
    name: (make, "once" if rounding == "stages" else "stages")
    for name, (make, rounding) in HONEST.items()
    if (make, "once" if rounding == "stages" else "stages") not in HONEST.values()
}
"""Honest ports that the self-test runs with one rounding alone, and the other one."""


@pytest.mark.requirement("NUM-1", "NUM-2", "NUM-3", "NUM-4", "NUM-6", "STG-1", "STG-2")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float64"])  # stored as it is
@pytest.mark.parametrize("name", OTHER_ROUNDING)
def test_honest_ports_stay_at_half_of_every_limit_however_they_round(name: str, dtype: str) -> None:
    make, rounding = OTHER_ROUNDING[name]
    for case in CASES.values():
        if dtype in case.dtypes:
            assert_half(make(rounding, stages=True), case.id, dtype)


@pytest.mark.requirement("ROPE-5", "NUM-6")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("share", [-0.95, 0.5, 0.95])
def test_angles_may_use_all_that_they_are_allowed(dtype: str, share: float) -> None:
    """Every angle off in the same way, as a rounded frequency or reduction makes them."""

    def turned(port: Port, *arguments: Any) -> Any:
        angles = port.angles(*arguments)
        return None if angles is None else angles * (1 + share * 4 * 2.0**-53)

    for case in CASES.values():
        if case.config["rope"] != "none" and dtype in case.dtypes:
            assert_half(Port("once", stages=True, replace={"angles": turned}), case.id, dtype)


# The table of mutants

NO_MUTANT = {
    "DIM-2": "sizes of 0 are taken or refused; what they give is [SOFT-2]",
    "ARG-5": "a port in NumPy has no kernel that could misread a layout; backends are run on the cases",
    "KEY-4": "nothing is required there",
    "ROPE-6": "a refusal",
    "STG-1": "names and shapes, which the judge checks before values",
    "STG-2": "formats, which the judge checks before values",
    "PROF-1": "names for configurations",
    "PROF-2": "a consequence of the operation",
    "NUM-4": "the limit itself",
    "NUM-5": "the limit itself",
    "NUM-6": "the limit itself",
    "NUM-10": "the limit itself",
    "NUM-7": "about two runs, and about reports",
    "ERR": "refusals, which the cases of bad input show",
    "GEN": "how the corpus is made",
    "EXC": "files",
    "VEC": "files",
    "CKPT": "files",
    "LAY": "the layer around the operation, which has tests of its own",
    "INIT": "start values, which have tests of their own",
}
"""Requirements, by id or by their first part, that no computation of an output breaks; and why."""


def reason(requirement: str) -> str | None:
    return NO_MUTANT.get(requirement) or NO_MUTANT.get(requirement.partition("-")[0])


def requirements() -> list[str]:
    """The ids of SPEC.md, where they are defined."""
    return re.findall(r"^- \[([A-Z]+-\d+)\]", spec_path("SPEC.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_requirement_has_a_mutant_or_a_reason_for_none() -> None:
    named = {requirement for mutant in MUTANTS.values() for requirement in mutant.requirements}
    assert len(requirements()) > 60
    for requirement in requirements():
        assert (requirement in named) != (reason(requirement) is not None), requirement
    assert named <= set(requirements())
    for stale in NO_MUTANT:
        assert any(stale in (requirement, requirement.partition("-")[0]) for requirement in requirements())


def test_the_table_of_mutants() -> None:
    assert len(MUTANTS) >= FEWEST_MUTANTS
    for name, mutant in MUTANTS.items():
        assert mutant.name == name
        assert mutant.step in {"attention": STEPS, "gradient": BACKWARD_STEPS}[mutant.operation], name
        assert mutant.dtypes, name
        assert set(mutant.dtypes) <= set(DTYPES), name
        assert (mutant.because is None) == (set(mutant.dtypes) == set(DTYPES)), name
        assert mutant.shown_by in STAGES, name
        assert len(set(mutant.requirements)) == len(mutant.requirements) > 0, name


def test_every_step_has_a_mutant() -> None:
    """But for that which leaves dropped keys out: its mutant multiplies what is there after all."""
    assert {mutant.step for mutant in MUTANTS.values()} == {*STEPS, *BACKWARD_STEPS} - {"isolate"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "pseudo-major"}, "expected a new name"),
        ({"requirements": ()}, "expected a requirement that it breaks"),
        ({"step": "store"}, "expected a step among change_inputs, .*, got 'store'"),
        ({"dtypes": ("float64",)}, "expected a reason for some dtypes"),
        ({"because": "it is hard"}, "none for all, got it is hard"),
    ],
)
def test_the_table_refuses_what_says_too_little(changed: dict[str, Any], message: str) -> None:
    before = dict(registered())
    mutant: dict[str, Any] = {"name": "new", "requirements": ("MIX-1",), "step": "mix", **changed}
    name, ids = mutant.pop("name"), mutant.pop("requirements")
    with pytest.raises(ValueError, match=message):
        add(name, *ids, function=lambda port, *arguments: None, **mutant)
    assert registered() == before


def test_a_port_refuses_to_replace_what_is_no_step() -> None:
    with pytest.raises(ValueError, match=r"replace: expected steps among change_inputs, .*, got 'store'"):
        Port("once", replace={"mix": lambda *_: None, "store": lambda *_: None})


def test_there_are_honest_ports_for_both_roundings() -> None:
    assert {rounding for _, rounding in HONEST.values()} == set(ROUNDINGS)
    assert len(set(HONEST.values())) == len(HONEST)
