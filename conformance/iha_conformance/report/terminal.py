"""The report for people: a table, each failure on a line, and a verdict."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.box import Box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from iha_conformance.protocol import DIFFERS, DTYPES
from iha_conformance.report.output import PLAIN_WIDTH, console
from iha_conformance.report.reproduction import diagnose_command
from iha_conformance.runner import Row, Summary, TargetReport
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import Launch
from iha_core.bounds import HIGHEST

OFFER_STAGES = (
    "every stage before the output is right, or none was offered; a port that gives the stages of SPEC.md"
    " chapter 4 by name is told at which one it starts to be wrong"
)

TITLES = ("target", "dtype", "passed", "failed", "skipped", "n/a", "worst\nratio", "seconds", "kernels")
NUMBERS = ("passed", "failed", "skipped", "n/a", "worst\nratio", "seconds")
OPTIONAL = ("skipped", "n/a", "kernels")
"""Columns of the table, those that are numbers, and those that are left out where they are empty."""

GAP = 2
"""Blank columns between two of the table's."""

LEAST_ROOM = 12
"""Columns that kernels have in any case."""

PLAIN = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""One line, below the titles: every encoding has it, and it costs no width."""

MAX_FAILURES = 25
"""Failed cases that are listed for a target; a systematic fault has hundreds."""

MAX_REQUIREMENTS = 3
"""Requirements that are named for a failed case; `iha case ID` names all."""


class _Bar:
    """A progress display; shows nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO | None, *columns: ProgressColumn) -> None:
        output = console(stream)
        self._progress = Progress(
            *columns,
            console=output,
            transient=True,
            disable=not output.is_terminal or output.is_dumb_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)


class ProgressBar(_Bar):
    """Counts judged cases while a run goes on."""

    def __init__(self, stream: TextIO | None, names: Sequence[str], total: int) -> None:
        super().__init__(
            stream,
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
        )
        self._failed = [0] * len(names)
        self._tasks: list[TaskID] = [self._progress.add_task(name, total=total, failed=0) for name in names]

    def on_row(self, target: int, row: Row) -> None:
        """Count one more result."""
        self._failed[target] += row.status == "failed"
        self._progress.update(self._tasks[target], advance=1, failed=self._failed[target])


