"""The must-bind gate: complete, passed by the corpus, and not passed by cases that show too little."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from iha_conformance.corpus import Case
from iha_conformance.power.measure import Problem, corpus
from iha_conformance.power.must_bind import (
    FACTOR,
    MOST_TOKENS,
    Bound,
    Change,
    all_pairs,
    bind,
    changes,
    levels,
    moves,
)
from iha_conformance.protocol import DTYPES
from iha_core.spec_files import spec_path

CASES = {case.id: case for case in corpus()}


@cache
def whole(dtype: str) -> Bound:
    return bind(dtype)


# The corpus


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_corpus_binds_everything(dtype: str) -> None:
    assert whole(dtype).unbound == ()
    assert len(set(whole(dtype).checked)) == len(whole(dtype).checked)


def table(heading: str, following: str) -> list[list[str]]:
    """Cells of the first table of SPEC.md between two headings, without the row of its titles."""
    text = spec_path("SPEC.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*)\|$", text[text.index(heading) : text.index(following)], re.MULTILINE)
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[2:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_argument_is_checked(dtype: str) -> None:
    rows = table("## 2 Arguments", "- [DIM-1]")
    names = {name for row in rows for name in row[0].split(", ")} - {"output"}
    assert {"q", "kv_positions", "query_offset"} <= names
    checked = {re.split(r"[\[, ]", item)[0] for item in whole(dtype).checked}
    assert names <= checked


def elements(case: Case) -> Iterator[str]:
    """What chapter 2 of SPEC.md says of the shapes of a case: an item for each index of an axis."""
    size = case.sizes
    H, G, P = (size[letter] for letter in "HGP")
    axes = {
        "alpha_q": {"source": H, "target": H, "pseudo": P},
        "alpha_k": {"source": G, "target": H, "pseudo": P},
        "alpha_v": {"source": G, "target": H, "pseudo": P},
        "collapse": {"out": H, "source": H, "pseudo": P},
        "q": {"head": H, "lane": size["d"]},
        "k": {"head": G, "lane": size["d"]},
        "v": {"head": G, "lane": size["e"]},
    }
    if case.parameters.get("collapse") == "per_head":
        axes["collapse"] = {"head": H, "pseudo of a head": P}
    for name, of_name in axes.items():
        for axis, count in of_name.items():
            yield from (f"{name}[{axis} {i} of {count}]" for i in range(count))
    tokens = {
        "key_mask": "M",
        "segment_ids": "N",
        "kv_segment_ids": "M",
        "positions": "N",
        "kv_positions": "M",
    }
    for name, letter in tokens.items():
        if name in case.arguments and size[letter] <= MOST_TOKENS:
            yield from (f"{name}[token {i}]" for i in range(size[letter]))
    offset = case.arguments.get("query_offset")
    if isinstance(offset, list):
        yield from (f"query_offset[batch element {b}]" for b in range(size["B"]))
    else:
        yield "query_offset, default" if offset is None else "query_offset, int"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_of_every_axis_is_checked(dtype: str) -> None:
    """For each size that an axis has anywhere in the corpus."""
    expected = {item for case in CASES.values() if dtype in case.dtypes for item in elements(case)}
    assert len(expected) > 250
    assert expected <= set(whole(dtype).checked)


def values(case: Case) -> Iterator[str]:
    """Values of the fields of a case's configuration that have an effect."""
    config = case.config
    idle = {"window_unit"} if config["window"] is None else set()
    idle |= {"rope_theta", "rope_pairing"} if config["rope"] == "none" else set()
    yield from (f"{field} {value!r}" for field, value in config.items() if field not in idle)


