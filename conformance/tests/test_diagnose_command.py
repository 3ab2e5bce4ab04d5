"""`iha diagnose` as its users meet it: targets of every kind, exit statuses, one-line errors, reports."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from processes import wait_until_gone

from iha_conformance import cli
from iha_conformance.diagnose import command
from iha_conformance.diagnose.diagnosis import Diagnosis
from iha_conformance.diagnose.dialect import AXES, Dialect
from iha_conformance.errors import CommandError
from iha_conformance.protocol import Job, Result, TargetInfo
from iha_conformance.report.reproduction import diagnose_command
from iha_conformance.targets.messages import Launch
from iha_core import SPEC_VERSION, AttentionConfig
from iha_core.spec_files import spec_path

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "iha_conformance", "diagnose"]
SCHEMA = json.loads(spec_path("schemas/diagnose.schema.json").read_text(encoding="utf-8"))
CANONICAL = f"IHA {SPEC_VERSION}, diagnose: canonical"

PORTS = """
import numpy as np
import iha_core


def honest(inputs, config):
    return iha_core.attention(**inputs, config=iha_core.AttentionConfig.from_dict(config))


def token_causal(inputs, config):
    return honest(inputs, {**config, "causal": "token"})


def transposed(inputs, config):
    return honest({**inputs, "alpha_q": inputs["alpha_q"].transpose(1, 0, 2)}, config)


