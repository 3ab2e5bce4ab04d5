"""`iha self-test` from the command line: what it prints and writes, and that it can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from processes import wait_until_gone

from iha_conformance import cli
from iha_conformance.power import command
from iha_conformance.power.must_bind import Bound
from iha_conformance.power.mutants import MUTANTS
from iha_conformance.power.outcome import Measured, Outcome
from iha_conformance.report import power as report

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "spec" / "schemas" / "self-test.schema.json").read_text(encoding="utf-8"))


def outcome(**changes: Any) -> Outcome:
    """An outcome that speaks for the suite, in one dtype."""
    honest = {
        f"honest {i}": {"bfloat16": Measured(ratios={"core": 0.4}, digests={"core/paper": bytes([i])})}
        for i in range(12)
    }
    mutants = {
        name: {"bfloat16": Measured(ratios={"core": 0.2, "mask": 40.0})}
        for name, mutant in MUTANTS.items()
        if "bfloat16" in mutant.dtypes
    }
    bound = {"bfloat16": Bound(("q[head 0 of 1]",), ())}
    good = Outcome(dtypes=("bfloat16",), honest=honest, mutants=mutants, must_bind=bound)
    return dataclasses.replace(good, **changes)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the command find an outcome, without running anything."""

    def find(result: Outcome) -> None:
        monkeypatch.setattr(command, "self_test", lambda dtypes, on_done: result)
        monkeypatch.setattr(command, "_with_backends", lambda result: (result, ["NOTE a backend"]))

    return find


def test_an_outcome_without_faults_passes(
    found: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found(outcome())
    path = tmp_path / "out.json"
    assert cli.main(["self-test", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("self-test: PASSED")
    assert "NOTE a backend" in shown
    row = next(line for line in shown.splitlines() if line.startswith("alpha_q [target, source, pseudo]"))
    assert row.split()[-3:] == [".", "1", "40"]  # core, mask, the largest
    written = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(written, SCHEMA)
    assert written["dtypes"]["bfloat16"] == {
        "honest_max": 0.4,
        "mutant_min": 40.0,
        "separation": 100.0,
        "honest": 12,
        "mutants": sum("bfloat16" in mutant.dtypes for mutant in MUTANTS.values()),
        "survivors": [],
    }
    assert written["must_bind"] == {"checked": 1, "unbound": []}
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        jsonschema.validate({**written, "more": 1}, SCHEMA)


def weaker(name: str, ratio: float) -> dict[str, dict[str, Measured]]:
    mutants = dict(outcome().mutants)
    mutants[name] = {"bfloat16": Measured(ratios={"core": ratio})}
    return mutants


def noisier(ratio: float) -> dict[str, dict[str, Measured]]:
    honest = dict(outcome().honest)
    honest["honest 3"] = {
        "bfloat16": dataclasses.replace(honest["honest 3"]["bfloat16"], ratios={"core": ratio})
    }
    return honest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mutants": weaker("pseudo-major", 1.9)},
            "bfloat16: mutant 'pseudo-major' survives, 1.9 of a limit",
        ),
        ({"honest": noisier(0.51)}, "bfloat16: honest 'honest 3' reaches 0.51 of a limit, over 0.5"),
        ({"honest": noisier(float("nan"))}, "bfloat16: honest 'honest 3' reaches nan"),
        ({"mutants": weaker("pseudo-major", float("nan"))}, "bfloat16: mutant 'pseudo-major' survives"),
        (
            {"honest": noisier(0.5), "mutants": weaker("pseudo-major", 2.0 - 1e-9)},
            "bfloat16: separation 4, expected at least 4",
        ),
        (
            {"honest": dict(list(outcome().honest.items())[1:])},
            "bfloat16: expected at least 12 honest implementations with different bits, found 11",
        ),
        ({"mutants": dict(list(outcome().mutants.items())[:79])}, "expected at least 80 mutants, found 79"),
        (
            {"must_bind": {"bfloat16": Bound(("scale None",), ("scale None",))}},
            "bfloat16: scale None moves no output by 10 limits",
        ),
    ],
)
def test_whatever_speaks_against_the_suite_fails(
    changes: dict[str, Any], said: str, found: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found(outcome(**changes))
    path = tmp_path / "out.json"
    assert cli.main(["self-test", "--json", str(path)]) == 1
    shown = capsys.readouterr().out
    assert f"FAULT {said}" in shown
    assert "FAILED" in shown.splitlines()[-1]
    written = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(written, SCHEMA)
    assert any(fault.startswith(said) for fault in written["faults"])


def test_equal_bits_count_once(found: Any) -> None:
    honest = dict(outcome().honest)
    honest["honest 3"] = honest["honest 4"]
    assert outcome(honest=honest).distinct("bfloat16") == 11


def test_a_ratio_beyond_any_number_is_null() -> None:
    mutants = weaker("pseudo-major", float("inf"))
    written = report.as_json(outcome(mutants=mutants), spec_version="1.1", corpus_sha256="0" * 64)
    jsonschema.validate(written, SCHEMA)
    entry = next(entry for entry in written["mutants"] if entry["name"] == "pseudo-major")
    assert entry["dtypes"]["bfloat16"]["largest"] is None


def test_an_unknown_dtype_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["self-test", "--dtype", "float8"]) == 2
    assert (
        "--dtype: expected one of float64, float32, float16, bfloat16, got 'float8'"
        in capsys.readouterr().err
    )


