"""The runner: counts, verdicts, order, and one expectation for all targets, with everything else faked."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from iha_conformance import runner
from iha_conformance.errors import CommandError, nearest
from iha_conformance.protocol import Result, TargetInfo, TargetUnavailable, Verdict
from iha_conformance.runner import HarnessError, Pace, Suite, Summary, run_suite
from iha_conformance.selection import Filters, select


def make_case(name: str, **fields) -> SimpleNamespace:
    defaults = {
        "id": name,
        "family": "family",
        "requirements": ("MIX-1",),
        "flags": frozenset(),
        "config": {},
        "layout": "contiguous",
        "dtypes": ("float32",),
        "capability": None,
        "invalid": None,
        "operation": "attention",
    }
    return SimpleNamespace(**defaults | fields)


class FakeTarget:
    """Answers each job by a function; counts from nothing."""

    def __init__(self, answer, name: str = "fake", capabilities=frozenset()) -> None:
        self.info = TargetInfo(name=name, framework="f", version="0", device="cpu", precision="default")
        self.capabilities = capabilities
        self.takes_all = False
        self.jobs = []
        self._answer = answer

    def evaluate(self, jobs):
        for job in jobs:
            self.jobs.append(job)
            yield dataclasses.replace(self._answer(job), case_id=job.case_id, dtype=job.dtype)

    def close(self) -> None:
        pass


def gives(value: float, **fields):
    """A target's answer: an output of this value."""
    result = Result(case_id="", dtype="", kind="arrays", arrays={"output": np.array(value)}, **fields)
    return lambda job: result


def fails(failure: str, **fields):
    result = Result(case_id="", dtype="", kind="failed", failure=failure, reason="why", **fields)
    return lambda job: result


def fake_judge(case, dtype, expectation, result):
    """Passes outputs up to 1; as strict about the rest as the real one."""
    if result.kind in ("refused", "not_applicable"):
        return Verdict(status=result.kind, reason=result.reason)
    if case.invalid is not None:
        ok = result.failure == "raised" and case.invalid in result.error_types
        return Verdict(status="passed" if ok else "failed", reason=None if ok else "accepted")
    if result.kind == "failed":
        return Verdict(status="failed", reason=f"{result.failure}: {result.reason}")
    assert expectation == f"{case.id} {dtype}"
    ratio = float(result.arrays["output"])
    if ratio <= 1:
        return Verdict(status="passed", ratio=ratio)
    return Verdict(status="failed", ratio=ratio, stage="output", reason="too far")


@dataclasses.dataclass
class Counters:
    inputs: list = dataclasses.field(default_factory=list)
    expectations: list = dataclasses.field(default_factory=list)

    def suite(self, judge=fake_judge) -> Suite:
        def build_inputs(case, dtype):
            self.inputs.append((case.id, dtype))
            return {"q": np.zeros(1)}

        def expect(case, dtype, inputs):
            self.expectations.append((case.id, dtype))
            return f"{case.id} {dtype}"

        return Suite(build_inputs=build_inputs, expect=expect, judge=judge)


def run_one(answer, case=None, counters=None):
    """The only row of a run of one target over one case."""
    pair = (case or make_case("a"), "float32")
    (report,) = run_suite([FakeTarget(answer)], [pair], suite=(counters or Counters()).suite())
    (row,) = report.rows
    return row


def test_row_has_the_verdict_and_what_the_target_said():
    row = run_one(gives(0.5, kernel="fast", seconds=0.25, repeatable=True))
    assert row.id == "a"
    assert (row.status, row.ratio, row.stage, row.reason) == ("passed", 0.5, None, None)
    assert (row.kernel, row.seconds, row.requirements) == ("fast", 0.25, ("MIX-1",))
    assert row.capability is None
    assert run_one(fails("raised"), make_case("a", capability="invalid")).capability == "invalid"


@pytest.mark.parametrize("failure", ["raised", "crashed", "hung", "missing"])
def test_failures_fail(failure):
    row = run_one(fails(failure))
    assert (row.status, row.reason) == ("failed", f"{failure}: why")


