"""The `iha` command as its users meet it: exit statuses, one-line errors, reports, interruptions."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from processes import is_running, wait_for_text, wait_until_gone

from iha_conformance import cli
from iha_conformance.corpus import corpus_sha256, load_cases
from iha_conformance.corpus.cases import FAMILIES
from iha_core import SPEC_VERSION, STAGES
from iha_core.spec_files import spec_path

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "iha_conformance"]
CASE = "core/paper"
ONE = ["--case", CASE, "--dtype", "float32"]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a command, which imports what this process can."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | changes


def iha(*arguments: str, cwd: Path = HERE, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        check=False,
    )


def run_fake(name: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return iha("run", "--target", f"fake_targets:{name}", *(arguments or ONE), **changes)


def assert_one_line_error(process: subprocess.CompletedProcess[str], *parts: str, status: int = 2) -> None:
    assert process.returncode == status, process.stderr
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("iha: error: ")
    for part in parts:
        assert part in lines[0]


# Exit statuses


def test_passing_run_ends_with_0():
    process = run_fake("honest")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[-1] == (
        f"IHA {SPEC_VERSION}, 1 target: 1 of 1 case executed, 1 passed, 0 failed, 0 skipped, 0 not applicable"
        f" (filtered: --dtype float32 --case {CASE}): PASSED"
    )


@pytest.mark.parametrize(
    ("name", "reason", "has_values"),
    [
        ("off_by_one", "stage output", True),
        ("wrong_shape", "(2, 7, 3, 4, 1)", True),
        ("all_nan", "nan", True),
        ("raises", "raised: ZeroDivisionError: gr\u00f6\u00dfer \u2265 [red]0[/red] [MIX-1]", False),
        ("crashes", "crashed: the process ended with exit status 3", False),
        ("exits", "crashed: SystemExit: enough", False),
        ("no_output", "missing: expected 'output'", False),
        ("returns_list", "raised: TypeError: `output`: expected a numpy array, got list", False),
        ("wears_out", "second run: ", True),
    ],
)
def test_failing_case_ends_with_1(name, reason, has_values):
    process = run_fake(name)
    assert (process.returncode, process.stderr) == (1, "")
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("FAILED")]
    assert line.startswith(f"FAILED fake_targets:{name}: {CASE}, float32")
    assert reason in line
    lines = process.stdout.splitlines()
    diagnosis = f"To see what it computes instead: iha diagnose fake_targets:{name}"
    assert lines[-1] == diagnosis if has_values else diagnosis not in lines
    assert lines[-1 - has_values].endswith(f"FAILED by fake_targets:{name}")


def test_hanging_case_ends_with_1():
    process = run_fake("hangs", *ONE, "--timeout", "0.5")
    assert process.returncode == 1
    assert "hung: no result within 0.5 s" in process.stdout


def test_a_target_that_always_hangs_is_given_up(tmp_path):
    report = tmp_path / "report.json"
    process = run_fake("hangs", "--family", "window", "--timeout", "0.5", "--json", str(report))
    assert process.returncode == 1
    (entry,) = json.loads(report.read_text())["targets"]
    assert entry["summary"]["failed"] == entry["summary"]["expected"] > 100
    reasons = [row["reason"] for row in entry["results"]]
    assert reasons[:3] == ["hung: no result within 0.5 s"] * 3
    assert set(reasons[3:]) == {"hung: not run: hung 3 times in a row"}
    assert sum(line.startswith("FAILED fake_targets:hangs: ") for line in process.stdout.splitlines()) == 26


def test_one_bad_target_does_not_spoil_another(tmp_path):
    report = tmp_path / "report.json"
    process = run_fake("honest", "--target", "fake_targets:crashes", *ONE, "--json", str(report))
    assert process.returncode == 1
    good, bad = json.loads(report.read_text())["targets"]
    assert (good["target"]["name"], good["summary"]["passed"]) == ("fake_targets:honest", 1)
    assert (bad["target"]["name"], bad["summary"]["failed"]) == ("fake_targets:crashes", 1)


def test_different_bits_pass_with_a_remark(tmp_path):
    report = tmp_path / "report.json"
    process = run_fake("flickers", "--case", CASE, "--dtype", "bfloat16", "--json", str(report))
    assert process.returncode == 0
    assert (
        f"NOTE fake_targets:flickers: second run differs in bits in 1 case: {CASE} bfloat16" in process.stdout
    )
    (row,) = json.loads(report.read_text())["targets"][0]["results"]
    assert (row["status"], row["reason"]) == ("passed", "second run differs in bits")


def test_prints_of_a_target_stay_out_of_the_report(tmp_path):
    process = run_fake("prints", *ONE, "--json", str(tmp_path / "report.json"))
    assert process.returncode == 0
    assert "noise" not in process.stdout
    assert "noise" in process.stderr


def test_in_place_changes_do_not_reach_other_cases():
    process = run_fake("overwrites", "--family", "core", "--dtype", "float32")
    assert process.returncode == 0, process.stdout


def test_everything_refused_is_an_error(tmp_path):
    report = tmp_path / "report.json"
    process = run_fake("refuses", *ONE, "--json", str(report))
    assert_one_line_error(process, "expected at least one executed case, got 0")
    assert "REFUSED fake_targets:refuses: 1 case: no kernels today" in process.stdout
    assert process.stdout.splitlines()[-1].endswith("NO VERDICT")
    (row,) = json.loads(report.read_text())["targets"][0]["results"]
    assert (row["status"], row["ratio"], row["kernel"]) == ("refused", None, None)


def test_a_callable_that_executes_nothing_is_an_error_beside_others():
    process = run_fake("honest", "--target", "fake_targets:refuses", *ONE)
    assert_one_line_error(process, "target 'fake_targets:refuses'", "got 0")


def test_some_refused_is_no_error():
    process = run_fake("refuses_half", "--case", CASE)
    assert process.returncode == 0
    assert "REFUSED fake_targets:refuses_half: 1 case: no float16" in process.stdout
    assert "3 of 4 cases executed, 3 passed, 0 failed, 1 skipped" in process.stdout
    assert process.stdout.splitlines()[-1].endswith(": PASSED what was executed; 1 skipped")


@pytest.mark.requirement("ERR-1")
def test_bad_input_needs_a_declared_capability():
    some = ["--case", "invalid/window-zero", "--case", CASE, "--dtype", "float32"]
    assert (
        "1 of 1 case executed, 1 passed, 0 failed, 0 skipped, 1 not applicable"
        in run_fake("modest", *some).stdout
    )
    assert "2 of 2 cases executed, 2 passed" in run_fake("honest", *some).stdout
    careless = run_fake("no_validation", "--case", "invalid/window-zero")
    assert careless.returncode == 1
    only = run_fake("modest", "--case", "invalid/window-zero")
    assert_one_line_error(only, "expected at least one executed case, got 0")


# Errors of usage


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["expected a command, run or case", "got none"]),
        (["rum"], ["'rum'", "'run'"]),
        (["run", "--bogus"], ["'--bogus'"]),
        (["run", "--timeout", "0"], ["--timeout", "0"]),
        (["run", "--timeout", "nan"], ["--timeout", "nan"]),
        (["run", "--timeout", "soon"], ["--timeout", "'soon'"]),
        (
            ["run", "--backend", "jaxx"],
            ["--backend: expected one of torch, jax, mlx, array-api", "got 'jaxx'"],
        ),
        (["run", "--backend", "torch:cpu"], ["got 'torch:cpu'"]),
        (["run", "--backend", "array-api:"], ["got 'array-api:'"]),
        (["run", "--backend", "array-api:no_such"], ["'array-api:no_such'", "no module named 'no_such'"]),
        (["run", "--backend", "array-api:json"], ["expected an Array API namespace"]),
        (["run", "--backend", "array-api:numpy", "--device", "cuda"], ["expected device cpu, got 'cuda'"]),
        (["run", "--target", "fake_targets:honest", "--device", "cuda"], ["--device", "'cuda'"]),
        (["run", "--dtype", "f32"], ["expected one of float64, float32, float16, bfloat16, got 'f32'"]),
        (["run", "--family", "cor"], ["--family", *FAMILIES, "got 'cor' (nearest: core"]),
        (["run", "--target", "fake_targets:misspelt_capability"], ["invalid, gradient", "got 'gradients'"]),
        (["run", "--case", "core/papre"], ["--case", CASE, "got 'core/papre'"]),
        (["run", "--case", CASE, "--family", "mask"], ["expected at least one case", "got 0"]),
        (["run", "--target", "fake_targets"], ["expected MODULE:CALLABLE, got 'fake_targets'"]),
        (["run", "--target", "fake_targets:absent"], ["has no attribute 'absent'"]),
        (["run", "--target", "fake_targets:not_callable"], ["expected a callable, got int"]),
        (["run", "--target", "no_such_module:fn"], ["no module named 'no_such_module'"]),
        (["run", "--json", "/no/such/folder/x.json"], ["--json: cannot write '/no/such/folder/x.json'"]),
        (["case", "--family", "windows"], ["--family", *FAMILIES, "got 'windows' (nearest: window)"]),
        (["case", "--dtype", "float32"], ["--dtype: expected the ID of a case", "got none for 'float32'"]),
        (["case", CASE, "--family", "core"], [f"--family: expected no ID beside it, got '{CASE}'"]),
        (["case", "core/papre"], ["ID: ", "known names", f"got 'core/papre' (nearest: {CASE}"]),
        (["case", "zzz"], ["known names, got 'zzz'"]),
        (["case", CASE, "--dtype", "int8"], ["expected one of float64", "got 'int8'"]),
        (["case", "invalid/window-zero", "--dtype", "float64"], ["float32", "got 'float64'"]),
        (["case", CASE, "--json", "/no/such/folder/x.json"], ["--json: cannot write"]),
    ],
)
def test_errors_are_one_line(arguments, parts, capfd, monkeypatch):
    monkeypatch.chdir(HERE)
    status = cli.main(arguments)
    out, err = capfd.readouterr()
    assert_one_line_error(subprocess.CompletedProcess([], status, out, err), *parts)
    assert out == ""


def test_module_that_fails_at_import_is_one_line(tmp_path):
    (tmp_path / "port.py").write_text("raise RuntimeError('first\\nsecond')")
    process = iha("run", "--target", "port:fn", cwd=tmp_path)
    assert_one_line_error(process, "target 'port:fn' raised at import: RuntimeError: first second")


def test_fault_of_the_kit_is_one_line(monkeypatch, capfd):
    import iha_conformance.command as command

    def broken(cases, filters):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(command, "select", broken)
    assert cli.main(["run"]) == 2
    assert re.fullmatch(
        r"iha: error: fault of the kit: ZeroDivisionError: oops \(.*:\d+\)\n", capfd.readouterr().err
    )


def test_unwritable_report_is_found_out_before_the_run():
    start = time.monotonic()
    process = run_fake("hangs", *ONE, "--json", "/no/such/folder/x.json")
    assert_one_line_error(process, "--json")
    assert time.monotonic() - start < 30


def hide(modules: list[str], tmp_path: Path) -> dict[str, str]:
    """An environment in which modules cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, importlib.util, sys\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {modules!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}


