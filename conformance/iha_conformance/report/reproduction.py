"""The command that runs one case again."""

from __future__ import annotations

import shlex

from iha_conformance.targets.messages import Launch


def reproduce(launch: Launch, case_id: str, dtype: str) -> str:
    """The command that runs one case, in one dtype, on that target alone."""
    option = {"backend": "--backend", "callable": "--target"}[launch.kind]
    words = ["iha", "run", option, launch.name]
    for option, value in (("--device", launch.device), ("--precision", launch.precision)):
        words += [option, value] if value is not None else []
    return shlex.join([*words, "--case", case_id, "--dtype", dtype])
