"""The manifest of exported vectors: which cases, in which files, of which corpus ([VEC-1])."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iha_conformance.corpus import Case, corpus_sha256
from iha_conformance.report.json_report import filters_as_json
from iha_conformance.selection import Filters
from iha_conformance.vectors.exchange import TENSORS, stem
from iha_conformance.vectors.untrusted import FormatError, check_schema, parse_json, read_regular
from iha_core import SPEC_VERSION, STAGES
from iha_core.bounds import HIGHEST

NAME = "manifest.json"
INPUTS, EXPECTED = "inputs", "expected"
"""Folders of the files; one of each has the name of the other."""

MAX_MANIFEST = 2**22
"""Bytes of a manifest; the one of the whole corpus has half a million."""

SCHEMA = "vectors-manifest"


def sha256(data: bytes) -> str:
    """SHA-256 as a hexadecimal string."""
    return hashlib.sha256(data).hexdigest()


def describe(case: Case, dtype: str) -> dict[str, Any]:
    """What a manifest says of a case in a dtype, but for the hashes of its files."""
    name = stem(case.id, dtype) + TENSORS
    return {
        "id": case.id,
        "family": case.family,
        "dtype": dtype,
        "flags": sorted(case.flags),
        "requirements": list(case.requirements),
        "why": case.why,
        "layout": case.layout,
        "input": {"file": name},
        "expected": {"file": name},
    }


def with_hashes(entry: Mapping[str, Any], **hashes: str) -> dict[str, Any]:
    """An entry with the hash of its `input` and `expected` file."""
    return {**entry, **{key: {**entry[key], "sha256": value} for key, value in hashes.items()}}


def without_hashes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as `describe` gives it."""
    return {**entry, **{key: {"file": entry[key]["file"]} for key in ("input", "expected")}}


def build(entries: Sequence[Mapping[str, Any]], filters: Filters, stages: Sequence[str]) -> dict[str, Any]:
    """The manifest of these entries.

    Args:
        entries: with hashes, in the order of the corpus.
        filters: what they were selected by.
        stages: names of the stages in the files with expected values.
    """
    return {
        "spec_version": SPEC_VERSION,
        "corpus_sha256": corpus_sha256(),
        "vectors_sha256": hash_of(entries),
        "filters": filters_as_json(_distinct(filters)),
        "precision": HIGHEST,
        "stages": [stage for stage in STAGES if stage in stages],
        "counts": {"cases": len({entry["id"] for entry in entries}), "files": len(entries)},
        "entries": list(entries),
    }


def _distinct(filters: Filters) -> Filters:
    """The same filters, each name once, as the schema has them."""
    return Filters(
        dtype=tuple(dict.fromkeys(filters.dtype)),
        family=tuple(dict.fromkeys(filters.family)),
        case=tuple(dict.fromkeys(filters.case)),
        quick=filters.quick,
    )


def hash_of(entries: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over all entries, and through the hashes in them over all files."""
    return sha256(json.dumps(list(entries), sort_keys=True, separators=(",", ":")).encode("ascii"))


def as_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as a file."""
    return json.dumps(manifest, indent=1).encode("ascii") + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """The manifest in a folder, of the form that its schema says; what it claims is not verified.

    Raises:
        FileNotFoundError: there is none.
        FormatError: it is none.
    """
    manifest: dict[str, Any] = parse_json(read_regular(folder / NAME, at_most=MAX_MANIFEST))
    check_schema(manifest, SCHEMA)
    if manifest["vectors_sha256"] != hash_of(manifest["entries"]):
        raise FormatError("vectors_sha256: expected the hash of the entries, found another one")
    return manifest


def filters_of(manifest: Mapping[str, Any]) -> Filters:
    """What the entries of a manifest were selected by."""
    found = manifest["filters"]
    if found is None:
        return Filters()
    named = {name: tuple(found[name] or ()) for name in ("dtype", "family", "case")}
    return Filters(**named, quick=found["quick"])
