"""Hands every case to every target, has the results judged, and counts.

Targets work in the background while results are judged here; where there is nothing to judge, the
next expectation is computed ahead. An expectation is computed once for all targets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from iha_conformance.corpus import Case, build_inputs
from iha_conformance.judge import expect, judge
from iha_conformance.protocol import (
    DIFFERS,
    FailureKind,
    Inputs,
    Job,
    Result,
    Status,
    Target,
    TargetInfo,
    Verdict,
)
from iha_conformance.targets.messages import describe
from iha_core import GRADIENTS, STAGES

LOOKAHEAD = 128
"""How many cases a fast target may be ahead of the slowest one; bounds what is kept in memory."""

Pair = tuple[Case, str]
"""A case and a dtype."""


class HarnessError(Exception):
    """A fault of the kit itself, not of a target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a report: a case, in a dtype, for one target."""

    id: str
    family: str
    dtype: str
    status: Status
    ratio: float | None
    stage: str | None
    kernel: str | None
    reason: str | None
    seconds: float
    requirements: tuple[str, ...] = ()
    capability: str | None = None
    repeatable: bool | None = None
    failure: FailureKind | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts of a report. `not_applicable` is no part of `expected`.

    executed = passed + failed, expected = executed + skipped; refused counts as skipped.
    """

    expected: int
    executed: int
    passed: int
    failed: int
    skipped: int
    not_applicable: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Summary:
        """Count the rows."""
        count = dict.fromkeys(("passed", "failed", "skipped", "refused", "not_applicable"), 0)
        for row in rows:
            count[row.status] += 1
        executed = count["passed"] + count["failed"]
        skipped = count["skipped"] + count["refused"]
        return cls(
            expected=executed + skipped,
            executed=executed,
            passed=count["passed"],
            failed=count["failed"],
            skipped=skipped,
            not_applicable=count["not_applicable"],
        )


