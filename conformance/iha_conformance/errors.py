"""Errors that the `iha` command reports in one line and ends with exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CommandError(Exception):
    """The command was asked for something that does not exist or cannot be done."""


FEW = 24
"""Names that are all listed."""

NEAREST = 5
"""Names suggested in place of an unknown one."""


def unknown(what: str, found: str, known: Iterable[str]) -> CommandError:
    """The fault of an unknown name: what is known, unless that is too much, and what is like it."""
    names = list(dict.fromkeys(known))
    listed = ", ".join(names) if len(names) <= FEW else f"{len(names)} known names"
    alike = nearest(found, names)
    hint = f" (nearest: {', '.join(alike)})" if alike else ""
    return CommandError(f"{what}: expected one of {listed}, got {found!r}{hint}")


def nearest(found: str, names: Sequence[str]) -> list[str]:
    """The names most like the one found, best first; those that contain it count as like it."""
    alike = difflib.get_close_matches(found, names, n=NEAREST, cutoff=0.6)
    inside = [name for name in names if found and found in name and name not in alike]
    return [*alike, *inside][:NEAREST]
