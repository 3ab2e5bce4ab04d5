"""Commands as targets: whatever they do, each case has one verdict, and nothing of them is left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
from exec_port import raw
from processes import wait_for_text, wait_until_gone

from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.errors import CommandError
from iha_conformance.protocol import TargetUnavailable
from iha_conformance.report.reproduction import reproduce
from iha_conformance.runner import LOOKAHEAD, make_job, run_suite
from iha_conformance.selection import Filters, select
from iha_conformance.targets.exec import ExecTarget, split_command
from iha_conformance.targets.messages import Launch
from iha_core import STAGES

HERE = Path(__file__).parent
PORT = HERE / "exec_port.py"
COMMAND = [sys.executable, "-m", "iha_conformance"]
CASE = "core/paper"
FILE = "core.paper.bfloat16.safetensors"  # the first in the order of names
TWO = ("--case", CASE, "--dtype", "float32", "--dtype", "bfloat16")


@pytest.fixture(autouse=True)
def importable(monkeypatch, tmp_path):
    """Ports import what this process can, and temporary folders are easy to look over."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def command(*modes: str) -> str:
    return shlex.join([sys.executable, str(PORT), *modes])


def target(*modes: str, timeout: float = 30.0, precision: str | None = None) -> ExecTarget:
    return ExecTarget(Launch(kind="exec", name=command(*modes), precision=precision), timeout=timeout)


def pairs(**filters):
    return select(load_cases(), Filters(**{"case": (CASE,), "dtype": ("bfloat16", "float32")} | filters))


def results(port: ExecTarget, **filters):
    """Results by dtype."""
    jobs = [make_job(case, dtype, build_inputs(case, dtype)) for case, dtype in pairs(**filters)]
    try:
        found = list(port.evaluate(iter(jobs)))
    finally:
        port.close()
    assert os.listdir(tempfile.gettempdir()) == [], "both folders are gone"
    assert [(result.case_id, result.dtype) for result in found] == [(job.case_id, job.dtype) for job in jobs]
    return {result.dtype: result for result in found}


def rows(port: ExecTarget, **filters):
    try:
        (report,) = run_suite([port], pairs(**filters))
    finally:
        port.close()
    return {row.dtype: row for row in report.rows}


def iha(*arguments: str, cwd: Path = HERE, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=dict(os.environ) | changes,
        input="not for the port",
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        check=False,
    )


# Ports that end well


@pytest.mark.requirement("EXC-1", "EXC-2", "EXC-3", "EXC-4")
def test_an_honest_command_passes_in_every_dtype_and_stage():
    found = results(target(), dtype=(), case=(CASE, "cross/per-row", "keymask/nan", "degenerate/no-batch"))
    assert set(found) == {"float64", "float32", "float16", "bfloat16"}
    for result in found.values():
        assert (result.kind, set(result.arrays)) == ("arrays", set(STAGES)), result.reason
        assert (result.repeatable, result.kernel) == (None, None)
        assert result.seconds > 0
    some = (CASE, "core/linear", "cross/per-row", "keymask/nan", "degenerate/no-batch", "degenerate/no-keys")
    judged = run_suite([port := target()], pairs(case=some, dtype=()))
    port.close()
    assert {row.status for row in judged[0].rows} == {"passed"}


def test_what_is_known_of_a_command():
    port = target(precision="tf32")
    assert (port.info.name, port.info.framework) == (command(), "command")
    assert (port.info.version, port.info.device, port.info.precision) == ("unknown", "unknown", "tf32")
    assert target().info.precision == "undeclared"
    assert port.capabilities == frozenset()


def test_cases_that_need_a_capability_do_not_apply():
    found = results(target(), case=(CASE, "invalid/window-zero"), dtype=("float32",), family=())
    assert found["float32"].kind == "not_applicable"
    (only,) = results(target("nothing"), case=("invalid/window-zero",), dtype=("float32",)).values()
    assert only.kind == "not_applicable"


@pytest.mark.requirement("EXC-5")
def test_a_skip_refuses_with_its_reason():
    found = results(target("first_skipped"))
    assert (found["bfloat16"].kind, found["bfloat16"].reason) == (
        "refused",
        "no kernels today \u2265 [red]two[/red]",
    )
    assert found["float32"].kind == "arrays"


def test_what_a_command_prints_goes_to_standard_error():
    run = iha("run", "--exec", command("print_much"), *TWO)
    assert run.returncode == 0, run.stdout
    assert "xxx" not in run.stdout
    assert run.stderr.count("x" * 10000) == 400


