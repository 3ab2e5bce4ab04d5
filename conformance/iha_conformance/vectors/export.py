"""`iha vectors export`: the corpus as files, written as a whole or not at all ([VEC-1], [VEC-2])."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iha_conformance.corpus import build_inputs, check_frozen, load_cases
from iha_conformance.errors import CommandError, unknown
from iha_conformance.judge import expect
from iha_conformance.runner import Pair, make_job
from iha_conformance.selection import Filters, select
from iha_conformance.targets.messages import one_line
from iha_conformance.vectors import manifest
from iha_conformance.vectors.exchange import input_file
from iha_conformance.vectors.places import real
from iha_conformance.vectors.safetensors_file import encode
from iha_conformance.vectors.untrusted import FormatError, shown
from iha_core import STAGES
from iha_core.bounds import Limits

NEW, OLD = "new", "old"
"""In the folder beside an export that is being written: itself, and what it takes the place of."""

PREFIX = 40
"""Characters of the name of a folder that the one beside it has too: in UTF-8 no name is too long then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vector:
    """A case in a dtype as it is exported.

    Attributes:
        entry: what the manifest says of it, but for the hashes.
        input: the file with its inputs.
        expected: exact values and limits by name, as `expected_tensors` has them.
    """

    entry: dict[str, Any]
    input: bytes
    expected: dict[str, np.ndarray[Any, Any]]


def exported_pairs(filters: Filters) -> list[Pair]:
    """The cases, each in its dtypes, that an export of these filters has: those that files can carry.

    Raises:
        CommandError: an unknown name, or nothing is left.
        CorpusError: a case is not the one that was frozen.
    """
    pairs = [(case, dtype) for case, dtype in select(load_cases(), filters) if case.capability is None]
    if not pairs:
        raise CommandError(f"expected a case that files can carry, got none that matches {filters}")
    check_frozen(case for case, _ in pairs)
    return pairs


def check_stages(stages: Sequence[str]) -> tuple[str, ...]:
    """The stages to be exported, all if none is named; output is always among them.

    Raises:
        CommandError: an unknown stage.
    """
    for stage in stages:
        if stage not in STAGES:
            raise unknown("--stage", stage, STAGES)
    return tuple(stage for stage in STAGES if not stages or stage in stages or stage == "output")


def make_vectors(pairs: Sequence[Pair], stages: Sequence[str]) -> Iterator[Vector]:
    """What this machine makes of these cases, one at a time."""
    for case, dtype in pairs:
        inputs = build_inputs(case, dtype)
        expectation = expect(case, dtype, inputs)
        assert expectation is not None  # only cases of bad input have none
        yield Vector(
            entry=manifest.describe(case, dtype),
            input=input_file(make_job(case, dtype, inputs)),
            expected=expected_tensors(expectation.limits, stages),
        )


def expected_tensors(limits: Limits, stages: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Exact values and limits of a case in float64, by the names of [VEC-2]."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for stage in stages:
        if stage in limits.stages:
            tensors[stage] = limits.stages[stage]
            tensors[f"limit.{stage}"] = limits.limits[stage]
    for companion in limits.companions:
        name = f"companion.{companion.kind.replace(' ', '_')}"
        tensors[f"{name}.limit"] = companion.limit
        if companion.weights is not None:
            tensors[f"{name}.weights"] = companion.weights
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """An export: where it is, and its manifest."""

    folder: str
    manifest: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The manifest without its entries, as plain JSON values."""
        return {
            "folder": self.folder,
            **{key: self.manifest[key] for key in self.manifest if key != "entries"},
        }

    def render(self) -> str:
        """In a line."""
        about, counts = self.manifest, self.manifest["counts"]
        return (
            f"IHA {about['spec_version']}, corpus {about['corpus_sha256'][:12]}, vectors"
            f" {about['vectors_sha256'][:12]}: {counts['files']} files of {counts['cases']} cases in"
            f" {one_line(self.folder)}\n"
        )


def export(name: str, filters: Filters, stages: Sequence[str] = ()) -> Written:
    """Write the vectors into a folder, in place of those that it may have.

    They are written beside it and then take its place: whatever interrupts that, the folder has either
    what it had or all of the new ones.

    Args:
        name: the folder, as on the command line.
        filters: which cases.
        stages: whose values to write; all if none is named.

    Raises:
        CommandError: the folder has something else in it or cannot be written, or nothing is selected.
        CorpusError: a case is not the one that was frozen.
    """
    chosen = check_stages(stages)
    pairs = exported_pairs(filters)
    path = real("DIR", name)  # a link to a folder stays a link
    with _unwritable(name):
        check_replaceable(path, name)
        with _workspace(path, name) as workspace:
            written = _write(workspace / NEW, pairs, filters, chosen)
            check_replaceable(path, name)  # others may have put something there meanwhile
            _take_place(path, workspace, name)
    return Written(folder=name, manifest=written)


@contextlib.contextmanager
def _workspace(path: Path, name: str) -> Iterator[Path]:
    """A new folder beside the path, of a name that nobody else has, and its end, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:PREFIX]}.", dir=path.parent))
    try:
        yield folder
    finally:
        _tidy(folder, path, name)