@dataclasses.dataclass(kw_only=True)
class TargetReport:
    """All rows of one target, in the order of the cases."""

    info: TargetInfo
    rows: list[Row] = dataclasses.field(default_factory=list)

    @property
    def summary(self) -> Summary:
        """The counts so far."""
        return Summary.of(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """The parts of the kit that a run needs; replaceable, so that the runner can be tested alone."""

    build_inputs: Callable[[Case, str], Inputs] = build_inputs
    expect: Callable[[Case, str, Inputs], Any] = expect
    judge: Callable[[Case, str, Any, Result], Verdict] = judge


@dataclasses.dataclass(frozen=True)
class _Event:
    """What a target's thread reports: its info, a result, or (neither) its end."""

    target: int
    info: TargetInfo | None = None
    result: Result | None = None
    error: BaseException | None = None


def run_suite(
    targets: Sequence[Target],
    pairs: Sequence[Pair],
    *,
    suite: Suite | None = None,
    on_row: Callable[[int, Row], None] | None = None,
) -> list[TargetReport]:
    """Hold the targets to the cases and return a report for each.

    Args:
        targets: what to judge; the caller closes them.
        pairs: the cases and dtypes, in the order of the reports.
        suite: the kit's parts, the real ones by default.
        on_row: called with the index of the target for each row, as rows become known.

    Raises:
        TargetUnavailable: a target cannot be launched.
        HarnessError: the kit failed.
    """
    run = _Run(targets, pairs, suite or Suite())
    try:
        for index, row in run.rows():
            if on_row is not None:
                on_row(index, row)
    finally:
        run.pace.stop()
    return run.reports()


def make_job(case: Case, dtype: str, inputs: Inputs) -> Job:
    """The call that a case asks a target to make."""
    wanted: tuple[str, ...] = STAGES if case.invalid is None else ("output",)
    if case.operation == "gradient":
        wanted = GRADIENTS
    if case.config.get("normalisation") == "none":  # there is no lse ([LIN-1])
        wanted = tuple(stage for stage in wanted if stage != "lse")
    return Job(
        case_id=case.id,
        dtype=dtype,
        inputs=inputs,
        config=dict(case.config),
        operation=case.operation,
        wanted=wanted,
        layout=case.layout,
        capability=case.capability,
    )


class _Run:
    """The state of one run. Everything but `_drive` and `_jobs` happens in the caller's thread."""

    def __init__(self, targets: Sequence[Target], pairs: Sequence[Pair], suite: Suite) -> None:
        self._targets = targets
        self._pairs = pairs
        self._suite = suite
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._infos: dict[int, TargetInfo] = {}
        self._rows: list[list[Row]] = [[] for _ in targets]
        self._inputs = _Shared(self._build_inputs, users=len(targets) + 1)
        self._expectations: dict[int, Any] = {}
        self._ahead = 0  # first pair whose expectation has not been computed ahead
        self.pace = Pace(len(targets), LOOKAHEAD)

    def reports(self) -> list[TargetReport]:
        return [TargetReport(info=self._infos[i], rows=rows) for i, rows in enumerate(self._rows)]

    def rows(self) -> Iterator[tuple[int, Row]]:
        for index, target in enumerate(self._targets):
            threading.Thread(target=self._drive, args=(index, target), daemon=True).start()
        active = len(self._targets)
        while active:
            event = self._next_event()
            if event.error is not None:
                raise event.error
            if event.info is not None:
                self._infos[event.target] = event.info
            elif event.result is not None:
                yield event.target, self._record(event.target, event.result)
            else:
                active -= 1
                while len(self._rows[event.target]) < len(self._pairs):
                    yield event.target, self._record(event.target, None)

    def _next_event(self) -> _Event:
        """The next event; while there is none, expectations are computed ahead."""
        while self._ahead < min(len(self._pairs), self.pace.limit()):
            with contextlib.suppress(queue.Empty):
                return self._events.get_nowait()
            self._expectation(self._ahead)
            self._ahead += 1
        return self._events.get()

    def _record(self, target: int, result: Result | None) -> Row:
        """Judge a result, None for a missing one, and keep the row."""
        index = len(self._rows[target])
        case, dtype = self._pairs[index]
        if result is None:
            result = Result(
                case_id=case.id, dtype=dtype, kind="failed", failure="missing", reason="no result"
            )
        verdict = self._verdict(index, result)
        row = Row(
            id=case.id,
            family=case.family,
            dtype=dtype,
            status=verdict.status,
            ratio=verdict.ratio,
            stage=verdict.stage,
            kernel=result.kernel,
            reason=verdict.reason,
            seconds=result.seconds,
            requirements=tuple(case.requirements),
            capability=case.capability,
            repeatable=result.repeatable,
            failure=result.failure,
        )
        self._rows[target].append(row)
        self.pace.advance(target)
        if all(len(rows) > index for rows in self._rows):
            self._expectations.pop(index, None)
        return row

    def _verdict(self, index: int, result: Result) -> Verdict:
        case, dtype = self._pairs[index]
        if (result.case_id, result.dtype) != (case.id, dtype):
            found = f"{result.case_id} in {result.dtype}"
            raise HarnessError(f"results out of order: expected {case.id} in {dtype}, got {found}")
        expectation = self._expectation(index) if result.kind == "arrays" else None
        try:
            verdict = self._suite.judge(case, dtype, expectation, result)
            if result.rerun is None:
                return verdict
            again = dataclasses.replace(result, arrays=result.rerun, rerun=None)
            return _worse(verdict, self._suite.judge(case, dtype, expectation, again))
        except Exception as error:
            raise HarnessError(f"judging {case.id} in {dtype}: {describe(error)}") from error

    def _expectation(self, index: int) -> Any:
        case, dtype = self._pairs[index]
        if case.invalid is not None:
            return None
        if index not in self._expectations:
            inputs = self._inputs.get(index)
            try:
                self._expectations[index] = self._suite.expect(case, dtype, inputs)
            except Exception as error:
                raise HarnessError(f"expectation of {case.id} in {dtype}: {describe(error)}") from error
        return self._expectations[index]

    # In the threads of the targets

    def _drive(self, index: int, target: Target) -> None:
        try:
            self._events.put(_Event(index, info=target.info))
            for result in target.evaluate(self._jobs(index)):
                self._events.put(_Event(index, result=result))
            self._events.put(_Event(index))
        except BaseException as error:  # raised again in the caller's thread
            self._events.put(_Event(index, error=error))

    def _jobs(self, target: int) -> Iterator[Job]:
        for index, (case, dtype) in enumerate(self._pairs):
            # One that takes all jobs first would wait for itself.
            if not self.pace.wait(target, index, limited=not self._targets[target].takes_all):
                return
            yield make_job(case, dtype, self._inputs.get(index))

    def _build_inputs(self, index: int) -> Inputs:
        case, dtype = self._pairs[index]
        try:
            return self._suite.build_inputs(case, dtype)
        except Exception as error:
            raise HarnessError(f"inputs of {case.id} in {dtype}: {describe(error)}") from error


def _worse(first: Verdict, second: Verdict) -> Verdict:
    """One verdict on two runs with different bits: a failure if either is one."""
    if first.status != "failed" and second.status == "failed":
        return dataclasses.replace(second, reason=f"second run: {second.reason}")
    ratio = first.ratio
    if first.status != "failed" and first.ratio is not None and second.ratio is not None:
        ratio = max(first.ratio, second.ratio)
    reason = first.reason or DIFFERS
    if DIFFERS not in reason:
        reason = f"{reason}; {DIFFERS}"
    return dataclasses.replace(first, ratio=ratio, reason=reason)


class Pace:
    """Keeps fast targets within reach of the slowest one.

    Args:
        targets: how many there are.
        lookahead: how many cases one may be ahead of what has been judged for all.
    """

    def __init__(self, targets: int, lookahead: int) -> None:
        self._judged = [0] * targets
        self._lookahead = lookahead
        self._stopped = False
        self._changed = threading.Condition()

    def limit(self) -> int:
        """First case that nobody may begin yet."""
        return min(self._judged) + self._lookahead

    def advance(self, target: int) -> None:
        """One more case has been judged for this target."""
        with self._changed:
            self._judged[target] += 1
            self._changed.notify_all()

    def wait(self, target: int, case: int, *, limited: bool = True) -> bool:
        """Wait until this target may begin this case; False if the run is over.

        Unless it is limited it may begin at once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not limited or case < self.limit())
            return not self._stopped

    def stop(self) -> None:
        """The run is over: nobody begins another case."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class _Shared:
    """Computes a value once for several users, in whichever thread asks first, then forgets it."""

    def __init__(self, compute: Callable[[int], Any], *, users: int) -> None:
        self._compute = compute
        self._users = users
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def get(self, key: int) -> Any:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(left=self._users))
        with entry.lock:
            if not entry.known:
                entry.value = self._compute(key)
                entry.known = True
        with self._lock:
            entry.left -= 1
            if entry.left == 0:
                del self._entries[key]
        return entry.value


@dataclasses.dataclass
class _Entry:
    left: int
    known: bool = False
    value: Any = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