def test_summary_counts_every_status_once():
    answers = {
        "good": gives(0.0),
        "bad": gives(2.0),
        "crash": fails("crashed"),
        "no": lambda job: Result(case_id="", dtype="", kind="refused", reason="no"),
        "other": lambda job: Result(case_id="", dtype="", kind="not_applicable", reason="n/a"),
    }
    target = FakeTarget(lambda job: answers[job.case_id](job))
    (report,) = run_suite(
        [target], [(make_case(name), "float32") for name in answers], suite=Counters().suite()
    )
    assert [row.status for row in report.rows] == ["passed", "failed", "failed", "refused", "not_applicable"]
    assert report.summary == Summary(expected=4, executed=3, passed=1, failed=2, skipped=1, not_applicable=1)


def test_skipped_and_refused_count_as_skipped():
    row = run_one(gives(0.0))
    rows = [dataclasses.replace(row, status=status) for status in ("skipped", "refused", "refused")]
    assert Summary.of(rows) == Summary(
        expected=3, executed=0, passed=0, failed=0, skipped=3, not_applicable=0
    )


def test_results_that_never_come_are_failures():
    class Lazy(FakeTarget):
        def evaluate(self, jobs):
            yield next(super().evaluate(jobs))

    (report,) = run_suite(
        [Lazy(gives(0.0))], [(make_case(name), "float32") for name in "abc"], suite=Counters().suite()
    )
    assert [row.status for row in report.rows] == ["passed", "failed", "failed"]
    assert report.rows[2].reason == "missing: no result"


def test_results_in_another_order_are_a_fault_of_the_kit():
    class Confused(FakeTarget):
        def evaluate(self, jobs):
            for result in super().evaluate(jobs):
                yield dataclasses.replace(result, case_id="z")

    with pytest.raises(HarnessError, match="expected a in float32, got z in float32"):
        run_suite([Confused(gives(0.0))], [(make_case("a"), "float32")], suite=Counters().suite())


# Two runs


def test_passing_case_says_that_its_bits_differ():
    row = run_one(gives(0.2, repeatable=False, rerun={"output": np.array(0.7)}))
    assert (row.status, row.ratio, row.reason) == ("passed", 0.7, "second run differs in bits")


def test_remark_of_the_judge_is_not_repeated():
    counters = Counters()

    def judge(case, dtype, expectation, result):
        return Verdict(status="passed", ratio=0.0, reason="second run differs in bits")

    target = FakeTarget(gives(0.2, repeatable=False, rerun={"output": np.array(0.7)}))
    (report,) = run_suite([target], [(make_case("a"), "float32")], suite=counters.suite(judge))
    assert report.rows[0].reason == "second run differs in bits"


def test_second_run_can_fail_a_case():
    row = run_one(gives(0.2, repeatable=False, rerun={"output": np.array(3.0)}))
    assert (row.status, row.ratio, row.stage) == ("failed", 3.0, "output")
    assert row.reason == "second run: too far"


def test_first_run_fails_whatever_the_second_does():
    row = run_one(gives(3.0, repeatable=False, rerun={"output": np.array(0.0)}))
    assert (row.status, row.ratio) == ("failed", 3.0)
    assert row.reason == "too far; second run differs in bits"


# Bad input


def test_bad_input_is_judged_without_expectation():
    counters = Counters()
    case = make_case("a", capability="invalid", invalid="ValueError")
    row = run_one(fails("raised", error_types=("ShapeError", "ValueError")), case, counters)
    assert row.status == "passed"
    assert counters.expectations == []
    assert run_one(fails("crashed"), case).status == "failed"
    assert run_one(gives(0.0), case).status == "failed"


# Sharing and order