def test_backend_that_is_not_installed(tmp_path):
    without_torch = hide(["torch"], tmp_path)
    asked = iha("run", "--backend", "torch", *ONE, **without_torch)
    assert_one_line_error(asked, "expected 'torch' to be installed, found no module named 'torch'")
    default = iha("run", *ONE, **without_torch)
    assert default.returncode == 0, default.stderr
    assert "SKIPPED torch: not installed, no module named 'torch'" in default.stdout
    assert "SKIPPED array-api:torch: not installed, no module named 'torch'" in default.stdout
    group = iha("run", "--backend", "array-api", *ONE, **without_torch)
    assert group.returncode == 0
    assert "SKIPPED torch" not in group.stdout
    assert "SKIPPED array-api:torch" in group.stdout


def test_no_backend_at_all_is_an_error(tmp_path):
    nothing = hide(["torch", "jax", "mlx", "array_api_compat"], tmp_path)
    assert_one_line_error(iha("run", *ONE, **nothing), "expected an installed backend or a --target")
    assert_one_line_error(iha("run", "--backend", "array-api", *ONE, **nothing), "array_api_compat")


def test_unrequested_backend_without_the_device_is_a_stated_skip():
    from iha_conformance.command import plan_targets
    from iha_conformance.targets.backends import missing_module

    if missing_module("torch"):
        pytest.skip("torch is not installed")
    plan = plan_targets([], [], "cuda")
    assert {"torch", "array-api:torch"} <= {launch.name for launch in plan.launches}
    assert "SKIPPED array-api:numpy: it has no device 'cuda'" in plan.absent
    run = iha("run", *ONE, "--device", "meta")  # a device of PyTorch alone, where nothing is computed
    assert "SKIPPED jax: backend 'jax': no device 'meta'" in run.stdout or missing_module("jax")
    assert run.returncode == 1
    nowhere = iha("run", *ONE, "--device", "abacus")
    assert_one_line_error(nowhere, "--device: expected a backend that has 'abacus', found none", "torch")


