"""Cases of gradients from end to end: targets with and without `vjp`, verdicts, commands, files, mutants."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_cli import iha
from test_power import requirements

from iha_conformance import cli
from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.judge import Expectation, expect, judge
from iha_conformance.judge.verdict import GRADIENT_OF
from iha_conformance.power.backward import BACKWARD_STEPS, BackwardPort
from iha_conformance.power.backward_honest import BACKWARD_HONEST
from iha_conformance.power.measure import Problem, corpus, mutant_ratio, ratio
from iha_conformance.power.mutants import MUTANTS, Mutant
from iha_conformance.power.outcome import CAUGHT, HALF
from iha_conformance.power.port import Port
from iha_conformance.power.steps import ROUNDINGS
from iha_conformance.protocol import DTYPES, Job, Result, TargetUnavailable, Verdict
from iha_conformance.runner import make_job
from iha_conformance.targets.callables import CallableAdapter, load
from iha_conformance.targets.messages import OutputMissingError
from iha_conformance.targets.worker import run_job
from iha_core import GRADIENTS, AttentionConfig, attention, attention_vjp
from iha_core.validation import dtype_name

Array = npt.NDArray[Any]

CASES = {case.id: case for case in corpus("gradient")}
PAPER = "gradient/paper"
PARAMETERS = ("alpha_q", "alpha_k", "alpha_v", "collapse")


# Targets


class Target:
    """A callable with gradients, and what is done to them."""

    capabilities: Any = frozenset({"gradient"})

    def __init__(self, change: Callable[[dict[str, Array]], Any] = lambda found: found) -> None:
        self.change = change

    def __call__(self, inputs: dict[str, Any], config: dict[str, Any]) -> Array:
        return attention(**inputs, config=AttentionConfig.from_dict(config))

    def vjp(self, inputs: dict[str, Any], config: dict[str, Any], cotangent: Array) -> Any:
        found = attention_vjp(**inputs, config=AttentionConfig.from_dict(config), cotangent=cotangent)
        return self.change(found)


@cache
def expectation_of(case_id: str, dtype: str) -> Expectation:
    case = CASES[case_id]
    found = expect(case, dtype, build_inputs(case, dtype))
    assert found is not None
    return found


def job_of(case_id: str, dtype: str) -> Job:
    return make_job(CASES[case_id], dtype, build_inputs(CASES[case_id], dtype))


def result_of(target: Any, case_id: str = PAPER, dtype: str = "float32") -> Result:
    """What becomes of a job, carried out here as a worker process does it."""
    return run_job(CallableAdapter("target", target, frozenset({"gradient"})), job_of(case_id, dtype))


def verdict_of(target: Any, case_id: str = PAPER, dtype: str = "float32") -> Verdict:
    return judge(CASES[case_id], dtype, expectation_of(case_id, dtype), result_of(target, case_id, dtype))


@pytest.mark.requirement("GRAD-9")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_passes_every_case(dtype: str) -> None:
    for case in CASES.values():
        if dtype in case.dtypes:
            found = verdict_of(Target(), case.id, dtype)
            assert found.status == "passed", (case.id, found)
            # Sums may be in another order where arrays lie in another way.
            assert found.ratio is not None
            assert found.ratio <= (0.01 if case.layout != "contiguous" else 0.0), case.id


@pytest.mark.requirement("GRAD-9", "NUM-10")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_port_that_rounds_passes_every_case(dtype: str) -> None:
    def vjp(inputs: dict[str, Any], config: dict[str, Any], cotangent: Array) -> dict[str, Any]:
        return BackwardPort("stages")({**inputs, "cotangent": cotangent}, config)

    target = Target()
    target.vjp = vjp  # type: ignore[method-assign]
    for case in CASES.values():
        if dtype in case.dtypes:
            result = result_of(target, case.id, dtype)
            for name, gradient in result.arrays.items():
                kept = "float32" if "float32_parameters" in case.parameters and name in PARAMETERS else dtype
                assert dtype_name(gradient) == kept
            found = judge(case, dtype, expectation_of(case.id, dtype), result)
            assert found.status == "passed", (case.id, found)
            assert found.ratio is not None
            assert found.ratio <= HALF, (case.id, found)


@pytest.mark.requirement("GEN-3")
def test_a_target_is_given_everything_but_the_cotangent_with_the_inputs() -> None:
    seen: list[tuple[dict[str, Any], dict[str, Any], Array]] = []

    class Noting(Target):
        def vjp(self, inputs: dict[str, Any], config: dict[str, Any], cotangent: Array) -> Any:
            seen.append((dict(inputs), dict(config), cotangent.copy()))
            found = super().vjp(inputs, config, cotangent)
            for array in (*inputs.values(), cotangent):
                array[...] = 0  # nobody else's
            inputs.clear()
            config.clear()
            return found

    for case_id in (PAPER, "gradient/late", "gradient/poison"):
        seen.clear()
        result = result_of(Noting(), case_id, "bfloat16")
        assert (result.kind, result.repeatable, result.rerun) == ("arrays", True, None)
        expected = build_inputs(CASES[case_id], "bfloat16")
        assert len(seen) == 2  # it is run twice
        for inputs, config, cotangent in seen:
            np.testing.assert_array_equal(cotangent, expected["cotangent"])
            assert dtype_name(cotangent) == "bfloat16"
            assert set(inputs) == set(expected) - {"cotangent"}
            assert config == CASES[case_id].config
        job = job_of(case_id, "bfloat16")
        assert (job.operation, job.wanted, job.capability) == ("gradient", GRADIENTS, "gradient")


@pytest.mark.requirement("ARG-5")
def test_arrays_and_cotangent_lie_in_memory_as_the_case_says() -> None:
    strides: list[tuple[int, ...]] = []

    class Noting(Target):
        def vjp(self, inputs: dict[str, Any], config: dict[str, Any], cotangent: Array) -> Any:
            strides.extend((inputs["q"].strides, cotangent.strides))
            return super().vjp(inputs, config, cotangent)

    assert verdict_of(Noting(), "gradient/transposed").status == "passed"
    assert all(list(steps) == sorted(steps) for steps in strides)


# Wrong gradients


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_is_named_with_its_worst_element(name: str) -> None:
    exact = expectation_of(PAPER, "float32").limits
    index = tuple(size - 1 for size in exact.stages[name].shape)

    def change(found: dict[str, Array]) -> dict[str, Array]:
        found[name][index] += 5 * exact.limits[name][index]
        return found

    found = verdict_of(Target(change))
    assert (found.status, found.stage) == ("failed", f"gradient of {name}")
    assert found.ratio == pytest.approx(5, rel=1e-3)
    axes = {"q": "bnhd", "k": "bmgd", "v": "bmge", "collapse": "ihp"}.get(name, "ghp")
    where = ", ".join(f"{axis}={i}" for axis, i in zip(axes, index, strict=True))
    assert found.reason is not None
    assert found.reason.startswith(f"`gradient of {name}`[{where}]: expected ")
    assert "is 5 x its limit" in found.reason
    right = ", ".join(other for other in GRADIENTS if other != name)
    which = f"[{GRADIENT_OF[name]}]; wrong: {name}; right: {right}"
    assert found.reason.endswith(f"(1 of {exact.stages[name].size} elements are wrong) {which}")


def test_a_per_head_collapse_is_named_by_its_two_axes() -> None:
    def change(found: dict[str, Array]) -> dict[str, Array]:
        found["collapse"][1, 0] = np.nan
        return found

    found = verdict_of(Target(change), "gradient/algorithm1")
    assert (found.status, found.stage, found.ratio) == ("failed", "gradient of collapse", None)
    assert found.reason is not None
    assert found.reason.startswith("`gradient of collapse`[h=1, p=0]: expected ")
    assert ", got nan (1 of " in found.reason


@pytest.mark.requirement("GRAD-8")
def test_a_nan_where_a_key_is_dropped_fails() -> None:
    """0·NaN in a gradient that is exactly 0, and the smallest normal number there."""
    dropped = ~build_inputs(CASES["gradient/poison"], "float32")["key_mask"]
    for value in (np.nan, np.float32(2.0**-126)):

        def change(found: dict[str, Array], value: float = value) -> dict[str, Array]:
            found["k"][dropped] = value
            return found

        found = verdict_of(Target(change), "gradient/poison")
        assert (found.status, found.stage) == ("failed", "gradient of k")


def test_the_first_wrong_one_is_named_and_the_worst_is_too() -> None:
    def change(found: dict[str, Array]) -> dict[str, Array]:
        return found | {"k": found["k"] * 1.01, "alpha_v": found["alpha_v"] * 2}

    found = verdict_of(Target(change))
    assert found.stage == "gradient of k"
    assert found.reason is not None
    assert "is that of `gradient of alpha_v` [GRAD-6]; wrong: k, alpha_v; right: " in found.reason


def without(name: str) -> Callable[[dict[str, Array]], Any]:
    return lambda found: {key: x for key, x in found.items() if key != name}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_missing_gradient_fails(name: str) -> None:
    found = verdict_of(Target(without(name)))
    label = f"gradient of {name}"
    assert found == Verdict(status="failed", stage=label, reason=f"missing: no `{label}` among the results")


@pytest.mark.parametrize("name", ["alpha", "output", "cotangent", "logits", ""])
def test_an_unknown_gradient_fails(name: str) -> None:
    result = Result(
        case_id=PAPER,
        dtype="float32",
        kind="arrays",
        arrays={**expectation_of(PAPER, "float32").stages, name: np.zeros(1)},
    )
    found = judge(CASES[PAPER], "float32", expectation_of(PAPER, "float32"), result)
    expected = ", ".join(GRADIENTS)
    assert found.status == "failed"
    assert found.reason == f"unknown gradient {name!r}: expected names among {expected}"


@pytest.mark.requirement("GRAD-9")
@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("q", lambda x: x[..., None], "shape: expected (b, n, h, d) = (2, 7, 3, 4), got (2, 7, 3, 4, 1)"),
        ("v", lambda x: x[:1], "shape: expected (b, m, g, e) = (2, 7, 3, 4), got (1, 7, 3, 4)"),
        ("alpha_k", lambda x: x.reshape(-1), "shape: expected (g, h, p) = (3, 3, 2), got (18,)"),
        ("collapse", lambda x: x.sum(axis=1), "shape: expected (i, h, p) = (3, 3, 2), got (3, 2)"),
        ("k", lambda x: x.astype(np.float16), "dtype: expected float32 or wider, got float16"),
        ("alpha_q", lambda x: x.astype(np.int64), "dtype: expected float32 or wider, got int64"),
    ],
)
def test_another_shape_or_a_narrower_dtype_fails(
    name: str, change: Callable[[Array], Array], part: str
) -> None:
    found = verdict_of(Target(lambda gradients: gradients | {name: change(gradients[name])}))
    assert (found.status, found.stage) == ("failed", f"gradient of {name}")
    assert found.reason.startswith(f"`gradient of {name}` {part} [GRAD-")


@pytest.mark.requirement("GRAD-9")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_float32_parameters_have_to_be_float32(dtype: str) -> None:
    """Those of the data may have the data's dtype."""
    case_id = "gradient/float32-parameters"

    def narrow(*names: str) -> Callable[[dict[str, Array]], Any]:
        kind = build_inputs(CASES[case_id], dtype)["q"].dtype
        return lambda found: found | {name: found[name].astype(kind) for name in names}

    assert verdict_of(Target(narrow("q", "k", "v")), case_id, dtype).status == "passed"
    for name in PARAMETERS:
        found = verdict_of(Target(narrow(name)), case_id, dtype)
        assert (found.status, found.stage) == ("failed", f"gradient of {name}")
        assert found.reason.startswith(
            f"`gradient of {name}` dtype: expected float32 or wider, got {dtype} [GRAD-"
        )


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "TypeError: expected a dict of gradients, got NoneType"),
        (np.zeros(3), "TypeError: expected a dict of gradients, got ndarray"),
        ([np.zeros(3)] * 7, "TypeError: expected a dict of gradients, got list"),
        ({0: np.zeros(1)}, "TypeError: expected gradients by name, got the key 0"),
        ({"q": [0.0]}, "TypeError: `q`: expected a numpy array, got list"),
        ({"q": None}, "TypeError: `q`: expected a numpy array, got NoneType"),
        (
            {"q": np.array([object()])},
            "TypeError: `q`: expected an array of numbers, got dtype object",
        ),
    ],
)
def test_what_is_no_dict_of_arrays_fails(returned: Any, reason: str) -> None:
    result = result_of(Target(lambda _: returned))
    assert (result.kind, result.failure, result.reason) == ("failed", "raised", reason)
    assert verdict_of(Target(lambda _: returned)).status == "failed"