def test_inputs_and_expectations_are_made_once_for_all_targets():
    counters = Counters()
    cases = [make_case(f"case{i}", dtypes=("float32", "float16")) for i in range(5)]
    pairs = select(cases, Filters())
    targets = [FakeTarget(gives(0.0), name) for name in "xyz"]
    reports = run_suite(targets, pairs, suite=counters.suite())
    wanted = [(case.id, dtype) for case, dtype in pairs]
    assert sorted(counters.expectations) == sorted(wanted)
    assert sorted(counters.inputs) == sorted(wanted)
    for report in reports:
        assert [(row.id, row.dtype) for row in report.rows] == wanted


def test_rows_are_announced_as_they_come():
    seen = []
    pairs = [(make_case(name), "float32") for name in "ab"]
    run_suite(
        [FakeTarget(gives(0.0)), FakeTarget(gives(2.0))],
        pairs,
        suite=Counters().suite(),
        on_row=lambda index, row: seen.append((index, row.id, row.status)),
    )
    assert sorted(seen) == [(0, "a", "passed"), (0, "b", "passed"), (1, "a", "failed"), (1, "b", "failed")]


def test_targets_work_at_the_same_time():
    barrier = threading.Barrier(3, timeout=10)

    def meet(job):
        barrier.wait()
        return gives(0.0)(job)

    reports = run_suite(
        [FakeTarget(meet) for _ in range(3)], [(make_case("a"), "float32")], suite=Counters().suite()
    )
    assert all(report.rows[0].status == "passed" for report in reports)


def test_jobs_carry_what_the_case_says():
    from iha_core import STAGES

    target = FakeTarget(fails("raised", error_types=("ValueError",)))
    case = make_case("a", config={"window": 3}, layout="sliced")
    bad = make_case("b", capability="invalid", invalid="ValueError")
    run_suite([target], [(case, "float16"), (bad, "float32")], suite=Counters().suite())
    first, second = target.jobs
    assert (first.case_id, first.dtype, first.config, first.layout) == (
        "a",
        "float16",
        {"window": 3},
        "sliced",
    )
    assert first.wanted == STAGES
    assert (second.capability, second.wanted) == ("invalid", ("output",))


def test_fast_targets_wait_for_slow_ones(monkeypatch):
    monkeypatch.setattr(runner, "LOOKAHEAD", 3)
    release = threading.Event()

    def slow(job):
        assert release.wait(10)
        return gives(0.0)(job)

    fast = FakeTarget(gives(0.0), "fast")
    pairs = [(make_case(f"case{i}"), "float32") for i in range(10)]
    thread = threading.Thread(
        target=run_suite, args=([fast, FakeTarget(slow, "slow")], pairs), kwargs={"suite": Counters().suite()}
    )
    thread.start()
    time.sleep(0.3)
    ahead = len(fast.jobs)
    release.set()
    thread.join(10)
    assert ahead == 3
    assert len(fast.jobs) == 10


def test_pace_lets_everybody_go_when_the_run_is_over():
    pace = Pace(2, lookahead=1)
    assert pace.wait(0, 0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pace.wait(0, 1)))
    thread.start()
    pace.stop()
    thread.join(10)
    assert answers == [False]


# Faults


def test_unavailable_target_ends_the_run():
    class Absent(FakeTarget):
        @property
        def info(self):
            raise TargetUnavailable("not there")

        @info.setter
        def info(self, value):
            pass

    with pytest.raises(TargetUnavailable, match="not there"):
        run_suite(
            [FakeTarget(gives(0.0)), Absent(gives(0.0))],
            [(make_case("a"), "float32")],
            suite=Counters().suite(),
        )


@pytest.mark.parametrize("part", ["build_inputs", "expect", "judge"])
def test_faults_of_the_kit_name_the_case(part):
    def broken(*arguments):
        raise ZeroDivisionError("oops")

    suite = dataclasses.replace(Counters().suite(), **{part: broken})
    with pytest.raises(HarnessError, match=r"(of|judging) a in float32") as caught:
        run_suite([FakeTarget(gives(0.0))], [(make_case("a"), "float32")], suite=suite)
    assert "ZeroDivisionError: oops" in str(caught.value)