def one_head_off(inputs, config):
    config = iha_core.AttentionConfig.from_dict(config)
    stages = iha_core.attention_stages(**inputs, config=config)
    out, R = stages["virtual_out"].copy(), inputs["collapse"].astype(float)
    out[:, :, 0] *= 1.5
    B, T, H, e = out.shape
    pseudo = out.reshape(B, T // R.shape[-1], R.shape[-1], H, e)
    output = np.einsum("bnphe,ihp->bnie" if R.ndim == 3 else "bnphe,hp->bnhe", pseudo, R)
    return {**stages, "virtual_out": out, "output": output}


def half_only(inputs, config):
    if inputs["q"].dtype != np.float16:
        raise NotImplementedError("float16 alone")
    return honest(inputs, config)


def raises(inputs, config):
    raise ZeroDivisionError("gr\\u00f6\\u00dfer\\n\\u2265 [red]0[/red]")


def refuses(inputs, config):
    raise NotImplementedError("no kernels today")


def scalar(inputs, config):
    return np.zeros(())


not_callable = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ports in it; what is started imports what this process can."""
    (tmp_path / "ports_of_users.py").write_text(PORTS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["diagnose", *arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that ends with exit status 2."""
    status, out, error = run(capsys, *arguments)
    assert (status, out) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith("iha: error: ")
    return line.removeprefix("iha: error: ")


def written(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA)
    return document


def canned(**changes: Any) -> Diagnosis:
    """A diagnosis, for tests of what becomes of one."""
    asked = Dialect.of(AttentionConfig())
    info = TargetInfo(name="a:b", framework="python", version="3", device="cpu", precision="undeclared")
    fields = {"matched": True, "found": asked, "certain": asked.axes(), "possible": {}} | changes
    return Diagnosis(
        info=info,
        dtype="float32",
        config=AttentionConfig().to_dict(),
        asked=asked,
        P=3,
        per_head=False,
        calls=1,
        **fields,
    )


# What is found


def test_a_canonical_callable(folder, capsys):
    status, out, error = run(capsys, "ports_of_users:honest", "--json", "found.json")
    assert (status, error) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("ports_of_users:honest: python ")
    assert lines[-1] == CANONICAL
    assert "FIX" not in out
    found = written(folder / "found.json")
    assert (found["matched"], found["canonical"], found["ambiguous"]) == (True, True, [])
    assert (found["dtype"], found["fix"], found["ignores"]) == ("float32", None, [])
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [
        "found.json",
        "ports_of_users.py",
    ]


def test_another_dialect_is_found_and_ends_with_0(folder, capsys):
    status, out, _ = run(capsys, "ports_of_users:token_causal", "--dtype", "float64", "--json", "found.json")
    assert status == 0
    assert "DEVIATES causal [MASK-1] [MASK-2] [MASK-3]" in out.splitlines()
    assert out.splitlines()[-1].startswith(f"IHA {SPEC_VERSION}, diagnose: a dialect: deviates in causal")
    found = written(folder / "found.json")
    assert (found["matched"], found["canonical"], found["dtype"]) == (True, False, "float64")
    canonical = Dialect().axes()
    differs = {axis: value for axis, value in found["dialect"].items() if value != canonical[axis]}
    assert differs == {"causal": "token"}
    assert "causal" in found["ignores"]


def test_fix_prints_what_to_do_to_weights(folder, capsys):
    status, out, _ = run(capsys, "ports_of_users:transposed", "--fix", "--json", "found.json")
    assert status == 0
    lines = [line.strip() for line in out.splitlines()]
    assert "alpha_q = alpha_q.transpose(1, 0, 2)" in lines
    assert 'weights["alpha_q"] = weights["alpha_q"].transpose(1, 0, 2)' in lines
    found = written(folder / "found.json")
    assert found["dialect"]["alpha_q_axes"] == "target,source,pseudo"
    assert found["fix"]["complete"]


def test_no_dialect_ends_with_1_and_names_the_stage(folder, capsys):
    status, out, error = run(capsys, "ports_of_users:one_head_off", "--json", "found.json")
    assert (status, error) == (1, "")
    assert any(line.startswith("FIRST BAD STAGE virtual_out [") for line in out.splitlines())
    assert out.splitlines()[-1].startswith(
        f"IHA {SPEC_VERSION}, diagnose: no dialect: first bad stage virtual_out"
    )
    found = written(folder / "found.json")
    assert (found["matched"], found["canonical"]) == (False, False)
    assert found["first_bad_stage"] == found["example"]["stage"] == "virtual_out"
    assert found["nearest"] is not None


def test_the_first_dtype_that_it_takes(folder, capsys):
    status, out, _ = run(capsys, "ports_of_users:half_only", "--json", "found.json")
    assert status == 0
    assert out.splitlines()[-1].startswith(CANONICAL)
    assert written(folder / "found.json")["dtype"] == "float16"


def test_a_backend(folder, capsys):
    status, out, error = run(capsys, "array-api:numpy", "--dtype", "float32", "--json", "found.json")
    assert (status, error) == (0, "")
    assert out.splitlines()[0].startswith("array-api:numpy: numpy ")
    assert out.splitlines()[-1] == CANONICAL
    assert written(folder / "found.json")["target"]["precision"] == "highest"


def test_a_command(folder, capsys):
    words = shlex.join([sys.executable, str(HERE / "exec_port.py")])
    status, out, error = run(capsys, "--exec", words, "--json", "found.json", "--precision", "highest")
    assert (status, error) == (0, "")
    assert out.splitlines()[0] == f"{words}: command unknown, unknown, precision highest"
    assert out.splitlines()[-1] == CANONICAL
    assert written(folder / "found.json")["target"]["name"] == words


def test_what_a_port_prints_stays_out_of_the_diagnosis():
    """As a process of its own, whose standard output is a pipe."""
    done = subprocess.run(
        [*COMMAND, "fake_targets:prints"],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == CANONICAL
    assert "noise" not in done.stdout
    assert "noise" in done.stderr


def test_the_process_of_the_target_ends(tmp_path, monkeypatch, capsys):
    note = tmp_path / "pid"
    monkeypatch.setenv("FAKE_PID_FILE", str(note))
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(command, "diagnose", answered_once)
    assert run(capsys, "fake_targets:leaves_pid")[0] == 0
    wait_until_gone(int(note.read_text()))


def answered_once(target: Any, **_: Any) -> Diagnosis:
    """A diagnosis that makes one call."""
    one = np.ones((1, 1, 1, 2))
    mixing = {name: np.ones((1, 1, 1)) for name in ("alpha_q", "alpha_k", "alpha_v", "collapse")}
    job = Job(
        case_id="diagnose/one",
        dtype="float64",
        inputs={"q": one, "k": one, "v": one, **mixing},
        config=AttentionConfig().to_dict(),
    )
    (result,) = target.evaluate(iter([job]))
    assert result.kind == "arrays", result.reason
    return canned()


# Which target


NOT_A_NAME = "TARGET: expected MODULE:CALLABLE, with names as Python has them, or the name of a backend, got"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected one target, MODULE:CALLABLE, the name of a backend or --exec 'CMD ARGS', got none"),
        (["torch", "--exec", "./port"], "expected one target, got two: 'torch' and --exec './port'"),
        (["trch"], "TARGET: expected one of MODULE:CALLABLE, torch, jax, mlx, "),
        (["trch"], "got 'trch' (nearest: torch)"),
        (["numpy"], "(nearest: array-api:numpy)"),
        (["ports_of_users"], "got 'ports_of_users'"),
        ([""], "TARGET: expected one of MODULE:CALLABLE, "),
        (["array-api"], "expected one namespace, such as array-api:numpy, got 'array-api', which means all"),
        (
            ["array-api:no_such"],
            "TARGET: expected 'array-api:no_such' to be installed, found no module named",
        ),
        (["array-api:"], f"{NOT_A_NAME} 'array-api:'"),
        (["./port.py:attention"], f"{NOT_A_NAME} './port.py:attention'"),
        (["no_such:attention"], "target 'no_such:attention': no module named 'no_such'"),
        (["ports_of_users:no"], "'ports_of_users' has no attribute 'no'"),
        (["ports_of_users:not_callable"], "expected a callable, got int"),
        (["jax:splish"], "target 'jax:splish': "),
        (["--exec", ""], "--exec: expected a command, got ''"),
        (["--exec", "'"], "--exec: expected words as in a shell"),
        (["--exec", "no-such-program"], "no such program: 'no-such-program'"),
        (["ports_of_users:honest", "torch"], "unexpected extra argument (torch)"),
        (["ports_of_users:honest", "--dtype", "float8"], "--dtype: expected one of float64, float32, "),
        (["ports_of_users:honest", "--precision", "low"], "--precision: expected one of "),
        (["ports_of_users:honest", "--device", "cuda"], "--device: expected a backend that it applies to"),
        (["ports_of_users:honest", "--timeout", "nan"], "--timeout: expected a number of seconds, got nan"),
        (["ports_of_users:honest", "--timeout", "0"], "--timeout"),
    ],
)
def test_one_line_says_what_was_expected(arguments, said, folder, capsys):
    assert said in fails(capsys, *arguments)


