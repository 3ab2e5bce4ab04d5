"""Reports: JSON by its schema and whole or not at all; the terminal's one readable everywhere."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import re
import stat
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from rich.text import Text

from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.errors import CommandError
from iha_conformance.judge import compare, expect, judge
from iha_conformance.protocol import Result, TargetInfo
from iha_conformance.report.json_report import as_json, open_json
from iha_conformance.report.terminal import _fold, describe_failure, print_report
from iha_conformance.runner import Row, TargetReport
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import Launch
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
    info = TargetInfo(name=name, framework="numpy", version="2.0", device="cpu", precision="highest")
    return TargetReport(info=info, rows=list(rows))


MIXED = make_report(
    make_row(),
    make_row("failed", id="core/two", ratio=float("inf"), stage="lse", reason="`lse`[b=0]: too far"),
    make_row("refused", dtype="bfloat16", ratio=None, kernel=None, reason="numpy has no bfloat16"),
    make_row("refused", id="core/two", dtype="bfloat16", ratio=None, reason="numpy has no bfloat16"),
    make_row(
        "not_applicable",
        id="invalid/x",
        ratio=None,
        kernel=None,
        reason="no capability",
        capability="invalid",
    ),
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
        "precision": "highest",
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


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def table_of(text: str) -> list[str]:
    """The lines of the table, without what follows it."""
    lines = text.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("worst ratio:"))]


def test_terminal_report_names_everything():
    lines = printed(MIXED, absent=["SKIPPED torch: not installed"]).splitlines()
    assert [cells(line) for line in lines[:7]] == [
        ["worst"],
        ["target", "dtype", "passed", "failed", "skipped", "n/a", "ratio", "seconds", "kernels"],
        [lines[2].strip()],
        ["array-api:numpy", "float32", "2", "1", "0", "1", "inf", "2.00", "composed 3"],
        ["2.0, cpu", "bfloat16", "0", "0", "2", "0", "-", "1.00", "composed 1"],
        ["precision highest"],
        cells(lines[6]),
    ]
    assert set(lines[2].strip()) == {"-"}
    assert lines[6:8] == [
        "worst ratio: largest error / its limit; 1 is the limit, a conforming result stays at or below 0.5",
        "seconds: the target's own time; n/a: needs a capability it does not declare, 'invalid' (1 case)",
    ]
    assert (
        "FAILED array-api:numpy: core/two, float32: first wrong stage lse: `lse`[b=0]: too far"
        " [MIX-1] [MIX-2]"
    ) in lines
    assert ("NOTE array-api:numpy: second run differs in bits in 1 case: core/three float32") in lines
    assert "REFUSED array-api:numpy: 2 cases: numpy has no bfloat16" in lines
    assert "SKIPPED torch: not installed" in lines
    assert lines[-1] == (
        "IHA 1.0, 1 target: 3 of 5 cases executed, 2 passed, 1 failed, 2 skipped, 1 not applicable:"
        " FAILED by array-api:numpy"
    )


def test_columns_without_content_are_left_out():
    text = printed(make_report(make_row(kernel=None), name="port:fn"))
    assert cells(text.splitlines()[1]) == ["target", "dtype", "passed", "failed", "ratio", "seconds"]
    assert "n/a" not in text
    assert ["numpy 2.0, cpu"] in [cells(line) for line in table_of(text)]


def busy_report(name: str, kernel: str) -> TargetReport:
    """As wide as reports get: everything happened, in every dtype, hundreds of times."""
    rows = [
        make_row(status, dtype=dtype, kernel=kernel, ratio=1.76e13, seconds=12.0)
        for dtype in ("float64", "float32", "float16", "bfloat16")
        for status in ("passed", "failed", "refused", "not_applicable")
        for _ in range(250)
    ]
    rows += [dataclasses.replace(row, kernel="composed") for row in rows[:3]]
    return make_report(*rows, name=name)


def test_table_fits_100_columns():
    reports = [
        busy_report("torch", "scaled_dot_product_attention"),
        busy_report("array-api:array_api_strict", "composed"),
    ]
    table = table_of(printed(*reports))
    assert max(map(len, table)) <= 100
    text = "".join(cells(line)[-1] for line in table[3:6])
    assert "composed 3" in text
    some = printed(make_report(*(make_row(kernel="scaled_dot_product_attention") for _ in range(60))))
    assert "scaled_dot_product_attention 60" in some  # whole where there is room
    both = make_report(make_row(), make_row(kernel="flash_attention"))
    assert "composed 1, flash_attention 1" in printed(both)


@pytest.mark.parametrize("width", range(12, 32))
def test_kernels_are_folded_between_words_and_nothing_is_lost(width):
    names = "composed 12\nscaled_dot_product_attention 345"
    lines = _fold(Text(names), width).plain.split("\n")
    assert all(len(line) <= width for line in lines)
    assert lines[0] == "composed 12"
    assert "".join(lines[1:]).replace(" ", "") == "scaled_dot_product_attention345"


def test_counts_in_the_legend_are_of_cases():
    row = make_row("not_applicable", id="invalid/x", ratio=None, capability="invalid")
    rows = [row, dataclasses.replace(row, dtype="float64"), dataclasses.replace(row, id="decode/x")]
    rows[2] = dataclasses.replace(rows[2], capability="decode")
    text = printed(make_report(make_row(), *rows), make_report(make_row(), *rows, name="other:fn"))
    assert "n/a: needs a capability it does not declare, 'invalid' (1 case), 'decode' (1 case)" in text


def test_a_case_has_one_line_for_all_its_dtypes():
    requirements = ("MIX-1", "MIX-2", "MIX-3", "MIX-4")
    rows = [
        make_row(
            "failed", dtype=dtype, stage=stage, reason=f"`{stage}` off", ratio=3.0, requirements=requirements
        )
        for dtype, stage in [("float64", "lse"), ("float32", "output"), ("bfloat16", "output")]
    ]
    rows.insert(1, make_row("failed", id="core/two", ratio=None, reason="hung: no result"))
    rows.insert(2, make_row(dtype="float16"))
    failed = [line for line in printed(make_report(*rows)).splitlines() if line.startswith("FAILED")]
    assert failed == [
        "FAILED array-api:numpy: core/one, float64, float32, bfloat16: in float64: first wrong stage lse:"
        " `lse` off [MIX-1] [MIX-2] [MIX-3] ...",
        "FAILED array-api:numpy: core/two, float32: hung: no result [MIX-1] [MIX-2]",
    ]


@pytest.mark.parametrize(("number", "more"), [(25, None), (26, "1 more case"), (90, "65 more cases")])
def test_a_systematic_fault_is_cut_short(number, more):
    rows = [
        make_row("failed", id=f"core/{i}", dtype=dtype)
        for i in range(number)
        for dtype in ("float64", "float32")
    ]
    lines = printed(make_report(*rows), make_report(*rows, name="port:fn")).splitlines()
    for name in ("array-api:numpy", "port:fn"):
        failed = [line for line in lines if line.startswith(f"FAILED {name}: ")]
        assert [line.split(",")[0] for line in failed[:25]] == [f"FAILED {name}: core/{i}" for i in range(25)]
        cut = [] if more is None else [f"FAILED {name}: {more} failed, too; --json FILE has them all"]
        assert failed[25:] == cut


def test_failure_tells_what_is_wrong_first_and_what_is_wrong_most():
    """The ratio in the table is that of the worst stage, the text that of the first wrong one."""
    case = next(case for case in load_cases() if case.id == "core/paper")
    expectation = expect(case, "float64", build_inputs(case, "float64"))
    limits = expectation.limits.limits

    def reason(**errors: float) -> str | None:
        arrays = {name: array.copy() for name, array in expectation.stages.items()}
        for stage, share in errors.items():
            arrays[stage][0, 0, 0, 0] += share * limits[stage][0, 0, 0, 0]
        result = Result(case_id=case.id, dtype="float64", kind="arrays", arrays=arrays)
        return judge(case, "float64", expectation, result).reason

    both = reason(mixed_q=19.3, virtual_out=44.0)
    assert both.startswith("`mixed_q`[b=0, t=0, h=0, d=0]: expected ")
    assert re.search(
        r"is 19(\.\d+)? x its limit .*; the worst ratio, 44(\.0)?, is that of `virtual_out`$", both
    )
    assert reason(mixed_q=44.0, virtual_out=19.3).endswith("elements are wrong)")
    assert reason(mixed_q=2.0, virtual_out=0.5).endswith("elements are wrong)")
    assert reason(mixed_q=2.0, virtual_out=np.inf).endswith("; `virtual_out` is wrong beyond any number")


@pytest.mark.parametrize(
    ("exact", "error", "text"),
    [
        (-0.0248211, 1e-8, "expected -0.0248211, got -0.02482109"),
        (-0.024821, 1e-17, "expected -0.024821, got -0.02482099999999999"),
        (1.0, 2.0**-52, "expected 1, got 1.0000000000000002"),
        (1.0, 0.5, "expected 1, got 1.5"),
        (0.1234567, 1e-3, "expected 0.123457, got 0.124457"),
        (1e300, 1e299, "expected 1e+300, got 1.1e+300"),
        (0.0, 5e-324, "expected 0, got 4.94066e-324"),
    ],
)
def test_numbers_that_differ_are_printed_so(exact, error, text):
    expected, found = np.full((1, 1, 1, 1), exact), np.full((1, 1, 1, 1), exact + error)
    reason = compare("output", found, expected, np.zeros_like(expected), storage="float64").reason
    assert f": {text};" in reason


def test_verdict_says_what_a_run_was_limited_to():
    report = make_report(make_row())
    assert printed(report).splitlines()[-1].endswith(": PASSED")
    limited = printed(report, filters=Filters(dtype=("float32",), quick=True))
    assert limited.splitlines()[-1].endswith(" (filtered: --dtype float32 --quick): PASSED")
    assert printed(report, fault="nothing").splitlines()[-1].endswith(": NO VERDICT")


def test_verdict_says_what_was_not_executed():
    skips = [make_row(status, id=f"core/{status}", ratio=None) for status in ("skipped", "refused")]
    other = make_row("not_applicable", ratio=None, capability="invalid")
    passed = printed(make_report(make_row(), *skips, other)).splitlines()[-1]
    assert passed.endswith(" 2 skipped, 1 not applicable: PASSED what was executed; 2 skipped")
    assert printed(make_report(make_row(), other)).splitlines()[-1].endswith(": PASSED")


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
    assert "[red]x[/red] :smile:  float32" in printed(make_report(make_row(), name="[red]x[/red] :smile:"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_table_uses_what_the_encoding_has(encoding):
    text = printed(MIXED, encoding=encoding)
    assert text.isascii()
    assert "array-api:numpy  float32" in text.replace("numpy    ", "numpy  ")


def test_missing_stream_is_no_fault():
    print_report(None, [MIXED], Filters(), spec_version="1.0")


def test_failure_line_leaves_out_what_is_not_known():
    row = make_row("failed", ratio=None, requirements=(), reason="crashed: gone")
    assert describe_failure([row]) == "core/one, float32: crashed: gone"


def test_failures_are_counted_by_family_before_they_are_listed():
    rows = [make_row("failed", id="mask/one", family="mask", stage="output", reason="off", ratio=2.0)]
    rows += [make_row("passed", id="mask/two", family="mask")]
    rows += [make_row("failed", id="rope/one", family="rope", stage="output", reason="off", ratio=2.0)]
    lines = printed(make_report(*rows)).splitlines()
    families = [line for line in lines if line.startswith("FAMILIES ")]
    assert families == ["FAMILIES array-api:numpy: failed mask 1 of 2, rope 1 of 1"]


@pytest.mark.parametrize(("stage", "hinted"), [("output", True), ("mixed_q", False), (None, False)])
def test_stages_are_asked_for_where_only_the_output_is_known_to_be_wrong(stage, hinted):
    ratio = None if stage is None else 2.0
    report = make_report(make_row("failed", id="mask/one", stage=stage, reason="off", ratio=ratio))
    assert any(line.startswith("HINT ") for line in printed(report).splitlines()) == hinted


# What diagnoses a failure

DIAGNOSIS = "To see what it computes instead: "
PORT = Launch(kind="callable", name="port:fn")


def wrong(**fields) -> Row:
    return make_row("failed", **{"stage": "logits", "reason": "off", "ratio": 2.0} | fields)


def test_last_line_says_what_diagnoses_all_that_failed():
    reports = [make_report(*rows) for rows in ([make_row()], [wrong()], [wrong(), make_row(id="core/two")])]
    launches = [
        Launch(kind="backend", name="jax"),
        Launch(kind="backend", name="torch", device="cuda", precision="tf32"),
        Launch(kind="exec", name="./a port"),
    ]
    lines = printed(*reports, launches=launches).splitlines()
    assert lines[-1] == (
        f"{DIAGNOSIS}iha diagnose torch --device cuda --precision tf32; iha diagnose --exec './a port'"
    )
    assert lines[-2].endswith("FAILED by array-api:numpy, array-api:numpy")


@pytest.mark.parametrize(
    "rows",
    [
        [make_row()],
        [make_row("failed", ratio=None, failure="crashed", reason="crashed: gone")],
        [make_row("failed", ratio=None, failure="raised", reason="raised: ValueError")],
        [make_row("failed", id="invalid/x", ratio=None, capability="invalid", reason="accepted")],
        # right in another dtype: rounding, not another function
        [wrong(dtype="bfloat16"), make_row(dtype="float32")],
        [make_row("refused", ratio=None)],
    ],
    ids=["passed", "crashed", "raised", "invalid", "rounding", "refused"],
)
def test_what_no_diagnosis_explains_has_no_such_line(rows):
    assert DIAGNOSIS not in printed(make_report(*rows), launches=[PORT])


def test_a_refused_dtype_does_not_speak_against_a_dialect():
    rows = [wrong(dtype="float32"), make_row("refused", dtype="bfloat16", ratio=None)]
    assert printed(make_report(*rows), launches=[PORT]).splitlines()[-1] == DIAGNOSIS + "iha diagnose port:fn"


def test_files_have_no_diagnosis():
    launch = Launch(kind="files", name="out", directory="vectors")
    assert (
        printed(make_report(wrong()), launches=[launch])
        .splitlines()[-1]
        .endswith("FAILED by array-api:numpy")
    )