def test_nothing_in_a_dict_is_missing() -> None:
    found = verdict_of(Target(lambda _: {}))
    assert found.reason == "missing: no `gradient of q` among the results"


def raising(error: BaseException) -> Callable[[Any], Any]:
    def change(found: Any) -> Any:
        raise error

    return change


def test_a_vjp_that_raises_fails() -> None:
    found = verdict_of(Target(raising(ZeroDivisionError("two\nlines"))))
    assert found == Verdict(status="failed", reason="raised: ZeroDivisionError: two lines")
    error = OutputMissingError("none")
    assert verdict_of(Target(raising(error))).status == "failed"


@pytest.mark.requirement("ERR-2")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError("no double backward"), "no double backward"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_a_vjp_may_refuse(error: BaseException, reason: str) -> None:
    assert verdict_of(Target(raising(error))) == Verdict(status="refused", reason=reason)


@pytest.mark.requirement("NUM-7")
def test_a_second_run_that_differs_is_judged_too() -> None:
    calls = []

    def change(found: dict[str, Array]) -> dict[str, Array]:
        calls.append(1)
        return found if len(calls) % 2 else found | {"v": found["v"] * 1.5}

    result = result_of(Target(change))
    assert (result.kind, result.repeatable) == ("arrays", False)
    assert result.rerun is not None
    assert set(result.rerun) == set(GRADIENTS)


