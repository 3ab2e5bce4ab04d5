"""The judge rejects every kind of wrong result, says where it is wrong, and accepts what must be accepted."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from iha_conformance.corpus import Case, build_inputs, load_cases
from iha_conformance.judge import Comparison, Expectation, compare, expect, judge
from iha_conformance.power.mutants import MUTANTS
from iha_conformance.power.port import Port
from iha_conformance.protocol import Result, Verdict
from iha_core.reference import STAGES

Array = npt.NDArray[Any]

EXACT = np.arange(1.0, 13.0).reshape(1, 2, 3, 2)
LIMIT = np.full_like(EXACT, 0.25)


def held(found: Any, *, stage: str = "output", storage: str = "float32", **changed: Array) -> Comparison:
    exact, limit = changed.get("exact", EXACT), changed.get("limit", LIMIT)
    return compare(stage, found, exact, limit, storage=storage)


# The comparator


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_values_within_their_limits_pass(share: float) -> None:
    found = held(EXACT + share * LIMIT)
    assert found.passed
    assert found.ratio == pytest.approx(share)
    assert found.reason is None


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("index", [(0, 0, 0, 0), (0, 1, 2, 1), (0, 1, 0, 1)])
def test_one_element_over_its_limit_fails_and_is_named(index: tuple[int, ...], sign: int) -> None:
    values = EXACT.copy()
    values[index] += sign * 1.01 * LIMIT[index]
    found = held(values)
    assert not found.passed
    assert found.ratio == pytest.approx(1.01)
    b, n, h, e = index
    assert found.reason is not None
    assert f"`output`[b={b}, n={n}, h={h}, e={e}]" in found.reason
    assert "1 of 12 elements" in found.reason


def test_the_worst_element_is_named_by_its_own_limit() -> None:
    limit = LIMIT.copy()
    limit[0, 0, 1, 0] = 0.001
    values = EXACT + 0.1
    values[0, 1, 1, 1] += 0.3
    reason = held(values, limit=limit).reason
    assert reason is not None
    assert "[b=0, n=0, h=1, e=0]" in reason
    assert "2 of 12 elements" in reason


@pytest.mark.requirement("DIM-1", "STG-1")
@pytest.mark.parametrize(
    "shape", [(2, 1, 3, 2), (1, 2, 3), (1, 2, 3, 2, 1), (1, 2, 2, 3), (12,), (), (0, 2, 3, 2), (1, 2, 3, 1)]
)
def test_wrong_shapes_fail(shape: tuple[int, ...]) -> None:
    """Also those that would broadcast or that have as many elements."""
    found = held(np.zeros(shape))
    assert (found.passed, found.ratio) == (False, None)
    assert found.reason is not None
    assert "(b, n, h, e) = (1, 2, 3, 2)" in found.reason


@pytest.mark.parametrize("found", [None, 1.0, EXACT.tolist(), "array"])
def test_what_is_no_array_fails(found: Any) -> None:
    assert not held(found).passed


@pytest.mark.requirement("TYP-1", "STG-2")
@pytest.mark.parametrize(
    ("storage", "accepted"),
    [
        ("float64", ["float64"]),
        ("float32", ["float32", "float64"]),
        ("float16", ["float16", "float32", "float64"]),
        ("bfloat16", ["bfloat16", "float32", "float64"]),
    ],
)
def test_the_storage_dtype_or_a_wider_one(storage: str, accepted: list[str]) -> None:
    """Float16 does not hold bfloat16's range nor bfloat16 float16's digits."""
    floats: list[Any] = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
    for dtype in [*floats, np.int32, np.int64, np.bool_, np.complex128, np.uint8, ml_dtypes.float8_e4m3fn]:
        found = held(EXACT.astype(dtype), storage=storage)
        assert found.passed == (np.dtype(dtype).name in accepted), dtype
        if not found.passed:
            assert found.reason is not None
            assert f"`output` dtype: expected {storage} or wider" in found.reason


@pytest.mark.requirement("NUM-2", "STG-2")
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_logits_and_lse_are_never_narrow(storage: str) -> None:
    for stage, shape in (("logits", (1, 2, 3, 2)), ("lse", (1, 2, 6))):
        exact, limit = EXACT.reshape(shape), LIMIT.reshape(shape)
        for dtype in (np.float16, ml_dtypes.bfloat16):
            found = held(exact.astype(dtype), stage=stage, storage=storage, exact=exact, limit=limit)
            assert not found.passed
        wide = exact.astype(np.float32)
        assert held(wide, stage=stage, storage=storage, exact=exact, limit=limit).passed


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_fails(bad: float) -> None:
    values = EXACT.copy()
    values[0, 1, 0, 1] = bad
    found = held(values)
    assert (found.passed, found.ratio) == (False, None)
    assert found.reason is not None
    assert "[b=0, n=1, h=0, e=1]" in found.reason


@pytest.mark.requirement("NUM-4")
@pytest.mark.parametrize("found", [0.0, 1.0, -1e300, np.inf, -np.inf])
def test_nan_must_be_nan(found: float) -> None:
    exact = EXACT.copy()
    exact[0, 0, 0, 0] = np.nan
    assert held(exact.copy(), exact=exact).passed
    values = exact.copy()
    values[0, 0, 0, 0] = found
    assert not held(values, exact=exact).passed


@pytest.mark.requirement("LOG-3", "NUM-4")
@pytest.mark.parametrize("hidden", [-1e30, -65504.0, np.inf, np.nan, 0.0, -3.4e38])
def test_hidden_logits_must_be_minus_infinity(hidden: float) -> None:
    exact = EXACT.copy()
    exact[0, 0, 0, 1] = -np.inf
    assert held(exact.copy(), stage="logits", exact=exact).passed
    values = exact.copy()
    values[0, 0, 0, 1] = hidden
    found = held(values, stage="logits", exact=exact)
    assert not found.passed
    assert found.reason is not None
    assert "`logits`[b=0, h=0, t=0, s=1]: expected -inf" in found.reason


def test_the_sign_of_zero_does_not_matter() -> None:
    exact = np.zeros((1, 2, 3, 2))
    found = held(-exact, exact=exact, limit=np.full_like(exact, 5e-324))
    assert found.passed
    assert found.ratio == 0.0


@pytest.mark.requirement("STG-2")
@pytest.mark.parametrize("anything", [0.0, 1e300, np.nan, np.inf])
def test_infinite_limits_compare_nothing(anything: float) -> None:
    limit = LIMIT.copy()
    limit[0, 0] = np.inf
    values = EXACT.copy()
    values[0, 0] = anything
    assert held(values, limit=limit).passed
    assert held(np.full_like(EXACT, anything), limit=np.full_like(LIMIT, np.inf)) == Comparison(True, 0.0)
    values[0, 1, 0, 0] += 1.0
    assert not held(values, limit=limit).passed


def test_errors_beyond_float64_fail() -> None:
    """The difference overflows although both numbers are finite."""
    huge = np.full_like(EXACT, 1.7e308)
    found = held(-huge, exact=huge)
    assert (found.passed, found.ratio) == (False, None)


def test_empty_arrays_have_nothing_wrong() -> None:
    empty = np.zeros((0, 2, 3, 2))
    assert held(empty, exact=empty, limit=empty) == Comparison(True, 0.0)
    assert not held(np.zeros((0, 2, 3, 1)), exact=empty, limit=empty).passed


# Verdicts on values


@cache
def case_of(case_id: str) -> Case:
    return next(case for case in load_cases() if case.id == case_id)


@cache
def expectation_of(case_id: str, dtype: str) -> Expectation:
    case = case_of(case_id)
    expectation = expect(case, dtype, build_inputs(case, dtype))
    assert expectation is not None
    return expectation


def verdict(case_id: str, arrays: dict[str, Any], dtype: str = "float32", **fields: Any) -> Verdict:
    result = Result(case_id=case_id, dtype=dtype, kind="arrays", arrays=arrays, **fields)
    return judge(case_of(case_id), dtype, expectation_of(case_id, dtype), result)


def right(case_id: str, dtype: str = "float32") -> dict[str, Array]:
    return {name: array.copy() for name, array in expectation_of(case_id, dtype).stages.items()}


@pytest.mark.requirement("STG-1")
def test_the_reference_passes_with_any_stages() -> None:
    arrays = right("core/paper")
    assert verdict("core/paper", arrays) == Verdict(status="passed", ratio=0.0)
    for stage in STAGES:
        assert verdict("core/paper", {stage: arrays[stage], "output": arrays["output"]}).status == "passed"


@pytest.mark.requirement("STG-1")
@pytest.mark.parametrize("stage", STAGES)
def test_the_first_wrong_stage_is_named(stage: str) -> None:
    """However wrong later ones are, and in whatever order they are given."""
    arrays = right("core/paper")
    for i, later in enumerate(STAGES[STAGES.index(stage) :]):
        arrays[later] = np.where(np.isfinite(arrays[later]), arrays[later] + 10.0**i, arrays[later])
    found = verdict("core/paper", dict(reversed(arrays.items())))
    assert (found.status, found.stage) == ("failed", stage)
    assert found.reason is not None
    assert found.reason.startswith(f"`{stage}`[")


def test_the_ratio_is_the_worst_of_all_stages() -> None:
    arrays = right("core/paper")
    limits = expectation_of("core/paper", "float32").limits.limits
    arrays["mixed_q"][0, 3, 1, 2] += 1.5 * limits["mixed_q"][0, 3, 1, 2]
    arrays["virtual_out"][1, 2, 0, 1] -= 7.0 * limits["virtual_out"][1, 2, 0, 1]
    found = verdict("core/paper", arrays)
    assert found.stage == "mixed_q"
    assert found.ratio == pytest.approx(7.0)
    arrays["output"][0, 0, 0, 0] = np.nan
    assert verdict("core/paper", arrays).ratio is None


def test_stages_that_do_not_exist_fail() -> None:
    for name in ("weights", "mixed_Q", ""):
        found = verdict("core/paper", {**right("core/paper"), name: np.zeros(1)})
        assert found.status == "failed"
        assert found.reason is not None
        assert "unknown stage" in found.reason


@pytest.mark.requirement("LIN-1")
def test_lse_without_normalisation_is_not_compared() -> None:
    arrays = {**right("core/linear"), "lse": np.zeros(1)}
    assert verdict("core/linear", arrays).status == "passed"


def test_a_result_without_output_fails() -> None:
    arrays = right("core/paper")
    del arrays["output"]
    for given in (arrays, {}):
        found = verdict("core/paper", given)
        assert (found.status, found.stage) == ("failed", "output")


@pytest.mark.requirement("STG-2", "KEY-3")
def test_stages_of_dropped_keys_may_hold_anything() -> None:
    arrays = right("keymask/nan")
    dropped = np.repeat(~build_inputs(case_of("keymask/nan"), "float32")["key_mask"], 2, axis=1)
    for stage in ("mixed_k", "mixed_v", "rotated_k"):
        arrays[stage][dropped] = np.nan
    assert verdict("keymask/nan", arrays).status == "passed"
    arrays["mixed_v"][~dropped] = np.nan
    assert verdict("keymask/nan", arrays).stage == "mixed_v"


@pytest.mark.requirement("NUM-7")
def test_runs_that_differ_in_bits_are_reported() -> None:
    found = verdict("core/paper", right("core/paper"), repeatable=False)
    assert found.status == "passed"
    assert found.reason is not None
    assert "bits" in found.reason
    assert verdict("core/paper", right("core/paper"), repeatable=True).reason is None


@pytest.mark.parametrize("failure", ["raised", "crashed", "hung", "wrong shape", "missing"])
def test_failures_fail(failure: Any) -> None:
    result = Result(case_id="core/paper", dtype="float32", kind="failed", failure=failure, reason="because")
    found = judge(case_of("core/paper"), "float32", expectation_of("core/paper", "float32"), result)
    assert (found.status, found.reason) == ("failed", f"{failure}: because")


@pytest.mark.requirement("ERR-2")
@pytest.mark.parametrize("case_id", ["core/paper", "invalid/q-rank"])
@pytest.mark.parametrize("kind", ["refused", "not_applicable"])
def test_what_is_refused_has_neither_passed_nor_failed(case_id: str, kind: Any) -> None:
    result = Result(case_id=case_id, dtype="float32", kind=kind, reason="no bfloat16 here")
    assert judge(case_of(case_id), "float32", None, result) == Verdict(status=kind, reason="no bfloat16 here")


# Companions


def gain_of_one_head(dtype: str) -> tuple[Array, Expectation]:
    """An honest output of the case `gain`, one head of which is 0.5% too large."""
    case = case_of("gain/two-keys")
    output = Port("once")(build_inputs(case, dtype), case.config).astype(np.float64)
    output[:, :, 1] *= 1.005
    return output, expectation_of(case.id, dtype)


@pytest.mark.requirement("NUM-6")
def test_companions_see_a_gain_that_no_element_shows() -> None:
    """Half a percent is 0.6 of an ulp in bfloat16; 3000 elements together show it."""
    output, expectation = gain_of_one_head("bfloat16")
    limits = expectation.limits
    alone = compare("output", output, limits.stages["output"], limits.limits["output"], storage="bfloat16")
    assert alone.passed
    found = verdict("gain/two-keys", {"output": output}, "bfloat16")
    assert (found.status, found.stage) == ("failed", "output")
    assert found.reason is not None
    assert "gain of the error" in found.reason
    without = Expectation(dataclasses.replace(limits, companions=()))
    result = Result(case_id="gain/two-keys", dtype="bfloat16", kind="arrays", arrays={"output": output})
    assert judge(case_of("gain/two-keys"), "bfloat16", without, result).status == "passed"


@pytest.mark.requirement("NUM-6")
@pytest.mark.parametrize("kind", ["rms", "mean", "gain", "total mean", "total gain"])
def test_every_companion_judges(kind: str) -> None:
    """An error made to reach 1.01 times one companion's limit fails; 0.99 times passes."""
    case_id, dtype = "core/long", "bfloat16"
    expectation = expectation_of(case_id, dtype)
    companion = next(c for c in expectation.limits.companions if c.kind == kind)
    exact = expectation.limits.stages["output"]
    of_all = companion.limit.ndim == 0
    touched = (Ellipsis,) if of_all else (slice(None), slice(None), 1)
    error = np.zeros_like(exact)
    shape = expectation.limits.limits["output"] if companion.weights is None else companion.weights
    error[touched] = shape[touched]
    limit = companion.limit if of_all else companion.limit[0, 1]
    error *= limit / companion.measure(error).max()
    alone = Expectation(dataclasses.replace(expectation.limits, companions=(companion,)))
    for share, status in ((0.99, "passed"), (1.01, "failed")):
        output = exact + share * error
        result = Result(case_id=case_id, dtype=dtype, kind="arrays", arrays={"output": output})
        found = judge(case_of(case_id), dtype, alone, result)
        assert found.status == status
        assert found.ratio is not None
        if status == "failed":
            assert found.reason is not None
            assert f"`output` {kind} of the error" in found.reason
            assert ("[b=0, h=1]" in found.reason) == (not of_all)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("alpha_k [target, source, pseudo]", "mixed_k"),
        ("opposite rotation", "rotated_q"),
        ("queries and keys rotated apart", "rotated_k"),
        ("scale of d + 1", "logits"),
        ("denominator + 0.001", "virtual_out"),
        ("lse to base 2", "lse"),
        ("collapse [source, out, pseudo]", "output"),
    ],
)
def test_a_fault_is_caught_where_it_starts(name: str, stage: str) -> None:
    """The stages of a mutant: the judge names the first that the fault touches."""
    case, mutant = case_of("core/paper"), MUTANTS[name]
    port = Port("once", stages=True, replace={mutant.step: mutant.function})
    arrays = port(build_inputs(case, "float32"), case.config)
    assert verdict(case.id, arrays).stage == stage


