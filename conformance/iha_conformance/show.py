"""What `iha case` shows, for people and as JSON: one case in full, or a line for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from iha_conformance.corpus import Case, build_inputs, load_cases
from iha_conformance.errors import CommandError, unknown
from iha_conformance.judge import expect
from iha_conformance.protocol import DTYPES
from iha_conformance.selection import find, of_families
from iha_core import GRADIENTS, STAGES, AttentionConfig, validate
from iha_core.bounds import ForwardLimits
from iha_core.reference import token_indices, visibility

MASK_ROWS, MASK_COLUMNS = 64, 96
"""Part of a mask that is drawn."""

MAX_PRINTED = 64
"""Elements of an array up to which all are printed."""

MAX_JSON = 4096
"""Elements of an array up to which all are in the JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The limits of a stage or companion in short.

    Attributes:
        smallest, largest: of the finite ones; None where nothing is compared.
        exact: whether every element has to be right to the last bit.
    """

    smallest: float | None
    largest: float | None
    exact: bool = False

    @classmethod
    def of(cls, limits: np.ndarray[Any, Any], *, exact: bool = False) -> Range:
        finite = limits[np.isfinite(limits)]
        if finite.size == 0:
            return cls(smallest=None, largest=None)
        return cls(smallest=float(finite.min()), largest=float(finite.max()), exact=exact)

    def __str__(self) -> str:
        if self.smallest is None or self.largest is None:
            return "nothing to compare"
        if self.exact:
            return "exact: every element is right to the last bit"
        if self.smallest == self.largest:
            return f"limit {self.smallest:.3g}"
        return f"limit {self.smallest:.3g} to {self.largest:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A case in one dtype; what follows from its answer is None for a case of bad input.

    Attributes:
        mask: which keys each virtual query sees, (B, T, S).
        stages: the exact answer; for a case of gradients, these by argument.
        limits: by stage.
        companions: limits on functionals of the output's error, by kind ([NUM-6]).
    """

    case: Case
    dtype: str
    inputs: Mapping[str, Any]
    mask: np.ndarray[Any, Any] | None = None
    stages: Mapping[str, np.ndarray[Any, Any]] | None = None
    limits: Mapping[str, Range] | None = None
    companions: Mapping[str, Range] | None = None

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        case = self.case
        invalid = case.invalid
        return {
            "id": case.id,
            "family": case.family,
            "why": case.why,
            "requirements": list(case.requirements),
            "flags": sorted(case.flags),
            "sizes": dict(case.sizes),
            "config": as_plain(dict(case.config)),
            "layout": case.layout,
            "dtypes": list(case.dtypes),
            "capability": case.capability,
            "invalid": None if invalid is None else {"error": invalid.error, "argument": invalid.argument},
            "dtype": self.dtype,
            "inputs": {name: array_as_json(value) for name, value in self.inputs.items()},
            "mask": None if self.mask is None else array_as_json(self.mask.astype(np.int64)),
            "stages": None
            if self.stages is None
            else {name: array_as_json(array) for name, array in self.stages.items()},
            "limits": _ranges(self.limits),
            "companions": _ranges(self.companions),
        }

    def render(self) -> str:
        """All of it as text."""
        sections = [_head(self.case, self.dtype)]
        if self.mask is not None:
            sections.append(_draw_mask(self.mask, self.case.sizes.get("P", 1)))
        shown = "\n".join(render_array(name, value) for name, value in self.inputs.items())
        sections.append(f"Inputs\n{shown}")
        if self.stages is not None:
            limits = self.limits or {}
            shown = "\n".join(
                render_array(name, array, limits.get(name)) for name, array in self.stages.items()
            )
            what = "Gradients" if self.case.operation == "gradient" else "Stages"
            sections.append(f"{what} (exact answer in float64; limits of {self.dtype})\n{shown}")
        if self.companions:
            shown = "\n".join(f"  {kind}: {limit}" for kind, limit in self.companions.items())
            sections.append(f"Limits on the output's error as a whole ({self.dtype}, [NUM-6])\n{shown}")
        return "\n\n".join(sections) + "\n"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Cases, a line each."""

    cases: Sequence[Case]

    def as_json(self) -> dict[str, Any]:
        """Without inputs and answers."""
        return {
            "cases": [
                {
                    "id": case.id,
                    "family": case.family,
                    "flags": sorted(case.flags),
                    "why": case.why,
                    "requirements": list(case.requirements),
                    "dtypes": list(case.dtypes),
                    "capability": case.capability,
                }
                for case in self.cases
            ]
        }

    def render(self) -> str:
        """Id, flags and why, in columns."""
        flags = [", ".join(sorted(case.flags)) or "-" for case in self.cases]
        wide, narrow = (max(map(len, texts)) for texts in ([case.id for case in self.cases], flags))
        return "".join(
            f"{case.id:<{wide}}  {text:<{narrow}}  {' '.join(case.why.split())}\n"
            for case, text in zip(self.cases, flags, strict=True)
        )


def list_cases(families: Sequence[str]) -> Listing:
    """The cases of these families, or all.

    Raises:
        CommandError: an unknown family.
    """
    return Listing(of_families(load_cases(), families))


def describe_case(name: str, dtype: str | None) -> Description:
    """Look up a case and compute what is known about it.

    Raises:
        CommandError: no such case, no such dtype, or the case does not have that dtype.
    """
    case = find(load_cases(), name, option="ID")
    if dtype is not None and dtype not in DTYPES:
        raise unknown("--dtype", dtype, DTYPES)
    if dtype is not None and dtype not in case.dtypes:
        raise CommandError(
            f"--dtype: expected a dtype of case {name!r}, {' or '.join(case.dtypes)}, got {dtype!r}"
        )
    chosen = dtype or case.dtypes[0]
    inputs = build_inputs(case, chosen)
    if case.invalid is not None:
        return Description(case=case, dtype=chosen, inputs=inputs)
    expectation = expect(case, chosen, inputs)
    assert expectation is not None  # only cases of bad input have none
    stages, limits = expectation.stages, expectation.limits
    all_exact = isinstance(limits, ForwardLimits) and bool(limits.exact.all())
    return Description(
        case=case,
        dtype=chosen,
        inputs=inputs,
        mask=_mask(case, inputs),
        stages={stage: stages[stage] for stage in (*STAGES, *GRADIENTS) if stage in stages},
        limits={
            stage: Range.of(array, exact=stage == "output" and all_exact)
            for stage, array in limits.limits.items()
        },
        companions={companion.kind: Range.of(companion.limit) for companion in limits.companions},
    )


def _mask(case: Case, inputs: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    config = AttentionConfig.from_dict(dict(case.config))
    dims = validate(**{name: value for name, value in inputs.items() if name != "cotangent"}, config=config)
    query_index, key_index = token_indices(dims, inputs.get("query_offset"))
    masks = {name: inputs.get(name) for name in ("key_mask", "segment_ids", "kv_segment_ids")}
    return visibility(query_index, key_index, dims, config, **masks)


def _head(case: Case, dtype: str) -> str:
    lines = {
        "family": case.family,
        "why": case.why,
        "requirements": " ".join(f"[{name}]" for name in case.requirements),
        "flags": ", ".join(sorted(case.flags)) or "none",
        "sizes": ", ".join(f"{letter}={size}" for letter, size in case.sizes.items()),
        "config": ", ".join(f"{field}={value!r}" for field, value in case.config.items()),
        "layout": case.layout,
        "dtypes": ", ".join(case.dtypes) + f" (shown: {dtype})",
    }
    if case.invalid is not None:
        lines["must raise"] = f"{case.invalid.error} that names {case.invalid.argument!r}"
    width = max(map(len, lines))
    return "\n".join([f"Case {case.id}", *(f"  {name:<{width}}  {text}" for name, text in lines.items())])


def _draw_mask(mask: np.ndarray[Any, Any], P: int) -> str:
    """Rows are virtual queries, columns virtual keys, 1 is visible; tokens are set apart by spaces."""
    B, T, S = mask.shape
    for count, name in ((B, "batch elements"), (T, "queries"), (S, "keys")):
        if count == 0:
            return f"Mask: no {name}"
    lines = [f"Mask: rows are the {T} virtual queries, columns the {S} virtual keys; 1 = visible"]
    drawn: list[int] = []
    for b in range(B):
        if drawn and np.array_equal(mask[b], mask[drawn[0]]):
            continue
        drawn.append(b)
        lines.append(f"  batch element {b}" + (" (and all that are not shown)" if b == 0 and B > 1 else ""))
        for row in mask[b, :MASK_ROWS, :MASK_COLUMNS]:
            marks = ["1" if seen else "." for seen in row]
            tokens = ["".join(marks[i : i + P]) for i in range(0, len(marks), P)]
            lines.append("    " + " ".join(tokens) + (" ..." if S > MASK_COLUMNS else ""))
        if T > MASK_ROWS:
            lines.append(f"    ... {T - MASK_ROWS} more rows")
    return "\n".join(lines)


def render_array(name: str, value: Any, limit: Range | None = None) -> str:
    if not isinstance(value, np.ndarray):
        return f"  {name} = {value!r}"
    head = f"  {name} {value.dtype.name} ({', '.join(map(str, value.shape))})"
    if value.size == 0:
        return head + " empty"
    if limit is not None:
        head += f", {limit}"
    # bfloat16 prints as numbers only after widening, which is exact.
    array = value.astype(np.float64) if value.dtype.name == "bfloat16" else value
    body = np.array2string(
        array,
        threshold=MAX_PRINTED,
        edgeitems=3 if array.ndim < 3 else 1,
        max_line_width=110,
        formatter={"float_kind": lambda number: f"{number:>12.6g}"},
    )
    return head + "\n" + "\n".join("    " + line for line in body.splitlines() if line.strip())


def _ranges(ranges: Mapping[str, Range] | None) -> dict[str, Any] | None:
    return None if ranges is None else {name: dataclasses.asdict(limit) for name, limit in ranges.items()}


def array_as_json(value: Any) -> Any:
    """An input or stage as JSON; an array is an object with its shape, dtype and elements."""
    if not isinstance(value, np.ndarray):
        return as_plain(value)
    flat = value.ravel()
    if value.dtype.name == "bfloat16":
        flat = flat.astype(np.float64)
    cut = value.size > MAX_JSON
    elements = flat[:MAX_JSON].tolist()
    return {
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "cut": cut,
        "values": [as_plain(element) for element in elements],
    }


def as_plain(value: Any) -> Any:
    """A value as JSON has it; NaN and infinities as strings, anything unknown as its repr."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [as_plain(item) for item in value]
    return repr(value)
