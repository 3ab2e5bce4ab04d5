"""Errors that the `iha` command reports in one line and ends with exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CommandError(Exception):
    """The command was asked for something that does not exist or cannot be done."""


FEW = 8
"""Names that are all listed."""


def unknown(what: str, found: str, known: Iterable[str]) -> CommandError:
    """The fault of an unknown name: what is known, or of many names those that are like it."""
    names = list(dict.fromkeys(known))
    if len(names) <= FEW:
        return CommandError(f"{what}: expected one of {', '.join(names)}, got {found!r}")
    alike = [name for name in names if found and found in name]
    alike = alike or difflib.get_close_matches(found, names, n=FEW, cutoff=0.5)
    listed = ", ".join((alike or names)[:FEW]) + ", ..."
    return CommandError(f"{what}: expected one of {len(names)} known names such as {listed} got {found!r}")