# Capability


MODULE = """
from iha_core import AttentionConfig, attention, attention_vjp


def modest(inputs, config):
    return attention(**inputs, config=AttentionConfig.from_dict(config))


def right(inputs, config):
    return modest(inputs, config)


def vjp(inputs, config, cotangent):
    return attention_vjp(**inputs, config=AttentionConfig.from_dict(config), cotangent=cotangent)


right.vjp = vjp
right.capabilities = {"gradient"}


def wrong(inputs, config):
    return modest(inputs, config)


def no_row_term(inputs, config, cotangent):
    found = vjp(inputs, config, cotangent)
    return found | {"alpha_q": 1.5 * found["alpha_q"]}


wrong.vjp = no_row_term
wrong.capabilities = ["gradient"]


def refusing(inputs, config):
    return modest(inputs, config)


def refuse(inputs, config, cotangent):
    raise NotImplementedError("forward only")


refusing.vjp = refuse
refusing.capabilities = {"gradient"}


def declared_only(inputs, config):
    return modest(inputs, config)


declared_only.capabilities = {"gradient"}


def vjp_is_no_function(inputs, config):
    return modest(inputs, config)


vjp_is_no_function.vjp = 3
vjp_is_no_function.capabilities = {"gradient"}


def silent(inputs, config):
    return modest(inputs, config)


silent.vjp = no_row_term
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with targets in a module."""
    (tmp_path / "gradient_targets.py").write_text(MODULE)
    return tmp_path


