"""Reports: JSON by its schema and whole or not at all; the terminal's one readable everywhere."""

from __future__ import annotations

import copy
import io
import json
import os
import stat
import threading
from pathlib import Path

import jsonschema
import pytest

from iha_conformance.errors import CommandError
from iha_conformance.protocol import TargetInfo
from iha_conformance.report.json_report import as_json, open_json
from iha_conformance.report.terminal import describe_failure, print_report
from iha_conformance.runner import Row, TargetReport
from iha_conformance.selection import Filters
from iha_core.spec_files import spec_path

SCHEMA = json.loads(spec_path("schemas/report.schema.json").read_text())
SHA = "0" * 64


def make_row(status: str = "passed", **fields) -> Row:
    defaults = {
        "id": "core/one",
        "family": "core",
        "dtype": "float32",
        "status": status,
        "ratio": 0.25,
        "stage": None,
        "kernel": "composed",
        "reason": None if status == "passed" else "because",
        "seconds": 0.5,
        "requirements": ("MIX-1", "MIX-2"),
        "repeatable": True,
    }
    return Row(**defaults | fields)


def make_report(*rows: Row, name: str = "array-api:numpy") -> TargetReport:
    info = TargetInfo(name=name, framework="numpy", version="2.0", device="cpu", precision="default")
    return TargetReport(info=info, rows=list(rows))


MIXED = make_report(
    make_row(),
    make_row("failed", id="core/two", ratio=float("inf"), stage="lse", reason="`lse`[b=0]: too far"),
    make_row("refused", dtype="bfloat16", ratio=None, kernel=None, reason="numpy has no bfloat16"),
    make_row("refused", id="core/two", dtype="bfloat16", ratio=None, reason="numpy has no bfloat16"),
    make_row("not_applicable", id="invalid/x", ratio=None, kernel=None, reason="no capability"),
    make_row(id="core/three", repeatable=False, reason="second run differs in bits"),
)


def to_json(*reports: TargetReport, **filters):
    return as_json(reports, Filters(**filters), spec_version="1.0", corpus_sha256=SHA)


# JSON


def test_json_has_the_agreed_form():
    document = to_json(MIXED)
    assert list(document) == ["spec_version", "corpus_sha256", "filters", "targets"]
    assert document["spec_version"] == "1.0"
    assert document["corpus_sha256"] == SHA
    assert document["filters"] is None
    (entry,) = document["targets"]
    assert entry["target"] == {
        "name": "array-api:numpy",
        "framework": "numpy",
        "version": "2.0",
        "device": "cpu",
        "precision": "default",
    }
    assert entry["summary"] == {"expected": 5, "executed": 3, "passed": 2, "failed": 1, "skipped": 2}
    assert entry["results"][0] == {
        "id": "core/one",
        "family": "core",
        "dtype": "float32",
        "status": "passed",
        "ratio": 0.25,
        "stage": None,
        "kernel": "composed",
        "reason": None,
        "seconds": 0.5,
    }
    assert entry["results"][1]["ratio"] is None  # JSON has no infinity
    assert entry["results"][2]["kernel"] is None


def test_json_states_filters():
    document = to_json(MIXED, dtype=("float32",), quick=True)
    assert document["filters"] == {"dtype": ["float32"], "family": None, "case": None, "quick": True}
    jsonschema.validate(document, SCHEMA)


def test_json_fits_its_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(to_json(MIXED, case=("core/one",)), SCHEMA)
    jsonschema.validate(to_json(MIXED, make_report(make_row())), SCHEMA)


def _objects(value, path=()):
    """Paths of all objects in a document."""
    if isinstance(value, dict):
        yield path
        for key, item in value.items():
            yield from _objects(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value[:1]):
            yield from _objects(item, (*path, index))


def _at(document, path):
    for step in path:
        document = document[step]
    return document