def test_no_thread_outlives_a_failed_run(monkeypatch):
    monkeypatch.setattr(runner, "LOOKAHEAD", 1)
    before = threading.active_count()
    pairs = [(make_case(f"case{i}"), "float32") for i in range(5)]
    broken = dataclasses.replace(Counters().suite(), judge=lambda *arguments: 1 / 0)
    with pytest.raises(HarnessError):
        run_suite([FakeTarget(gives(0.0)) for _ in range(3)], pairs, suite=broken)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


# Filters

CASES = [
    make_case("core/one", family="core", dtypes=("float32", "bfloat16"), flags=frozenset({"quick"})),
    make_case("core/two", family="core", dtypes=("float64",)),
    make_case("mask/one", family="mask", dtypes=("bfloat16", "float32")),
]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (
            {},
            [
                "core/one float32",
                "core/one bfloat16",
                "core/two float64",
                "mask/one float32",
                "mask/one bfloat16",
            ],
        ),
        ({"quick": True}, ["core/one float32", "core/one bfloat16"]),
        ({"family": ("mask",)}, ["mask/one float32", "mask/one bfloat16"]),
        ({"case": ("mask/one", "core/two")}, ["core/two float64", "mask/one float32", "mask/one bfloat16"]),
        ({"dtype": ("float64", "bfloat16")}, ["core/one bfloat16", "core/two float64", "mask/one bfloat16"]),
        ({"dtype": ("bfloat16",), "family": ("core",), "quick": True}, ["core/one bfloat16"]),
    ],
)
def test_filters(filters, expected):
    assert [f"{case.id} {dtype}" for case, dtype in select(CASES, Filters(**filters))] == expected


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"dtype": ("f32",)}, "--dtype: expected one of float64, float32, float16, bfloat16, got 'f32'"),
        ({"family": ("cor",)}, "--family: expected one of core, mask, got 'cor'"),
        ({"case": ("core/on",)}, "--case: expected one of core/one, core/two, mask/one, got 'core/on'"),
        (
            {"family": ("mask",), "quick": True},
            "expected at least one case to match --family mask --quick, got 0 of 3",
        ),
    ],
)
def test_filters_that_leave_nothing(filters, message):
    with pytest.raises(CommandError) as caught:
        select(CASES, Filters(**filters))
    assert message in str(caught.value)


def test_many_names_are_cut_to_those_alike():
    many = [make_case(f"case/{i}") for i in range(50)] + [make_case("window/off-by-one")]
    with pytest.raises(CommandError) as caught:
        select(many, Filters(case=("window/off-by-two",)))
    assert str(caught.value) == (
        "--case: expected one of 51 known names, got 'window/off-by-two' (nearest: window/off-by-one)"
    )


def test_all_families_are_listed_and_the_nearest_one_is_named():
    families = [f"family{letter}" for letter in "abcdefghijklmnopq"] + ["window"]
    many = [make_case(f"{family}/one", family=family) for family in families]
    with pytest.raises(CommandError) as caught:
        select(many, Filters(family=("windows",)))
    message = str(caught.value)
    assert all(family in message for family in families)
    assert message.endswith(", got 'windows' (nearest: window)")


def test_nearest_names_are_alike_first_then_those_around_what_was_found():
    names = ["mask/virtual-edge", "mask/token-edge", "keymask/edge", "core/paper"]
    assert nearest("mask/token-egde", names)[0] == "mask/token-edge"
    assert nearest("edge", names) == names[:3]
    assert nearest("", names) == nearest("zzz", names) == []


def test_filters_know_whether_they_filter():
    assert not Filters()
    for one in ({"dtype": ("float32",)}, {"family": ("x",)}, {"case": ("x",)}, {"quick": True}):
        assert Filters(**one)
    assert str(Filters(dtype=("float32",), case=("a", "b"), quick=True)) == (
        "--dtype float32 --case a --case b --quick"
    )