# Ports that write something else


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("first_missing", "failed", f"missing: expected the file {FILE}, found none"),
        ("first_nan", "failed", "got nan"),
        ("first_truncated", "failed", f"unreadable: {FILE}: expected "),
        ("first_empty", "failed", f"unreadable: {FILE}: expected 8 bytes with the length"),
        ("first_symlink", "failed", "expected a regular file, found a symbolic link"),
        ("first_good_symlink", "failed", "expected a regular file, found a symbolic link"),
        ("first_fifo", "failed", "expected a regular file, found a named pipe"),
        ("first_folder", "failed", "expected a regular file, found a folder"),
        ("first_huge_shape", "failed", "`output` shape: expected at most "),
        ("first_sparse", "failed", "bytes, found 1099511627776"),
        (
            "first_misspelt",
            "failed",
            f"found none, but '{FILE.replace('paper', 'papre')}', which belongs to no",
        ),
        ("first_unknown_stage", "failed", "unknown stage 'virtual_outs'"),
        ("first_no_output", "failed", "missing: no `output` among the results"),
        ("first_integers", "failed", "`output` dtype: expected bfloat16 or wider, got int64"),
        (
            "first_skipped_without_reason",
            "failed",
            "core.paper.bfloat16.skip: expected the reason in one line",
        ),
        ("first_skipped_at_length", "failed", "core.paper.bfloat16.skip: expected at most 4096 bytes"),
        ("first_both", "failed", f"expected either it or {FILE}, found both"),
        ("first_skipped", "refused", "no kernels today"),
    ],
)
def test_a_bad_file_fails_its_case_and_no_other(mode, status, reason):
    start = time.monotonic()
    found = rows(target(mode))
    assert time.monotonic() - start < 20
    assert (found["bfloat16"].status, found["float32"].status) == (status, "passed")
    assert reason in found["bfloat16"].reason
    assert "\n" not in found["bfloat16"].reason


def test_a_file_without_a_case_fails_the_run():
    found = rows(target("extra"))
    assert found["bfloat16"].status == "failed"  # the last of two in the order of the suite
    assert (
        found["bfloat16"].reason
        == "unreadable: expected files of these cases alone, found 'core.other.float32.skip'"
    )
    assert found["float32"].status == "passed"


def test_a_command_may_take_its_folder_away():
    found = rows(target("lose_all"))
    assert {row.failure for row in found.values()} == {"missing"}


def test_a_folder_that_cannot_be_listed_is_never_a_pass(monkeypatch):
    """A port may take the right to list it away; who runs the tests may have all rights."""
    real = os.scandir

    def scandir(path="."):
        if not isinstance(path, int) and os.path.basename(path) == "out":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = rows(target("extra"))
    assert {row.status for row in found.values()} == {"failed"}
    assert {row.reason for row in found.values()} == {
        "unreadable: cannot list the folder of results: Permission denied"
    }


# Ports that do not end well


def test_a_crash_fails_what_is_missing():
    found = rows(target("first_missing", "crash"))
    assert (found["bfloat16"].failure, found["float32"].status) == ("crashed", "passed")
    assert found["bfloat16"].reason == "crashed: the process was ended by SIGSEGV: last words"


def test_a_failure_quotes_the_line_that_names_its_file():
    """What a command says of other files last is not about this one."""
    found = rows(target("nothing", "complain"))
    ending = "crashed: the process ended with exit status 1: cannot read core.paper."
    assert [row.reason for row in found.values()] == [
        f"{ending}{dtype}.safetensors: expected more" for dtype in found
    ]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("crash", "crashed: the process was ended by SIGSEGV: last words"),
        ("fail", "crashed: the process ended with exit status 1: could not clean up"),
    ],
)
def test_an_exit_status_is_never_a_pass(mode, reason):
    found = rows(target(mode))
    assert (found["float32"].status, found["bfloat16"].status) == ("passed", "failed")
    assert found["bfloat16"].reason == reason


def test_an_exit_status_is_no_refusal_either():
    found = rows(target("first_skipped", "fail"))
    assert found["bfloat16"].reason == "crashed: the process ended with exit status 1: could not clean up"


