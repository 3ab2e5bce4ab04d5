"""The proof of the suite's power can fail: what speaks against it is found, and short cuts change nothing.

`iha self-test` in test_cli.py runs all of it; here its parts meet tables that are wrong on purpose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
import pytest

from iha_conformance.corpus import Case, load_cases
from iha_conformance.power import kernels, must_bind, self_test
from iha_conformance.power.honest import HONEST, OnlineSoftmax
from iha_conformance.power.measure import Problem, all_cases, corpus, mutant_ratio, ratio, stages
from iha_conformance.power.must_bind import Bound
from iha_conformance.power.mutants import MUTANTS, Mutant
from iha_conformance.power.outcome import CAUGHT, Measured, Outcome
from iha_conformance.power.port import Port
from iha_conformance.power.self_test import BEYOND_DOUBT, HONEST_OF, examine
from iha_conformance.power.steps import ROUNDINGS, Rounding
from iha_conformance.protocol import Job, Result, TargetInfo
from iha_core import AttentionConfig, attention

CASES = {case.id: case for case in corpus()}
FORWARD_MUTANTS = {name: mutant for name, mutant in MUTANTS.items() if mutant.operation == "attention"}


@cache
def problem(case_id: str, dtype: str) -> Problem:
    return Problem.of(CASES[case_id], dtype)


# What speaks against the suite


def measured(largest: float, output: str = "") -> Measured:
    """One family's ratio, and the digest of one case's output."""
    return Measured(ratios={"core": largest}, digests={"core/paper": output.encode()})


def outcome(
    *,
    honest: Mapping[str, Measured] | None = None,
    mutants: Mapping[str, float] | None = None,
    unbound: tuple[str, ...] = (),
    honest_count: int = 12,
    mutant_count: int = 80,
) -> Outcome:
    """Twelve honest implementations and eighty mutants as they should be, and some more."""
    right = {f"honest {i}": measured(0.25, f"bits {i}") for i in range(honest_count)}
    wrong = dict.fromkeys((f"mutant {i}" for i in range(mutant_count)), 8.0)
    return Outcome(
        dtypes=("float32",),
        honest={name: {"float32": of} for name, of in {**right, **(honest or {})}.items()},
        mutants={name: {"float32": measured(of)} for name, of in {**wrong, **(mutants or {})}.items()},
        must_bind={"float32": Bound(("q[lane 0 of 4]", *unbound), unbound)},
    )


def test_nothing_speaks_against_a_suite_as_it_should_be() -> None:
    found = outcome(honest={"edge": measured(0.5, "more")}, mutants={"edge": 2.0})
    assert list(found.faults()) == []
    assert (found.honest_max("float32"), found.mutant_min("float32")) == (0.5, 2.0)
    assert found.separation("float32") == 4.0
    assert found.survivors("float32") == []
    assert found.distinct("float32") == 13


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        (
            {"honest": {"new": measured(0.51, "new")}},
            ["float32: honest 'new' reaches 0.51 of a limit, over 0.5"],
        ),
        (
            {"honest": {"new": measured(math.inf, "new")}},
            [
                "float32: honest 'new' reaches inf of a limit, over 0.5",
                "float32: separation 0, expected at least 4",
            ],
        ),
        (
            {"mutants": {"new": 1.99}},
            ["float32: mutant 'new' survives, 1.99 of a limit at most, under 2"],
        ),
        (
            {"mutants": {"new": 0.75}},
            [
                "float32: mutant 'new' survives, 0.75 of a limit at most, under 2",
                "float32: separation 3, expected at least 4",
            ],
        ),
        (
            {"honest_count": 11, "honest": {"new": measured(0.1, "bits 3")}},
            ["float32: expected at least 12 honest implementations with different bits, found 11"],
        ),
        ({"unbound": ("window 3",)}, ["float32: window 3 moves no output by 10 limits"]),
        ({"mutant_count": 79}, ["expected at least 80 mutants, found 79"]),
    ],
)
def test_what_speaks_against_the_suite_is_named(changed: dict[str, Any], faults: list[str]) -> None:
    assert list(outcome(**changed).faults()) == faults


def test_a_dtype_in_which_nothing_was_run_speaks_against_the_suite() -> None:
    nothing = dataclasses.replace(outcome(), dtypes=("float16",), must_bind={"float16": Bound((), ())})
    assert list(nothing.faults()) == [
        "float16: separation 0, expected at least 4",
        "float16: expected at least 12 honest implementations with different bits, found 0",
    ]


def test_implementations_are_distinct_by_the_bits_of_cases_that_both_were_given() -> None:
    """A kernel that ran other cases has not been seen to differ."""
    first = Measured(ratios={}, digests={"a": b"1", "b": b"2"})
    for digests, distinct in (
        ({"a": b"1", "b": b"3"}, 2),
        ({"b": b"3"}, 2),
        ({"a": b"1", "c": b"3"}, 1),
        ({"c": b"3"}, 1),
        ({}, 1),
    ):
        second = Measured(ratios={}, digests=digests)
        found = outcome(honest_count=0, honest={"first": first, "second": second})
        assert found.distinct("float32") == distinct, digests


def test_measurements_of_different_cases_are_added_up() -> None:
    first = Measured(ratios={"core": 1.0, "mask": 5.0}, digests={"a": b"1"})
    second = Measured(ratios={"core": 3.0, "rope": math.inf}, digests={"b": b"2"})
    both = first.with_more(second)
    assert both == second.with_more(first)
    assert both.ratios == {"core": 3.0, "mask": 5.0, "rope": math.inf}
    assert both.digests == {"a": b"1", "b": b"2"}
    assert (both.largest, first.largest, Measured(ratios={}).largest) == (math.inf, 5.0, 0.0)
    assert first.with_more(Measured(ratios={})) == first


# Tables that are wrong on purpose


def faulty(name: str) -> Callable[..., Port]:
    """What makes the port of a mutant, with all stages, as the table of honest ports has it."""
    mutant = MUTANTS[name]

    def make(rounding: Rounding, *, stages: bool) -> Port:
        return Port(rounding, stages=stages, replace={mutant.step: mutant.function})

    return make


def right(name: str, step: str, function: Callable[..., Any]) -> Mutant:
    return Mutant(name=name, requirements=("OUT-1",), step=step, function=function)


def as_it_should_be(port: Port, *arguments: Any) -> Any:
    return port.weighted_sum(*arguments)


def values_from_the_last(port: Port, weights: Any, mixed_v: Any, visible: Any) -> Any:
    """Other bits, and no fault."""
    return np.einsum("bhts,bshe->bthe", weights[..., ::-1], mixed_v[:, ::-1])


def of_family(family: str, dtype: str) -> Outcome:
    """The outcome of a self-test of one family in one dtype."""
    honest, mutants = examine(family, dtype)
    return Outcome(
        dtypes=(dtype,),
        honest={name: {dtype: of} for name, of in honest.items()},
        mutants={name: {dtype: of} for name, of in mutants.items()},
        must_bind={dtype: Bound((), ())},
    )


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_fault_among_the_honest_and_honesty_among_the_faults_are_found(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: dict[str, Any] = {
        "plain": (Port, "stages"),
        "the same": (Port, "stages"),
        "online": (OnlineSoftmax, "stages"),
        "mistaken": (faulty("collapse [source, out, pseudo]"), "stages"),
    }
    mutants = {
        "mean for collapse": MUTANTS["mean for collapse"],
        "of no effect": right("of no effect", "weighted_sum", as_it_should_be),
        "of other bits": right("of other bits", "weighted_sum", values_from_the_last),
        "elsewhere": dataclasses.replace(MUTANTS["mean for collapse"], dtypes=("float16",)),
    }
    monkeypatch.setattr(self_test, "HONEST_OF", {"attention": honest})
    monkeypatch.setattr(self_test, "MUTANTS", mutants)
    found = of_family("collapse", dtype)
    assert found.distinct(dtype) == 3
    assert found.survivors(dtype) == ["of no effect", "of other bits"]
    assert "elsewhere" not in found.mutants
    faults = list(found.faults())
    assert any(f"honest 'mistaken' reaches {found.honest_max(dtype):.3g}" in fault for fault in faults)
    for name in ("plain", "the same", "online", "mean for collapse"):
        assert not any(repr(name) in fault for fault in faults), faults


def test_a_stage_of_an_honest_port_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are right; its lse is to base 2."""
    honest = {"mistaken": (faulty("lse to base 2"), "once")}
    monkeypatch.setattr(self_test, "HONEST_OF", {"attention": honest})
    monkeypatch.setattr(self_test, "MUTANTS", {})
    assert of_family("spread", "float32").honest_max("float32") > 1


