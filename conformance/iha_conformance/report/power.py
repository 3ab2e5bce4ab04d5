"""What `iha self-test` prints and writes; the schema of its JSON is spec/schemas/self-test.schema.json."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.text import Text

from iha_conformance.corpus.cases import FAMILIES
from iha_conformance.power.mutants import MUTANTS
from iha_conformance.power.outcome import CAUGHT, HALF, SEPARATION, Measured, Outcome
from iha_conformance.power.self_test import BEYOND_DOUBT
from iha_conformance.report.output import console

Of = Mapping[str, Measured]

COLUMN = 10
"""Width of a column of numbers."""


def as_json(outcome: Outcome, *, spec_version: str, corpus_sha256: str) -> dict[str, Any]:
    """The outcome as plain JSON values; a ratio that is not finite is null."""
    return {
        "spec_version": spec_version,
        "corpus_sha256": corpus_sha256,
        "dtypes": {
            dtype: {
                "honest_max": _number(outcome.honest_max(dtype)),
                "mutant_min": _number(outcome.mutant_min(dtype)),
                "separation": _number(outcome.separation(dtype)),
                "honest": outcome.distinct(dtype),
                "mutants": sum(dtype in of for of in outcome.mutants.values()),
                "survivors": outcome.survivors(dtype),
            }
            for dtype in outcome.dtypes
        },
        "must_bind": {
            "checked": sum(len(bound.checked) for bound in outcome.must_bind.values()),
            "unbound": [
                f"{dtype}: {item}" for dtype, bound in outcome.must_bind.items() for item in bound.unbound
            ],
        },
        "honest": [
            {"name": name, "dtypes": {dtype: _number(measured.largest) for dtype, measured in of.items()}}
            for name, of in outcome.honest.items()
        ],
        "mutants": [
            {
                "name": name,
                "requirements": list(MUTANTS[name].requirements),
                "because": MUTANTS[name].because,
                "dtypes": {
                    dtype: {
                        "largest": _number(measured.largest),
                        "families": {family: _number(r) for family, r in measured.ratios.items()},
                    }
                    for dtype, measured in of.items()
                },
            }
            for name, of in outcome.mutants.items()
        ],
        "faults": list(outcome.faults()),
    }


def _number(ratio: float) -> float | None:
    return float(f"{ratio:.6g}") if math.isfinite(ratio) else None


def print_outcome(
    stream: TextIO | None, outcome: Outcome, *, spec_version: str, notes: Iterable[str]
) -> None:
    """Print the whole outcome; notes are lines of their own before the verdict."""
    out = console(stream)
    for line in _lines(outcome, spec_version, notes):
        out.print(Text(line), soft_wrap=True)


def _lines(outcome: Outcome, spec_version: str, notes: Iterable[str]) -> Iterator[str]:
    yield from _mutants(outcome)
    yield ""
    yield from _honest(outcome)
    yield ""
    yield from _summary(outcome)
    yield from notes
    faults = list(outcome.faults())
    yield from (f"FAULT {fault}" for fault in faults)
    verdict = "PASSED" if not faults else f"FAILED, {len(faults)} faults"
    yield f"IHA {spec_version}, self-test: {verdict}"


def _mutants(outcome: Outcome) -> Iterator[str]:
    """A row a mutant: in how many dtypes each family catches it, and the largest ratio in each dtype."""
    seen = {
        family for of in outcome.mutants.values() for measured in of.values() for family in measured.ratios
    }
    families = [family for family in FAMILIES if family in seen]
    names = dict(zip(families, string.ascii_lowercase[: len(families)], strict=True))
    wide = max(map(len, outcome.mutants), default=0)
    yield "Families: " + ", ".join(f"{letter} {family}" for family, letter in names.items())
    yield f"Below them, in how many dtypes a family catches the mutant by {CAUGHT:g} limits or more, and its"
    yield f"largest error / limit in each dtype (or more: a family is left at {BEYOND_DOUBT:g} limits)."
    yield ""
    yield f"{'mutant':<{wide}}  {' '.join(names.values())}" + _columns(outcome.dtypes)
    for name, of in outcome.mutants.items():
        cells = [
            sum(measured.ratios.get(family, 0.0) >= CAUGHT for measured in of.values()) for family in families
        ]
        marks = " ".join(str(count) if count else "." for count in cells)
        yield f"{name:<{wide}}  {marks}{_ratios(of, outcome.dtypes)}"
    for name, of in outcome.mutants.items():
        if (because := MUTANTS[name].because) and set(of) != set(outcome.dtypes):
            yield f"only in {', '.join(MUTANTS[name].dtypes)}: {name}: {because}"


def _honest(outcome: Outcome) -> Iterator[str]:
    wide = max(map(len, outcome.honest), default=0)
    yield f"{'honest, largest error / limit':<{wide}}" + _columns(outcome.dtypes)
    for name, of in outcome.honest.items():
        yield f"{name:<{wide}}" + _ratios(of, outcome.dtypes)


def _summary(outcome: Outcome) -> Iterator[str]:
    wide = len("honest with different bits")
    rows: dict[str, list[str]] = {
        f"honest maximum (<= {HALF:g})": [_short(outcome.honest_max(dtype)) for dtype in outcome.dtypes],
        f"mutant minimum (>= {CAUGHT:g})": [_short(outcome.mutant_min(dtype)) for dtype in outcome.dtypes],
        f"separation (>= {SEPARATION:g})": [_short(outcome.separation(dtype)) for dtype in outcome.dtypes],
        "honest with different bits": [str(outcome.distinct(dtype)) for dtype in outcome.dtypes],
        "mutants": [str(sum(dtype in of for of in outcome.mutants.values())) for dtype in outcome.dtypes],
        "survivors": [str(len(outcome.survivors(dtype))) for dtype in outcome.dtypes],
        "must-bind items": [str(len(outcome.must_bind[dtype].checked)) for dtype in outcome.dtypes],
        "unbound": [str(len(outcome.must_bind[dtype].unbound)) for dtype in outcome.dtypes],
    }
    yield " " * wide + _columns(outcome.dtypes)
    for title, cells in rows.items():
        yield f"{title:<{wide}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)


def _columns(dtypes: Sequence[str]) -> str:
    return "".join(f"{dtype:>{COLUMN}}" for dtype in dtypes)


def _ratios(of: Of, dtypes: Sequence[str]) -> str:
    cells = (_short(of[dtype].largest) if dtype in of else "-" for dtype in dtypes)
    return "".join(f"{cell:>{COLUMN}}" for cell in cells)


def _short(ratio: float) -> str:
    return f"{ratio:.3g}"