@pytest.mark.parametrize(
    ("launch", "directory"),
    [
        (Launch(kind="backend", name="array-api:numpy", device="cpu", precision="highest"), False),
        (Launch(kind="backend", name="array-api:numpy"), False),
        (Launch(kind="callable", name="ports_of_users:honest", precision="tf32"), True),
        (Launch(kind="exec", name="sh -c 'exit 1' \u2265"), False),
    ],
)
def test_the_command_that_a_failed_run_names_is_this_one(launch, directory, folder, monkeypatch, capsys):
    started = []

    def record(launch: Launch, *, timeout: float) -> None:
        started.append(launch)
        raise CommandError("recorded")

    monkeypatch.setattr(command, "start", record)
    program, *words = shlex.split(diagnose_command(launch))
    assert program == "iha"
    assert cli.main(words) == 2
    assert "recorded" in capsys.readouterr().err
    (found,) = started
    assert (found.kind, found.name) == (launch.kind, launch.name)
    assert (found.device, found.precision) == (launch.device, launch.precision)
    assert found.directory == (str(folder) if directory else "")


def test_a_namespace_may_be_spelled_with_dashes(monkeypatch):
    monkeypatch.setattr(command, "missing_module", lambda name: None)
    monkeypatch.setattr("iha_conformance.command.missing_module", lambda name: None)
    (launch,) = command._plan("array-api:array-api-strict", None, None, None).launches
    assert (launch.kind, launch.name) == ("backend", "array-api:array_api_strict")
    (launch,) = command._plan("jax:splash", None, None, None).launches
    assert (launch.kind, launch.name) == ("backend", "jax:splash")
    (launch,) = command._plan("torch:splash", None, None, None).launches
    assert (launch.kind, launch.name) == ("callable", "torch:splash")


