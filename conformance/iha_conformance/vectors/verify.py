"""`iha vectors export --check`: whether exported vectors are those that this machine makes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iha_conformance.errors import CommandError
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import one_line
from iha_conformance.vectors import manifest
from iha_conformance.vectors.exchange import METADATA
from iha_conformance.vectors.export import Vector, check_stages, exported_pairs, make_vectors
from iha_conformance.vectors.places import check_named
from iha_conformance.vectors.safetensors_file import MAX_HEADER, Contents, parse
from iha_conformance.vectors.untrusted import FormatError, read_regular, shown
from iha_core import STAGES

VALUES, LIMITS = 1e-13, 1e-11
"""Largest difference of two exact values, and of two limits or weights, divided by the largest magnitude
of their tensor.

The reference computes in float64, where the order of a sum and the last bit of an exponential are the
platform's. Each rounding is 2**-53 of a sum of magnitudes, which in one tensor are of one size: 1e-13 is
900 of them. Limits are sums of such sums and go through the exponential of their own errors; that they
bound is not changed by their eleventh digit.
"""

MAX_LISTED = 25
"""Differences that are listed."""

MEANING = (
    "inputs that differ are another corpus, expectations that differ another version of the specification"
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is not as this machine makes it, in which file of the folder."""

    file: str
    what: str

    def __str__(self) -> str:
        """In a line."""
        return f"{self.file}: {self.what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Outcome of a check: how many files with inputs there should be, and what differs."""

    folder: str
    files: int
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return dataclasses.asdict(self) | {"differences": list(map(str, self.differences))}

    def render(self) -> str:
        """The differences, as many as a person reads, and a verdict."""
        lines = [f"DIFFERS {line}" for line in self.differences[:MAX_LISTED]]
        if len(self.differences) > MAX_LISTED:
            lines.append(f"DIFFERS {len(self.differences) - MAX_LISTED} more; --json FILE has them all")
        count = f"{self.files} file" + ("" if self.files == 1 else "s")
        if self.differences:
            lines.append(f"{len(self.differences)} differences in vectors of {count}: {MEANING}")
        else:
            lines.append(
                f"EQUAL {count}: inputs of the same bits, exact values within {VALUES:g},"
                f" limits within {LIMITS:g}"
            )
        return "\n".join(lines) + "\n"


def verify(name: str, filters: Filters, stages: Sequence[str] = ()) -> Checked:
    """Compare exported vectors with what this machine makes.

    Inputs have to be the same bits. Exact values may differ by `VALUES` of the largest finite magnitude of
    their tensor, limits and weights by `LIMITS` of it; what is NaN or infinite in one must be in the other.

    Args:
        name: the folder, as on the command line.
        filters: which cases should be there; those that its manifest names, if empty.
        stages: whose values should be there; those that its manifest names, if empty.

    Raises:
        CommandError: there is no export, or nothing is selected.
        CorpusError: a case is not the one that was frozen.
    """
    folder = Path(name)
    found = read_manifest(name)
    filters = filters or manifest.filters_of(found)
    chosen = check_stages(stages or found["stages"])
    pairs = exported_pairs(filters)
    differences: list[Difference] = []
    entries = []
    known = {entry["input"]["file"]: entry for entry in found["entries"]}
    for vector in make_vectors(pairs, chosen):
        file = vector.entry["input"]["file"]
        entry = known.get(file)
        entries.append(vector.entry)
        if entry is None:
            differences.append(Difference(manifest.NAME, f"expected an entry for {file}, found none"))
            continue
        differences += _differences(folder, vector, entry)
    expected = manifest.build(
        [manifest.with_hashes(entry, input="", expected="") for entry in entries], filters, chosen
    )
    for key in ("spec_version", "corpus_sha256", "filters", "precision", "stages", "counts"):
        if found[key] != expected[key]:
            what = f"{key}: expected {shown(expected[key])}, found {shown(found[key])}"
            differences.append(Difference(manifest.NAME, what))
    if [manifest.without_hashes(entry) for entry in found["entries"]] != entries:
        what = "entries: expected those of this corpus, in its order"
        differences.append(Difference(manifest.NAME, what))
    differences += _stray(folder, {entry["input"]["file"] for entry in entries})
    return Checked(folder=name, files=len(entries), differences=tuple(differences))