def run(here: Path, name: str, *options: str) -> tuple[Any, dict[str, Any]]:
    report = here / "report.json"
    process = iha("run", "--target", f"gradient_targets:{name}", *options, "--json", str(report), cwd=here)
    return process, json.loads(report.read_text()) if report.exists() else {}


QUICK = ("--family", "gradient", "--quick", "--dtype", "float32")


def test_a_right_target_passes_by_the_command(here: Path) -> None:
    process, document = run(here, "right", "--family", "gradient", "--quick")
    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    summary = document["targets"][0]["summary"]
    quick = sum(len(case.dtypes) for case in CASES.values() if "quick" in case.flags)
    assert (summary["executed"], summary["passed"]) == (quick, quick)
    assert {row["family"] for row in document["targets"][0]["results"]} == {"gradient"}


def test_a_wrong_target_is_told_what_is_wrong(here: Path) -> None:
    process, document = run(here, "wrong", *QUICK)
    assert process.returncode == 1
    rows = {row["id"]: row for row in document["targets"][0]["results"]}
    assert rows[PAPER]["stage"] == "gradient of alpha_q"
    assert rows[PAPER]["status"] == "failed"
    assert rows[PAPER]["ratio"] > 2
    assert rows[PAPER]["reason"].startswith("`gradient of alpha_q`[g=")
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("FAILED") and PAPER in line]
    assert "gradient of alpha_q" in line


