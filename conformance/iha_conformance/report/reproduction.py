"""The command that runs one case again."""

from __future__ import annotations

import shlex

from iha_conformance.targets.messages import Launch


def reproduce(launch: Launch, case_id: str, dtype: str) -> str:
    """The command that runs one case, in one dtype, on that target alone; for files, that judges them."""
    if launch.kind == "files":  # which are all there; the port itself is the user's to run again
        words = ["iha", "vectors", "check", launch.directory, launch.name]
        return shlex.join(words + ([] if launch.precision is None else ["--precision", launch.precision]))
    option = {"backend": "--backend", "callable": "--target", "exec": "--exec"}[launch.kind]
    words = ["iha", "run", option, launch.name]
    for option, value in (("--device", launch.device), ("--precision", launch.precision)):
        words += [option, value] if value is not None else []
    return shlex.join([*words, "--case", case_id, "--dtype", dtype])
