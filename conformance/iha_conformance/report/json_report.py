"""The JSON report of a run; its schema is spec/schemas/report.schema.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from iha_conformance.errors import CommandError
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
        "filters": _filters(filters),
        "targets": [
            {
                "target": dataclasses.asdict(report.info),
                "summary": {key: getattr(report.summary, key) for key in SUMMARY_KEYS},
                "results": [_row(row) for row in report.rows],
            }
            for report in reports
        ],
    }


def _filters(filters: Filters) -> dict[str, Any] | None:
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
    """A file that is written at the end, whole or not at all, but found unwritable at the start.

    Use `open_json`. Devices and pipes are written to directly, since they cannot be replaced.
    """

    def __init__(self, path: Path, temporary: Path | None) -> None:
        self._path = path
        self._temporary = temporary

    def write(self, document: object) -> None:
        """Write a document; NaN and infinities in it are an error."""
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        destination = self._temporary or self._path
        try:
            destination.write_text(text, encoding="ascii")
            if self._temporary is not None:
                os.replace(self._temporary, self._path)
        except OSError as error:
            raise CommandError(f"--json: cannot write {str(self._path)!r}: {error.strerror}") from error


@contextlib.contextmanager
def open_json(name: str | None) -> Iterator[JsonFile | None]:
    """A file to write JSON into, None without a name; leaves nothing behind if it is not written.

    Raises:
        CommandError: the path cannot be written to.
    """
    if name is None:
        yield None
        return
    path = Path(name)
    try:
        if not path.exists() or path.is_file():
            path = Path(os.path.realpath(name))  # the file changes, a link to it stays a link
        temporary = _temporary(path)
    except OSError as error:
        raise CommandError(f"--json: cannot write {name!r}: {error.strerror}") from error
    try:
        yield JsonFile(path, temporary)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path | None:
    """A new file beside the path, to take its place; None for a device or pipe."""
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory")
    if path.is_fifo():  # opening one and closing it again would send its reader away
        return None
    if path.exists() and not path.is_file():
        with path.open("ab"):
            return None
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask()
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "Permission denied")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    os.chmod(name, mode)
    return Path(name)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