def read_manifest(name: str) -> dict[str, Any]:
    """The manifest of an export.

    Raises:
        CommandError: there is none.
    """
    check_named("DIR", name)
    try:
        return manifest.read(Path(name))
    except FileNotFoundError:
        what = "no such folder" if not os.path.lexists(name) else f"no {manifest.NAME} in it"
        raise CommandError(f"{name!r}: expected a folder of `iha vectors export`, found {what}") from None
    except FormatError as error:
        raise CommandError(f"{os.path.join(name, manifest.NAME)!r}: {error}") from error


def read_input(folder: Path, entry: Mapping[str, Any], made: bytes) -> None:
    """Hold a file with inputs to its manifest and to what the kit makes of its case.

    Its bytes may be others, since versions of the library may lay out a header otherwise; its contents are
    the same to the last bit.

    Raises:
        FormatError: they are not.
    """
    contents = _read(folder / manifest.INPUTS, entry["input"], at_most=len(made) + MAX_HEADER)
    expected = parse(made)
    if contents.metadata.get(METADATA) != expected.metadata[METADATA]:
        raise FormatError(f"metadata {METADATA!r}: expected that of the case, found another")
    for name, found, exact in _pairs(contents, expected.tensors):
        if found.dtype != exact.dtype or found.shape != exact.shape or found.tobytes() != exact.tobytes():
            raise FormatError(f"`{name}`: expected the bits that this kit makes, found others")


def _read(folder: Path, listed: Mapping[str, str], *, at_most: int) -> Contents:
    try:
        data = read_regular(folder / listed["file"], at_most=at_most)
    except FileNotFoundError:
        raise FormatError("expected a file, found none") from None
    if manifest.sha256(data) != listed["sha256"]:
        raise FormatError(f"expected the SHA-256 of {manifest.NAME}, found another")
    return parse(data)


def _pairs(
    contents: Contents, expected: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Tensors of both by name, which have to be the same."""
    if contents.tensors.keys() != expected.keys():
        odd = min(contents.tensors.keys() ^ expected.keys())
        state = "found none" if odd in expected else "which is too much"
        raise FormatError(f"expected the tensors of the case; `{odd}`: {state}")
    for name, exact in expected.items():
        yield name, contents.tensors[name], exact


def _differences(folder: Path, vector: Vector, entry: Mapping[str, Any]) -> Iterator[Difference]:
    file = vector.entry["input"]["file"]
    try:
        read_input(folder, entry, vector.input)
    except FormatError as error:
        yield Difference(f"{manifest.INPUTS}/{file}", str(error))
    size = sum(tensor.nbytes for tensor in vector.expected.values())
    try:
        contents = _read(folder / manifest.EXPECTED, entry["expected"], at_most=size + MAX_HEADER + 8)
        for name, found, exact in _pairs(contents, vector.expected):
            check_close(name, found, exact)
    except FormatError as error:
        yield Difference(f"{manifest.EXPECTED}/{file}", str(error))


def check_close(name: str, found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> None:
    """Hold an array to the one that this machine makes, by the measure of `verify`.

    Raises:
        FormatError: they differ.
    """
    if found.dtype != exact.dtype or found.shape != exact.shape:
        raise FormatError(
            f"`{name}`: expected {exact.dtype} {exact.shape}, found {found.dtype} {found.shape}"
        )
    finite = np.isfinite(exact)
    allowed = VALUES if name in STAGES else LIMITS
    scale = float(np.max(np.abs(exact[finite]), initial=0.0))
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.where(finite, np.abs(found - exact) <= allowed * scale, found == exact)
    wrong = ~(close | (np.isnan(found) & np.isnan(exact)))
    if np.any(wrong):
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise FormatError(
            f"`{name}`{list(index)}: expected {exact[index]:.17g}, found {found[index]:.17g}"
            f" ({np.count_nonzero(wrong)} of {wrong.size} elements differ)"
        )


def _stray(folder: Path, expected: set[str]) -> Iterator[Difference]:
    """What belongs to no case; a port reads whatever lies beside its inputs."""
    for kind in (manifest.INPUTS, manifest.EXPECTED):
        try:
            with os.scandir(folder / kind) as entries:
                found = {entry.name for entry in entries}
        except (FileNotFoundError, NotADirectoryError):  # then all of its files are missing
            continue
        except OSError as error:
            what = f"expected a folder that can be listed, found: {error.strerror}"
            yield Difference(kind, what)
            continue
        for name in sorted(found - expected):
            yield Difference(f"{kind}/{one_line(name)}", "expected files of these cases alone")