def test_a_command_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    start = time.monotonic()
    found = rows(target("first_missing", "hang", timeout=2))
    assert time.monotonic() - start < 20
    assert (found["bfloat16"].failure, found["float32"].status) == ("hung", "passed")
    assert found["bfloat16"].reason == "hung: no new file with a result within 2 s"
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_to_hang_after_the_last_result_is_a_failure(tmp_path, monkeypatch):
    found = rows(target("hang", timeout=2))
    assert (found["bfloat16"].failure, found["float32"].status) == ("hung", "passed")


def test_the_time_limit_is_between_two_results(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time, pathlib\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    time.sleep(1)\n"
        "    (pathlib.Path(sys.argv[2]) / path.name).with_suffix('.skip').write_text('slow')\n"
    )
    port = ExecTarget(Launch(kind="exec", name=shlex.join([sys.executable, str(script)])), timeout=2)
    assert [row.status for row in rows(port, dtype=()).values()] == [
        "refused"
    ] * 4  # in more than four seconds


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes of this system have no groups")
def test_what_a_command_left_running_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    start = time.monotonic()
    found = rows(target("leave_child"))
    assert {row.status for row in found.values()} == {"passed"}
    assert time.monotonic() - start < 20
    wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_signals_end_the_command_and_remove_its_folders(tmp_path, monkeypatch, name, status):
    monkeypatch.setenv("FAKE_PID_FILE", str(tmp_path / "pid"))
    report = tmp_path / "report.json"
    words = [*COMMAND, "run", "--exec", command("hang"), *TWO, "--json", str(report)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child = int(wait_for_text(tmp_path / "pid"))
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors.splitlines()[-1].startswith("iha: error: ")
    wait_until_gone(child)
    assert os.listdir(tmp_path / "tmp") == []
    assert not report.exists()


def test_folders_are_removed_as_soon_as_the_results_are_read():
    port = target("skip_all")
    case, dtype = pairs()[0]
    assert [result.kind for result in port.evaluate([make_job(case, dtype, build_inputs(case, dtype))])] == [
        "refused"
    ]
    assert os.listdir(tempfile.gettempdir()) == []


def test_a_target_that_is_closed_while_it_is_given_its_jobs_runs_nothing(tmp_path):
    port = target("hang")

    def jobs():
        for case, dtype in pairs():
            yield make_job(case, dtype, build_inputs(case, dtype))
            port.close()

    assert list(port.evaluate(jobs())) == []
    assert list(port.evaluate(jobs())) == []
    assert os.listdir(tempfile.gettempdir()) == []


# In a run


def test_a_command_gets_all_jobs_beside_a_target_that_is_slow():
    """One that takes all jobs first would wait for ever if it had to keep pace."""

    class Slow:
        capabilities = frozenset()
        takes_all = False

        def __init__(self, info):
            self.info = info

        def evaluate(self, jobs):
            from iha_conformance.protocol import Result

            for job in jobs:
                yield Result(case_id=job.case_id, dtype=job.dtype, kind="refused", reason="no")

        def close(self):
            pass

    many = [
        pair for pair in select(load_cases(), Filters(quick=True)) if pair[0].family not in ("gain", "tiles")
    ]
    assert len(many) > LOOKAHEAD
    port = target("skip_all")
    done = threading.Event()
    reports = []

    def run():
        reports.extend(run_suite([Slow(port.info), port], many))
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60)
    port.close()
    assert [len(report.rows) for report in reports] == [len(many)] * 2


def test_a_run_of_several_targets(tmp_path):
    report = tmp_path / "report.json"
    words = ["--exec", command(), "--exec", command("first_nan"), "--target", "fake_targets:honest"]
    run = iha("run", *words, *TWO, "--json", str(report), "--junit", str(tmp_path / "junit.xml"))
    assert run.returncode == 1, run.stderr
    entries = json.loads(report.read_text())["targets"]
    assert [entry["target"]["name"] for entry in entries] == [
        "fake_targets:honest",
        command(),
        command("first_nan"),
    ]
    assert [entry["summary"]["passed"] for entry in entries] == [2, 2, 1]
    again = f"iha run --exec {shlex.quote(command('first_nan'))} --case {CASE} --dtype bfloat16"
    assert again in (tmp_path / "junit.xml").read_text()


def test_a_command_that_executes_nothing_is_an_error_beside_others():
    run = iha("run", "--exec", command("skip_all"), "--target", "fake_targets:honest", *TWO)
    assert run.returncode == 2
    assert "expected at least one executed case, got 0" in run.stderr


