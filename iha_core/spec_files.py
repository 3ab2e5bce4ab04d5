"""Where the files of `spec/` are: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).parent / "spec_files"
_CHECKOUT = Path(__file__).parent.parent / "spec"


def spec_path(name: str) -> Path:
    """Path of a file of the specification, such as "cases.toml"."""
    return (_PACKAGED if _PACKAGED.is_dir() else _CHECKOUT) / name


def load_toml(name: str) -> dict[str, Any]:
    """Contents of a TOML file of the specification."""
    with spec_path(name).open("rb") as file:
        return tomllib.load(file)