class PartsBar(_Bar):
    """Counts parts of some work."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        super().__init__(
            stream,
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task(name, total=None)

    def on_done(self, done: int, total: int) -> None:
        """So many of so many parts are done."""
        self._progress.update(self._task, completed=done, total=total)


def print_report(
    stream: TextIO | None,
    reports: Sequence[TargetReport],
    filters: Filters,
    *,
    spec_version: str,
    launches: Sequence[Launch] = (),
    precision: str | None = None,
    absent: Iterable[str] = (),
    fault: str | None = None,
) -> None:
    """Print the whole report.

    Args:
        stream: where to; normally standard output.
        reports: one for each target.
        filters: what the run was limited to.
        spec_version: version of the specification.
        launches: what each target was launched by, so that its diagnosis can be named.
        precision: precision class whose limits judged, if one was asked for.
        absent: one line for each backend that was not run because it is not installed.
        fault: why the run as a whole does not count, if so.
    """
    out = console(stream)
    out.print(_table(reports, out.width if out.is_terminal else PLAIN_WIDTH))
    lines = [
        *_legend(reports, precision),
        *_failures(reports),
        *_unrepeatable(reports),
        *_left_out(reports),
        *absent,
        _verdict(reports, filters, spec_version, fault),
        *_diagnoses(reports, launches),
    ]
    for line in lines:
        _print_line(out, line)


def _print_line(out: Console, line: str) -> None:
    out.print(Text(line), soft_wrap=True)


def _table(reports: Sequence[TargetReport], width: int) -> Table:
    """The counts of each target in each dtype, in no more columns than that if it can be done."""
    blocks = [_block(report) for report in reports]
    rows = [row for block in blocks for row in block]
    titles = [t for t in TITLES if t not in OPTIONAL or any(row[t].plain not in ("", "0") for row in rows)]
    widths = {t: max(_columns(text) for text in (Text(t), *(row[t] for row in rows))) for t in titles}
    room = width - sum(widths[t] + GAP for t in titles if t != "kernels")
    table = Table(box=PLAIN, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for title in titles:
        table.add_column(title, justify="right" if title in NUMBERS else "left", overflow="fold")
    for block in blocks:
        for row in block:
            row["kernels"] = _fold(row["kernels"], max(room, LEAST_ROOM))
            table.add_row(*(row[title] for title in titles))
        table.add_section()
    return table


def _columns(text: Text) -> int:
    return max((line.cell_len for line in text.split("\n")), default=0)


def _block(report: TargetReport) -> list[dict[str, Text]]:
    """The rows of one target, a dtype each; what the target is stands below its name."""
    info = report.info
    # The framework of a built-in target is part of its name.
    framework = "" if info.framework in info.name.split(":") else f"{info.framework} "
    about = [info.name, f"{framework}{info.version}, {info.device}", f"precision {info.precision}"]
    by_dtype = {dtype: [row for row in report.rows if row.dtype == dtype] for dtype in DTYPES}
    block = [{"dtype": Text(dtype), **_cells(rows)} for dtype, rows in by_dtype.items() if rows]
    for index, row in enumerate(block):
        last = index == len(block) - 1
        row["target"] = Text("\n".join(about[index:] if last else about[index : index + 1]))
    return block


def _cells(rows: Sequence[Row]) -> dict[str, Text]:
    """What one row of the table says of its cases."""
    count = Summary.of(rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    ratios += [math.inf for row in rows if row.ratio is None and row.stage]  # wrong beyond any number
    kernels = Counter(row.kernel for row in rows if row.kernel)
    return {
        "passed": Text(str(count.passed), style="green" if count.passed else ""),
        "failed": Text(str(count.failed), style="bold red" if count.failed else ""),
        "skipped": Text(str(count.skipped), style="yellow" if count.skipped else ""),
        "n/a": Text(str(count.not_applicable)),
        "worst\nratio": Text(f"{max(ratios):.3g}" if ratios else "-"),
        "seconds": Text(f"{sum(row.seconds for row in rows):.2f}"),
        "kernels": Text("\n".join(f"{name} {times}" for name, times in sorted(kernels.items()))),
    }


def _fold(kernels: Text, width: int) -> Text:
    """Kernels in one line if they fit, otherwise each on lines of its own, broken within names if need be."""
    joined = Text(", ".join(kernels.plain.split("\n")))
    if joined.cell_len <= width:
        return joined
    lines: list[str] = []
    for kernel in kernels.plain.split("\n"):
        lines.append("")
        for piece in re.findall(r"[^_ ]*[_ ]|[^_ ]+", kernel):
            if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return Text("\n".join(line.rstrip() for line in lines))


def _legend(reports: Sequence[TargetReport], precision: str | None) -> list[str]:
    """What the table's words mean."""
    lines = [
        "worst ratio: largest error / its limit; 1 is the limit, a conforming result stays at or below 0.5",
        "seconds: the target's own time",
    ]
    cases: dict[str, set[str]] = {}
    for report in reports:
        for row in report.rows:
            if row.status == "not_applicable":
                cases.setdefault(row.capability or "unnamed", set()).add(row.id)
    if cases:
        needs = ", ".join(f"{name!r} ({_cases(len(ids))})" for name, ids in cases.items())
        lines[-1] += f"; n/a: needs a capability it does not declare, {needs}"
    if precision not in (None, HIGHEST):
        lines.append(f"limits: those of precision class {precision}, no narrower than those of {HIGHEST}")
    return lines


def _failures(reports: Sequence[TargetReport]) -> list[str]:
    """A line for each failed case, whatever the number of its dtypes, up to `MAX_FAILURES` a target."""
    lines = []
    for report in reports:
        failed: dict[str, list[Row]] = {}
        for row in report.rows:
            if row.status == "failed":
                failed.setdefault(row.id, []).append(row)
        start = f"FAILED {report.info.name}: "
        if len(failed) > 1:
            lines.append(f"FAMILIES {report.info.name}: failed {_by_family(report)}")
        lines += [start + describe_failure(rows) for rows in list(failed.values())[:MAX_FAILURES]]
        if len(failed) > MAX_FAILURES:
            more = _cases(len(failed) - MAX_FAILURES).replace(" ", " more ")
            lines.append(f"{start}{more} failed, too; --json FILE has them all")
        judged = {row.stage for rows in failed.values() for row in rows}
        if "output" in judged and judged <= {None, "output"}:
            lines.append(f"HINT {report.info.name}: {OFFER_STAGES}")
    return lines