def test_schema_is_closed_and_every_key_is_required():
    document = to_json(MIXED, quick=True)
    paths = list(_objects(document))
    assert len(paths) == 6
    for path in paths:
        more = copy.deepcopy(document)
        _at(more, path)["surprise"] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(more, SCHEMA)
        for key in _at(document, path):
            less = copy.deepcopy(document)
            del _at(less, path)[key]
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(less, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec_version",), "one"),
        (("corpus_sha256",), "abc"),
        (("targets",), []),
        (("targets", 0, "target", "device"), None),
        (("targets", 0, "summary", "failed"), -1),
        (("targets", 0, "results", 0, "status"), "ok"),
        (("targets", 0, "results", 0, "dtype"), "int8"),
        (("targets", 0, "results", 0, "ratio"), "inf"),
        (("targets", 0, "results", 0, "stage"), "output"),
        (("targets", 0, "results", 1, "reason"), None),
        (("targets", 0, "results", 0, "seconds"), -1),
        (("filters", "dtype"), ["int8"]),
    ],
)
def test_schema_refuses_wrong_values(path, value):
    document = to_json(MIXED, quick=True)
    _at(document, path[:-1])[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


# Files


def test_file_appears_at_the_end_and_alone(tmp_path):
    path = tmp_path / "report.json"
    with open_json(str(path)) as file:
        assert not path.exists()
        file.write({"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_whoever_reads_the_old_file_reads_it_to_its_end(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with path.open() as reader, open_json(str(path)) as file:
        file.write({})
        assert reader.read() == "old"
    assert json.loads(path.read_text()) == {}


def test_file_stays_as_it_was_if_nothing_is_written(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), open_json(str(path)):
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_file_keeps_its_mode_and_a_link_stays_a_link(tmp_path):
    path, link = tmp_path / "report.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with open_json(str(link)) as file:
        file.write({})
    assert link.is_symlink()
    assert json.loads(path.read_text()) == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_new_file_has_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    with open_json(str(tmp_path / "new")) as file:
        file.write({})
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("name", ["", "absent/report.json", "file/report.json"])
def test_unwritable_paths_are_found_out_at_once(tmp_path, name):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / name)
    with pytest.raises(CommandError, match=r"^--json: cannot write ") as caught, open_json(path):
        raise AssertionError("not reached")
    assert path in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_found_out_at_once(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CommandError, match="Permission denied"), open_json(str(tmp_path / "x.json")):
            raise AssertionError("not reached")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("denied", ["folder", "file"])
def test_denied_permission_is_found_out_at_once(tmp_path, monkeypatch, denied):
    path = tmp_path / "x.json"
    if denied == "file":
        path.write_text("old")
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:

        def mkstemp(**arguments):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.mkstemp", mkstemp)
    with pytest.raises(CommandError, match="Permission denied"), open_json(str(path)):
        raise AssertionError("not reached")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_and_devices_are_written_to_and_not_replaced(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Held open for both, so that no end waits for the other.
    keeper = os.open(fifo, os.O_RDWR)
    try:
        with open_json(str(fifo)) as file:
            file.write({"a": 1})
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(os.read(keeper, 100)))
        reader.start()
        reader.join(10)
    finally:
        os.close(keeper)
    assert json.loads(received[0]) == {"a": 1}
    assert fifo.is_fifo()
    with open_json(os.devnull) as file:
        file.write({})
    assert Path(os.devnull).is_char_device()


# Terminal


def printed(*reports: TargetReport, encoding: str = "utf-8", **arguments) -> str:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    filters = arguments.pop("filters", Filters())
    print_report(stream, reports, filters, spec_version="1.0", **arguments)
    stream.flush()
    text = buffer.getvalue().decode(encoding)
    stream.close()
    return text


def test_terminal_report_names_everything():
    lines = printed(MIXED, absent=["SKIPPED torch: not installed"]).splitlines()
    row = next(line for line in lines if "float32" in line)
    cells = [cell.strip() for cell in row.strip("\u2502").split("\u2502")]
    assert cells == [
        "array-api:numpy (numpy 2.0, cpu, default)",
        "float32",
        "2",
        "1",
        "0",
        "1",
        "inf",
        "2.00",
        "composed 3",
    ]
    assert (
        "FAILED array-api:numpy: core/two, float32, stage lse, ratio inf: `lse`[b=0]: too far [MIX-1] [MIX-2]"
    ) in lines
    assert ("NOTE array-api:numpy: second run differs in bits in 1 case: core/three float32") in lines
    assert "REFUSED array-api:numpy: 2 cases: numpy has no bfloat16" in lines
    assert "NOT APPLICABLE array-api:numpy: 1 case: no capability" in lines
    assert "SKIPPED torch: not installed" in lines
    assert lines[-1] == (
        "IHA 1.0, 1 target: 3 of 5 cases executed, 2 passed, 1 failed, 2 skipped, 1 not applicable:"
        " FAILED by array-api:numpy"
    )


def test_verdict_says_what_a_run_was_limited_to():
    report = make_report(make_row())
    assert printed(report).splitlines()[-1].endswith(": PASSED")
    limited = printed(report, filters=Filters(dtype=("float32",), quick=True))
    assert limited.splitlines()[-1].endswith(" (filtered: --dtype float32 --quick): PASSED")
    assert printed(report, fault="nothing").splitlines()[-1].endswith(": NO VERDICT")


def test_piped_report_has_no_escapes_and_no_broken_lines():
    long = make_row("failed", id="core/" + "x" * 300, reason="[red]y[/red] :smile: " * 30)
    text = printed(make_report(long, name="module:" + "n" * 100))
    assert "\x1b" not in text
    assert "n" * 100 in text
    line = next(line for line in text.splitlines() if line.startswith("FAILED"))
    assert "x" * 300 in line
    assert "[red]y[/red] :smile: " * 30 in line
    assert line.endswith("[MIX-1] [MIX-2]")


def test_names_are_not_taken_for_markup():
    assert "[red]x[/red] :smile: (" in printed(make_report(make_row(), name="[red]x[/red] :smile:"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_table_uses_what_the_encoding_has(encoding):
    text = printed(MIXED, encoding=encoding)
    assert text.isascii()
    assert "| float32" in text


def test_missing_stream_is_no_fault():
    print_report(None, [MIXED], Filters(), spec_version="1.0")


def test_failure_line_leaves_out_what_is_not_known():
    row = make_row("failed", ratio=None, requirements=(), reason="crashed: gone")
    assert describe_failure(row) == "core/one, float32: crashed: gone"
