"""The commands that run one case again, and that find out what is wrong with a target."""

from __future__ import annotations

import shlex

from iha_conformance.targets.messages import Launch


def reproduce(launch: Launch, case_id: str, dtype: str) -> str:
    """The command that runs one case, in one dtype, on that target alone; for files, that judges them."""
    if launch.kind == "files":  # which are all there; the port itself is the user's to run again
        words = ["iha", "vectors", "check", launch.directory, launch.name]
        return shlex.join(words + ([] if launch.precision is None else ["--precision", launch.precision]))
    option = {"backend": "--backend", "callable": "--target", "exec": "--exec"}[launch.kind]
    words = ["iha", "run", option, launch.name, *_how(launch)]
    return shlex.join([*words, "--case", case_id, "--dtype", dtype])


def diagnose_command(launch: Launch) -> str | None:
    """The command that diagnoses the target; None for files, which answer no questions."""
    if launch.kind == "files":
        return None
    named = ["--exec", launch.name] if launch.kind == "exec" else [launch.name]
    return shlex.join(["iha", "diagnose", *named, *_how(launch)])


def _how(launch: Launch) -> list[str]:
    """The options that say how a target is launched."""
    options = (("--device", launch.device), ("--precision", launch.precision))
    return [word for option, value in options if value is not None for word in (option, value)]
