"""Precision classes: their limits hold honest matrix units and still show faults; `highest` is untouched.

SPEC.md 6.5. Ports multiply in a class, and adversaries push every operand as far as its class lets it be
rounded.
"""

from __future__ import annotations

import functools
import json
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from test_bounds import one_hot, stored
from test_cli import CASE, HERE, ONE, iha
from test_power import CASES
from test_reference import Case as Call
from test_reference import normal_tensors

from iha_conformance import cli
from iha_conformance.command import plan_targets
from iha_conformance.judge import expect
from iha_conformance.power.honest import HONEST, RotatedBeforeMixing
from iha_conformance.power.measure import Problem, excess, mutant_ratio, stages
from iha_conformance.power.measure import verdict as verdict_on
from iha_conformance.power.mutants import MUTANTS
from iha_conformance.power.outcome import CAUGHT, HALF
from iha_conformance.power.port import Port
from iha_conformance.power.steps import ROUNDINGS, Rounding, to_bits
from iha_conformance.protocol import DTYPES, Verdict
from iha_core import AttentionConfig
from iha_core.bounds import HIGHEST, Limits, arithmetic, derive_limits, limits, precision_classes
from iha_core.bounds.worst import operand
from iha_core.errors import ArgumentValueError

Array = npt.NDArray[Any]

ROUNDED = ("tf32", "bf16x3", "bf16x1")
BITS = {"tf32": 11, "bf16x3": 8, "bf16x1": 8}
C = {"tf32": 2.0**-11, "bf16x3": 3 * 2.0**-17, "bf16x1": 2.0**-8}
NARROW = ("float32", "float16", "bfloat16")
"""Dtypes that classes concern."""

CLEARLY = 4.0
"""A mutant that a case shows so clearly is not tried on others."""

SURVIVORS: dict[tuple[str, str], set[str]] = {
    # It is what the class does, or finer than that.
    ("tf32", "float32"): {"operands rounded to 11 bits"},
    ("bf16x1", "float32"): {"operands rounded to 11 bits"},
    # 21 c at two of eight roundings, none of them at its worst: the limit is twice the worst of all eight.
    # No case has logits of one lane with operands of more than eleven bits.
    ("bf16x3", "float32"): {"operands rounded to 11 bits"},
    # 1 + 2**-12 against -1 is what shows it, and that number is one that every class rounds.
    **{(name, dtype): {"parameters rounded to storage"} for name in ROUNDED for dtype in NARROW[1:]},
}
"""Mutants that no output of the corpus shows in a class, by class and dtype."""

# A logit x below the maximum is off by 2**-8 of x at most, and its weight by x*e**-x of that, no more than
# 2**-8/e. As an operand of the weighted sum a weight may be off by c, and the limit is twice that: 2**-10.
for _name in ("tf32", "bf16x1"):
    SURVIVORS[_name, "float32"].add("logits less their maximum stored in 16 bits")
# Operands of products: bf16x1 rounds them like that. To tf32 it is eight times the rounding of one operand; a
# limit is twice that of two operands in each of four products.
for _name in ("tf32", "bf16x1"):
    SURVIVORS[_name, "float32"] |= {
        "weights stored in 16 bits",
        "mixed values stored in 16 bits",
        "rotated queries and keys stored in 16 bits",
    }
SURVIVORS["bf16x1", "float32"].add("virtual outputs stored in 16 bits")  # the fourth; tf32 shows it
# It exists where e differs from d under RoPE, in cases whose logits are sums of terms of both signs. In
# bf16x1 and float32, half of the limits are over a quarter of the logit, and over the output itself.
for _dtype in NARROW:
    SURVIVORS["bf16x1", _dtype].add("exponent of the value's width")
# A bias of half a unit in the last place, 2**-12: what a class may add to an element counts in full in the
# limits of mean and gain, and is as much for numbers of more bits than bfloat16 has.
for _name in ("bf16x3", "bf16x1"):
    SURVIVORS[_name, "float16"].add("virtual outputs truncated, not rounded")
# Logits smaller by a fifth or a seventh, where d is 5 or 6: in those cases a limit is as a rule as large as
# its output for 6, and half as large for 5. (In bfloat16 a case shows it.)
for _dtype in ("float32", "float16"):
    SURVIVORS["bf16x1", _dtype].add("scale of the padded width")


