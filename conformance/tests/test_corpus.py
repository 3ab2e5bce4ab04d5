"""The corpus: complete, well-formed, the same bits everywhere, and tied to the requirements of SPEC.md."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from iha_conformance import cli
from iha_conformance.corpus import (
    Case,
    CorpusError,
    apply_layout,
    build_inputs,
    cases,
    corpus_sha256,
    frozen,
    load_cases,
)
from iha_conformance.corpus.cases import FAMILIES, SIZES
from iha_conformance.corpus.streams import bits24, cast, integers, uniform
from iha_conformance.judge import expect, judge
from iha_conformance.protocol import DTYPES, Result
from iha_core import AttentionConfig, attention
from iha_core.bounds import ForwardLimits, arithmetic
from iha_core.known_answers import load_known_answers
from iha_core.layer_config import MIXING
from iha_core.spec_files import load_toml, spec_path

Array = npt.NDArray[Any]

CASES = load_cases()
VALID = [case for case in CASES if case.invalid is None]
FORWARD = [case for case in VALID if case.operation == "attention"]
TESTS = Path(__file__).parent


# The table


@pytest.mark.requirement("GEN-3")
def test_the_table_is_complete() -> None:
    assert len(CASES) >= 120
    assert {case.family for case in CASES} == set(FAMILIES)
    assert len({case.signature for case in CASES}) <= 32
    assert set(load_toml("cases.toml")["signatures"]) == {case.signature for case in CASES}
    assert {dtype for case in CASES for dtype in case.dtypes} == set(DTYPES)
    families = [case.family for case in CASES]
    assert sorted(families, key=FAMILIES.index) == families, "rows stand in the order of their families"


def test_ids_are_unique_and_name_their_family() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    for case in CASES:
        assert re.fullmatch(rf"{case.family}/[a-z0-9]+(-[a-z0-9]+)*", case.id), case.id


def test_every_row_says_why() -> None:
    for case in CASES:
        assert case.why, case.id
        assert case.requirements, case.id
        assert "\n" not in case.why


def test_the_quick_run_has_a_case_of_every_family() -> None:
    quick = {case.family for case in CASES if "quick" in case.flags}
    assert quick >= set(FAMILIES) - {"invalid"}


def test_every_configuration_value_is_tested() -> None:
    for field, values in {
        "causal": {"virtual", "token", "none"},
        "window_unit": {"virtual", "token"},
        "rope": {"virtual", "token", "none"},
        "rope_pairing": {"half", "adjacent"},
        "normalisation": {"softmax", "none"},
    }.items():
        assert {case.config[field] for case in VALID} == values
    assert {case.config["window"] is None for case in VALID} == {True, False}
    assert {case.config["scale"] is None for case in VALID} == {True, False}
    given = {name for case in VALID for name in case.arguments}
    optional = ("key_mask", "segment_ids", "kv_segment_ids", "positions", "kv_positions", "query_offset")
    assert given == set(optional)


@pytest.mark.requirement("NUM-5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_flag_is_what_the_values_say(dtype: str) -> None:
    """Exactness is detected; the flag only says where to expect it: in every dtype of the case."""
    for case in FORWARD:
        if dtype in case.dtypes and "exact" in case.flags:
            expectation = expect(case, dtype, build_inputs(case, dtype))
            assert expectation is not None
            assert isinstance(expectation.limits, ForwardLimits)
            assert expectation.limits.exact.all(), case.id


@pytest.mark.requirement("NUM-5")
def test_cases_without_the_exact_flag_are_not_exact_in_some_dtype() -> None:
    for case in FORWARD:
        if "exact" not in case.flags:
            # The narrowest is the likeliest, and one is enough.
            found = (expect(case, dtype, build_inputs(case, dtype)) for dtype in reversed(case.dtypes))
            limits = (one.limits for one in found if one is not None)
            assert not all(isinstance(one, ForwardLimits) and one.exact.all() for one in limits), case.id


@pytest.mark.requirement("NUM-6")
def test_random_cases_hold_random_data() -> None:
    """Structured data repeat roundings: such a case must not be judged by independent ones."""
    for case in VALID:
        if "random" in case.flags:
            assert case.operation == "attention", "gradients have no limits of that kind ([NUM-10])"
            assert case.recipe in ("random", "gain"), case.id
            assert "exact" not in case.flags, case.id
            assert not case.parameters.get("same_batch"), case.id


# Malformed rows

GOOD_ROW: dict[str, Any] = {
    "id": "core/example",
    "family": "core",
    "why": "an example",
    "requirements": ["MIX-1"],
    "signature": "base",
}


def load_rows(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> tuple[Case, ...]:
    table = {"signatures": load_toml("cases.toml")["signatures"], "case": list(rows)}
    monkeypatch.setattr(cases, "load_toml", lambda name: table)
    found: tuple[Case, ...] = load_cases.__wrapped__()
    return found


def test_a_good_row_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = load_rows(monkeypatch, GOOD_ROW)
    assert (case.id, case.recipe, case.layout, case.dtypes) == (
        "core/example",
        "random",
        "contiguous",
        DTYPES,
    )
    assert case.attention_config == AttentionConfig()
    assert list(case.sizes) == list(SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("colour", "red"),
        ("family", "cores"),
        ("family", None),
        ("signature", "bases"),
        ("flags", ["fast"]),
        ("why", ""),
        ("why", None),
        ("requirements", []),
        ("requirements", None),
        ("dtypes", ["float8"]),
        ("recipe", "randomly"),
        ("layout", "diagonal"),
        ("config", {"causal": "full"}),
        ("config", {"window": 0}),
        ("config", {"dropout": 0.1}),
        ("invalid", {"error": "ValueError", "argument": "q"}),
    ],
)
def test_a_malformed_row_names_its_case_and_field(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None leaves the field out."""
    row = {name: entry for name, entry in {**GOOD_ROW, field: value}.items() if entry is not None}
    with pytest.raises(ValueError, match=rf"cases.toml: case 'core/example', {field}: expected") as caught:
        load_rows(monkeypatch, row)
    assert "\n" not in str(caught.value)


