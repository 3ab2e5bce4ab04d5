"""Which cases and dtypes a run covers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from iha_conformance.corpus import Case
from iha_conformance.errors import CommandError, unknown
from iha_conformance.protocol import DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters:
    """What was asked for; empty means all."""

    dtype: tuple[str, ...] = ()
    family: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    quick: bool = False

    def __bool__(self) -> bool:
        """Whether anything is filtered."""
        return bool(self.dtype or self.family or self.case or self.quick)

    def __str__(self) -> str:
        """As options of the command."""
        words = [f"--{name} {value}" for name in ("dtype", "family", "case") for value in getattr(self, name)]
        return " ".join([*words, "--quick"] if self.quick else words)


def select(cases: Sequence[Case], filters: Filters) -> list[tuple[Case, str]]:
    """The cases that pass all filters, each with its dtypes, in the order of the table.

    Raises:
        CommandError: an unknown name, or nothing is left.
    """
    for dtype in filters.dtype:
        if dtype not in DTYPES:
            raise unknown("--dtype", dtype, DTYPES)
    _check_families(cases, filters.family)
    for name in filters.case:
        find(cases, name, option="--case")
    pairs = [
        (case, dtype)
        for case in cases
        if (not filters.family or case.family in filters.family)
        and (not filters.case or case.id in filters.case)
        and (not filters.quick or "quick" in case.flags)
        for dtype in DTYPES
        if dtype in case.dtypes and (not filters.dtype or dtype in filters.dtype)
    ]
    if not pairs:
        raise CommandError(f"expected at least one case to match {filters}, got 0 of {len(cases)}")
    return pairs


def of_families(cases: Sequence[Case], families: Sequence[str]) -> list[Case]:
    """The cases of these families, of all if none is named, in the order of the table.

    Raises:
        CommandError: an unknown family.
    """
    _check_families(cases, families)
    return [case for case in cases if not families or case.family in families]


def _check_families(cases: Sequence[Case], families: Sequence[str]) -> None:
    known = dict.fromkeys(case.family for case in cases)
    for family in families:
        if family not in known:
            raise unknown("--family", family, known)


def find(cases: Sequence[Case], name: str, *, option: str) -> Case:
    """The case of that id.

    Raises:
        CommandError: there is none.
    """
    for case in cases:
        if case.id == name:
            return case
    raise unknown(option, name, (case.id for case in cases))