def test_a_refusal_is_counted_and_nothing_is_executed(here: Path) -> None:
    process, document = run(here, "refusing", *QUICK)
    rows = document["targets"][0]["results"]
    assert {(row["status"], row["reason"]) for row in rows} == {("refused", "forward only")}
    assert process.returncode == 2, "zero executed cases is an error"
    process, document = run(here, "refusing", *QUICK, "--family", "core")
    assert process.returncode == 0
    assert document["targets"][0]["summary"]["failed"] == 0


@pytest.mark.parametrize("name", ["declared_only", "vjp_is_no_function"])
def test_a_target_that_declares_gradients_without_having_them_cannot_be_launched(
    name: str, here: Path
) -> None:
    process, document = run(here, name, *QUICK)
    assert (process.returncode, process.stdout, document) == (2, "", {})
    (line,) = process.stderr.splitlines()
    reason = f"target 'gradient_targets:{name}': expected a callable vjp, as it declares 'gradient'"
    assert line == f"iha: error: {reason}"
    with pytest.raises(TargetUnavailable, match="expected a callable vjp"):
        load(f"gradient_targets:{name}", str(here))


@pytest.mark.requirement("GEN-3")
@pytest.mark.parametrize("name", ["modest", "silent"])
def test_without_the_capability_cases_are_not_applicable(name: str, here: Path) -> None:
    """Also for a callable that has a wrong `vjp` and does not declare it."""
    options = ("--quick", "--dtype", "float32", "--family", "gradient", "--family", "core")
    process, document = run(here, name, *options)
    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    rows = [row for row in document["targets"][0]["results"] if row["family"] == "gradient"]
    assert len(rows) == sum("quick" in case.flags and "float32" in case.dtypes for case in CASES.values())
    reason = "the target does not declare the capability 'gradient'"
    assert {(row["status"], row["reason"]) for row in rows} == {("not_applicable", reason)}
    process, _ = run(here, name, *QUICK)
    assert process.returncode == 2, "zero executed cases is an error"


# Other commands


