"""The exchange by files of SPEC.md 8.1: an input file for each job, and the results in a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iha_conformance.errors import nearest
from iha_conformance.protocol import FailureKind, Job, Result
from iha_conformance.targets.messages import one_line, only_wanted
from iha_conformance.vectors.safetensors_file import MAX_HEADER, encode, parse
from iha_conformance.vectors.untrusted import FormatError, read_regular, shown
from iha_core import SPEC_VERSION

TENSORS, SKIP = ".safetensors", ".skip"
"""Endings of the file with a result, and of the one with the reason why there is none."""

METADATA = "iha"
"""Key of the text that says what an input file is; its schema is exchange.schema.json."""

MAX_SKIP = 4096
"""Bytes of a reason."""

WIDEST = 8
"""Bytes of the widest element that a result has."""

MAX_UNCLAIMED = 1000
"""Files without a case of which account is kept."""

_ID = re.compile(r"[a-z0-9-]+/[a-z0-9-]+")


def stem(case_id: str, dtype: str) -> str:
    """Name of the files of a case in a dtype, without ending ([EXC-1]).

    Raises:
        ValueError: the id is not of the form family/name; another one might name a file elsewhere.
    """
    if _ID.fullmatch(case_id) is None:
        raise ValueError(f"case id: expected family/name in small letters, digits and -, got {case_id!r}")
    return f"{case_id.replace('/', '.')}.{dtype}"


def about(job: Job) -> dict[str, Any]:
    """What an input file says of itself ([EXC-3])."""
    offset = job.inputs.get("query_offset")
    return {
        "spec_version": SPEC_VERSION,
        "case_id": job.case_id,
        "dtype": job.dtype,
        "config": dict(job.config),
        "query_offset": offset.tolist() if isinstance(offset, (np.ndarray, np.generic)) else offset,
        "wanted": list(job.wanted),
    }


def input_file(job: Job) -> bytes:
    """The input file of a job: the same bytes for the same job on every platform."""
    tensors = {name: value for name, value in job.inputs.items() if name != "query_offset"}
    return encode(tensors, {METADATA: json.dumps(about(job), allow_nan=False)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Awaited:
    """What a result has to be known by, once its job's inputs have been handed over.

    Attributes:
        wanted: names of the stages that can be judged.
        at_most: bytes that its file can have.
        capability: what a port would have to declare, which by files it cannot; None if nothing.
    """

    case_id: str
    dtype: str
    wanted: tuple[str, ...] = ("output",)
    at_most: int = 0
    capability: str | None = None

    @classmethod
    def of(cls, job: Job) -> Awaited:
        """What is awaited for a job."""
        # What a job of bad input holds need not have a size.
        at_most = 8 + MAX_HEADER + WIDEST * _elements(job) if job.capability is None else 0
        return cls(
            case_id=job.case_id,
            dtype=job.dtype,
            wanted=job.wanted,
            at_most=at_most,
            capability=job.capability,
        )

    @property
    def stem(self) -> str:
        """Name of its files, without ending."""
        return stem(self.case_id, self.dtype)


def _elements(job: Job) -> int:
    """Elements of all stages of SPEC.md chapter 4, wanted or not."""
    (B, N, H, d), (_, M, _, e) = job.inputs["q"].shape, job.inputs["v"].shape
    T, S = N * job.inputs["alpha_q"].shape[2], M * job.inputs["alpha_q"].shape[2]
    mixed = T * H * d + S * H * d
    return int(B * (2 * mixed + S * H * e + H * T * S + H * T + T * H * e + N * H * e))


@dataclasses.dataclass(frozen=True)
class Fault:
    """How a command ended that did not end well.

    Attributes:
        kind, reason: what its cases fail by.
        said: the last lines of what it wrote to standard error.
    """

    kind: FailureKind
    reason: str
    said: tuple[str, ...] = ()

    def of(self, one: Awaited) -> Fault:
        """The same for one case: with the last line that names its file, or else the last of all."""
        naming = [line for line in self.said if one.stem in line]
        last = (naming or self.said)[-1:]
        return Fault(self.kind, ": ".join([self.reason, *map(one_line, last)]))


def collect(
    folder: Path, awaited: Sequence[Awaited], *, fault: Fault | None = None, seconds: float = 0.0
) -> Iterator[Result]:
    """Read the results that a port wrote, in the order in which they are awaited.

    A file is missing for the port's fault, if it had one. A fault that no missing file shows fails the last
    case, and so does a file of a name that belongs to none: neither may pass. A folder that cannot be listed
    fails all of them, since nobody can say what else is in it.

    Args:
        folder: what the port wrote; nobody writes to it any more.
        awaited: the results, one a job.
        fault: how the port ended, if not well.
        seconds: wall time of each case.
    """
    cases = [one for one in awaited if one.capability is None]
    try:
        stray, unlisted = unclaimed(folder, cases), None
    except OSError as error:
        stray, unlisted = [], Fault("unreadable", f"cannot list the folder of results: {error.strerror}")
    missing = {one.stem for one in cases if not _is_there(folder, one)}
    for one in awaited:
        if one.capability is not None:
            reason = f"files do not offer the capability {one.capability!r}"
            yield Result(case_id=one.case_id, dtype=one.dtype, kind="not_applicable", reason=reason)
            continue
        failed = unlisted
        if failed is None and one.stem in missing:
            failed = Fault("missing", f"expected the file {one.stem}{TENSORS}, found none")
            failed = failed if fault is None else fault.of(one)
            failed = dataclasses.replace(failed, reason=failed.reason + _instead(one.stem, stray))
        elif failed is None and not missing and one is cases[-1]:
            failed = _of_no_case(stray) if fault is None else fault.of(one)
        result = _failed(one, failed) if failed is not None else read_result(folder, one)
        yield dataclasses.replace(result, seconds=seconds)


def results_in(folder: Path, awaited: Sequence[Awaited]) -> int:
    """For how many of these cases there is a file with a result or a reason, finished or not."""
    return sum(_is_there(folder, one) for one in awaited)


def unclaimed(folder: Path, awaited: Sequence[Awaited]) -> list[str]:
    """Names of results and reasons that belong to no case, as many as anybody wants to know.

    Raises:
        OSError: the folder is there, but cannot be listed.
    """
    claimed = {one.stem + ending for one in awaited for ending in (TENSORS, SKIP)}
    found: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith((TENSORS, SKIP)) and entry.name not in claimed:
                    found.append(entry.name)
                    if len(found) == MAX_UNCLAIMED:
                        break
    except (FileNotFoundError, NotADirectoryError):  # then every file is missing
        return []
    return sorted(found)


def _is_there(folder: Path, one: Awaited) -> bool:
    return any(_exists(folder / (one.stem + ending)) for ending in (TENSORS, SKIP))


def _exists(path: Path) -> bool:
    """Whether something of that name is there, or may be: what cannot be looked at is not missing."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # to read it will say what it is
        return True
    return True


