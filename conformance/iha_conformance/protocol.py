"""What the runner, the targets and the judge say to each other.

A target is anything that can be held to the specification: a backend of this project, a Python
callable, a command or a folder of results. The runner knows only this protocol and never
asks which kind it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Storage dtypes of the suite, in the order of reports."""

CAPABILITIES = ("invalid", "gradient", "decode", "sharded")
"""What a target has to declare to be given the cases of it."""

DIFFERS = "second run differs in bits"
"""Remark on a case whose two runs did not give the same bits ([NUM-7])."""

Inputs = Mapping[str, Any]
"""Arguments of `attention` by name: numpy arrays, and query_offset as an int or int64 array (B,)."""

Operation = Literal["attention", "gradient"]
"""What a job asks for: the forward pass, or the gradients of all seven arrays (SPEC.md chapter 9)."""

UNDECLARED = "undeclared"
"""Precision class of a target that cannot be asked for it."""

ResultKind = Literal["arrays", "refused", "not_applicable", "failed"]
FailureKind = Literal["raised", "crashed", "hung", "wrong shape", "missing", "unreadable"]
Status = Literal["passed", "failed", "skipped", "refused", "not_applicable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """Who is being judged; the first part of a report.

    Attributes:
        name: name of the target, as on the command line.
        framework, version: what it computes with.
        device: where.
        precision: precision class of its products ([NUM-8]) in force, or `UNDECLARED`.
    """

    name: str
    framework: str
    version: str
    device: str
    precision: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One call to make.

    Attributes:
        case_id: permanent id of the case.
        dtype: storage dtype, one of `DTYPES`.
        operation: what to compute.
        inputs: arguments by name, only those that the case has, in the case's dtype; for "gradient" also
            the cotangent.
        config: all fields of the configuration (for a case of bad input, possibly not allowed ones).
        wanted: names of the stages that the judge can use, "output" always among them; for "gradient" the
            names of the arguments, all of which are wanted.
        layout: how the arrays lie in memory when the target sees them (`corpus.layouts`).
        capability: what a target must declare to be given this job, or None.
    """

    case_id: str
    dtype: str
    inputs: Inputs
    config: Mapping[str, Any]
    operation: Operation = "attention"
    wanted: tuple[str, ...] = ("output",)
    layout: str = "contiguous"
    capability: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a job.

    Attributes:
        kind: "arrays", or why there are none.
        arrays: stages by name, `output` among them, or gradients by argument, where kind is "arrays".
        failure: kind of failure, where kind is "failed".
        reason: one line for people; for a failure, what was raised or seen.
        error_types: names of the classes of the exception raised, most derived first.
        kernel: which computation ran, in the target's words.
        repeatable: whether a second run gave the same bits; None where it was not tried.
        rerun: what the second run gave, where its bits differ; it is judged as well.
        seconds: wall time of the first run.
    """

    case_id: str
    dtype: str
    kind: ResultKind
    arrays: Mapping[str, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)
    failure: FailureKind | None = None
    reason: str | None = None
    error_types: tuple[str, ...] = ()
    kernel: str | None = None
    repeatable: bool | None = None
    rerun: Mapping[str, np.ndarray[Any, Any]] | None = None
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judge's word on one result.

    Attributes:
        ratio: worst error divided by its limit; None where that is not a finite number.
        status: what became of the case.
        stage: first stage over its limit, also "output" where only a companion is, or "gradient of ..."; None
            where all are within.
        reason: one line: why it failed, was skipped or refused, or what is worth knowing.
    """

    status: Status
    ratio: float | None = None
    stage: str | None = None
    reason: str | None = None


class Target(Protocol):
    """Something that can be held to the specification."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    @property
    def takes_all(self) -> bool:
        """Whether it takes all jobs before it gives the first result, as a command that is run once."""
        ...

    def evaluate(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Carry out the jobs in order; one result each, whatever happens to the target."""
        ...

    def close(self) -> None:
        """End what was started for this target."""
        ...


class TargetUnavailable(Exception):  # noqa: N818 - a state, like KeyboardInterrupt
    """A target cannot be launched: not installed, not importable, no such device."""