def test_targets_are_planned_once_each():
    from iha_conformance.command import plan_targets

    plan = plan_targets(["array-api:array-api-strict", "array-api:array_api_strict"], ["m:f", "m:f"], None)
    assert [launch.name for launch in plan.launches] == ["array-api:array_api_strict", "m:f"]


# Reports


def test_json_report_of_a_real_run(tmp_path):
    report = tmp_path / "report.json"
    process = iha(
        "run", "--backend", "array-api:numpy", "--family", "core", "--json", str(report), cwd=tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr
    document = json.loads(report.read_text())
    jsonschema.validate(document, json.loads(spec_path("schemas/report.schema.json").read_text()))
    assert document["spec_version"] == SPEC_VERSION
    assert document["corpus_sha256"] == corpus_sha256()
    assert document["filters"] == {"dtype": None, "family": ["core"], "case": None, "quick": False}
    (entry,) = document["targets"]
    wanted = [(case.id, dtype) for case in load_cases() if case.family == "core" for dtype in case.dtypes]
    assert sorted((row["id"], row["dtype"]) for row in entry["results"]) == sorted(wanted)
    refused = [row for row in entry["results"] if row["status"] == "refused"]
    assert {row["dtype"] for row in refused} == {"bfloat16"}
    assert entry["summary"]["skipped"] == len(refused)
    assert entry["summary"]["expected"] == len(wanted)
    assert os.listdir(tmp_path) == ["report.json"]


def test_unfiltered_run_says_so(tmp_path, monkeypatch, capfd):
    import iha_conformance.command as command

    monkeypatch.setattr(command, "load_cases", lambda: tuple(load_cases()[:2]))
    monkeypatch.chdir(HERE)
    report = tmp_path / "report.json"
    assert cli.main(["run", "--target", "fake_targets:honest", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["filters"] is None
    assert "filtered" not in capfd.readouterr().out


def test_report_survives_a_reader_that_leaves(tmp_path):
    report = tmp_path / "report.json"
    process = subprocess.Popen(
        [*COMMAND, "run", "--target", "fake_targets:honest", *ONE, "--json", str(report)],
        cwd=HERE,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (0, b"")
    assert report.exists()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["case", CASE]])
def test_broken_pipe_leaves_no_traceback(arguments):
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert err == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_narrow_encodings_get_escapes(encoding):
    narrow = {
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": encoding,
    }
    process = subprocess.run(
        [*COMMAND, "run", "--target", "fake_targets:raises", *ONE],
        cwd=HERE,
        env=environment(**narrow),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stderr) == (1, b"")
    expected = "gr\u00f6\u00dfer \\u2265".encode(encoding, "backslashreplace")
    assert expected in process.stdout
    help_text = subprocess.run(
        [*COMMAND, "run", "--help"], env=environment(**narrow), capture_output=True, timeout=60, check=True
    )
    assert help_text.stdout.isascii()


# A terminal


def run_in_terminal(*arguments: str, columns: int = 100, **changes: str) -> tuple[int, str]:
    """Exit status and everything that the command writes to a terminal of its own."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    import struct

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=HERE,
        env=environment(TERM="xterm-256color", **changes),
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            if select.select([controller], [], [], 60)[0]:
                written += (chunk := os.read(controller, 65536))
                if chunk:
                    continue
        except OSError:  # the other side is closed
            pass
        break
    os.close(controller)
    return process.wait(60), written.decode("utf-8", "replace")


def test_terminal_has_progress_and_colours():
    status, text = run_in_terminal("run", "--target", "fake_targets:off_by_one", *ONE)
    assert status == 1
    assert "1/1" in text
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", text)
    assert "FAILED by fake_targets:off_by_one" in text


def test_no_color_is_respected():
    status, text = run_in_terminal("run", "--target", "fake_targets:off_by_one", *ONE, NO_COLOR="1")
    assert status == 1
    assert not re.search(r"\x1b\[[0-9;]*m", text)


def test_narrow_terminal():
    status, text = run_in_terminal("run", "--target", "fake_targets:honest", *ONE, columns=30)
    assert status == 0
    assert "PASSED" in text


def test_piped_output_has_no_escapes_whatever_the_environment_wants():
    process = run_fake("off_by_one", *ONE, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b" not in process.stdout + process.stderr


# Interruption


def test_interruption_ends_the_children_and_says_one_line(tmp_path):
    pid_file, report = tmp_path / "pid", tmp_path / "report.json"
    process = subprocess.Popen(
        [*COMMAND, "run", "--target", "fake_targets:hangs", *ONE, "--json", str(report)],
        cwd=HERE,
        env=environment(FAKE_PID_FILE=str(pid_file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker = int(wait_for_text(pid_file))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "iha: error: interrupted\n")
    wait_until_gone(worker)
    assert os.listdir(tmp_path) == ["pid"]


def test_no_worker_outlives_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    assert cli.main(["run", "--target", "fake_targets:leaves_pid", *ONE]) == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


# Help, versions, imports


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from iha_conformance import cli\n"
        "status = cli.main(['run', '--help'])\n"
        "heavy = {'numpy', 'rich', 'torch', 'array_api_compat', 'ml_dtypes', 'iha_core'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert time.monotonic() - start < 5  # 0.1 s on an idle machine
    for option in ("--backend", "--target", "--device", "--dtype", "--family", "--case", "--quick", "--json"):
        assert option in process.stdout


def test_parent_imports_no_framework():
    code = (
        "import sys\n"
        "from iha_conformance import cli\n"
        f"status = cli.main(['run', '--backend', 'array-api:numpy', *{ONE!r}])\n"
        "frameworks = {'torch', 'array_api_strict', 'iha_torch', 'iha_array_api'} & set(sys.modules)\n"
        "sys.exit(f'imported {frameworks}' if frameworks else status)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_version_names_package_and_specification():
    process = iha("--version")
    assert process.returncode == 0
    assert re.fullmatch(rf"iha .+, specification IHA {re.escape(SPEC_VERSION)}\n", process.stdout)


# iha case


def test_case_is_shown_in_full():
    process = iha("case", CASE, "--dtype", "bfloat16")
    assert (process.returncode, process.stderr) == (0, "")
    text = process.stdout
    case = next(case for case in load_cases() if case.id == CASE)
    assert case.why in text
    for requirement in case.requirements:
        assert f"[{requirement}]" in text
    for part in ("quick", "N=7", "causal='virtual'", "(shown: bfloat16)", "q bfloat16 (2, 7, 3, 4)"):
        assert part in text
    mask = [line.strip() for line in text.splitlines() if re.fullmatch(r"\s+[1.]{2}( [1.]{2}){6}", line)]
    assert len(mask) == 14
    assert mask[0] == "1. .. .. .. .. .. .."
    assert mask[3] == "11 11 .. .. .. .. .."
    for stage in ("mixed_q float64 (2, 14, 3, 4)", "lse float64 (2, 3, 14)", "output float64 (2, 7, 3, 4)"):
        assert stage in text


def test_cases_are_listed_a_line_each(tmp_path):
    process = iha("case")
    assert (process.returncode, process.stderr) == (0, "")
    cases = load_cases()
    lines = process.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [case.id for case in cases]
    for case, line in zip(cases, lines, strict=True):
        assert line.endswith(f"  {case.why}")
        assert f"  {', '.join(sorted(case.flags)) or '-'}  " in line

    path = tmp_path / "cases.json"
    process = iha("case", "--family", "mask", "--family", "gain", "--json", str(path))
    assert process.returncode == 0
    some = [case for case in cases if case.family in ("mask", "gain")]
    assert [line.split()[0] for line in process.stdout.splitlines()] == [case.id for case in some]
    listed = json.loads(path.read_text())["cases"]
    assert [(entry["id"], entry["why"]) for entry in listed] == [(case.id, case.why) for case in some]
    assert set(listed[0]) == {"id", "family", "flags", "why", "requirements", "dtypes", "capability"}


def test_case_shows_the_limits_of_its_stages(tmp_path):
    from iha_conformance.corpus import build_inputs
    from iha_conformance.judge import expect

    path = tmp_path / "case.json"
    process = iha("case", CASE, "--dtype", "float16", "--json", str(path))
    case = next(case for case in load_cases() if case.id == CASE)
    limits = expect(case, "float16", build_inputs(case, "float16")).limits
    document = json.loads(path.read_text())
    assert list(document["stages"]) == list(STAGES)
    for stage, limit in limits.limits.items():
        smallest, largest = limit.min(), limit.max()
        assert re.search(rf"  {stage} .*, limit {smallest:.3g} to {largest:.3g}\n", process.stdout)
        expected = {"smallest": smallest, "largest": largest, "exact": False}
        assert document["limits"][stage] == expected
    assert "limits of float16" in process.stdout
    rms = limits.companions[0].limit
    assert f"  rms: limit {rms.min():.3g} to {rms.max():.3g}\n" in process.stdout
    assert document["companions"]["rms"] == {"smallest": rms.min(), "largest": rms.max(), "exact": False}


def test_limits_leave_out_what_is_not_compared_and_name_what_is_exact():
    from iha_conformance.show import Range, describe_case

    assert str(Range.of(np.array([np.inf, np.inf]))) == "nothing to compare"
    assert str(Range.of(np.array([0.5, np.inf, 0.25]))) == "limit 0.25 to 0.5"
    assert str(Range.of(np.array(0.5))) == "limit 0.5"
    dropped = describe_case("keymask/nan", "float32")
    assert np.isfinite(dropped.limits["mixed_k"].largest)
    exact = describe_case("degenerate/no-keys", None)
    assert exact.limits["output"].exact
    assert re.search(r"  output .*, exact: every element is right to the last bit\n", exact.render())
    assert exact.render().count("exact: every") == 1


@pytest.mark.parametrize(
    ("case_id", "text"),
    [
        ("degenerate/no-batch", "Mask: no batch elements\n"),
        ("degenerate/no-queries", "Mask: no queries\n"),
        ("degenerate/no-keys", "Mask: no keys\n"),
    ],
)
def test_empty_masks_say_why(case_id, text):
    from iha_conformance.show import describe_case

    assert text in describe_case(case_id, None).render()


def test_batch_elements_with_masks_of_their_own_are_drawn():
    text = iha("case", "keymask/random").stdout
    assert "batch element 0" in text
    assert "batch element 1" in text


def test_case_as_json(tmp_path):
    path = tmp_path / "case.json"
    process = iha("case", "keymask/nan", "--json", str(path), "--dtype", "float16")
    assert process.returncode == 0
    document = json.loads(path.read_text())
    assert document["id"] == "keymask/nan"
    assert document["config"]["rope_theta"] == 500000.0
    assert "nan" in document["inputs"]["k"]["values"]
    assert "-inf" in document["stages"]["logits"]["values"]
    assert document["inputs"]["q"]["dtype"] == "float16"
    assert document["mask"]["shape"] == [2, 14, 14]
    assert len(document["stages"]["output"]["values"]) == 2 * 7 * 3 * 4


def test_large_arrays_are_cut(tmp_path):
    from iha_conformance.show import MAX_JSON

    path = tmp_path / "case.json"
    process = iha("case", "gain/two-keys", "--json", str(path))
    assert process.returncode == 0
    assert len(process.stdout.splitlines()) < 400
    document = json.loads(path.read_text())
    assert document["inputs"]["q"]["cut"]
    assert len(document["inputs"]["q"]["values"]) == MAX_JSON


def test_case_of_bad_input_says_what_must_be_raised():
    process = iha("case", "invalid/window-zero")
    assert process.returncode == 0
    assert re.search(r"must raise +ValueError that names 'window'", process.stdout)
    assert "Stages" not in process.stdout
    assert "Mask" not in process.stdout


def test_every_case_can_be_shown():
    from iha_conformance.show import describe_case

    for case in load_cases():
        description = describe_case(case.id, None)
        assert case.why in description.render()
        json.dumps(description.as_json(), allow_nan=False)


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_other_signals_end_the_children_too(tmp_path, name, status):
    note = tmp_path / "pid"
    process = subprocess.Popen(
        [
            *COMMAND,
            "run",
            "--target",
            "fake_targets:hangs_with_child",
            *ONE,
            "--json",
            str(tmp_path / "r.json"),
        ],
        cwd=HERE,
        env=environment(FAKE_PID_FILE=str(note)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child = int(wait_for_text(note).split()[0])
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors.splitlines()[-1] == f"iha: error: ended by {name}"
    wait_until_gone(child)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid"], "no temporary report is left"


def test_files_of_the_user_do_not_stand_in_for_the_library(tmp_path):
    for name in ("json", "types", "string", "tomllib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "port.py").write_text((HERE / "fake_targets.py").read_text())
    script = "import sys; from iha_conformance.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", script, "run", "--target", "port:honest", *ONE]
    run = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_complex_results_fail_and_are_no_fault_of_the_kit():
    run = run_fake("gives_complex", *ONE, PYTHONWARNINGS="error")
    assert run.returncode == 1
    assert "expected float32 or wider, got complex128" in run.stdout


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_do_not_fail_a_run(tmp_path, closed):
    report = tmp_path / "report.json"
    redirections = " ".join(f"{number}>&-" for number in closed)
    words = [*COMMAND, "run", "--target", "fake_targets:honest", *ONE, "--json", str(report)]
    command = f"{shlex.join(words)} {redirections}"
    run = subprocess.run(["sh", "-c", command], cwd=HERE, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0
    assert json.loads(report.read_text())["targets"][0]["summary"]["passed"] == 1


def test_a_report_goes_through_a_named_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run_fake("honest", *ONE, "--json", str(pipe)).returncode == 0
        text, _ = reader.communicate(timeout=30)
    assert json.loads(text)["spec_version"] == SPEC_VERSION


def test_an_empty_device_is_no_device():
    assert_one_line_error(iha("run", "--device", "", *ONE), "--device", "got ''")
