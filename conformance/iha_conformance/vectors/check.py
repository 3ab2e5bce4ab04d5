"""`iha vectors check`: judge the results that a port wrote for exported vectors.

Nothing in the vectors' folder is believed: which cases there are, their inputs and what is expected of them
are made anew, so that no change to a file there can make a port pass.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from iha_conformance.command import Options, Plan, check_precision, judge_targets
from iha_conformance.corpus import build_inputs, corpus_sha256
from iha_conformance.errors import CommandError
from iha_conformance.report.files import check_distinct
from iha_conformance.runner import Pair, make_job
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import Launch
from iha_conformance.vectors import manifest
from iha_conformance.vectors.exchange import input_file
from iha_conformance.vectors.export import exported_pairs
from iha_conformance.vectors.places import check_outside, check_results
from iha_conformance.vectors.untrusted import FormatError, shown
from iha_conformance.vectors.verify import read_input, read_manifest
from iha_core import SPEC_VERSION


def check_command(
    vectors: str,
    results: str,
    *,
    precision: str | None = None,
    json_name: str | None = None,
    junit_name: str | None = None,
) -> bool:
    """Judge results, write and print the report; returns whether every executed case passed.

    Args:
        vectors: folder of an export.
        results: folder with what a port wrote for its `inputs`.
        precision: precision class that is declared for the port.
        json_name, junit_name: files for reports.

    Raises:
        CommandError: a fault of the vectors or of usage: not this kit's corpus, not all of its cases,
            other inputs, no such folder, nothing executed.
        CorpusError: a case is not the one that was frozen.
        HarnessError: the kit failed.
    """
    check_precision(precision)
    reports = {"--json": json_name, "--junit": junit_name}
    check_outside(vectors, reports)
    check_distinct(reports)
    check_results(results)
    filters, pairs = trusted_pairs(vectors)
    launch = Launch(kind="files", name=results, precision=precision, directory=vectors)
    options = Options(precision=precision, filters=filters, json_name=json_name, junit_name=junit_name)
    return judge_targets(Plan((launch,), ()), pairs, options)


def trusted_pairs(name: str) -> tuple[Filters, list[Pair]]:
    """The cases of an export and what they were selected by, if they are those of this kit.

    Raises:
        CommandError: they are not.
    """
    found = read_manifest(name)
    where = f"{name!r}: fault of the vectors: "
    for key, expected in (("spec_version", SPEC_VERSION), ("corpus_sha256", corpus_sha256())):
        if found[key] != expected:
            raise CommandError(f"{where}{key}: expected this kit's, {expected}, found {shown(found[key])}")
    filters = manifest.filters_of(found)
    try:
        pairs = exported_pairs(filters)
    except CommandError as error:
        raise CommandError(f"{where}{error}") from error
    _check_entries(where, found["entries"], pairs)
    _check_counts(where, found)
    _check_no_more(where, Path(name), found)
    for (case, dtype), entry in zip(pairs, found["entries"], strict=True):
        made = input_file(make_job(case, dtype, build_inputs(case, dtype)))
        try:
            read_input(Path(name), entry, made)
        except FormatError as error:
            raise CommandError(f"{where}{manifest.INPUTS}/{entry['input']['file']}: {error}") from error
    return filters, pairs


def _check_entries(where: str, found: list[dict[str, object]], pairs: list[Pair]) -> None:
    """Refuse entries that are not exactly those of the cases, in their order."""
    expected = [manifest.describe(case, dtype) for case, dtype in pairs]
    given = [manifest.without_hashes(entry) for entry in found]
    if len(given) != len(expected):
        raise CommandError(
            f"{where}expected {len(expected)} entries, as its filters select, found {len(given)}"
        )
    for entry, listed in zip(expected, given, strict=True):
        if listed != entry:
            key = next(key for key in entry if listed[key] != entry[key])
            raise CommandError(
                f"{where}entry of {entry['id']} in {entry['dtype']}, {key}: expected {shown(entry[key])},"
                f" found {shown(listed[key])}"
            )


def _check_counts(where: str, found: dict[str, Any]) -> None:
    """Refuse counts that are not those of the entries, and stages that are not in the order of chapter 4."""
    built = manifest.build(found["entries"], manifest.filters_of(found), found["stages"])
    for key in ("counts", "stages"):
        if found[key] != built[key]:
            raise CommandError(f"{where}{key}: expected {shown(built[key])}, found {shown(found[key])}")


def _check_no_more(where: str, folder: Path, found: dict[str, Any]) -> None:
    """Refuse a folder of inputs with anything but them: an obedient port would fail at it ([EXC-1])."""
    expected = {entry["input"]["file"] for entry in found["entries"]}
    try:
        with os.scandir(folder / manifest.INPUTS) as entries:
            more = [entry.name for entry in entries if entry.name not in expected]
    except OSError as error:
        raise CommandError(
            f"{where}{manifest.INPUTS}: expected a folder that can be read, found: {error.strerror}"
        ) from error
    if more:
        raise CommandError(
            f"{where}{manifest.INPUTS}: expected files of its entries alone, found {shown(min(more))}"
        )