def test_a_case_of_bad_input_says_how_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**GOOD_ROW, "id": "invalid/example", "family": "invalid"}
    with pytest.raises(ValueError, match="case 'invalid/example', invalid: expected"):
        load_rows(monkeypatch, row)


def test_an_id_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'core/example' is used twice"):
        load_rows(monkeypatch, GOOD_ROW, GOOD_ROW)


def test_cases_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CASES[0].config["causal"] = "none"  # type: ignore[index]
    with pytest.raises(AttributeError):
        CASES[0].id = "other"  # type: ignore[misc]


# Streams


def split_mix(stream: str, i: int) -> int:
    """[GEN-1], in Python's integers."""
    wrap = 2**64
    key = int.from_bytes(hashlib.sha256(stream.encode("utf-8")).digest()[:8], "little")
    z = (key + (i + 1) * 0x9E3779B97F4A7C15) % wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % wrap
    return (z ^ (z >> 31)) >> 40


@pytest.mark.requirement("GEN-1")
@pytest.mark.parametrize("stream", ["core/paper/q", "", "π", "core/paper/k"])
def test_streams_are_those_of_the_specification(stream: str) -> None:
    expected = np.array([split_mix(stream, i) for i in range(60)])
    np.testing.assert_array_equal(bits24(stream, (3, 4, 5)), expected.reshape(3, 4, 5))
    np.testing.assert_array_equal(uniform(stream, (60,), 4.0), 4.0 * (expected - 2**23) / 2**23)
    np.testing.assert_array_equal(integers(stream, (60,), -3, 9), -3 + expected * 13 // 2**24)


@pytest.mark.requirement("GEN-1")
def test_streams_are_spread_evenly() -> None:
    r = bits24("any name", (100_000,))
    assert r.min() >= 0
    assert r.max() < 2**24
    counts = np.bincount(r * 16 // 2**24, minlength=16)
    # 6250 each on average; five standard deviations are 383.
    assert np.all(np.abs(counts - 6250) < 383)
    assert set(integers("any name", (10_000,), 1, 3)) == {1.0, 2.0, 3.0}
    assert bits24("a", (0, 3)).shape == (0, 3)


@pytest.mark.requirement("GEN-1")
def test_random_inputs_are_streams_by_name() -> None:
    case = next(case for case in CASES if case.id == "core/paper")
    inputs = build_inputs(case, "float64")
    for name in ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse"):
        amplitude = 2.0 if name in "qkv" else 1.0
        count = math.prod(inputs[name].shape)
        expected = [amplitude * (split_mix(f"core/paper/{name}", i) - 2**23) / 2**23 for i in range(count)]
        np.testing.assert_array_equal(inputs[name].ravel(), expected)


@pytest.mark.requirement("GEN-2")
def test_casting_rounds_to_nearest_and_ties_to_even() -> None:
    u = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    for dtype, unit in u.items():
        given = np.array([1 + unit, 1 + 3 * unit, 1 + 1.01 * unit, -1 - unit])
        expected = [1.0, 1 + 4 * unit, 1 + 2 * unit, -1.0]
        np.testing.assert_array_equal(cast(given, dtype).astype(np.float64), expected)


# Inputs


@pytest.mark.requirement("GEN-2")
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_the_same_numbers_rounded_once(dtype: str) -> None:
    form = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    for case in VALID:
        if dtype not in case.dtypes:
            continue
        inputs, wide = build_inputs(case, dtype), build_inputs(case, "float64")
        again = build_inputs(case, dtype)
        assert list(inputs) == list(wide) == list(again)
        for name, value in inputs.items():
            if not isinstance(value, np.ndarray):
                assert value == wide[name] == again[name]
                continue
            assert value.dtype == again[name].dtype
            assert value.tobytes() == again[name].tobytes()
            if value.dtype.kind in "bi":
                np.testing.assert_array_equal(value, wide[name])
                continue
            parameters = case.parameters.get("float32_parameters") and name in MIXING
            assert value.dtype == (np.float32 if parameters else form)
            # Rounding at most twice, from float64 and from float32, must be rounding once.
            with np.errstate(invalid="ignore"):  # NaN in dropped keys
                found, expected = value.astype(np.float32), wide[name].astype(value.dtype).astype(np.float32)
                if dtype == "float64":
                    found, expected = value, wide[name]
            np.testing.assert_array_equal(found, expected)


def test_inputs_fit_their_sizes() -> None:
    for case in VALID:
        inputs, z = build_inputs(case, "float32"), case.sizes
        assert inputs["q"].shape == tuple(z[letter] for letter in "BNHd")
        assert inputs["k"].shape == tuple(z[letter] for letter in "BMGd")
        assert inputs["v"].shape == tuple(z[letter] for letter in "BMGe")
        for name, value in inputs.items():
            if isinstance(value, np.ndarray) and value.dtype.kind == "i":
                assert value.dtype == np.int64, (case.id, name)
                assert np.all((value >= -(2**31)) & (value < 2**31)), (case.id, name)


def test_the_corpus_is_the_frozen_one() -> None:
    """A change to an existing case changes what the specification expects, and needs a new version of it."""
    expected, now = frozen.load_frozen(), frozen.made()
    changed = [name for name, digest in expected.cases.items() if now.cases.get(name) != digest]
    assert not changed, "these cases have changed or are gone, and with them the specification"
    added = [name for name in now.cases if name not in expected.cases]
    assert not added, "these cases are new: run `make freeze`, then `make readme`"
    assert corpus_sha256() == expected.corpus, "the order of cases has changed"
    assert frozen.FROZEN.read_text(encoding="ascii") == frozen.as_toml(expected)


def test_the_hash_of_the_corpus_is_over_the_bytes_of_all_cases() -> None:
    """The same bytes make the hash of a case and that of a corpus of this case alone."""
    for case in (CASES[0], CASES[-1]):
        alone = frozen.hashes([case])
        assert alone.corpus == alone.cases[case.id] == frozen.made().cases[case.id]
    pair = frozen.hashes(CASES[:2])
    assert list(pair.cases) == [case.id for case in CASES[:2]]
    assert pair.corpus not in pair.cases.values()


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**CASES[0].config, "causal": "token"}},
        {"dtypes": ("float32",)},
        {"layout": "sliced"},
        {"id": "core/other"},
        {"arguments": {"query_offset": 1}},
        {"parameters": {**CASES[0].parameters, "collapse": "per_head"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_case_is_in_its_hash(change: dict[str, Any]) -> None:
    changed = dataclasses.replace(CASES[0], **change)
    (digest,) = frozen.hashes([changed]).cases.values()
    assert digest != frozen.made().cases[CASES[0].id]


def test_a_case_that_is_not_the_frozen_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = frozen.load_frozen()
    first, second = (case.id for case in CASES[:2])
    others = {name: digest for name, digest in expected.cases.items() if name != first}
    wrong = frozen.Hashes(expected.corpus, {**others, second: "0" * 64})
    monkeypatch.setattr(frozen, "load_frozen", lambda: wrong)
    frozen.check_frozen(CASES[2:])
    with pytest.raises(CorpusError, match=f"case '{first}' is not in frozen.toml"):
        frozen.check_frozen(CASES[:1])
    with pytest.raises(CorpusError, match=f"case '{second}': expected .* SHA-256 000000000000, got"):
        frozen.check_frozen([CASES[2], CASES[1]])


def test_inputs_of_this_machine_that_differ_are_a_fault_of_the_kit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One bit of one input is enough, and only where the case is run."""
    build = frozen.build_inputs

    def differs(case: Case, dtype: str) -> dict[str, Any]:
        inputs = build(case, dtype)
        if case.id == "core/paper":
            inputs["v"][-1, -1, -1, -1] = np.nextafter(inputs["v"][-1, -1, -1, -1], np.inf)
        return inputs

    monkeypatch.setattr(frozen, "build_inputs", differs)
    frozen.made.cache_clear()
    monkeypatch.chdir(TESTS)
    run = ["run", "--target", "fake_targets:honest", "--dtype", "float32", "--case"]
    try:
        assert cli.main([*run, "core/paper"]) == 2
        out, err = capfd.readouterr()
        assert cli.main([*run, "core/cube"]) == 0
    finally:
        frozen.made.cache_clear()
    assert out == ""
    assert err.startswith("iha: error: fault of the kit: case 'core/paper': expected the frozen")
    assert len(err.splitlines()) == 1


def test_freezing_adds_cases_and_refuses_changed_ones(tmp_path: Path) -> None:
    file = tmp_path / "frozen.toml"

    def freeze(*arguments: str) -> subprocess.CompletedProcess[str]:
        tool = TESTS.parent / "tools" / "freeze_corpus.py"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(tool), str(file), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    expected = frozen.as_toml(frozen.made())
    first = CASES[0].id
    line = f'"{first}" = "{frozen.made().cases[first]}"\n'
    file.write_text(expected.replace(line, ""), encoding="ascii")
    done = freeze()
    assert (done.returncode, file.read_text()) == (0, expected), done.stderr
    assert done.stdout.startswith("frozen.toml: 1 added, 0 changed; corpus ")

    spoilt = expected.replace(line, f'"{first}" = "{"0" * 64}"\n')
    file.write_text(spoilt, encoding="ascii")
    done = freeze()
    assert (done.returncode, file.read_text()) == (1, spoilt)
    assert f"found changed or missing: {first};" in done.stderr
    assert freeze("--change-cases").returncode == 0
    assert file.read_text() == expected


def test_the_corpus_is_the_same_in_the_c_locale() -> None:
    script = (
        "from iha_conformance.corpus import *\n"
        "for case in load_cases():\n"
        "    for dtype in case.dtypes:\n"
        "        build_inputs(case, dtype)\n"
        "print(corpus_sha256())\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert done.stdout.decode().strip() == corpus_sha256()


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("case", [case for case in CASES if case.invalid], ids=lambda case: case.id)
def test_the_reference_refuses_bad_input(case: Case) -> None:
    inputs = build_inputs(case, "float32")
    try:
        attention(**inputs, config=AttentionConfig.from_dict(case.config))
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        result = Result(
            case_id=case.id,
            dtype="float32",
            kind="failed",
            failure="raised",
            reason=str(error),
            error_types=kinds,
        )
    else:
        result = Result(case_id=case.id, dtype="float32", kind="arrays")
    verdict = judge(case, "float32", None, result)
    assert verdict.status == "passed", verdict.reason


# Layouts


@pytest.mark.requirement("ARG-5")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.family == "strided"], ids=lambda case: case.id
)
def test_layouts_hold_the_same_values_elsewhere(case: Case, dtype: str) -> None:
    inputs = build_inputs(case, dtype)
    laid_out = apply_layout(inputs, case.layout)
    assert list(laid_out) == list(inputs)
    moved = 0
    for name, value in inputs.items():
        found = laid_out[name]
        if not isinstance(value, np.ndarray):
            assert found == value
            continue
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
        moved += not found.flags.c_contiguous
    for name in ("q", "k", "v"):
        assert not laid_out[name].flags.c_contiguous, name
        if case.layout == "broadcast":
            assert laid_out[name].strides[0] == 0
    assert case.layout in ("broadcast", "fused") or moved >= 7
    if case.layout == "fused":
        bases = {id(laid_out[name].base) for name in ("q", "k", "v")}
        assert len(bases) == 1, "q, k and v are slices of one array"


def test_contiguous_is_contiguous() -> None:
    case = next(case for case in CASES if case.id == "keymask/random")
    for value in apply_layout(build_inputs(case, "float32"), "contiguous").values():
        assert value.flags.c_contiguous


# Traceability


def required_ids() -> list[str]:
    """Ids of SPEC.md in order: those that begin an item of a list."""
    text = spec_path("SPEC.md").read_text(encoding="utf-8")
    return re.findall(r"^- \[([A-Z]+-\d+)\]", text, flags=re.MULTILINE)


@cache
def ids_in_tests() -> list[tuple[str, str]]:
    """Pairs of a file's name and an id: those that a test is marked with, and those of the known answers."""
    named = [
        ("known_answers.toml", found) for answer in load_known_answers() for found in answer.requirements
    ]
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.requirement":
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        named.append((path.name, part.value))
    return named


def test_requirements_are_numbered_without_gaps() -> None:
    numbers: dict[str, list[int]] = {}
    for requirement in required_ids():
        group, number = requirement.split("-")
        numbers.setdefault(group, []).append(int(number))
    for group, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), group


def test_ids_that_are_named_exist() -> None:
    existing = set(required_ids())
    for case in CASES:
        assert set(case.requirements) <= existing, case.id
    for file, requirement in ids_in_tests():
        assert requirement in existing, file
    text = spec_path("SPEC.md").read_text(encoding="utf-8")
    for document in (text, spec_path("cases.toml").read_text(encoding="utf-8")):
        assert set(re.findall(r"\[([A-Z]+-\d+)\]", document)) <= existing


@pytest.mark.parametrize("requirement", required_ids())
def test_every_requirement_has_a_case_or_a_test(requirement: str) -> None:
    by_case = [case.id for case in CASES if requirement in case.requirements]
    by_test = [file for file, named in ids_in_tests() if named == requirement]
    assert by_case or by_test


@pytest.mark.requirement("KEY-4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_case_overflows_and_none_has_a_visible_infinity(dtype: str) -> None:
    """Every stage is in the range of its format; only what is hidden is infinite."""
    for case in CASES:
        if case.invalid is not None or dtype not in case.dtypes:
            continue
        expectation = expect(case, dtype, build_inputs(case, dtype))
        assert expectation is not None
        for stage, exact in expectation.stages.items():
            formats = arithmetic(dtype)
            of_stage = formats.accumulator if stage in ("logits", "lse") else formats.storage
            compared = exact[expectation.limits.limits[stage] != np.inf]
            hidden = np.isneginf(compared) & (stage in ("logits", "lse"))
            assert np.all(hidden | np.isnan(compared) | (np.abs(compared) <= of_stage.largest)), case.id
            if "nan" not in case.parameters:
                assert not np.any(np.isnan(compared)), case.id