# Targets that answer nothing


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ZeroDivisionError: gr\u00f6\u00dfer \u2265 [red]0[/red]"),
        ("refuses", "no kernels today"),
        ("scalar", "`output` shape: expected "),
    ],
)
def test_a_target_that_answers_nothing_is_an_error(name, reason, folder, capsys):
    error = fails(capsys, f"ports_of_users:{name}", "--dtype", "float32")
    assert "expected a target that answers some call" in error
    assert reason in error


def test_a_module_that_raises_is_an_error(folder, capsys):
    (folder / "broken_port.py").write_text("raise RuntimeError('no licence')\n")
    assert "raised at import: RuntimeError: no licence" in fails(capsys, "broken_port:attention")


def test_a_command_that_refuses_all_is_an_error(folder, capsys):
    words = shlex.join([sys.executable, str(HERE / "exec_port.py"), "skip_all"])
    assert "no kernels today" in fails(capsys, "--exec", words, "--dtype", "float32")


# Reports


def test_a_report_that_cannot_be_written_is_found_before_the_work(folder, capsys, monkeypatch):
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(command, "start", never)
    error = fails(capsys, "ports_of_users:honest", "--json", "no/such/found.json")
    assert error == "--json: cannot write 'no/such/found.json': No such file or directory"
    assert fails(capsys, "ports_of_users:honest", "--json", ".").endswith("Is a directory")


def test_a_report_is_not_written_over_a_read_only_one(folder, capsys, monkeypatch):
    path = folder / "found.json"
    path.write_text("kept")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # which root may do all the same
    assert fails(capsys, "ports_of_users:honest", "--json", str(path)).endswith("Permission denied")
    assert path.read_text() == "kept"


def test_an_earlier_report_stays_where_there_is_no_diagnosis(folder, capsys):
    path = folder / "found.json"
    path.write_text("kept")
    fails(capsys, "ports_of_users:refuses", "--dtype", "float32", "--json", str(path))
    assert path.read_text() == "kept"
    assert not list(folder.glob(".*"))


def test_a_reader_that_leaves_costs_no_report(folder, capsys, monkeypatch):
    def leave(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(command, "diagnose", lambda target, **_: canned())
    monkeypatch.setattr(command, "print_diagnosis", leave)
    monkeypatch.setattr(cli, "discard_output", lambda stream: None)
    assert run(capsys, "ports_of_users:honest", "--json", "found.json")[0] == 2
    assert written(folder / "found.json")["canonical"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 0),
        ({"ignores": ("window",), "unexplained": ("G < H",)}, 0),
        ({"certain": {}}, 0),
        ({"matched": False, "found": None}, 1),
    ],
)
def test_the_exit_status_says_whether_a_dialect_was_found(changes, status, folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "diagnose", lambda target, **_: canned(**changes))
    found, out, _ = run(capsys, "ports_of_users:honest", "--json", "found.json")
    assert found == status
    assert (out.splitlines()[-1] == CANONICAL) is (changes in ({}, {"certain": {}}))
    assert written(folder / "found.json")["matched"] is (status == 0)


# Help and progress


def test_help_says_what_the_exit_status_means(capsys):
    assert cli.main(["diagnose", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 if a dialect was found, canonical or not, 1 if none explains" in text
    assert f"{len(AXES)} axes" in text
    assert cli.main(["--help"]) == 0
    assert "iha diagnose port:attention" in capsys.readouterr().out


def test_calls_are_counted_as_they_are_answered():
    class Echo:
        info, capabilities, takes_all, closed = "info", frozenset({"invalid"}), False, False

        def evaluate(self, jobs):
            for job in jobs:
                yield Result(case_id=job.case_id, dtype=job.dtype, kind="refused")

        def close(self):
            self.closed = True

    counts: list[tuple[int, int]] = []
    echo = Echo()
    counted = command._Counted(echo, lambda done, total: counts.append((done, total)))
    jobs = [Job(case_id=f"diagnose/{i}", dtype="float32", inputs={}, config={}) for i in range(3)]
    assert [result.case_id for result in counted.evaluate(iter(jobs[:2]))] == ["diagnose/0", "diagnose/1"]
    list(counted.evaluate(jobs[2:]))
    assert counts == [(1, 2), (2, 2), (3, 3)]
    assert (counted.info, counted.capabilities, counted.takes_all) == ("info", echo.capabilities, False)
    counted.close()
    assert echo.closed
