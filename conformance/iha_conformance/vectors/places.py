"""Names on the command line of `iha vectors`: of folders, and of reports that must not lie in one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from iha_conformance.errors import CommandError


def real(what: str, name: str) -> Path:
    """The path that a name leads to, without links.

    Args:
        what: the argument or option that it is, for errors.
        name: as on the command line.

    Raises:
        CommandError: it is empty, which would be the working directory, or that has been deleted.
    """
    check_named(what, name)
    try:
        return Path(os.path.realpath(name))
    except FileNotFoundError:
        raise CommandError(
            f"{what}: expected a working directory for {name!r}, but it has been deleted"
        ) from None


def check_named(what: str, name: str) -> None:
    """Refuse an empty name, as of a variable that is not set.

    Raises:
        CommandError: it is empty.
    """
    if not name:
        raise CommandError(f"{what}: expected the name of a folder, got ''")


def check_outside(folder: str, reports: Mapping[str, str | None]) -> None:
    """Refuse a report in the folder of vectors: it would be a file too many there, or take the place of one.

    Args:
        folder: with vectors, as on the command line.
        reports: names of files by their options; None for an option that was not given.

    Raises:
        CommandError: one lies there.
    """
    path = real("DIR", folder)
    for option, name in reports.items():
        if name and path in (found := real(option, name), *found.parents):
            raise CommandError(f"{option}: expected a file outside of {folder!r}, got {name!r}")


def check_results(name: str) -> None:
    """Refuse a folder of results that is none or that cannot be read: no port is at fault for that.

    Raises:
        CommandError: it is one of these.
    """
    check_named("OUT_DIR", name)
    try:
        with os.scandir(name) as entries:
            next(entries, None)
        os.lstat(os.path.join(name, os.curdir))  # to list a folder is one right, to reach its files another
    except OSError as error:
        found = {
            FileNotFoundError: "nothing of that name",
            NotADirectoryError: "a file",
        }.get(type(error), f"one that cannot be read: {error.strerror}")
        raise CommandError(f"OUT_DIR: expected a folder of results, found {found}: {name!r}") from error
