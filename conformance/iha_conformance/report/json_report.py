"""The JSON report of a run; its schema is spec/schemas/report.schema.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from iha_conformance.report.files import ReportFile, open_report
from iha_conformance.runner import Row, TargetReport
from iha_conformance.selection import Filters

ROW_KEYS = ("id", "family", "dtype", "status", "ratio", "stage", "kernel", "reason", "seconds")
SUMMARY_KEYS = ("expected", "executed", "passed", "failed", "skipped")


def as_json(
    reports: Sequence[TargetReport], filters: Filters, *, spec_version: str, corpus_sha256: str
) -> dict[str, Any]:
    """The report as plain JSON values; every key is always there."""
    return {
        "spec_version": spec_version,
        "corpus_sha256": corpus_sha256,
        "filters": filters_as_json(filters),
        "targets": [
            {
                "target": dataclasses.asdict(report.info),
                "summary": {key: getattr(report.summary, key) for key in SUMMARY_KEYS},
                "results": [_row(row) for row in report.rows],
            }
            for report in reports
        ],
    }


def filters_as_json(filters: Filters) -> dict[str, Any] | None:
    """What a run was limited to, None for the whole suite."""
    if not filters:
        return None
    named = {name: list(getattr(filters, name)) or None for name in ("dtype", "family", "case")}
    return {**named, "quick": filters.quick}


def _row(row: Row) -> dict[str, Any]:
    fields = {key: getattr(row, key) for key in ROW_KEYS}
    fields["ratio"] = float(row.ratio) if row.ratio is not None and math.isfinite(row.ratio) else None
    fields["kernel"] = row.kernel or None
    fields["seconds"] = round(row.seconds, 6)
    return fields


class JsonFile:
    """A file for one JSON document. Use `open_json`."""

    def __init__(self, file: ReportFile) -> None:
        self._file = file

    def write(self, document: object) -> None:
        """Write a document; NaN and infinities in it are an error."""
        self._file.write(json.dumps(document, indent=1, allow_nan=False).encode("ascii") + b"\n")


@contextlib.contextmanager
def open_json(name: str | None) -> Iterator[JsonFile | None]:
    """A file to write JSON into, None without a name; leaves nothing behind if it is not written.

    Raises:
        CommandError: the path cannot be written to.
    """
    with open_report(name, option="--json") as file:
        yield None if file is None else JsonFile(file)
