"""Write the tables of docs/power.md from the JSON of a self-test.

python conformance/tools/power_page.py SELF_TEST.json docs/power.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import replace

from iha_conformance.corpus.cases import FAMILIES
from iha_conformance.power.outcome import CAUGHT, HALF, SEPARATION

BEGIN = "<!-- tables of the self-test: made by `make power`, do not edit -->"
END = "<!-- end of tables -->"


def tables(outcome: dict[str, Any]) -> str:
    """All tables in Markdown."""
    return "\n".join(
        [*_summary(outcome), "", *_honest(outcome), "", *_mutants(outcome), "", *_restricted(outcome)]
    )


def _summary(outcome: dict[str, Any]) -> Iterator[str]:
    dtypes = outcome["dtypes"]
    yield f"IHA {outcome['spec_version']}, corpus `{outcome['corpus_sha256'][:12]}`."
    yield ""
    yield from _head("", list(dtypes))
    for key, title in (
        ("honest_max", f"largest honest error / limit, at most {HALF:g}"),
        ("mutant_min", f"smallest of the mutants' largest, at least {CAUGHT:g}"),
        ("separation", f"separation, at least {SEPARATION:g}"),
        ("honest", "honest implementations with different bits"),
        ("mutants", "mutants"),
    ):
        yield _row(title, [_number(of[key]) for of in dtypes.values()])
    yield _row("survivors", [str(len(of["survivors"])) for of in dtypes.values()])
    yield ""
    yield from _weakest(outcome)
    bind = outcome["must_bind"]
    yield ""
    yield f"Must-bind gate: {bind['checked']} items over all dtypes, {len(bind['unbound'])} unbound."


def _weakest(outcome: dict[str, Any]) -> Iterator[str]:
    """The mutants that come nearest to surviving, in each dtype."""
    for dtype in outcome["dtypes"]:
        ratios = {
            entry["name"]: entry["dtypes"][dtype]["largest"]
            for entry in outcome["mutants"]
            if dtype in entry["dtypes"] and entry["dtypes"][dtype]["largest"] is not None
        }
        nearest = sorted(ratios, key=ratios.__getitem__)[:3]
        yield (
            f"Weakest in {dtype}: " + ", ".join(f"{name} ({_number(ratios[name])})" for name in nearest) + "."
        )
        yield ""


def _honest(outcome: dict[str, Any]) -> Iterator[str]:
    yield "## Honest implementations"
    yield ""
    yield from _head("largest error / limit", list(outcome["dtypes"]))
    for entry in outcome["honest"]:
        yield _row(entry["name"], [_of(entry["dtypes"], dtype) for dtype in outcome["dtypes"]])


def _mutants(outcome: dict[str, Any]) -> Iterator[str]:
    yield "## Mutants"
    yield ""
    yield "A family without a number catches it in every dtype that can show it; `core (2)` in two of them."
    yield ""
    yield from _head("mutant | breaks | caught by", list(outcome["dtypes"]))
    for entry in outcome["mutants"]:
        largest = {dtype: of["largest"] for dtype, of in entry["dtypes"].items()}
        breaks = ", ".join(entry["requirements"])
        yield _row(
            f"{entry['name']} | {breaks} | {_families(entry)}",
            [_of(largest, dtype) for dtype in outcome["dtypes"]],
        )


def _families(entry: dict[str, Any]) -> str:
    """The families that catch a mutant, in the order of reports."""
    of_dtype = [of["families"] for of in entry["dtypes"].values()]
    named = []
    for family in FAMILIES:
        count = sum(family in of and (of[family] is None or of[family] >= CAUGHT) for of in of_dtype)
        if count:
            named.append(family if count == len(of_dtype) else f"{family} ({count})")
    return ", ".join(named)


def _restricted(outcome: dict[str, Any]) -> Iterator[str]:
    yield "## Faults that only some dtypes can show"
    yield ""
    yield "| mutant | dtypes | because |"
    yield "|---|---|---|"
    for entry in outcome["mutants"]:
        if entry["because"]:
            yield f"| {entry['name']} | {', '.join(entry['dtypes'])} | {_escaped(entry['because'])} |"


def _head(title: str, dtypes: list[str]) -> Iterator[str]:
    yield f"| {title} | " + " | ".join(dtypes) + " |"
    yield "|---" * (title.count("|") + 1) + "|---:" * len(dtypes) + "|"


def _row(title: str, cells: list[str]) -> str:
    return f"| {title} | " + " | ".join(cells) + " |"


def _of(ratios: dict[str, float | None], dtype: str) -> str:
    return _number(ratios[dtype]) if dtype in ratios else "-"


def _number(ratio: float | None) -> str:
    return "∞" if ratio is None else f"{ratio:.3g}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    """Replace what stands between the markers."""
    outcome, page = Path(sys.argv[1]), Path(sys.argv[2])
    replace(page, BEGIN, END, tables(json.loads(outcome.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
