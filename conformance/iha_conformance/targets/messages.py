"""What parent and worker process send each other, and how errors are put into one line."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from iha_conformance.protocol import Inputs, TargetInfo
from iha_core import STAGES

Arrays = dict[str, np.ndarray[Any, Any]]
Function = Callable[..., Any]

MAX_REASON = 500
"""Characters of a reason; some frameworks put whole traces into their messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Which target to launch; for a target in a worker, the first message to it.

    Attributes:
        kind: which module of `targets` knows the target: "backend" is of `backends`, "callable" of
            `callables`, "exec" of `exec`, "files" of `folder`.
        name: name of the target in reports: "torch", "array-api:numpy", "module:callable", a command, or
            a folder of results.
        device: device asked for, None for the default one.
        precision: precision class asked for ([NUM-8]), None to leave it as the environment has it.
        directory: working directory of the user, on the import path of callables; for a folder of
            results, that of the vectors.
    """

    kind: Literal["backend", "callable", "exec", "files"]
    name: str
    device: str | None = None
    precision: str | None = None
    directory: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """Answer to `Launch`: the target is loaded."""

    info: TargetInfo
    capabilities: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unavailable:
    """Answer to `Launch`: the target cannot be loaded, and why."""

    reason: str


class Adapter(Protocol):
    """One loaded target, inside its worker process.

    `detailed` returns all the stages that the target offers and the name of the computation that
    ran; `plain` calls the target as its users do. A target without that distinction does the same
    thing twice. `gradients` is asked only of targets that declare the capability "gradient"; it returns
    gradients by argument. Each may raise anything; `RefusedError` means the job counts as skipped.
    """

    @property
    def info(self) -> TargetInfo: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def detailed(self, inputs: Inputs, config: dict[str, Any]) -> tuple[Arrays, str | None]: ...

    def plain(self, inputs: Inputs, config: dict[str, Any]) -> Arrays: ...

    def gradients(
        self, inputs: Inputs, config: dict[str, Any], cotangent: np.ndarray[Any, Any]
    ) -> tuple[Arrays, str | None]: ...


class RefusedError(Exception):
    """The target does not offer what the job asks for."""


class OutputMissingError(Exception):
    """The target returned, but not the output."""


class WrongReturnError(Exception):
    """The target returned something that nobody can use in place of an array.

    No TypeError, though reports call it one: it is raised by the kit, and must not pass for the
    refusal of bad input that some cases expect of a target.
    """


def only_wanted(wanted: tuple[str, ...], arrays: Arrays) -> Arrays:
    """What is wanted, and stages that nobody knows: the judge has to see misspelt names."""
    return {name: array for name, array in arrays.items() if name in wanted or name not in STAGES}


def how_it_ended(status: int) -> str:
    """How a process ended, from its exit status as `subprocess` has it."""
    if status >= 0:
        return f"the process ended with exit status {status}"
    try:
        return f"the process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"the process was ended by signal {-status}"


def one_line(text: str) -> str:
    """The text without line breaks and unprintable characters, cut to a readable length."""
    joined = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
    return joined if len(joined) <= MAX_REASON else joined[: MAX_REASON - 3] + "..."


def describe(error: BaseException) -> str:
    """An exception as one line, "TypeError: what it says"; never raises itself."""
    name = one_line(type(error).__name__)
    try:
        text = one_line(str(error))
    except Exception:
        text = "(its message cannot be printed)"
    return f"{name}: {text}" if text else name


def class_names(error: BaseException) -> tuple[str, ...]:
    """Names of the error's classes, most derived first, `object` left out."""
    return tuple(cls.__name__ for cls in type(error).__mro__[:-1])