def _take_place(path: Path, workspace: Path, name: str) -> None:
    """Move the folder at the path away, look at it where nobody knows it, and put the new one there."""
    old = workspace / OLD
    with contextlib.suppress(FileNotFoundError):  # there is none
        path.rename(old)
    check_replaceable(old, name)  # if not, it is put back when the workspace is tidied
    (workspace / NEW).rename(path)


def _tidy(workspace: Path, path: Path, name: str) -> None:
    """Put back what was moved away, unless there is something new in its place, and remove the workspace.

    Raises:
        CommandError: what was moved away has become more than an export; it stays where it is then.
    """
    old = workspace / OLD
    if os.path.lexists(old):
        try:
            if os.path.lexists(path):
                check_replaceable(old, name)
            else:
                old.rename(path)
        except (CommandError, OSError) as error:
            raise CommandError(f"{error}; what was there is kept in {str(old)!r}") from error
    shutil.rmtree(workspace, ignore_errors=True)


def _write(folder: Path, pairs: Sequence[Pair], filters: Filters, stages: Sequence[str]) -> dict[str, Any]:
    """Write all files of an export and return its manifest."""
    entries = []
    for new in (folder, folder / manifest.INPUTS, folder / manifest.EXPECTED):
        new.mkdir()  # not by tempfile, whose folders nobody else may read
    for vector in make_vectors(pairs, stages):
        expected = encode(vector.expected)
        name = vector.entry["input"]["file"]
        (folder / manifest.INPUTS / name).write_bytes(vector.input)
        (folder / manifest.EXPECTED / name).write_bytes(expected)
        hashes = {"input": manifest.sha256(vector.input), "expected": manifest.sha256(expected)}
        entries.append(manifest.with_hashes(vector.entry, **hashes))
    built = manifest.build(entries, filters, stages)
    (folder / manifest.NAME).write_bytes(manifest.as_bytes(built))
    return built


def check_replaceable(path: Path, name: str) -> None:
    """Refuse a folder that has anything but an earlier export in it: all of it will be gone.

    Args:
        path: where the vectors are to be.
        name: the same, as on the command line.

    Raises:
        CommandError: it is no folder, or has something else in it.
        OSError: it cannot be read.
    """
    if not os.path.lexists(path):
        return
    try:
        _check_folder(path, name)
        _check_contents(path, name)
    except FileNotFoundError:  # another export moved it away meanwhile
        if os.path.lexists(path):
            raise CommandError(f"{name!r}: expected to write there alone, found that others do") from None


def _check_contents(path: Path, name: str) -> None:
    """Refuse a folder that is neither empty nor an export and no more."""
    found = set(os.listdir(path))
    if not found:
        return
    try:
        if manifest.NAME not in found:
            raise FormatError("expected a manifest, found none")
        earlier = manifest.read(path)
    except FormatError:
        raise CommandError(
            f"{name!r}: expected an empty folder or one of `iha vectors export`, found {shown(min(found))}"
        ) from None
    expected = {manifest.NAME, manifest.INPUTS, manifest.EXPECTED}
    for kind, key in ((manifest.INPUTS, "input"), (manifest.EXPECTED, "expected")):
        expected |= {f"{kind}/{entry[key]['file']}" for entry in earlier["entries"]}
        if kind in found:
            found |= _regular_files(path, kind, name)
    if found - expected:
        raise _more(name, min(found - expected))


def _check_folder(path: Path, name: str) -> None:
    """Refuse what is no folder, and the one that this process works in."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        found = "a link" if stat.S_ISLNK(mode) else "a file"
        raise CommandError(f"{name!r}: expected a folder or nothing, found {found}")
    with contextlib.suppress(FileNotFoundError):  # one that has been deleted cannot be lost
        if path == Path.cwd() or path in Path.cwd().parents:
            raise CommandError(
                f"{name!r}: expected another folder than the working directory, which would be lost"
            )


def _regular_files(path: Path, kind: str, name: str) -> set[str]:
    """Names of the files in `inputs` or `expected`, none of which may hold more than an export writes."""
    if not stat.S_ISDIR(os.lstat(path / kind).st_mode):
        raise _more(name, kind, " that is no folder")
    with os.scandir(path / kind) as entries:
        files = {f"{kind}/{entry.name}": entry.is_file(follow_symlinks=False) for entry in entries}
    for file, is_file in files.items():
        if not is_file:
            raise _more(name, file, " that is no file")
    return set(files)


def _more(name: str, found: str, how: str = "") -> CommandError:
    return CommandError(f"{name!r}: expected an export and no more, found {shown(found)}{how}")


_EXPECTED = {
    errno.EBUSY: "a folder that can be renamed, found one in use, such as a mount point",
    errno.EXDEV: "a folder that can be renamed, found a mount point",
    errno.ENOTEMPTY: "to write there alone, found what somebody else has written meanwhile",
    errno.EEXIST: "to write there alone, found what somebody else has written meanwhile",
    errno.EACCES: "a folder whose parent folder can be written to",
    errno.EPERM: "a folder whose parent folder can be written to",
    errno.EROFS: "a folder whose parent folder can be written to",
    errno.ENOENT: "a parent folder that exists, and stays",
    errno.ENOTDIR: "a parent folder that is one",
}
"""What an error of the system says was expected."""


@contextlib.contextmanager
def _unwritable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = f"cannot write vectors to {name!r}: "
        if error.errno in _EXPECTED:
            said += f"expected {_EXPECTED[error.errno]}: "
        raise CommandError(f"{said}{error.strerror or error}") from error