def test_without_any_framework_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(*_: object) -> None:
        raise command.CommandError("expected an installed backend or a --target, found none: all absent")

    monkeypatch.setattr(command, "plan_targets", none_installed)
    result, notes = command._with_backends(outcome())
    assert result == outcome()
    assert notes == ["NOTE backends: expected an installed backend or a --target, found none: all absent"]


def test_backends_are_among_the_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"torch": {"bfloat16": Measured(ratios={"core": 0.6}, digests={"core/paper": b"other"})}}
    monkeypatch.setattr(command, "measure_targets", lambda targets, dtypes: measured)
    monkeypatch.setattr(command, "ProcessTarget", lambda launch, timeout: NothingToClose())
    result, _ = command._with_backends(outcome())
    assert result.distinct("bfloat16") == 13
    assert [fault for fault in result.faults() if "torch (quick cases)" in fault]


class NothingToClose:
    def close(self) -> None:
        pass


def begin_self_test() -> tuple[subprocess.Popen[str], list[int]]:
    """A self-test whose processes are at work, and their ids."""
    arguments = [sys.executable, "-m", "iha_conformance", "self-test", "--dtype", "float32"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        # The first is multiprocessing's own helper.
        workers = [int(child) for child in children.read_text().split()[1:]]
        if workers and all(b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers):
            time.sleep(1.0)
            return process, workers
        time.sleep(0.05)
    process.kill()
    raise AssertionError("no process was started")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes")
def test_a_process_ended_from_outside_is_one_line() -> None:
    process, workers = begin_self_test()
    os.kill(workers[0], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == (
        "iha: error: fault of the kit: a process of the self-test was ended from outside (out of memory?)\n"
    )
    for pid in workers:
        wait_until_gone(pid)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes")
def test_processes_end_with_their_parent() -> None:
    process, workers = begin_self_test()
    process.kill()
    process.communicate(timeout=60)
    for pid in workers:
        wait_until_gone(pid, seconds=30)


@pytest.mark.requirement("NUM-4", "NUM-5", "NUM-6")
def test_the_real_self_test_passes_in_one_dtype(tmp_path: Path) -> None:
    """All dtypes are `make self-test`; bfloat16 is where faults are hardest to see."""
    path = tmp_path / "out.json"
    script = (
        "import sys; from iha_conformance.power import command;"
        "command._with_backends = lambda outcome: (outcome, []);"
        "from iha_conformance.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["self-test", "--dtype", "bfloat16", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(written, SCHEMA)
    of = written["dtypes"]["bfloat16"]
    assert of["survivors"] == written["must_bind"]["unbound"] == written["faults"] == []
    assert of["honest"] >= 12
    assert of["mutants"] >= 80
    assert of["separation"] >= 4
    for entry in written["mutants"]:
        families = set(entry["dtypes"]["bfloat16"]["families"])
        assert families == {"gradient"} or len(families) >= 10, entry["name"]
