"""The frozen corpus: the hash that each case must have, whichever machine builds it.

Inputs are made from integers, so that they are equal on every platform; where they are not, no result
says anything about the specification.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from iha_conformance.corpus.cases import Case, load_cases
from iha_conformance.corpus.inputs import build_inputs

FROZEN = Path(__file__).parent / "frozen.toml"

REMEDY = "if the table has changed on purpose, run `make freeze`"


class CorpusError(Exception):
    """A case is not the one that was frozen."""


@dataclasses.dataclass(frozen=True)
class Hashes:
    """SHA-256, as hexadecimal strings: of the whole corpus, and of each case by its id."""

    corpus: str
    cases: Mapping[str, str]


def corpus_sha256() -> str:
    """SHA-256 over ids, configurations and inputs of all cases, as a hexadecimal string.

    Equal on every platform: inputs are hashed in float64, before any rounding to a case's dtype.
    """
    return made().corpus


@cache
def made() -> Hashes:
    """The hashes of what this machine makes of the table; each case is built once."""
    return hashes(load_cases())


def hashes(cases: Iterable[Case]) -> Hashes:
    """The hashes of these cases and, over the same bytes in their order, of all of them."""
    corpus = hashlib.sha256()
    by_id: dict[str, str] = {}
    for case in cases:
        digest = hashlib.sha256()
        for piece in _bytes(case):
            corpus.update(piece)
            digest.update(piece)
        by_id[case.id] = digest.hexdigest()
    return Hashes(corpus.hexdigest(), by_id)


def _bytes(case: Case) -> Iterator[bytes]:
    """What is hashed of a case: what identifies it, then its inputs by name."""
    head = {
        "id": case.id,
        "config": dict(case.config),
        "dtypes": case.dtypes,
        "layout": case.layout,
        "sizes": dict(case.sizes),
    }
    yield json.dumps(head, sort_keys=True).encode()
    for name, value in sorted(build_inputs(case, "float64").items()):
        if isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"))
            yield f"{name} {value.dtype.name} {value.shape}".encode()
            yield np.ascontiguousarray(little).tobytes()
        else:
            yield f"{name} {value!r}".encode()


def load_frozen(path: Path = FROZEN) -> Hashes:
    """The hashes in a file of `as_toml`."""
    with path.open("rb") as file:
        table = tomllib.load(file)
    return Hashes(table["corpus_sha256"], table["cases"])


def check_frozen(cases: Iterable[Case]) -> None:
    """Hold cases that are to be run to their frozen hashes.

    Raises:
        CorpusError: this machine makes something else of one of them, or it was never frozen.
    """
    frozen, found = load_frozen().cases, made().cases
    for case in cases:
        expected, got = frozen.get(case.id), found[case.id]
        if expected is None:
            raise CorpusError(f"case {case.id!r} is not in {FROZEN.name}: {REMEDY}")
        if got != expected:
            raise CorpusError(
                f"case {case.id!r}: expected the frozen configuration and inputs, SHA-256 {expected[:12]},"
                f" got {got[:12]} on this machine; {REMEDY}"
            )


def as_toml(frozen: Hashes) -> str:
    """The frozen corpus as a file."""
    lines = [
        "# SHA-256 of id, configuration, dtypes, layout, sizes and float64 inputs of every case, and of all",
        "# of them. Written by `make freeze`. New cases add lines to [cases]; a line there that changes or",
        "# goes is a change of the specification.",
        "",
        f'corpus_sha256 = "{frozen.corpus}"',
        "",
        "[cases]",
        *(f'"{name}" = "{digest}"' for name, digest in frozen.cases.items()),
    ]
    return "\n".join(lines) + "\n"