@functools.cache
def problem(case_id: str, dtype: str, precision: str) -> Problem:
    return Problem.of(CASES[case_id], dtype, precision)


def limits_in(case_id: str, dtype: str, precision: str) -> Limits:
    return problem(case_id, dtype, precision).expectation.limits


def verdict(port: Port, case_id: str, dtype: str, precision: str) -> Verdict:
    return verdict_on(stages(port, problem(case_id, dtype, precision)), problem(case_id, dtype, precision))


def assert_half(port: Port, dtype: str, precision: str, *, quick: bool = False) -> None:
    """Hold a port to all cases of a dtype, or the quick ones: no ratio is over one half."""
    for case in CASES.values():
        if dtype in case.dtypes and ("quick" in case.flags or not quick):
            found = verdict(port, case.id, dtype, precision)
            assert found.status == "passed", (case.id, found)
            assert excess(found) <= HALF, (case.id, found)


# The classes


@pytest.mark.requirement("NUM-8")
def test_classes_and_their_formats() -> None:
    assert precision_classes() == ("highest", *ROUNDED)
    assert arithmetic("float32") == arithmetic("float32", "highest")
    for dtype in DTYPES:
        assert arithmetic(dtype).operands is None
        assert arithmetic("float64", "tf32").operands is None
    for name in ROUNDED:
        rule = arithmetic("float32", name).operands
        assert rule is not None
        assert (rule.c, rule.format.bits, rule.parts) == (C[name], BITS[name], 2 if name == "bf16x3" else 1)
        assert rule.format.eta == arithmetic("float32").storage.eta
        held = [dtype for dtype in DTYPES if rule.hold(arithmetic(dtype).storage)]
        assert held == (["float16", "bfloat16"] if name == "tf32" else ["bfloat16"])
        for dtype in held:
            every = np.arange(2**16, dtype=np.uint16).view(
                np.float16 if dtype == "float16" else ml_dtypes.bfloat16
            )
            with np.errstate(invalid="ignore"):
                numbers = every.astype(np.float64)
            numbers = numbers[np.isfinite(numbers)]
            kept = arithmetic(dtype).storage.represents(numbers)  # subnormals of bfloat16 may be flushed
            assert rule.format.represents(numbers[kept]).all()


@pytest.mark.requirement("NUM-8")
def test_the_roundoff_of_three_products_covers_what_they_leave_out() -> None:
    """lo lo, and the rests of both operands; or the rest of one, beside a bfloat16 number."""
    c, unit = Fraction(C["bf16x3"]), Fraction(1, 2**16)
    assert unit + 2 * unit + unit**2 <= 2 * c + c**2
    assert unit <= c


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("name", ROUNDED)
def test_no_product_is_further_off_than_its_class_allows(name: str) -> None:
    """Numbers of few and of many bits, those around ties of both roundings among them."""
    rng = np.random.default_rng(1)
    bits = rng.integers(1, 24, 40_000)
    x = np.ldexp(rng.integers(2**23, 2**24, bits.size).astype(np.float64), -23)
    # Near 1 + 2**-8, a tie of hi, half-way between two values of lo: the worst of bf16x3.
    x = np.concatenate([nearest_each(x, bits), 1 + 2.0**-8 + 2.0**-17 * rng.integers(-6, 7, 20_000)])
    y = rng.permutation(x)
    port = Port(precision=name)
    port.dtype = "float32"
    error = np.abs(port.multiply(lambda x, y: x * y, x, y) - x * y)
    c_x, c_y = (np.where(to_bits(z, BITS[name]) == z, 0.0, C[name]) for z in (x, y))
    allowed = c_x + c_y + c_x * c_y
    assert np.all(error <= allowed * np.abs(x * y) * (1 + 2.0**-40))
    both = (c_x > 0) & (c_y > 0)
    reached = np.max(error[both] / (allowed * x * y)[both])
    # Two thirds for lo rounded to nearest, which is here off by 2**-17 of x; cut off it may be by 2**-16.
    assert reached > (0.64 if name == "bf16x3" else 0.9), "nothing comes near the bound"
    assert np.count_nonzero(allowed == 0) > 100