def _instead(name: str, stray: Sequence[str]) -> str:
    """What was found in place of a missing file, if anything was."""
    alike = nearest(name + TENSORS, stray)
    return f", but {shown(alike[0])}, which belongs to no case" if alike else ""


def _of_no_case(stray: Sequence[str]) -> Fault | None:
    if not stray:
        return None
    more = f" and {len(stray) - 1} more" if len(stray) > 1 else ""
    return Fault("unreadable", f"expected files of these cases alone, found {shown(stray[0])}{more}")


def read_result(folder: Path, one: Awaited) -> Result:
    """Read what a port wrote for one case; whatever it is, the answer is a result."""
    tensors, skip = one.stem + TENSORS, one.stem + SKIP
    name = tensors
    try:
        if os.path.lexists(folder / skip):
            name = skip
            if os.path.lexists(folder / tensors):
                raise FormatError(f"expected either it or {tensors}, found both")
            reason = _reason(read_regular(folder / skip, at_most=MAX_SKIP))
            return Result(case_id=one.case_id, dtype=one.dtype, kind="refused", reason=reason)
        arrays = parse(read_regular(folder / tensors, at_most=one.at_most)).tensors
    except FileNotFoundError:
        return _failed(one, Fault("missing", f"expected the file {name}, found none"))
    except FormatError as error:
        return _failed(one, Fault("unreadable", f"{name}: {error}"))
    arrays = only_wanted(one.wanted, arrays)
    return Result(case_id=one.case_id, dtype=one.dtype, kind="arrays", arrays=arrays)


def _reason(data: bytes) -> str:
    try:
        text = one_line(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(f"expected UTF-8, found the byte {data[error.start]:#04x}") from error
    if not text:
        raise FormatError("expected the reason in one line, found none")
    return text


def _failed(one: Awaited, fault: Fault) -> Result:
    return Result(
        case_id=one.case_id, dtype=one.dtype, kind="failed", failure=fault.kind, reason=one_line(fault.reason)
    )
