"""Files of reports: written at the end, whole or not at all, and found unwritable at the start."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from iha_conformance.errors import CommandError


class ReportFile:
    """A file that is written at the end, whole or not at all, but found unwritable at the start.

    Use `open_report`. Devices and pipes are written to directly, since they cannot be replaced.
    """

    def __init__(self, path: Path, temporary: Path | None, option: str) -> None:
        self._path = path
        self._temporary = temporary
        self._option = option

    def write(self, contents: bytes) -> None:
        """Write the whole report, once."""
        destination = self._temporary or self._path
        try:
            destination.write_bytes(contents)
            if self._temporary is not None:
                os.replace(self._temporary, self._path)
        except OSError as error:
            raise _unwritable(self._option, str(self._path), error) from error


@contextlib.contextmanager
def open_report(name: str | None, *, option: str) -> Iterator[ReportFile | None]:
    """A file to write a report into, None without a name; leaves nothing behind if it is not written.

    Args:
        name: as on the command line.
        option: which one it was, for errors.

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
        raise _unwritable(option, name, error) from error
    try:
        yield ReportFile(path, temporary, option)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_distinct(names: Mapping[str, str | None]) -> None:
    """Refuse two options that name one file: the second report would take the place of the first.

    Raises:
        CommandError: two of them do.
    """
    options: dict[str, str] = {}
    for option, name in names.items():
        if name is None:
            continue
        path = os.path.realpath(name)
        if path in options:
            raise CommandError(f"{option}: expected another file than that of {options[path]}, got {name!r}")
        options[path] = option


def _unwritable(option: str, name: str, error: OSError) -> CommandError:
    return CommandError(f"{option}: cannot write {name!r}: {error.strerror}")


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