def nearest_each(x: Array, bits: Array) -> Array:
    return np.concatenate([to_bits(x[bits == b], b) for b in range(1, 24)])


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ROUNDED)
def test_an_operand_by_hand(name: str, dtype: str) -> None:
    """1/3, half of whose error is its rounding to storage; and 1, as it is but for small errors."""
    rules, x, st = arithmetic(dtype, name), np.array([1 / 3]), np.array([2.0**-20])
    eta = 2.0**-126
    found = operand(x, rules, error=2 * st, exact=np.array([True]), stored=st)
    if dtype == "bfloat16" or (dtype, name) == ("float16", "tf32"):  # either stored or rounded
        expected = 2 * st + np.maximum(0.0, C[name] * (x + st) + eta - st)
    else:
        expected = 2 * st + C[name] * (x + 2 * st) + eta
    np.testing.assert_array_equal(found.error, expected)
    assert found.grid == operand(x, rules, exact=np.array([False])).grid
    assert found.parts == (2 if name == "bf16x3" else 1)

    near, off = 2.0**-26, 2.0**-25  # an ulp of float32 at 1 is 2**-23
    one = np.array([1.0])
    assert operand(one, rules, error=np.array([near])).error == near
    assert operand(one, rules, error=np.array([off])).error > C[name]
    assert operand(one, rules).parts == 1
    assert operand(one, rules).grid == 0


