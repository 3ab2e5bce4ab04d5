"""The case table: rows of spec/cases.toml as checked, immutable objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from iha_conformance.corpus.layouts import LAYOUTS
from iha_conformance.corpus.recipes import RECIPES
from iha_conformance.protocol import CAPABILITIES, DTYPES, Operation
from iha_core.config import AttentionConfig
from iha_core.errors import IHAError
from iha_core.spec_files import load_toml

FAMILIES = (
    "core",
    "mask",
    "window",
    "rope",
    "collapse",
    "grouped",
    "cross",
    "keymask",
    "segments",
    "positions",
    "degenerate",
    "extreme",
    "strided",
    "exact",
    "spread",
    "gain",
    "accumulation",
    "tiles",
    "pairs",
    "gradient",
    "invalid",
)
"""Families in the order of reports."""

FLAGS = ("quick", "random", "exact")
SIZES = ("B", "N", "M", "H", "G", "P", "d", "e")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invalid:
    """How bad input must be refused ([ERR-1]): the class of the error and the argument it names."""

    error: str
    argument: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the case table.

    Attributes:
        id: permanent name, never reused.
        family: one of `FAMILIES`.
        why: the fault that this case is there to show.
        requirements: ids of SPEC.md that it tests.
        flags: "quick" (part of the quick run), "random" (errors are independent, [NUM-6] applies),
            "exact" (every element of the output is exact, [NUM-5]).
        signature: name of its sizes in the table.
        sizes: size by letter.
        config: complete configuration; for a case of bad input possibly one that is not allowed.
        dtypes: storage dtypes it is run in.
        recipe, parameters: how its data are made (`corpus.recipes`).
        arguments: optional arguments as written in the table.
        layout: how the arrays lie in memory (`corpus.layouts`).
        capability: what a target must declare to be given the case, or None.
        invalid: for a case of bad input, the refusal that is expected.
        replace: for a case of bad input, the arguments that are replaced, as written.
    """

    id: str
    family: str
    why: str
    requirements: tuple[str, ...]
    flags: frozenset[str]
    signature: str
    sizes: Mapping[str, int]
    config: Mapping[str, Any]
    dtypes: tuple[str, ...]
    recipe: str
    parameters: Mapping[str, Any]
    arguments: Mapping[str, Any]
    layout: str
    capability: str | None
    invalid: Invalid | None
    replace: Mapping[str, Any]

    @property
    def operation(self) -> Operation:
        """What a target is asked for."""
        return "gradient" if self.family == "gradient" else "attention"

    @property
    def attention_config(self) -> AttentionConfig:
        """The configuration as an object; raises where the case has one that is not allowed."""
        return AttentionConfig.from_dict(self.config)


@cache
def load_cases() -> tuple[Case, ...]:
    """All cases in the order of the table.

    Raises:
        ValueError: the table itself is wrong; names the case and the field.
    """
    table = load_toml("cases.toml")
    signatures = table["signatures"]
    cases = tuple(_case(row, signatures) for row in table["case"])
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise ValueError(f"cases.toml: id {case.id!r} is used twice")
        seen.add(case.id)
    return cases


_REQUIRED = ("id", "family", "why", "requirements", "signature")
_FIELDS = {
    "id",
    "family",
    "why",
    "requirements",
    "flags",
    "signature",
    "config",
    "dtypes",
    "recipe",
    "parameters",
    "arguments",
    "layout",
    "invalid",
    "replace",
}


def _fault(row: Mapping[str, Any], field: str, expected: object, found: object) -> ValueError:
    return ValueError(f"cases.toml: case {row.get('id', '?')!r}, {field}: expected {expected}, got {found!r}")


def _check_row(row: Mapping[str, Any], signatures: Mapping[str, Sequence[int]]) -> None:
    """Refuse fields that are unknown, missing, or have a value that is not known."""
    for field in row:
        if field not in _FIELDS:
            raise _fault(row, field, "one of " + ", ".join(sorted(_FIELDS)), field)
    for field in _REQUIRED:
        if not row.get(field):
            raise _fault(row, field, "a value", row.get(field))
    for field, default, known in (
        ("family", None, FAMILIES),
        ("signature", None, tuple(signatures)),
        ("recipe", "random", tuple(RECIPES)),
        ("layout", "contiguous", tuple(LAYOUTS)),
    ):
        if row.get(field, default) not in known:
            raise _fault(row, field, "one of " + ", ".join(known), row[field])
    if not set(row.get("dtypes", DTYPES)) <= set(DTYPES):
        raise _fault(row, "dtypes", DTYPES, row["dtypes"])
    if not set(row.get("flags", ())) <= set(FLAGS):
        raise _fault(row, "flags", FLAGS, sorted(row["flags"]))
    if ("invalid" in row) != (row["family"] == "invalid"):
        raise _fault(row, "invalid", "an [invalid] entry in family invalid and nowhere else", row["family"])


def _case(row: Mapping[str, Any], signatures: Mapping[str, Sequence[int]]) -> Case:
    _check_row(row, signatures)
    invalid = Invalid(**row["invalid"]) if "invalid" in row else None
    config = AttentionConfig().to_dict() | row.get("config", {})
    if invalid is None:
        try:
            config = AttentionConfig.from_dict(config).to_dict()
        except IHAError as error:
            raise _fault(row, "config", "fields of the configuration", str(error)) from error
    sizes: dict[str, int] = dict(zip(SIZES, signatures[row["signature"]], strict=True))
    return Case(
        id=row["id"],
        family=row["family"],
        why=row["why"],
        requirements=tuple(row["requirements"]),
        flags=frozenset(row.get("flags", ())),
        signature=row["signature"],
        sizes=MappingProxyType(sizes),
        config=MappingProxyType(config),
        dtypes=tuple(row.get("dtypes", ["float32"] if invalid else DTYPES)),
        recipe=row.get("recipe", "random"),
        parameters=MappingProxyType(row.get("parameters", {})),
        arguments=MappingProxyType(row.get("arguments", {})),
        layout=row.get("layout", "contiguous"),
        capability=row["family"] if row["family"] in CAPABILITIES else None,
        invalid=invalid,
        replace=MappingProxyType(row.get("replace", {})),
    )