# Refusals of bad input


def refusal(case_id: str, reason: str | None, *types: str, failure: Any = "raised") -> Verdict:
    result = Result(
        case_id=case_id,
        dtype="float32",
        kind="failed",
        failure=failure,
        reason=reason,
        error_types=types,
    )
    return judge(case_of(case_id), "float32", None, result)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    "message",
    [
        "`alpha_k` shape: expected (G=2, H=4, P=3), got (4, 4, 3)",
        "alpha_k: wrong shape",
        "bad shape of 'alpha_k'",
        "alpha_k",
        "ShapeError: (alpha_k)",
    ],
)
def test_the_right_refusal_passes(message: str) -> None:
    found = refusal("invalid/alpha-k-source", message, "ShapeError", "IHAError", "ValueError", "Exception")
    assert found == Verdict(status="passed")


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("message", "types", "failure"),
    [
        ("`alpha_k` shape", ("TypeError", "Exception"), "raised"),
        ("`alpha_k` shape", (), "raised"),
        ("`alpha_k` shape", ("ValueError",), "crashed"),
        ("`alpha_k` shape", ("ValueError",), "hung"),
        ("`alpha_q` shape", ("ValueError",), "raised"),
        ("shapes do not match", ("ValueError",), "raised"),
        ("alpha_k_grouped is wrong", ("ValueError",), "raised"),
        ("my_alpha_k is wrong", ("ValueError",), "raised"),
        ("alpha_k2 is wrong", ("ValueError",), "raised"),
        ("alpha is wrong", ("ValueError",), "raised"),
        ("", ("ValueError",), "raised"),
        (None, ("ValueError",), "raised"),
    ],
)
def test_other_refusals_fail(message: str | None, types: tuple[str, ...], failure: Any) -> None:
    """The wrong class, the wrong argument, a longer name that contains the argument's, or a crash."""
    found = refusal("invalid/alpha-k-source", message, *types, failure=failure)
    assert found.status == "failed"
    assert found.reason is not None
    assert "expected a ValueError that names `alpha_k`" in found.reason


@pytest.mark.requirement("ERR-1")
def test_a_single_letter_is_named_by_itself() -> None:
    assert refusal("invalid/q-rank", "`q` shape", "ValueError").status == "passed"
    assert refusal("invalid/q-rank", "alpha_q shape, unequal", "ValueError").status == "failed"


@pytest.mark.requirement("ERR-1")
def test_bad_input_that_is_accepted_fails() -> None:
    result = Result(case_id="invalid/q-rank", dtype="float32", kind="arrays", arrays={"output": np.zeros(1)})
    found = judge(case_of("invalid/q-rank"), "float32", None, result)
    assert found.status == "failed"
    assert found.reason is not None
    assert "accepted" in found.reason
