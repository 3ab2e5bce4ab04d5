"""The report for people: a table, each failure on a line, and a verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from iha_conformance.protocol import DTYPES
from iha_conformance.report.output import console
from iha_conformance.runner import DIFFERS, Row, Summary, TargetReport
from iha_conformance.selection import Filters


class ProgressBar:
    """Counts judged cases while a run goes on; shows nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO | None, names: Sequence[str], total: int) -> None:
        output = console(stream)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=output,
            transient=True,
            disable=not output.is_terminal or output.is_dumb_terminal,
        )
        self._failed = [0] * len(names)
        self._tasks: list[TaskID] = [self._progress.add_task(name, total=total, failed=0) for name in names]

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def on_row(self, target: int, row: Row) -> None:
        """Count one more result."""
        self._failed[target] += row.status == "failed"
        self._progress.update(self._tasks[target], advance=1, failed=self._failed[target])


def print_report(
    stream: TextIO | None,
    reports: Sequence[TargetReport],
    filters: Filters,
    *,
    spec_version: str,
    absent: Iterable[str] = (),
    fault: str | None = None,
) -> None:
    """Print the whole report.

    Args:
        stream: where to; normally standard output.
        reports: one for each target.
        filters: what the run was limited to.
        spec_version: version of the specification.
        absent: one line for each backend that was not run because it is not installed.
        fault: why the run as a whole does not count, if so.
    """
    out = console(stream)
    out.print(_table(reports))
    lines = [
        *_failures(reports),
        *_unrepeatable(reports),
        *_left_out(reports),
        *absent,
        _verdict(reports, filters, spec_version, fault),
    ]
    for line in lines:
        _print_line(out, line)


def _print_line(out: Console, line: str) -> None:
    out.print(Text(line), soft_wrap=True)


def _table(reports: Sequence[TargetReport]) -> Table:
    table = Table()
    for title in ("target", "dtype"):
        table.add_column(title)
    for title in ("passed", "failed", "skipped", "n/a", "worst ratio", "seconds"):
        table.add_column(title, justify="right")
    table.add_column("kernels")
    for report in reports:
        info = report.info
        name = f"{info.name} ({info.framework} {info.version}, {info.device}, {info.precision})"
        for dtype in DTYPES:
            rows = [row for row in report.rows if row.dtype == dtype]
            if rows:
                table.add_row(name, dtype, *_cells(rows))
                name = ""
        table.add_section()
    return table


def _cells(rows: Sequence[Row]) -> list[Text]:
    count = Summary.of(rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    ratios += [math.inf for row in rows if row.ratio is None and row.stage]  # wrong beyond any number
    kernels = Counter(row.kernel for row in rows if row.kernel)
    return [
        Text(str(count.passed), style="green" if count.passed else ""),
        Text(str(count.failed), style="bold red" if count.failed else ""),
        Text(str(count.skipped), style="yellow" if count.skipped else ""),
        Text(str(count.not_applicable)),
        Text(f"{max(ratios):.3g}" if ratios else "-"),
        Text(f"{sum(row.seconds for row in rows):.2f}"),
        Text(", ".join(f"{name} {times}" for name, times in sorted(kernels.items())) or "-"),
    ]


def _failures(reports: Sequence[TargetReport]) -> list[str]:
    return [
        f"FAILED {report.info.name}: {describe_failure(row)}"
        for report in reports
        for row in report.rows
        if row.status == "failed"
    ]


def describe_failure(row: Row) -> str:
    """A failed case on one line: id, dtype, first wrong stage, ratio, reason, requirements."""
    parts = [row.id, row.dtype]
    if row.stage:
        parts.append(f"stage {row.stage}")
    if row.ratio is not None:
        parts.append(f"ratio {row.ratio:.3g}")
    requirements = " ".join(f"[{name.strip('[]')}]" for name in row.requirements)
    return f"{', '.join(parts)}: {row.reason or 'no reason given'} {requirements}".rstrip()


def _unrepeatable(reports: Sequence[TargetReport]) -> list[str]:
    lines = []
    for report in reports:
        names = [f"{row.id} {row.dtype}" for row in report.rows if row.repeatable is False]
        if names:
            more = ", ..." if len(names) > 5 else ""
            listed = ", ".join(names[:5]) + more
            lines.append(f"NOTE {report.info.name}: {DIFFERS} in {_cases(len(names))}: {listed}")
    return lines


def _left_out(reports: Sequence[TargetReport]) -> list[str]:
    """Cases that were not executed, grouped by reason."""
    words = {"skipped": "SKIPPED", "refused": "REFUSED", "not_applicable": "NOT APPLICABLE"}
    lines = []
    for report in reports:
        groups = Counter((row.status, row.reason) for row in report.rows if row.status in words)
        for (status, reason), times in groups.items():
            lines.append(f"{words[status]} {report.info.name}: {_cases(times)}: {reason}")
    return lines


def _verdict(reports: Sequence[TargetReport], filters: Filters, version: str, fault: str | None) -> str:
    count = Summary.of([row for report in reports for row in report.rows])
    targets = f"{len(reports)} target" + ("" if len(reports) == 1 else "s")
    verdict = "FAILED" if count.failed else "NO VERDICT" if fault else "PASSED"
    if count.failed:
        bad = [report.info.name for report in reports if report.summary.failed]
        verdict += f" by {', '.join(bad)}"
    limited = f" (filtered: {filters})" if filters else ""
    return (
        f"IHA {version}, {targets}: {count.executed} of {_cases(count.expected)} executed,"
        f" {count.passed} passed, {count.failed} failed, {count.skipped} skipped,"
        f" {count.not_applicable} not applicable{limited}: {verdict}"
    )


def _cases(count: int) -> str:
    return f"{count} case" + ("" if count == 1 else "s")