# Short cuts


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("family", ["collapse", "gradient"])
def test_examining_is_running_everything(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what is known of the honest port, and without stopping early."""
    cases = [case for case in all_cases() if case.family == family and dtype in case.dtypes][:12]
    monkeypatch.setattr(self_test, "all_cases", lambda: tuple(cases))
    problems = [Problem.of(case, dtype) for case in cases]
    operation = cases[0].operation
    honest, mutants = examine(family, dtype)
    assert set(honest) == set(HONEST_OF[operation])
    for name, (make, rounding) in HONEST_OF[operation].items():
        port = make(rounding, stages=True)
        assert honest[name].ratios == {family: max(ratio(port, each) for each in problems)}
        outputs = {each.case.id: stages(port, each).get("output") for each in problems}
        assert honest[name].digests == {
            case: hashlib.sha256(output.tobytes()).digest()
            for case, output in outputs.items()
            if output is not None
        }
    of_operation = {name: mutant for name, mutant in MUTANTS.items() if mutant.operation == operation}
    assert set(mutants) == {name for name, mutant in of_operation.items() if dtype in mutant.dtypes}
    for name, of in mutants.items():
        worst = [max(ratio(MUTANTS[name].port(r), each) for each in problems) for r in ROUNDINGS]
        if of.largest < CAUGHT:
            assert min(worst) <= of.largest, name
        elif of.largest < BEYOND_DOUBT:
            assert of.ratios == {family: min(worst)}, name
        else:
            assert min(worst) >= BEYOND_DOUBT, name


class Counted:
    """Stands in for the measuring of a mutant: ratios by case, and the cases in the order of their turns."""

    def __init__(self, ratios: Mapping[str, tuple[float, float]]) -> None:
        self.ratios = ratios
        self.turns: list[str] = []

    def __call__(self, mutant: Mutant, rounding: Rounding, problem: Problem) -> float:
        self.turns.append(problem.case.id)
        return self.ratios[problem.case.id][ROUNDINGS.index(rounding)]


SPREAD = ("spread/open", "spread/token", "spread/virtual")


@pytest.mark.parametrize(
    ("ratios", "dtype", "found", "turns"),
    [
        # Nowhere beyond doubt: every case, the largest of each rounding, and the smaller of the two.
        (((3.0, 2.0), (1.0, 5.0), (99.9, 0.0)), "float32", 5.0, (0, 1, 2, 0, 1, 2)),
        # Beyond doubt in the second case, which is the first to be tried with the other rounding.
        (((3.0, 2.0), (100.0, 5.0), (math.inf, 7.0)), "float32", 7.0, (0, 1, 1, 0, 2)),
        (((0.0, 0.0), (0.0, 0.0), (math.inf, math.inf)), "float32", math.inf, (0, 1, 2, 2)),
        # Not caught with one rounding, it need not be tried with the other.
        (((1.5, 9.0), (1.9, 9.0), (0.1, 9.0)), "float32", 1.9, (0, 1, 2)),
        # Stored in float64, stages are as they were.
        (((3.0, 0.0), (1.0, 0.0), (4.0, 0.0)), "float64", 4.0, (0, 1, 2)),
    ],
)
def test_a_mutant_is_run_until_it_is_beyond_doubt(
    ratios: tuple[tuple[float, float], ...],
    dtype: str,
    found: float,
    turns: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(dict(zip(SPREAD, ratios, strict=True)))
    monkeypatch.setattr(self_test, "mutant_ratio", counted)
    problems = [problem(case_id, dtype) for case_id in SPREAD]
    assert self_test._least_caught(MUTANTS["pseudo-major"], problems) == found
    assert counted.turns == [SPREAD[turn] for turn in turns]


def test_a_mutant_is_not_caught_where_there_are_no_cases() -> None:
    assert self_test._least_caught(MUTANTS["pseudo-major"], []) == 0.0


SOME = (
    "core/cube",
    "core/linear",
    "mask/virtual-edge",
    "mask/nan-key",
    "window/none-token-edge",
    "rope/adjacent",
    "collapse/per-head-edge",
    "grouped/half",
    "cross/per-row",
    "keymask/edge",
    "keymask/empty-rows",
    "keymask/nan",
    "keymask/inf-gqa",
    "keymask/late",
    "segments/both",
    "segments/edge",
    "segments/keymask",
    "positions/both",
    "degenerate/no-keys",
    "degenerate/no-keys-linear",
    "degenerate/no-queries",
    "extreme/overflow",
    "extreme/far-wrap",
    "strided/transposed",
    "exact/cancel",
    "spread/open",
)
"""Cases of every family of small ones, and of all kinds of arguments."""


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results of a port are the same bits."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    return bool(
        ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    )


def arrays_of(x: Any) -> Iterator[np.ndarray[Any, Any]]:
    """All arrays in what the steps of a port gave."""
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        yield from arrays_of(list(x.values()))
    elif isinstance(x, list | tuple):
        for item in x:
            yield from arrays_of(item)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", "once"), ("bfloat16", "stages")])
def test_what_is_known_of_a_call_changes_no_bit_of_it(dtype: str, rounding: Rounding) -> None:
    """A fault of no effect on any step gives the honest port's bits, and none writes to what others take."""
    idle = 0
    for case_id in SOME:
        tried, config = problem(case_id, dtype), CASES[case_id].config
        honest = {offered: Port(rounding, stages=offered)(tried.inputs, config) for offered in (False, True)}
        known = Port(rounding).record(tried.inputs, config)
        before = [array.tobytes() for array in arrays_of(known)]
        for name, mutant in FORWARD_MUTANTS.items():
            expected = mutant.port(rounding)(tried.inputs, config)
            port = mutant.port(rounding, known=known)
            assert same(port(tried.inputs, config), expected), (name, case_id)
            if not port.deviates:
                assert same(expected, honest[mutant.shown_by != "output"]), (name, case_id)
                idle += 1
        assert [array.tobytes() for array in arrays_of(known)] == before, case_id
        assert not any(step.flags.writeable for step in known if isinstance(step, np.ndarray)), case_id
    assert idle > len(SOME) * len(FORWARD_MUTANTS) / 4, "nothing is saved"


def test_whether_a_call_deviates_says_nothing_about_the_next_one() -> None:
    tried, config = problem("core/paper", "float32"), CASES["core/paper"].config
    wrong = [True, False, True]

    def at_times(port: Port, q: Any, k: Any, scale: float) -> Any:
        return port.products(q, k, 2 * scale if wrong.pop(0) else scale)

    honest = Port()(tried.inputs, config)
    port = Port(replace={"products": at_times}, known=Port().record(tried.inputs, config))
    found = [(same(port(tried.inputs, config), honest), port.deviates) for _ in range(3)]
    assert found == [(False, True), (True, False), (False, True)]


def test_a_fault_of_no_effect_has_the_ratio_of_the_honest_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not judged again."""
    tried = problem("core/paper", "float32")
    mutant = right("of no effect", "weighted_sum", as_it_should_be)
    for rounding in ROUNDINGS:
        honest = ratio(Port(rounding), tried)
        assert 0 < mutant_ratio(mutant, rounding, tried) == honest
    monkeypatch.setattr("iha_conformance.power.measure.verdict", None)
    assert mutant_ratio(mutant, "once", tried) > 0


# All parts together


class Inline:
    """Stands in for the processes: parts are done here, at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cases of two families, three honest ports and four mutants, in this process."""
    cases = tuple(CASES[case_id] for case_id in ("core/paper", "core/float64-inputs", "collapse/large"))
    monkeypatch.setattr(self_test, "all_cases", lambda: cases)
    monkeypatch.setattr(must_bind, "corpus", lambda: cases)
    monkeypatch.setattr(self_test, "ProcessPoolExecutor", Inline)
    honest = dict(itertools.islice(HONEST.items(), 3))
    monkeypatch.setattr(self_test, "HONEST_OF", {"attention": honest})
    names = ("pseudo-major", "inverted key mask", "inputs cast to float32", "lse to base 2")
    monkeypatch.setattr(self_test, "MUTANTS", {name: MUTANTS[name] for name in names})


@pytest.mark.usefixtures("small")
def test_parts_come_together() -> None:
    told: list[tuple[int, int]] = []
    found = self_test.self_test(("float32", "float64"), on_done=lambda *counts: told.append(counts))
    assert found.dtypes == ("float32", "float64")
    assert told == [(i, 6) for i in range(1, 7)], "two families and the gate, in two dtypes"
    for name, (make, rounding) in itertools.islice(HONEST.items(), 3):
        for dtype in found.dtypes:
            ratios = {
                family: max(
                    ratio(make(rounding, stages=True), problem(case_id, dtype))
                    for case_id in (
                        "core/paper",
                        *(["core/float64-inputs"] if dtype == "float64" else []),
                        "collapse/large",
                    )
                    if case_id.startswith(family)
                )
                for family in ("core", "collapse")
            }
            assert found.honest[name][dtype].ratios == ratios
            assert len(found.honest[name][dtype].digests) == (3 if dtype == "float64" else 2)
    assert list(found.mutants) == [
        "pseudo-major",
        "inverted key mask",
        "inputs cast to float32",
        "lse to base 2",
    ]
    assert list(found.mutants["inputs cast to float32"]) == ["float64"]
    for dtype in found.dtypes:
        assert found.survivors(dtype) == ["inverted key mask"]
        assert found.must_bind[dtype] == must_bind.bind(dtype)
        assert "causal 'virtual', not 'token'" in found.must_bind[dtype].checked
    assert "expected at least 80 mutants, found 4" in list(found.faults())


@pytest.mark.usefixtures("small")
def test_a_part_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(port: Port, *arguments: Any) -> Any:
        raise ZeroDivisionError("in a mutant")

    monkeypatch.setattr(self_test, "MUTANTS", {"broken": right("broken", "weighted_sum", broken)})
    with pytest.raises(ZeroDivisionError, match="in a mutant"):
        self_test.self_test(("float32",))


def test_long_parts_are_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no process is left with one when all others are done."""
    begun: list[tuple[str, str]] = []

    def noting(family: str, dtype: str) -> tuple[dict[str, Measured], dict[str, Measured]]:
        begun.append((family, dtype))
        return {}, {}

    monkeypatch.setattr(self_test, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(self_test, "examine", noting)
    monkeypatch.setattr(must_bind, "bind", lambda dtype: Bound((), ()))
    self_test.self_test(("float32", "float16"))
    families = {case.family for case in all_cases()}
    assert sorted(begun) == sorted(itertools.product(families, ("float32", "float16")))
    assert {family for family, _ in begun[:2]} == {"tiles"}


# Frameworks' kernels


class FakeTarget:
    """Answers each job by a function, in this process."""

    takes_all = False
    capabilities: frozenset[str] = frozenset()

    def __init__(self, name: str, answer: Callable[[Job], Result]) -> None:
        self.info = TargetInfo(name=name, framework="f", version="0", device="cpu", precision="highest")
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        for job in jobs:
            self.asked.append((job.case_id, job.dtype))
            yield self.answer(job)

    def close(self) -> None:
        pass


def answers(job: Job, **fields: Any) -> Result:
    return Result(case_id=job.case_id, dtype=job.dtype, **{"kind": "arrays", **fields})


def computes(job: Job) -> Result:
    output = attention(**job.inputs, config=AttentionConfig.from_dict(job.config))
    return answers(job, arrays={"output": output.astype(job.inputs["q"].dtype)})


def refuses_bfloat16(job: Job) -> Result:
    if job.dtype == "bfloat16":
        return answers(job, kind="refused", reason="no bfloat16 here")
    return computes(job)


def off_in_masks(job: Job) -> Result:
    right = computes(job)
    if not job.case_id.startswith("mask/"):
        return right
    return dataclasses.replace(right, arrays={"output": right.arrays["output"] * 2})


def crashes_on_masks(job: Job) -> Result:
    if not job.case_id.startswith("mask/"):
        return computes(job)
    return answers(job, kind="failed", failure="crashed", reason="exit status 3")


def test_kernels_are_measured_on_the_quick_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ("core/paper", "core/linear", "core/float64-inputs", "mask/virtual-edge", "mask/nan-query")
    cases = tuple(CASES[case_id] for case_id in (*quick, "core/pair", "mask/token-random"))
    monkeypatch.setattr(kernels, "all_cases", lambda: cases)
    functions = (computes, refuses_bfloat16, off_in_masks, crashes_on_masks)
    targets = [FakeTarget(function.__name__, function) for function in functions]
    dtypes = ("float32", "bfloat16")
    found = kernels.measure_targets(targets, dtypes)
    pairs = [(case_id, dtype) for case_id in quick if case_id != "core/float64-inputs" for dtype in dtypes]
    assert [target.asked for target in targets] == [pairs] * len(targets)
    assert list(found) == [function.__name__ for function in functions]
    assert set(found["refuses_bfloat16"]) == {"float32"}
    assert found["refuses_bfloat16"]["float32"] == found["computes"]["float32"]
    for dtype in dtypes:
        right, wrong, crashed = (
            found[name][dtype] for name in ("computes", "off_in_masks", "crashes_on_masks")
        )
        assert set(right.ratios) == {"core", "mask"}
        assert 0 < right.largest <= 0.5
        assert set(right.digests) == {case_id for case_id, _ in pairs[::2]}
        assert wrong.ratios["core"] == right.ratios["core"]
        assert 2 < wrong.ratios["mask"] < math.inf
        assert {name for name in quick if wrong.digests.get(name) != right.digests.get(name)} == {
            "mask/virtual-edge",
            "mask/nan-query",
        }
        assert crashed.ratios == {**right.ratios, "mask": math.inf}
        assert set(crashed.digests) == {"core/paper", "core/linear"}


def test_bad_input_is_no_part_of_the_proof() -> None:
    assert all(case.invalid is None for case in corpus())
    assert {case.id for case in load_cases()} > set(CASES)
    assert isinstance(corpus()[0], Case)