@pytest.mark.requirement("NUM-8")
def test_split_operands_have_more_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both factors in two parts: four times the terms in every sum."""
    chains = []
    plain = limits.propagate

    def noting(*arguments: Any, **options: Any) -> Any:
        chains.append(plain(*arguments, **options))
        return chains[-1]

    monkeypatch.setattr(limits, "propagate", noting)
    case = stored(Call(normal_tensors(np.random.default_rng(1), N=3), AttentionConfig()), "float32")
    for name in ("highest", "tf32", "bf16x3"):
        derive_limits(**case.arguments(), storage="float32", precision=name)
    highest, tf32, bf16x3 = chains
    for stage in ("v", "logits", "virtual_out", "output"):
        terms = getattr(highest, stage).terms
        np.testing.assert_array_equal(getattr(tf32, stage).terms, terms)
        np.testing.assert_array_equal(getattr(bf16x3, stage).terms, 4 * terms)


@pytest.mark.requirement("NUM-8", "ERR-1")
@pytest.mark.parametrize("name", ["tf31", "", "TF32", "high"])
def test_an_unknown_class_is_named_with_the_choices(name: str) -> None:
    case = one_hot("float32")
    with pytest.raises(
        ArgumentValueError, match="`precision`: expected one of highest, tf32, bf16x3, bf16x1"
    ):
        derive_limits(**case.arguments(), storage="float32", precision=name)
    with pytest.raises(ArgumentValueError, match=f"got '{name}'"):
        derive_limits(**case.arguments(), storage="float64", precision=name)


# Limits of the classes among each other


def assert_ordered(narrow: Limits, wide: Limits, *, equal: bool = False) -> None:
    def below(ours: Array, theirs: Array) -> None:
        if equal:
            np.testing.assert_array_equal(ours, theirs)
        assert not np.any(ours > theirs * (1 + 1e-12))  # NaN where a visible value is

    for stage in narrow.limits:
        below(narrow.limits[stage], wide.limits[stage])
    below(narrow.worst, wide.worst)
    assert np.all(narrow.exact | ~wide.exact)
    assert [c.kind for c in narrow.companions] == [c.kind for c in wide.companions]
    for ours, theirs in zip(narrow.companions, wide.companions, strict=True):
        below(ours.limit, theirs.limit)


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_highest_is_the_default_to_the_last_bit(dtype: str) -> None:
    for case in CASES.values():
        if dtype in case.dtypes and "quick" in case.flags:
            default = expect(case, dtype, problem(case.id, dtype, HIGHEST).inputs)
            assert default is not None
            assert_ordered(default.limits, limits_in(case.id, dtype, HIGHEST), equal=True)
    case = CASES["core/paper"]
    inputs = problem(case.id, dtype, HIGHEST).inputs
    unsaid = derive_limits(**inputs, config=case.attention_config, storage=dtype, random=True)
    assert_ordered(unsaid, limits_in(case.id, dtype, HIGHEST), equal=True)


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("dtype", NARROW)
def test_lower_classes_only_widen_limits(dtype: str) -> None:
    """Of tf32 and bf16x3 neither is above the other: numbers of eleven bits are numbers of tf32 alone.

    Beside storage in bfloat16 all that is left of bf16x3 is that its sums have more terms.
    """
    wider = dict.fromkeys(ROUNDED, 0)
    for case in CASES.values():
        if dtype not in case.dtypes:
            continue
        highest, *rounded = (limits_in(case.id, dtype, name) for name in precision_classes())
        for name, found in zip(ROUNDED, rounded, strict=True):
            assert_ordered(highest, found)
            wider[name] += bool(np.any(found.limits["output"] > highest.limits["output"]))
        tf32, bf16x3, bf16x1 = rounded
        assert_ordered(tf32, bf16x1)
        if dtype != "bfloat16":
            assert_ordered(bf16x3, bf16x1)
    assert all(count > 10 for count in wider.values()), wider


@pytest.mark.requirement("NUM-8")
def test_classes_do_not_concern_float64() -> None:
    for case in CASES.values():
        if "float64" in case.dtypes and "quick" in case.flags:
            for name in ROUNDED:
                highest, found = (limits_in(case.id, "float64", chosen) for chosen in (HIGHEST, name))
                assert_ordered(highest, found, equal=True)


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("name", ROUNDED)
def test_what_has_been_stored_is_not_rounded_again(name: str) -> None:
    """Numbers of bfloat16 are numbers of every class, so the larger rounding counts, and that is storage's.

    What is left is c times incoming errors, and all that a rotation before the mixing would add.
    """
    checked = 0
    for case in CASES.values():
        if case.config["rope"] == "none" and "bfloat16" in case.dtypes and "random" in case.flags:
            inputs = problem(case.id, "bfloat16", HIGHEST).inputs
            if inputs["alpha_q"].dtype == inputs["q"].dtype:
                highest, found = (limits_in(case.id, "bfloat16", chosen) for chosen in (HIGHEST, name))
                assert found.worst.sum() <= highest.worst.sum() * (1 + 4 * C["bf16x1"]), case.id
                checked += 1
    assert checked > 5


# Exact cases


@pytest.mark.requirement("NUM-5", "NUM-8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDED)
def test_exact_cases_stay_exact_where_the_format_has_all_operands(name: str, dtype: str) -> None:
    for tied in (1, 2, 4):
        case = one_hot(dtype, tied=tied)
        highest, found = (
            derive_limits(**case.arguments(), storage=dtype, precision=chosen) for chosen in (HIGHEST, name)
        )
        assert found.exact.all()
        for stage, limit in highest.limits.items():
            np.testing.assert_array_equal(found.limits[stage], limit)


@pytest.mark.requirement("NUM-5", "NUM-8")
@pytest.mark.parametrize(
    ("value", "classes"),
    [
        (255.0, {"highest", "tf32", "bf16x3", "bf16x1"}),
        (257.0, {"highest", "tf32"}),
        (2047.0, {"highest", "tf32"}),
        (2049.0, {"highest"}),
        (2.0**15 + 1, {"highest"}),  # hi + lo of bf16x3, without lo lo
    ],
)
@pytest.mark.parametrize("tensor", ["v", "alpha_v", "collapse"])
def test_one_operand_that_is_rounded_is_not_exact(tensor: str, value: float, classes: set[str]) -> None:
    case = one_hot("float32")
    small = {"v": np.full_like(case.tensors["v"], 4.0)} if tensor != "v" else {}
    changed = case.replace(**small, **{tensor: np.full_like(case.tensors[tensor], value)})
    for name in precision_classes():
        found = derive_limits(**changed.arguments(), storage="float32", precision=name)
        assert bool(found.exact.all()) == (name in classes), name


@pytest.mark.requirement("NUM-5", "NUM-8")
def test_exact_cases_of_the_corpus_stay_sharp_in_tf32() -> None:
    """Those without a rotation whose exact stages are all numbers of eleven bits."""
    kept = 0
    for case in CASES.values():
        if "exact" not in case.flags or "float32" not in case.dtypes or case.config["rope"] != "none":
            continue
        highest, found = (limits_in(case.id, "float32", chosen) for chosen in (HIGHEST, "tf32"))
        arguments = problem(case.id, "float32", HIGHEST).inputs.values()
        inputs = [x for x in arguments if getattr(x, "dtype", None) == np.float32]
        operands = [highest.stages[stage] for stage in ("mixed_q", "mixed_k", "mixed_v", "virtual_out")]
        if all(np.all((to_bits(x, 11) == x) | ~np.isfinite(x)) for x in (*inputs, *operands)):
            np.testing.assert_array_equal(found.exact, highest.exact, err_msg=case.id)
            kept += bool(highest.exact.all())
    assert kept > 20


# Honest ports

MAKERS = tuple(dict.fromkeys(make for make, _ in HONEST.values()))


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("make", MAKERS)
def test_honest_ports_of_a_class_stay_at_half_of_its_limits(
    make: type[Port], precision: str, rounding: Rounding
) -> None:
    """Operands of every product rounded, in float32; and results of a class are none of `highest`.

    The quick cases are enough for the rounding that the port is not listed with.
    """
    port = make(rounding, stages=True, precision=precision)
    assert_half(port, "float32", precision, quick=(make, rounding) not in HONEST.values())
    assert verdict(port, "core/paper", "float32", HIGHEST).status == "failed"


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [Port, RotatedBeforeMixing])
def test_honest_ports_with_16_bits_in_a_class(
    make: type[Port], dtype: str, precision: str, rounding: Rounding
) -> None:
    """Stages are stored in 16 bits, or stay wide and are rounded as operands alone."""
    assert_half(make(rounding, stages=True, precision=precision), dtype, precision)


class Pushed(Port):
    """Operands off by all that the class allows them, where it rounds: alike everywhere, or at random."""

    def __init__(self, *args: Any, signs: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signs = signs
        self.rng = np.random.default_rng(3)

    def multiply(self, product: Any, x: Array, y: Array) -> Array:
        return np.asarray(product(self.pushed(x), self.pushed(y)))

    def pushed(self, x: Array) -> Array:
        signs = self.rng.choice([-1.0, 1.0], x.shape) if self.signs is None else self.signs
        rounds = to_bits(x, BITS[self.precision]) != x
        return np.where(rounds, x * (1 + C[self.precision] * signs), x)


@pytest.mark.requirement("NUM-6", "NUM-8")
@pytest.mark.parametrize("signs", [-1.0, 1.0, None])
@pytest.mark.parametrize("precision", ROUNDED)
def test_operands_may_be_off_by_all_that_they_are_allowed(precision: str, signs: float | None) -> None:
    """Means and gains of random data too: nothing says that roundings of operands are independent."""
    worst = 0.0
    for case in CASES.values():
        if "float32" in case.dtypes:
            found = verdict(
                Pushed("once", stages=True, precision=precision, signs=signs), case.id, "float32", precision
            )
            # What is left out is of second order: products of an operand's rounding with what it moves.
            assert excess(found) <= HALF * (1 + 4 * C[precision]), (case.id, found)
            worst = max(worst, excess(found))
    assert worst > 0.45, "a limit that nothing approaches judges nothing"


# Faults


@pytest.mark.requirement("NUM-4", "NUM-8")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("precision", ROUNDED)
def test_mutants_are_caught_in_every_class(precision: str, dtype: str) -> None:
    """All of them reach twice a limit in a case, but for those that are named with a reason."""
    order = [problem(case.id, dtype, precision) for case in CASES.values() if dtype in case.dtypes]
    survivors = set()
    forward = {name: mutant for name, mutant in MUTANTS.items() if mutant.operation == "attention"}
    for name, mutant in forward.items():
        for rounding in ROUNDINGS if dtype == "float32" else ("stages",):
            most = 0.0
            for i, tried in enumerate(order if dtype in mutant.dtypes else ()):
                most = max(most, mutant_ratio(mutant, rounding, tried))
                if most > CLEARLY:
                    order.insert(0, order.pop(i))  # it may show the next one as well
                    break
            if dtype in mutant.dtypes and most < CAUGHT:
                survivors.add(name)
    assert survivors == SURVIVORS[precision, dtype]


@pytest.mark.requirement("ROPE-5", "NUM-8")
@pytest.mark.parametrize("precision", ROUNDED)
def test_angles_of_a_matrix_unit_are_a_fault(precision: str) -> None:
    """Positions and frequencies multiplied with their operands rounded."""

    def turned(port: Port, *arguments: Any) -> Any:
        found = port.angles(*arguments)
        if found is None:
            return None
        frequencies = np.array(port.config.rope_frequencies(port.dims.d))
        return to_bits(found[..., :1], BITS[precision]) * to_bits(frequencies, BITS[precision])

    most = max(
        excess(verdict(Port("once", replace={"angles": turned}), case.id, "float32", precision))
        for case in CASES.values()
        if case.family == "extreme" and "float32" in case.dtypes
    )
    assert most >= CAUGHT


# The command


def report_of(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    report = tmp_path / "report.json"
    process = iha("run", *arguments, "--json", str(report), cwd=tmp_path)
    return process, json.loads(report.read_text())


@pytest.mark.requirement("NUM-8")
def test_a_callable_is_judged_by_the_class_that_is_declared_for_it(tmp_path: Path) -> None:
    (tmp_path / "unit.py").write_text(
        "from iha_conformance.power.port import Port\n"
        "multiply = Port('once', stages=True, precision='tf32')\n"
    )
    some = ["--target", "unit:multiply", "--family", "core", "--dtype", "float32"]
    process, document = report_of(tmp_path, *some, "--precision", "tf32")
    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    assert document["targets"][0]["target"]["precision"] == "tf32"
    assert document["filters"]["family"] == ["core"]
    assert "precision tf32" in process.stdout
    assert "limits: those of precision class tf32, no narrower than those of highest" in process.stdout
    assert "(filtered: --dtype float32 --family core)" in process.stdout

    process, document = report_of(tmp_path, *some)
    assert process.returncode == 1
    assert document["targets"][0]["target"]["precision"] == "undeclared"
    assert "limits: " not in process.stdout
    process, document = report_of(tmp_path, *some, "--precision", "highest")
    assert process.returncode == 1
    assert document["targets"][0]["target"]["precision"] == "highest"
    assert "limits: " not in process.stdout


@pytest.mark.requirement("NUM-8")
@pytest.mark.parametrize("name", precision_classes())
def test_the_class_of_a_backend_is_set(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process, document = report_of(tmp_path, "--backend", "torch", *ONE, "--precision", name)
    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    assert document["targets"][0]["target"]["precision"] == name
    assert ("limits: " in process.stdout) == (name != "highest")


@pytest.mark.requirement("NUM-8")
def test_the_class_is_no_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import iha_conformance.command as command

    load = command.load_cases
    monkeypatch.setattr(command, "load_cases", lambda: tuple(load()[:2]))
    monkeypatch.chdir(HERE)
    report = tmp_path / "report.json"
    arguments = ["--target", "fake_targets:honest", "--precision", "bf16x1", "--json", str(report)]
    assert cli.main(["run", *arguments]) == 0
    assert json.loads(report.read_text())["filters"] is None
    assert "filtered" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["tf31", "", "high"])
def test_an_unknown_class_is_an_error_of_usage(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--precision", name, "--case", CASE]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("iha: error: --precision: expected one of highest, tf32, bf16x3, bf16x1, got ")
    assert len(err.splitlines()) == 1


def test_every_launch_has_the_class() -> None:
    plan = plan_targets(["array-api:numpy"], ["m:f"], None, "bf16x3")
    assert [launch.precision for launch in plan.launches] == ["bf16x3", "bf16x3"]
    assert [launch.precision for launch in plan_targets([], ["m:f"], None).launches] == [None]


@pytest.mark.requirement("NUM-8")
def test_pytorch_is_set_to_a_class_or_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `high` may be tf32, which is no bf16x3."""
    torch = pytest.importorskip("torch")
    from iha_conformance.targets.bridges import TorchBridge

    words: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", words.append)
    for name in precision_classes():
        assert TorchBridge(torch, None, name).precision == name
    assert words == ["highest", "high", "highest", "medium"]
