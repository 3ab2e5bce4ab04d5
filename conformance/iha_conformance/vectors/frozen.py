"""The frozen vectors that are shipped: some of the quick cases, in all their dtypes."""

from __future__ import annotations

from pathlib import Path

from iha_conformance.corpus.cases import FAMILIES
from iha_conformance.selection import Filters

FOLDER = Path(__file__).parent / "core"

LARGE = ("gain", "accumulation")
"""Families whose inputs alone would be most of what is shipped."""

FILTERS = Filters(
    family=tuple(name for name in FAMILIES if name not in (*LARGE, "invalid")),
    quick=True,
)

STAGES = ("mixed_v", "lse", "virtual_out", "output")
"""One after each part of the operation: mixing, logits, weighted sum, collapse. The others are large."""