def test_reproduction_has_the_declared_precision():
    launch = Launch(kind="exec", name="./a port", precision="tf32")
    assert reproduce(launch, CASE, "float32") == (
        "iha run --exec './a port' --precision tf32 --case core/paper --dtype float32"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "--exec: expected a command, got ''"),
        ("''", "--exec: expected a command"),
        ("'a", "--exec: expected words as in a shell"),
        ("no-such-program x", "no such program: 'no-such-program'"),
        ("./exec_port.py", "not executable"),
        ("sh -c 'exit 127'", "cannot run"),
        ("env no-such-program", "cannot run"),
        ("./no-format", "cannot run './no-format'"),
    ],
)
def test_what_cannot_be_run_is_an_error_in_one_line(name, reason, tmp_path):
    (tmp_path / "exec_port.py").touch(mode=0o644)
    (tmp_path / "no-format").write_bytes(b"\x7fELF")
    (tmp_path / "no-format").chmod(0o755)
    run = iha("run", "--exec", name, *TWO, cwd=tmp_path)
    assert run.returncode == 2
    assert reason in run.stderr
    assert run.stderr.splitlines()[-1].startswith("iha: error: ")
    assert run.stdout == ""
    assert os.listdir(tmp_path / "tmp") == []


def test_commands_are_split_without_a_shell(tmp_path, monkeypatch):
    assert split_command("sh -c 'a  b' $HOME *") == ["sh", "-c", "a  b", "$HOME", "*"]
    with pytest.raises(CommandError):
        split_command(" ")
    with pytest.raises(TargetUnavailable):
        split_command("/no/such/file")


def test_a_device_needs_a_backend():
    run = iha("run", "--exec", "sh", "--device", "cuda", *TWO)
    assert run.returncode == 2
    assert "--device" in run.stderr


def test_a_command_runs_in_the_working_directory_by_names_of_any_kind(tmp_path):
    folder = tmp_path / "gr\u00f6\u00dfe und raum"
    folder.mkdir()
    port = folder / "der port"
    port.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(PORT)])} "$@"\n')
    port.chmod(0o755)
    (folder / "tmp dir").mkdir()
    narrow = {"LC_ALL": "C", "LANG": "C", "TMPDIR": str(folder / "tmp dir")}
    run = iha("run", "--exec", "'./der port'", *TWO, cwd=folder, **narrow)
    assert run.returncode == 0, run.stdout + run.stderr
    assert os.listdir(folder / "tmp dir") == []


def test_inputs_that_cannot_be_written_are_an_error_in_one_line(monkeypatch):
    def full(job):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("iha_conformance.targets.exec.input_file", full)
    with pytest.raises(CommandError, match=r"--exec: cannot write inputs in .*: No space left on device"):
        results(target())
    assert os.listdir(tempfile.gettempdir()) == []


@pytest.mark.parametrize("mode", ["first_missing", "first_empty", "first_truncated", "crash"])
def test_a_full_disk_is_no_fault_of_the_port(monkeypatch, mode):
    free = types.SimpleNamespace(free=2**20 - 1)
    monkeypatch.setattr("iha_conformance.targets.exec.shutil.disk_usage", lambda path: free)
    assert {result.kind for result in results(target()).values()} == {"arrays"}, "it had room enough"
    with pytest.raises(CommandError, match=r"--exec: expected at least 1048576 bytes free .*, found 1048575"):
        results(target(mode))
    with pytest.raises(CommandError, match="bytes free"):
        rows(target(mode))
    assert os.listdir(tempfile.gettempdir()) == []
    free.free = 2**20
    assert results(target(mode))["float32"].kind == "arrays"


def test_what_is_free_may_be_unknown(monkeypatch):
    def unknown(path):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("iha_conformance.targets.exec.shutil.disk_usage", unknown)
    assert results(target("first_missing"))["bfloat16"].failure == "missing"


def test_a_folder_that_cannot_be_removed_is_said(monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(tempfile.TemporaryDirectory, "cleanup", lambda self: self._finalizer.detach())
        port = target("skip_all")
        case, dtype = pairs()[0]
        list(port.evaluate([make_job(case, dtype, build_inputs(case, dtype))]))
        port.close()
    (left,) = os.listdir(tempfile.gettempdir())
    path = os.path.join(tempfile.gettempdir(), left)
    assert capfd.readouterr().err == f"iha: --exec: cannot remove {path!r}\n"


def test_headers_of_the_ports_are_well_formed():
    """The raw writer of the faulty ports writes what the library reads."""
    from safetensors import deserialize

    assert deserialize(raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)))