def texts() -> dict[str, list[str]]:
    """The fields of [CFG-1] whose values are texts."""
    rows = table("- [CFG-1]", "- [CFG-2]")
    return {row[0]: re.findall(r'"(\w+)"', row[1]) for row in rows if '"' in row[1]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_of_the_configuration_is_checked(dtype: str) -> None:
    """Those of the corpus; and texts of [CFG-1] in place of every other, in both directions."""
    checked = set(whole(dtype).checked)
    expected = {item for case in CASES.values() if dtype in case.dtypes for item in values(case)}
    assert {
        "window None",
        "scale None",
        "window 1",
        "rope_pairing 'adjacent'",
        "rope_theta 100.0",
    } <= expected
    assert expected <= {item.partition(", not ")[0] for item in checked}
    assert set(texts()) == {"causal", "window_unit", "rope", "rope_pairing", "normalisation"}
    for field, choices in texts().items():
        for value, other in itertools.permutations(choices, 2):
            assert f"{field} {value!r}, not {other!r}" in checked
    assert {item.split(" ")[0] for item in checked if " " in item} >= set(CASES["core/paper"].config)


@pytest.mark.parametrize(
    ("case_id", "expected"),
    [
        (
            "cross/per-row-window",
            [
                "query_offset[batch element 0]",
                "query_offset[batch element 1]",
                "causal 'none', not 'virtual'",
                "causal 'none', not 'token'",
                "window_unit 'token', not 'virtual'",
                "rope 'none', not 'virtual'",
                "rope 'none', not 'token'",
                "normalisation 'softmax', not 'none'",
                "scale None",
                "window 2",
            ],
        ),
        (
            "segments/both",
            [
                *(f"segment_ids[token {i}]" for i in range(3)),
                *(f"kv_segment_ids[token {i}]" for i in range(7)),
                "query_offset, default",
                "causal 'virtual', not 'token'",
                "causal 'virtual', not 'none'",
                "rope 'virtual', not 'token'",
                "rope 'virtual', not 'none'",
                "rope_pairing 'half', not 'adjacent'",
                "normalisation 'softmax', not 'none'",
                "rope_theta 500000.0",
                "scale None",
                "window None",
            ],
        ),
    ],
)
def test_items_of_a_case(case_id: str, expected: list[str]) -> None:
    """Beside those of its tensors."""
    case = CASES[case_id]
    items = [change.item for change in changes(case, Problem.of(case, "float32").inputs)]
    tensors = ("alpha_", "collapse[", "q[", "k[", "v[")
    assert list(dict.fromkeys(item for item in items if not item.startswith(tensors))) == expected


# Cases that show too little


def starting(items: tuple[str, ...], *names: str) -> set[str]:
    return {item for item in items if item.startswith(names)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cases_do_not_show_is_unbound(dtype: str) -> None:
    """Without a mask, logits that are all 0 leave the mean of all values, whatever the queries."""
    found = bind(dtype, [CASES["mask/none-probe"]])
    nothing = starting(found.checked, "q[", "k[", "alpha_q[", "alpha_k[", "query_offset", "rope", "scale")
    assert {"q[head 2 of 3]", "alpha_k[target 0 of 3]", "query_offset, default"} <= nothing
    if dtype in ("float64", "float32"):
        assert set(found.unbound) == nothing
    assert nothing <= set(found.unbound), "and some values that are small beside ten limits"
    assert starting(found.unbound, "causal", "window", "normalisation", "alpha_v[") == set()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_case_is_enough_to_bind(dtype: str) -> None:
    """Wherever it comes; the items are those of all cases."""
    weak, strong = CASES["mask/none-probe"], CASES["core/paper"]
    for cases in ([weak, strong], [strong, weak]):
        found = bind(dtype, cases)
        assert set(found.checked) == {*bind(dtype, [weak]).checked, *bind(dtype, [strong]).checked}
        # Positions up to 13 hardly show the base in bfloat16.
        unbound = {item for item in found.unbound if " beside " not in item}
        assert unbound <= ({"rope_theta 500000.0"} if dtype == "bfloat16" else set())


def test_cases_of_other_dtypes_bind_nothing() -> None:
    only_16_bits = [CASES["core/float32-parameters"]]
    assert bind("float64", only_16_bits) == Bound((), ())
    assert bind("bfloat16", only_16_bits).checked


@pytest.mark.parametrize("limits", [-1.1, -0.9, 0.9, 1.1])
def test_an_output_has_to_move_by_ten_limits(limits: float) -> None:
    """The output is linear in the collapse: one element moves by so many times ten, none by more."""
    assert FACTOR == 10
    problem = Problem.of(CASES["core/paper"], "float64")
    allowed = problem.expectation.limits
    largest = np.max(np.abs(allowed.stages["output"]) / allowed.limits["output"])
    moved = problem.inputs["collapse"] * (1 + limits * FACTOR / largest)
    change = Change("collapse", {**problem.inputs, "collapse": moved}, problem.case.config)
    assert moves(problem, change) == (abs(limits) > 1)


def test_what_becomes_nan_has_not_moved() -> None:
    """An item is not bound by values that a port would be right to call wrong for another reason."""
    problem = Problem.of(CASES["core/paper"], "float32")
    everywhere = np.full_like(problem.inputs["v"], np.nan)
    assert not moves(problem, Change("v", {**problem.inputs, "v": everywhere}, problem.case.config))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_change_leaves_the_call_as_it_was(dtype: str) -> None:
    """And each changes one argument, or one field of the configuration, alone."""
    for case in CASES.values():
        if dtype not in case.dtypes or "quick" not in case.flags or case.family == "gain":
            continue
        inputs = Problem.of(case, dtype).inputs
        for change in changes(case, inputs):
            argument = change.item.partition("[")[0].partition(",")[0]
            if change.config != case.config:
                differing = [field for field in case.config if change.config[field] != case.config[field]]
                assert differing == [change.item.split(" ")[0]], change.item
                assert change.inputs is inputs
            else:
                before = inputs.get(argument, case.sizes["M"] - case.sizes["N"])
                after = change.inputs[argument]
                assert np.shape(before) == np.shape(after), change.item
                if np.size(after):
                    assert not np.array_equal(np.float64(before), np.float64(after)), change.item
                others = {name for name in inputs if name != argument}
                assert all(change.inputs[name] is inputs[name] for name in others), change.item


def test_features_bind_beside_each_other() -> None:
    """Without the cases that combine them, a port may get two features right and the two together wrong."""
    others = [case for case in corpus() if case.family != "pairs"]
    found = bind("float32", others, all_pairs())
    pairs = set(all_pairs())
    assert pairs <= set(found.checked)
    unbound = pairs & set(found.unbound)
    for item in (
        "segment_ids alone beside normalisation none",
        "normalisation none beside segment_ids alone",
        "collapse per head beside window virtual",
        "key_mask given beside segment_ids both",
        "rope_pairing adjacent beside causal token",
    ):
        assert item in unbound, item


def test_pairs_leave_out_what_has_no_meaning() -> None:
    pairs = set(all_pairs())
    assert not any("rope_pairing" in pair and "rope none" in pair for pair in pairs)
    assert not any("positions" in pair and "rope none" in pair for pair in pairs)
    assert len(pairs) > 400
    case = next(case for case in corpus() if case.id == "pairs/05")
    assert "rope_pairing" not in levels(case)
    assert levels(case)["collapse"] == "per head"
    assert levels(case)["query_offset"] == "int"