def _by_family(report: TargetReport) -> str:
    """How many cases of each family failed, in any dtype; families without a failure are left out."""
    executed: dict[str, set[str]] = {}
    failed: dict[str, set[str]] = {}
    for row in report.rows:
        if row.status in ("passed", "failed"):
            executed.setdefault(row.family, set()).add(row.id)
        if row.status == "failed":
            failed.setdefault(row.family, set()).add(row.id)
    return ", ".join(f"{name} {len(ids)} of {len(executed[name])}" for name, ids in failed.items())


def describe_failure(rows: Sequence[Row]) -> str:
    """A failed case on one line: id, dtypes; first wrong stage and reason of the first; requirements.

    Args:
        rows: the failed rows of one case for one target, at least one.
    """
    row = rows[0]
    parts = [f"{row.id}, {', '.join(row.dtype for row in rows)}"]
    if len(rows) > 1:
        parts.append(f"in {row.dtype}")
    reason = row.reason or "no reason given"
    if row.stage and row.capability == "gradient":  # no stage; and the reason names its requirement
        return f"{': '.join(parts)}: {reason}"
    if row.stage:
        parts.append(f"first wrong stage {row.stage}")
    shown = [f"[{name}]" for name in row.requirements[:MAX_REQUIREMENTS]]
    if len(row.requirements) > MAX_REQUIREMENTS:
        shown.append("...")
    return " ".join([f"{': '.join(parts)}: {reason}", *shown])


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
    """Cases that were not executed, grouped by reason; the legend has those that do not apply."""
    words = {"skipped": "SKIPPED", "refused": "REFUSED"}
    lines = []
    for report in reports:
        groups = Counter((row.status, row.reason) for row in report.rows if row.status in words)
        for (status, reason), times in groups.items():
            lines.append(f"{words[status]} {report.info.name}: {_cases(times)}: {reason}")
    return lines


def _verdict(reports: Sequence[TargetReport], filters: Filters, version: str, fault: str | None) -> str:
    count = Summary.of([row for report in reports for row in report.rows])
    targets = f"{len(reports)} target" + ("" if len(reports) == 1 else "s")
    if count.failed:
        verdict = "FAILED by " + ", ".join(report.info.name for report in reports if report.summary.failed)
    elif fault:
        verdict = "NO VERDICT"
    else:
        verdict = f"PASSED what was executed; {count.skipped} skipped" if count.skipped else "PASSED"
    limited = f" (filtered: {filters})" if filters else ""
    return (
        f"IHA {version}, {targets}: {count.executed} of {_cases(count.expected)} executed,"
        f" {count.passed} passed, {count.failed} failed, {count.skipped} skipped,"
        f" {count.not_applicable} not applicable{limited}: {verdict}"
    )


def _diagnoses(reports: Sequence[TargetReport], launches: Sequence[Launch]) -> list[str]:
    """One line with the commands that diagnose what failed, where a diagnosis can explain it."""
    failed = [launch for report, launch in zip(reports, launches, strict=False) if _is_explicable(report)]
    commands = [command for launch in failed if (command := diagnose_command(launch)) is not None]
    return ["To see what it computes instead: " + "; ".join(commands)] if commands else []


def _is_explicable(report: TargetReport) -> bool:
    """Whether some case has wrong values in every dtype in which it was executed.

    A dialect has them in all; where some pass, arithmetic is at fault. Nor does a dialect say why a
    target crashes, hangs or takes bad input, or why its gradients alone are wrong.
    """
    wrong: dict[str, list[bool]] = {}
    for row in report.rows:
        if row.status in ("passed", "failed") and row.capability is None:
            wrong.setdefault(row.id, []).append(row.status == "failed" and row.stage is not None)
    return any(all(of) for of in wrong.values())


def _cases(count: int) -> str:
    return f"{count} case" + ("" if count == 1 else "s")
