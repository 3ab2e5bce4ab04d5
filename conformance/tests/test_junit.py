"""The JUnit report: the counts of the JSON one, valid XML whatever a target says, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shlex
from xml.etree import ElementTree

import pytest
from test_report import MIXED, SHA, make_report, make_row

from iha_conformance import cli
from iha_conformance.report.junit import as_junit
from iha_conformance.report.reproduction import diagnose_command, reproduce
from iha_conformance.runner import TargetReport
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import Launch

NUMPY = Launch(kind="backend", name="array-api:numpy")


def written(*reports: TargetReport, **filters) -> bytes:
    launches = [NUMPY] * len(reports)
    return as_junit(reports, launches, Filters(**filters), spec_version="1.0", corpus_sha256=SHA)


def parsed(*reports: TargetReport, **filters) -> ElementTree.Element:
    return ElementTree.fromstring(written(*reports, **filters))


def test_a_suite_for_each_target_and_a_case_for_each_row():
    root = parsed(MIXED, make_report(make_row(), name="torch"), quick=True)
    assert (root.tag, root.get("name"), root.get("tests")) == ("testsuites", "IHA 1.0", "7")
    assert [suite.get("name") for suite in root] == ["array-api:numpy", "torch"]
    counts = {"tests": "6", "failures": "1", "errors": "0", "skipped": "3", "time": "3.000000"}
    assert {name: root[0].get(name) for name in counts} == counts
    assert [case.get("name") for case in root[0].iter("testcase")] == [
        "core/one[float32]",
        "core/two[float32]",
        "core/one[bfloat16]",
        "core/two[bfloat16]",
        "invalid/x[float32]",
        "core/three[float32]",
    ]
    assert {case.get("classname") for case in root[1].iter("testcase")} == {"torch.core"}
    assert {case.get("time") for case in root.iter("testcase")} == {"0.500000"}
    properties = {entry.get("name"): entry.get("value") for entry in root[0].find("properties")}
    assert properties == {
        "spec_version": "1.0",
        "corpus_sha256": SHA,
        "framework": "numpy",
        "version": "2.0",
        "device": "cpu",
        "precision": "highest",
        "filters": "--quick",
    }
    assert root[0][0].tag == "properties", "readers with a schema want them first"
    assert parsed(MIXED).find(".//property[@name='filters']").get("value") == "none"


def test_a_failure_says_all_there_is_to_know():
    (failure,) = parsed(MIXED).iter("failure")
    assert failure.get("message") == "`lse`[b=0]: too far"
    assert failure.get("type") == "wrong result"
    assert failure.text.splitlines() == [
        "reason: `lse`[b=0]: too far",
        "first wrong stage: lse",
        "worst ratio: infinite",
        "requirements: [MIX-1] [MIX-2]",
        "why the case exists: iha case core/two --dtype float32",
        "to run it again: iha run --backend array-api:numpy --case core/two --dtype float32",
    ]
    crashed = make_row("failed", failure="crashed", ratio=None, reason=None)
    (failure,) = parsed(make_report(crashed)).iter("failure")
    assert (failure.get("type"), failure.get("message")) == ("crashed", "no reason given")
    assert "first wrong stage: none\nworst ratio: none\n" in failure.text
    (failure,) = parsed(make_report(make_row("failed", ratio=12.3456789))).iter("failure")
    assert "worst ratio: 12.3457\n" in failure.text


def test_what_was_not_executed_is_skipped_with_its_reason():
    skipped = [entry.get("message") for entry in parsed(MIXED).iter("skipped")]
    assert skipped == ["refused: numpy has no bfloat16"] * 2 + ["not_applicable: no capability"]


def test_a_remark_on_a_passed_case_is_kept():
    (remark,) = parsed(MIXED).iter("system-out")
    assert remark.text == "second run differs in bits"


ODD = [
    *map(chr, range(0x20)),
    "\x7f\x85\x9f",
    "]]>",
    "<failure/>&amp;&#0;'\"",
    "\ud800",
    "\udfff\ud800",
    "\ufffe\uffff",
    "größer ≥ \U0001f600",
    "\x1b[31mred\x1b[0m",
]


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_whatever_a_target_says_is_valid_xml(text):
    report = make_report(
        make_row("failed", reason=f"a{text}b", stage=text),
        make_row("refused", reason=text),
        make_row(reason=text),
        name=f"m{text}:f",
    )
    root = parsed(report)
    assert len(list(root.iter("testcase"))) == 3
    assert [len(list(root.iter(tag))) for tag in ("failure", "skipped", "system-out")] == [1, 1, 1]


def test_what_xml_cannot_hold_is_escaped_and_all_else_is_kept():
    reason = "\x00 \x1b[0m \ud800 \uffff größer \t ≥ \U0001f600 \x85"
    root = parsed(make_report(make_row("failed", reason=reason)))
    message = root.find(".//failure").get("message")
    assert message == "\\x00 \\x1b[0m \\ud800 \\uffff größer \t ≥ \U0001f600 \x85"


def test_equal_reports_are_equal_bytes():
    assert written(MIXED, MIXED) == written(MIXED, MIXED)
    assert written(MIXED).startswith(b"<?xml version='1.0' encoding='utf-8'?>\n<testsuites ")


def test_times_are_plain_numbers():
    root = parsed(make_report(make_row(seconds=1e-9), make_row(seconds=12345.678)))
    assert [float(case.get("time")) for case in root.iter("testcase")] == [0.0, 12345.678]


# The command that runs a case again


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (NUMPY, "--backend array-api:numpy"),
        (Launch(kind="backend", name="torch", device="cuda:1"), "--backend torch --device cuda:1"),
        (
            Launch(kind="backend", name="torch", device="cuda", precision="tf32"),
            "--backend torch --device cuda --precision tf32",
        ),
        (Launch(kind="callable", name="port:fn", directory="/x"), "--target port:fn"),
        (Launch(kind="backend", name="torch", device="a b"), "--backend torch --device 'a b'"),
    ],
)
def test_the_command_has_what_the_target_was_launched_with(launch, expected):
    assert reproduce(launch, "core/one", "float16") == f"iha run {expected} --case core/one --dtype float16"


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (NUMPY, "array-api:numpy"),
        (
            Launch(kind="backend", name="torch", device="cuda", precision="tf32"),
            "torch --device cuda --precision tf32",
        ),
        (Launch(kind="callable", name="port:fn", precision="bf16x1"), "port:fn --precision bf16x1"),
        (Launch(kind="exec", name="./a port", directory="/x"), "--exec './a port'"),
    ],
)
def test_the_command_that_diagnoses_a_target(launch, expected):
    assert diagnose_command(launch) == f"iha diagnose {expected}"


def test_files_are_not_diagnosed():
    assert diagnose_command(Launch(kind="files", name="out", directory="vectors")) is None


def test_the_command_runs_that_case_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(os.path.dirname(__file__))
    report = tmp_path / "report.json"
    words = shlex.split(
        reproduce(Launch(kind="callable", name="fake_targets:honest"), "mask/probe", "float16")
    )
    words[words.index("mask/probe")] = "core/paper"
    assert cli.main([*words[1:], "--json", str(report)]) == 0
    (target,) = json.loads(report.read_text())["targets"]
    assert [(row["id"], row["dtype"]) for row in target["results"]] == [("core/paper", "float16")]


# iha run --junit


def run(*arguments: str) -> int:
    return cli.main(["run", "--case", "core/paper", "--case", "invalid/window-zero", *arguments])


def test_counts_agree_with_the_json_report(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(os.path.dirname(__file__))
    as_json, as_xml = tmp_path / "report.json", tmp_path / "report.xml"
    names = ("modest", "refuses_half", "crashes", "raises", "exits", "off_by_one", "flickers")
    targets = [word for name in names for word in ("--target", f"fake_targets:{name}")]
    assert run(*targets, "--json", str(as_json), "--junit", str(as_xml)) == 1
    document = json.loads(as_json.read_text())
    root = ElementTree.parse(as_xml).getroot()
    kinds = {}
    for entry, suite in zip(document["targets"], root, strict=True):
        statuses = [row["status"] for row in entry["results"]]
        assert suite.get("name") == entry["target"]["name"]
        assert int(suite.get("tests")) == len(list(suite.iter("testcase"))) == len(statuses)
        assert int(suite.get("failures")) == len(list(suite.iter("failure"))) == entry["summary"]["failed"]
        skipped = len(list(suite.iter("skipped")))
        assert int(suite.get("skipped")) == skipped == len(statuses) - entry["summary"]["executed"]
        assert math.isclose(
            float(suite.get("time")), sum(row["seconds"] for row in entry["results"]), abs_tol=1e-5
        )
        kinds[entry["target"]["name"]] = {entry.get("type") for entry in suite.iter("failure")}
    assert kinds == {
        "fake_targets:modest": set(),
        "fake_targets:refuses_half": set(),
        "fake_targets:crashes": {"crashed"},
        "fake_targets:raises": {"raised"},
        "fake_targets:exits": {"crashed"},
        "fake_targets:off_by_one": {"wrong result"},
        "fake_targets:flickers": set(),
    }
    assert sorted(os.listdir(tmp_path)) == ["report.json", "report.xml"]


def test_filters_and_quick_are_stated(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(os.path.dirname(__file__))
    path = tmp_path / "report.xml"
    arguments = ["--target", "fake_targets:modest", "--quick", "--family", "core", "--dtype", "float32"]
    assert cli.main(["run", *arguments, "--junit", str(path)]) == 0
    root = ElementTree.parse(path).getroot()
    stated = root.find(".//property[@name='filters']").get("value")
    assert stated == "--dtype float32 --family core --quick"
    assert {case.get("classname") for case in root.iter("testcase")} == {"fake_targets:modest.core"}


@pytest.mark.parametrize("second", ["report", "./report", "link", "folder/../report"])
def test_one_file_for_two_reports_is_an_error(tmp_path, monkeypatch, capfd, second):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("report")
    assert run("--json", "report", "--junit", second) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"iha: error: --junit: expected another file than that of --json, got {second!r}\n"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]


def test_an_unwritable_file_is_found_out_at_once(tmp_path, capfd):
    as_json = tmp_path / "report.json"
    assert run("--json", str(as_json), "--junit", "/no/such/folder/x.xml") == 2
    assert capfd.readouterr().err.startswith("iha: error: --junit: cannot write '/no/such/folder/x.xml'")
    assert os.listdir(tmp_path) == []


def test_a_run_that_ends_early_leaves_the_old_report(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(os.path.dirname(__file__))
    path = tmp_path / "report.xml"
    path.write_text("old")
    assert run("--target", "fake_targets:absent", "--junit", str(path)) == 2
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.xml"]


def test_everything_refused_is_still_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(os.path.dirname(__file__))
    path = tmp_path / "report.xml"
    assert run("--target", "fake_targets:refuses", "--junit", str(path)) == 2
    root = ElementTree.parse(path).getroot()
    assert root.get("tests") == root.get("skipped") != "0"
