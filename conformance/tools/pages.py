"""Pages of the documentation that hold tables made by commands."""

from __future__ import annotations

import sys
from pathlib import Path


def replace(page: Path, begin: str, end: str, made: str) -> None:
    """Put a text between two lines of a page; ends the program if it has not both."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or not after:
        sys.exit(f"{page}: expected the lines {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}", encoding="utf-8")