def test_a_case_of_gradients_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["case", PAPER]) == 0
    out = capfd.readouterr().out
    assert "Gradients (exact answer in float64; limits of float64)" in out
    assert "Stages" not in out
    lines = out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  ") and " float64 (" in line]
    assert shown == [*GRADIENTS, "cotangent", *GRADIENTS]  # inputs, and answers
    for name in GRADIENTS:
        assert any(line.startswith(f"  {name} float64") and "limit " in line for line in lines)
    assert "[GRAD-1]" in out


def test_a_case_of_gradients_is_shown_as_json(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    assert cli.main(["case", "gradient/algorithm1", "--dtype", "bfloat16", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert list(document["stages"]) == list(document["limits"]) == list(GRADIENTS)
    assert document["inputs"]["cotangent"]["dtype"] == "bfloat16"
    assert document["capability"] == "gradient"
    exact = expectation_of("gradient/algorithm1", "bfloat16").stages
    for name in GRADIENTS:
        shown = document["stages"][name]
        assert (shown["dtype"], shown["shape"]) == ("float64", list(exact[name].shape))
        np.testing.assert_array_equal(shown["values"], exact[name].ravel())


@pytest.mark.parametrize("case_id", ["gradient/poison", "gradient/no-keys", "gradient/no-batch"])
def test_cases_with_nan_or_nothing_are_shown(
    case_id: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["case", case_id]) == 0
    assert "Gradients (exact answer" in capfd.readouterr().out
    assert cli.main(["case", case_id, "--json", str(tmp_path / "case.json")]) == 0
    assert list(json.loads((tmp_path / "case.json").read_text())["stages"]) == list(GRADIENTS)


@pytest.mark.requirement("GEN-3", "EXC-1")
def test_files_never_have_a_case_of_gradients(tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    options = ["--family", "core", "--family", "gradient", "--dtype", "float32"]
    assert cli.main(["vectors", "export", str(folder), *options]) == 0
    names = [path.name for path in folder.rglob("*.safetensors")]
    assert names
    assert all(name.startswith("core.") for name in names)
    listed = re.findall(r'"([\w./-]+\.safetensors)"', (folder / "manifest.json").read_text())
    assert sorted(path.rpartition("/")[2] for path in listed) == sorted(names)


@pytest.mark.requirement("GEN-3", "EXC-1")
def test_a_command_is_never_given_a_case_of_gradients(tmp_path: Path) -> None:
    script = tmp_path / "port.py"
    script.write_text(
        "import pathlib, sys\n"
        "given, out = map(pathlib.Path, sys.argv[1:])\n"
        "for path in given.iterdir():\n"
        "    assert not path.name.startswith('gradient'), path.name\n"
        "    (out / (path.name.removesuffix('.safetensors') + '.skip')).write_text('seen ' + path.name)\n"
    )
    report = tmp_path / "report.json"
    command = shlex.join([sys.executable, str(script)])
    options = ("--family", "gradient", "--family", "core", "--quick", "--dtype", "float32")
    process = iha("run", "--exec", command, *options, "--json", str(report), cwd=tmp_path)
    document = json.loads(report.read_text())
    rows = document["targets"][0]["results"]
    for row in rows:
        status = "not_applicable" if row["family"] == "gradient" else "refused"
        assert row["status"] == status, (row, process.stderr)
    assert {row["family"] for row in rows} == {"core", "gradient"}


# The table of cases


def test_cases_of_gradients_are_a_family_and_a_capability_of_their_own() -> None:
    assert len(CASES) >= 30
    for case in load_cases():
        assert (
            (case.operation == "gradient") == (case.family == "gradient") == (case.capability == "gradient")
        )
        assert ("cotangent" in build_inputs(case, case.dtypes[0])) == (case.family == "gradient")
    assert not any({"random", "exact"} & case.flags for case in CASES.values())
    assert sum("quick" in case.flags for case in CASES.values()) >= 3


def test_cotangents_have_the_shape_of_the_output_and_the_dtype_of_q() -> None:
    for case in CASES.values():
        for dtype in case.dtypes:
            inputs = build_inputs(case, dtype)
            cotangent = inputs["cotangent"]
            assert cotangent.shape == tuple(case.sizes[letter] for letter in "BNHe"), case.id
            assert dtype_name(cotangent) == dtype_name(inputs["q"]) == dtype
            assert np.isfinite(cotangent.astype(np.float64)).all()


def gradient_mutants() -> Mapping[str, Mutant]:
    return {name: mutant for name, mutant in MUTANTS.items() if mutant.operation == "gradient"}


REQUIREMENTS = (*(f"GRAD-{i}" for i in range(1, 10)), "NUM-9")


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_requirement_has_a_case_and_a_mutant(requirement: str) -> None:
    assert requirement in requirements()
    assert any(requirement in case.requirements for case in CASES.values())
    assert any(requirement in mutant.requirements for mutant in gradient_mutants().values())


def test_every_requirement_of_the_chapter_is_listed_here() -> None:
    chapter = [name for name in requirements() if name.startswith("GRAD-")]
    assert chapter == [name for name in REQUIREMENTS if name.startswith("GRAD-")]


# Mutants

OF_STEP: Mapping[str, set[str]] = {
    "change_cotangent": {"GRAD-2"},
    "leave_out": {"GRAD-8"},
    "weights": {"GRAD-3", "GRAD-8"},
    "weights_bar": {"GRAD-3", "NUM-9"},
    "collapse_bar": {"GRAD-1"},
    "virtual_out_bar": {"GRAD-2"},
    "values_bar": {"GRAD-2", "GRAD-8"},
    "row_term": {"GRAD-3"},
    "logits_bar": {"GRAD-3", "GRAD-8", "NUM-9"},
    "queries_bar": {"GRAD-4"},
    "keys_bar": {"GRAD-4"},
    "rotate_back": {"GRAD-5"},
    "unmix": {"GRAD-6"},
    "alpha_bar": {"GRAD-7"},
    "change_gradients": {"GRAD-1", "GRAD-6", "GRAD-7", "GRAD-9"},
}
"""Requirements that a step carries out, of which its mutants break one."""

TOUCHED: Mapping[str, set[str]] = {
    "GRAD-1": {"collapse"},
    "GRAD-4": {"q", "alpha_q", "k", "alpha_k"},
    "GRAD-5": {"q", "alpha_q", "k", "alpha_k"},
    "GRAD-6": {"q", "k", "v"},
    "GRAD-7": {"alpha_q", "alpha_k", "alpha_v"},
}
"""Gradients that a fault in one of the last steps can reach; earlier ones reach more."""


def test_there_are_mutants_enough() -> None:
    assert len(gradient_mutants()) >= 25
    for mutant in gradient_mutants().values():
        assert mutant.step in BACKWARD_STEPS
        assert set(mutant.requirements) & OF_STEP[mutant.step], mutant.name


@cache
def problem(case_id: str, dtype: str) -> Problem:
    return Problem.of(CASES[case_id], dtype)


@pytest.mark.requirement(*REQUIREMENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", gradient_mutants())
def test_every_mutant_is_caught(name: str, dtype: str) -> None:
    """However it rounds. (The whole table, in all dtypes, is the self-test's.)"""
    mutant = gradient_mutants()[name]
    if dtype not in mutant.dtypes:
        pytest.skip(f"{mutant.because}")
    # Cases of a requirement that it breaks come first; nearly always these show it.
    cases = sorted(CASES.values(), key=lambda case: not set(mutant.requirements) & set(case.requirements))
    caught = dict.fromkeys(ROUNDINGS, 0.0)
    for rounding in ROUNDINGS:
        for case in cases:
            if dtype in case.dtypes and caught[rounding] < CAUGHT:
                tried = problem(case.id, dtype)
                caught[rounding] = max(caught[rounding], mutant_ratio(mutant, rounding, tried))
    assert min(caught.values()) >= CAUGHT, caught


@pytest.mark.parametrize("name", gradient_mutants())
def test_a_mutant_is_wrong_where_its_requirement_says(name: str) -> None:
    """Held to the exact gradients in float64, without limits."""
    mutant = gradient_mutants()[name]
    requirement = mutant.requirements[0]
    if "float64" not in mutant.dtypes:
        pytest.skip(f"{mutant.because}")
    wrong: set[str] = set()
    for case in CASES.values():
        if "float64" not in case.dtypes:
            continue
        tried = problem(case.id, "float64")
        found = mutant.port("once")(tried.inputs, case.config)
        for gradient, exact in tried.expectation.stages.items():
            size = np.max(np.abs(exact), initial=0.0)
            off = ~(np.abs(found[gradient] - exact) <= 1e-9 * size)  # NaN is off as well
            if np.any(off):
                wrong.add(gradient)
    assert wrong, "a mutant that computes what it should"
    assert wrong <= TOUCHED.get(requirement, set(GRADIENTS)), (requirement, wrong)


def test_honest_backward_passes_are_right_and_differ_in_bits() -> None:
    tried = problem(PAPER, "float32")
    seen = set()
    for name, (make, rounding) in BACKWARD_HONEST.items():
        port = make(rounding)
        assert ratio(port, tried) <= HALF, name
        found = port(tried.inputs, tried.case.config)
        seen.add(b"".join(found[gradient].tobytes() for gradient in GRADIENTS))
    assert len(seen) >= len(BACKWARD_HONEST) - 1
    assert {rounding for _, rounding in BACKWARD_HONEST.values()} == set(ROUNDINGS)


def test_a_backward_port_refuses_to_replace_what_is_no_step() -> None:
    for step in ("mix", "store", "contract"):
        with pytest.raises(ValueError, match=rf"replace: expected steps among .*, got '{step}'"):
            BackwardPort(replace={step: lambda *_: None})
    with pytest.raises(ValueError, match="got 'unmix'"):
        Port(replace={"unmix": lambda *_: None})


# Backends


@pytest.mark.requirement(*REQUIREMENTS)
@pytest.mark.parametrize("name", ["torch", "jax", "mlx", "array-api:torch", "array-api:numpy"])
def test_installed_backends_pass(name: str, tmp_path: Path) -> None:
    modules = {"mlx": "mlx.core", "array-api:torch": "torch", "array-api:numpy": "numpy"}
    pytest.importorskip(modules.get(name, name))
    report = tmp_path / "report.json"
    options = ("--family", "gradient", "--quick", "--dtype", "float32", "--dtype", "bfloat16")
    options += ("--family", "core") if name == "array-api:numpy" else ()
    process = iha("run", "--backend", name, *options, "--json", str(report), cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads(report.read_text())["targets"][0]["results"]
    found = [row for row in rows if row["family"] == "gradient"]
    quick = [case for case in CASES.values() if "quick" in case.flags]
    assert len(found) == sum(dtype in case.dtypes for case in quick for dtype in ("float32", "bfloat16"))
    if name == "array-api:numpy":  # which does not differentiate
        assert {row["status"] for row in found} == {"not_applicable"}
        return
    assert {row["status"] for row in found} == {"passed"}
    assert all(row["ratio"] <= 1 for row in found)
    assert all(row["kernel"].startswith("derivative of ") for row in found)
