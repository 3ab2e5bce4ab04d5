"""`iha vectors export`: the corpus as files, written as a whole or not at all ([VEC-1], [VEC-2])."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
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
from iha_conformance.vectors.safetensors_file import encode
from iha_conformance.vectors.untrusted import FormatError, shown
from iha_core import STAGES
from iha_core.bounds import Limits


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
    path = Path(os.path.realpath(name))  # a link to a folder stays a link
    with _unwritable(name):
        check_replaceable(path, name)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        temporary, old = beside.with_suffix(".tmp"), beside.with_suffix(".old")
        try:
            temporary.mkdir()
            written = _write(temporary, pairs, filters, chosen)
            if path.exists():
                path.rename(old)
            temporary.rename(path)
        finally:
            if old.exists() and not path.exists():
                old.rename(path)
            for rest in (temporary, old):
                shutil.rmtree(rest, ignore_errors=True)
    return Written(folder=name, manifest=written)


def _write(folder: Path, pairs: Sequence[Pair], filters: Filters, stages: Sequence[str]) -> dict[str, Any]:
    """Write all files of an export and return its manifest."""
    entries = []
    for kind in (manifest.INPUTS, manifest.EXPECTED):
        (folder / kind).mkdir()
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
    if not path.exists():
        return
    if not path.is_dir():
        raise CommandError(f"{name!r}: expected a folder or nothing, found a file")
    if path == Path.cwd() or path in Path.cwd().parents:
        raise CommandError(
            f"{name!r}: expected another folder than the working directory, which would be lost"
        )
    found = {entry.name for entry in os.scandir(path)}
    if not found:
        return
    try:
        earlier = manifest.read(path)
    except (FileNotFoundError, FormatError):
        raise CommandError(
            f"{name!r}: expected an empty folder or one of `iha vectors export`, found {shown(min(found))}"
        ) from None
    expected = {manifest.NAME, manifest.INPUTS, manifest.EXPECTED}
    for kind, key in ((manifest.INPUTS, "input"), (manifest.EXPECTED, "expected")):
        if (path / kind).is_dir():
            found |= {f"{kind}/{entry.name}" for entry in os.scandir(path / kind)}
        expected |= {f"{kind}/{entry[key]['file']}" for entry in earlier["entries"]}
    if found - expected:
        raise CommandError(f"{name!r}: expected an export and no more, found {shown(min(found - expected))}")


@contextlib.contextmanager
def _unwritable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write vectors to {name!r}: {error.strerror or error}") from error
