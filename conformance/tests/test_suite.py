"""The suite as pytest tests: selection, verdicts, errors of usage, and processes that do not outlive it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import wait_for_text, wait_until_gone

from iha_conformance.command import plan_targets
from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.judge import expect
from iha_conformance.protocol import DTYPES
from iha_conformance.suite import plugin
from iha_conformance.suite.session import SuiteSession

HERE = Path(__file__).parent
QUIET = ("no:cacheprovider", "no:hypothesispytest")
COMMAND = [
    *(sys.executable, "-m", "pytest", "-p", plugin.__name__, "--pyargs", "iha_conformance.suite"),
    *("-W", "error", "--strict-markers", "-rA", *[word for name in QUIET for word in ("-p", name)]),
]
ONE = ["-k", "core/paper and float32"]


def environment(**changes: str) -> dict[str, str]:
    # Neither the options nor the workers of the pytest that runs this test are those of the other one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Callables have to be found by the working directory alone.
    path = os.pathsep.join(folder for folder in sys.path if folder and Path(folder) != HERE)
    return kept | {"PYTHONPATH": path} | changes


def suite(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--rootdir", str(cwd), *arguments],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake targets as a user's own module."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "port.py").write_text((HERE / "fake_targets.py").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def ids(text: str) -> list[str]:
    return re.findall(r"test_cases\.py::test_case\[(.+)\]$", text, re.MULTILINE)


def expected_ids(target: str, *, quick: bool = False, families: Iterable[str] = ()) -> list[str]:
    return [
        f"{target}-{case.id}-{dtype}"
        for case in load_cases()
        if (not quick or "quick" in case.flags) and (not families or case.family in families)
        for dtype in DTYPES
        if dtype in case.dtypes
    ]


# Selection


def test_a_test_for_each_case_and_dtype():
    settings = {"iha_target": ["port:honest"], "iha_timeout": 60.0}
    session = SuiteSession(SimpleNamespace(getoption=settings.get))
    assert [str(node) for node in session.nodes] == expected_ids("port:honest")


def test_marks_options_and_words_select(port):
    """Marks by the one run, the option by the other, words by both."""
    two = ["--iha-target", "port:modest", "--iha-target", "array-api:numpy", "--collect-only", "-q"]
    run = suite(*two, "-m", "iha_quick and iha_family(name='window')", "-k", "numpy", cwd=port)
    window = expected_ids("array-api:numpy", quick=True, families=["window"])
    assert ids(run.stdout) == window != []
    run = suite(*two, "--iha-quick", "-k", "(core and bfloat16) or exact", cwd=port)
    expected = [name for name in expected_ids("x", quick=True) if re.search("core.*bfloat16|exact", name)]
    for target in ("port:modest", "array-api:numpy"):
        assert [f"x{name.removeprefix(target)}" for name in ids(run.stdout) if target in name] == expected
    assert len(ids(run.stdout)) == 2 * len(expected)


def test_every_installed_backend_is_the_default():
    settings = {"iha_target": [], "iha_timeout": 60.0, "iha_quick": True}
    session = SuiteSession(SimpleNamespace(getoption=settings.get))
    assert list(session.launches) == list(plan_targets([], [], None).launches)
    first = [str(node) for node in session.nodes[: len(session.launches)]]
    assert first == [f"{launch.name}-core/paper-float64" for launch in session.launches]


def test_the_precision_class_sets_the_limits_and_is_passed_on():
    settings = {"iha_target": ["port:fn"], "iha_timeout": 60.0, "iha_precision": "tf32"}
    session = SuiteSession(SimpleNamespace(getoption=settings.get))
    (launch,) = session.launches
    assert (launch.name, launch.precision) == ("port:fn", "tf32")
    case = load_cases()[0]
    inputs = build_inputs(case, "float32")
    known = expect(case, "float32", inputs, "tf32").limits.limits["logits"]
    found = session._suite.expect(case, "float32", inputs)
    assert np.array_equal(found.limits.limits["logits"], known)
    assert session._suite.expect(case, "float32", inputs) is found
    assert session._suite.expect(case, "float16", build_inputs(case, "float16")) is not found
    assert not np.array_equal(expect(case, "float32", inputs).limits.limits["logits"], known)


# Verdicts


@pytest.fixture(scope="module")
def verdicts(port: Path) -> subprocess.CompletedProcess[str]:
    """A few cases on targets of many kinds."""
    names = ("honest", "off_by_one", "raises", "crashes", "wears_out", "refuses_half", "crashes_on_masks")
    targets = [word for name in names for word in ("--iha-target", f"port:{name}")]
    cases = "core/paper or keymask/random or invalid/window-zero"
    return suite(*targets, "-k", f"({cases}) and (float32 or float16) and not bfloat16", cwd=port)


def outcomes(text: str, target: str) -> dict[str, str]:
    found = re.findall(rf"^(PASSED|FAILED) \S*\[port:{target}-(\S+)\]", text, re.MULTILINE)
    return {name: outcome for outcome, name in found}


def test_outcomes_are_the_verdicts(verdicts):
    assert verdicts.returncode == 1, verdicts.stdout
    cases = ["core/paper-float32", "core/paper-float16", "keymask/random-float32", "keymask/random-float16"]
    bad = "invalid/window-zero-float32"
    assert outcomes(verdicts.stdout, "honest") == dict.fromkeys([*cases, bad], "PASSED")
    for target in ("off_by_one", "raises", "crashes", "wears_out"):
        assert outcomes(verdicts.stdout, target) == dict.fromkeys(cases, "FAILED")
    assert outcomes(verdicts.stdout, "refuses_half") == dict.fromkeys(cases[::2], "PASSED")
    of_masks = {name: "FAILED" if name.startswith("keymask") else "PASSED" for name in cases}
    assert outcomes(verdicts.stdout, "crashes_on_masks") == of_masks


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("off_by_one", "first wrong stage output: `output`[b=0, n=0, h=0, e=1]: expected"),
        ("raises", "raised: ZeroDivisionError"),
        ("crashes", "crashed: the process ended with exit status 3"),
        ("wears_out", "first wrong stage output: second run: `output`"),
    ],
)
def test_a_failure_has_the_verdict_and_the_command(verdicts, name, reason):
    command = f"iha run --target port:{name} --case core/paper --dtype float32"
    lines = verdicts.stdout.splitlines()
    where = lines.index(f"to run it again: {command}")
    assert lines[where - 1].startswith(f"core/paper, float32: {reason}")
    assert "Traceback" not in verdicts.stdout
    assert "def test_case" not in verdicts.stdout


def test_what_is_refused_or_does_not_apply_is_skipped_with_its_reason(verdicts):
    skipped = re.findall(r"^SKIPPED \[(\d)\] \S+: (.+)$", verdicts.stdout, re.MULTILINE)
    undeclared = "the target does not declare the capability 'invalid'"
    assert sorted(skipped) == [("2", "no float16"), ("6", undeclared)]


def test_a_hanging_one_fails_in_time(port):
    run = suite("--iha-target", "port:hangs", "--iha-timeout", "0.5", *ONE, cwd=port)
    assert run.returncode == 1
    assert "hung: no result within 0.5 s" in run.stdout


# Errors of usage


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"target": "torhc"}, ["--iha-target: expected one of torch", "MODULE:CALLABLE", "got 'torhc'"]),
        ({"target": "torch:"}, ["--iha-target: expected MODULE:CALLABLE, got 'torch:'"]),
        ({"target": "array-api:"}, ["--iha-target: expected one of torch", "got 'array-api:'"]),
        ({"target": "array-api:no_such"}, ["--iha-target: expected 'array-api:no_such' to be installed"]),
        ({"target": "port:fn", "device": "cuda"}, ["--iha-device: expected a backend", "'cuda'"]),
        ({"target": "port:fn", "device": ""}, ["--iha-device: expected the name of a device", "''"]),
        ({"target": "port:fn", "precision": "fast"}, ["--iha-precision: expected one of", "got 'fast'"]),
    ],
)
def test_wrong_names_are_errors_of_usage(options, parts):
    settings = {"iha_timeout": 60.0} | {f"iha_{name}": value for name, value in options.items()}
    settings["iha_target"] = [options["target"]]
    with pytest.raises(pytest.UsageError) as caught:
        SuiteSession(SimpleNamespace(getoption=settings.get))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--iha-target", "torhc"], "--iha-target: expected one of torch"),
        (["--iha-target", "port:absent"], "target 'port:absent': 'port' has no attribute 'absent'"),
        (["--iha-target", "port:absent", "-n", "1"], "'port' has no attribute 'absent'"),
        (["--iha-timeout", "nan"], "--iha-timeout: expected seconds above 0, up to 86400, got 'nan'"),
    ],
)
def test_errors_of_usage_are_one_line(port, arguments, part):
    run = suite(*arguments, *ONE, cwd=port)
    assert run.returncode == 4, run.stdout + run.stderr
    assert [part in line for line in run.stderr.splitlines()].count(True) == 1
    assert "Traceback" not in run.stdout + run.stderr


def test_a_changed_corpus_is_a_fault_of_the_kit(port, tmp_path):
    (tmp_path / "spoils_corpus.py").write_text(
        "from iha_conformance.corpus import frozen\nfrozen.load_frozen = lambda: frozen.Hashes('', {})\n"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    run = suite("-p", "spoils_corpus", cwd=port, PYTHONPATH=path)
    assert run.returncode == 4, run.stdout
    assert run.stderr.startswith("ERROR: fault of the kit: case 'core/paper' is not in frozen.toml")


def test_without_the_plugin_the_suite_says_what_it_needs(port):
    command = [word for word in COMMAND if word not in ("-p", plugin.__name__, *QUIET)]
    run = subprocess.run(
        [*command, "--rootdir", str(port)],
        cwd=port,
        env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert f"pytest -p {plugin.__name__}" in run.stdout
    assert "Traceback" not in run.stdout


# Processes


def test_it_runs_in_parallel(port):
    run = suite("-k", "core/pa and float32", "--iha-target", "port:honest", "-n", "2", cwd=port)
    assert run.returncode == 0, run.stdout + run.stderr
    expected = [name for name in expected_ids("port:honest") if "core/pa" in name and "float32" in name]
    assert outcomes(run.stdout, "honest") == {name.partition("-")[2]: "PASSED" for name in expected}
    assert len(expected) > 1


def test_interruption_ends_the_workers(port, tmp_path):
    note, out = tmp_path / "pid", tmp_path / "out"
    with out.open("w") as file:  # no pipe, which would stay open as long as a worker
        process = subprocess.Popen(
            [*COMMAND, "--rootdir", str(port), "--iha-target", "port:hangs_with_child", *ONE],
            cwd=port,
            env=environment(FAKE_PID_FILE=str(note)),
            stdout=file,
            stderr=file,
        )
    try:
        child = int(wait_for_text(note))
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    wait_until_gone(child, seconds=1)  # left alone, a worker gives its target two
    assert status == 2, out.read_text()
    assert "KeyboardInterrupt" in out.read_text()


def test_one_process_serves_all_cases_and_ends_with_the_session(port, tmp_path):
    (port / "notes.py").write_text(
        "import os\n"
        "import port\n"
        "with open(os.environ['NOTE'], 'a') as note: note.write(f'{os.getpid()}\\n')\n"
        "honest = port.modest\n"
    )
    note = tmp_path / "note"
    run = suite("--iha-target", "notes:honest", "-k", "core/paper", cwd=port, NOTE=str(note))
    assert run.returncode == 0, run.stdout
    (worker,) = note.read_text().splitlines()
    wait_until_gone(int(worker), seconds=1)


def test_the_plugin_costs_other_sessions_nothing(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    heavy = {'numpy', 'click', 'rich', 'ml_dtypes', 'iha_core', 'iha_conformance.protocol'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", plugin.__name__, "-p", "no:cacheprovider", "-q"]
    run = subprocess.run(
        [*command, "-p", "no:hypothesispytest", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


def test_a_variant_of_a_backend_is_no_callable():
    from iha_conformance.suite.session import plan

    kinds = {launch.name: launch.kind for launch in plan(["jax:splash", "port:attention"], None, None)}
    assert kinds == {"jax:splash": "backend", "port:attention": "callable"}
