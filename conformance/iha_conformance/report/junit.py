"""The report as JUnit XML, in the dialect that Jenkins, GitLab and GitHub's readers share.

Everything that counts as failed in the JSON report is a <failure>, a target that crashed included, so
that the counts of both agree; <error> would say that the kit failed, and then there is no report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from iha_conformance.report.reproduction import reproduce
from iha_conformance.runner import Row, Summary, TargetReport
from iha_conformance.selection import Filters
from iha_conformance.targets.messages import Launch

WRONG_RESULT = "wrong result"
"""Type of a failure of a target that gave a result; otherwise it is the kind of its failure."""

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write, not even escaped: control characters, surrogates, U+FFFE, U+FFFF."""


def as_junit(
    reports: Sequence[TargetReport],
    launches: Sequence[Launch],
    filters: Filters,
    *,
    spec_version: str,
    corpus_sha256: str,
) -> bytes:
    """The report as a file: a suite for each target, a case for each row, in the order of the run.

    Args:
        reports: one for each target.
        launches: how each target was launched, in the same order.
        filters: what the run was limited to.
        spec_version: version of the specification.
        corpus_sha256: hash of the corpus.
    """
    rows = [row for report in reports for row in report.rows]
    root = ElementTree.Element("testsuites", {"name": f"IHA {spec_version}", **_counts(rows)})
    for report, launch in zip(reports, launches, strict=True):
        info = report.info
        suite = ElementTree.SubElement(root, "testsuite", {"name": info.name, **_counts(report.rows)})
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in {
            "spec_version": spec_version,
            "corpus_sha256": corpus_sha256,
            "framework": info.framework,
            "version": info.version,
            "device": info.device,
            "precision": info.precision,
            "filters": str(filters) or "none",
        }.items():
            ElementTree.SubElement(properties, "property", {"name": name, "value": value})
        for row in report.rows:
            _add_case(suite, info.name, row, launch)
    for element in root.iter():
        _clean(element)
    ElementTree.indent(root, " ")
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _counts(rows: Sequence[Row]) -> dict[str, str]:
    count = Summary.of(rows)
    return {
        "tests": str(len(rows)),
        "failures": str(count.failed),
        "errors": "0",
        "skipped": str(count.skipped + count.not_applicable),
        "time": _seconds(sum(row.seconds for row in rows)),
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.6f}"


def _add_case(suite: ElementTree.Element, target: str, row: Row, launch: Launch) -> None:
    names = {"classname": f"{target}.{row.family}", "name": f"{row.id}[{row.dtype}]"}
    case = ElementTree.SubElement(suite, "testcase", {**names, "time": _seconds(row.seconds)})
    if row.status == "failed":
        kind = {"message": row.reason or "no reason given", "type": row.failure or WRONG_RESULT}
        ElementTree.SubElement(case, "failure", kind).text = _details(row, launch)
    elif row.status != "passed":
        reason = f"{row.status}: {row.reason or 'no reason given'}"
        ElementTree.SubElement(case, "skipped", {"message": reason})
    elif row.reason:
        ElementTree.SubElement(case, "system-out").text = row.reason


def _details(row: Row, launch: Launch) -> str:
    """What a failure's reader wants to know, a line each."""
    ratio = "none" if row.ratio is None else f"{row.ratio:.6g}" if math.isfinite(row.ratio) else "infinite"
    lines = {
        "reason": row.reason or "no reason given",
        "first wrong stage": row.stage or "none",
        "worst ratio": ratio,
        "requirements": " ".join(f"[{name}]" for name in row.requirements),
        "why the case exists": f"iha case {row.id} --dtype {row.dtype}",
        "to run it again": reproduce(launch, row.id, row.dtype),
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items())


def _clean(element: ElementTree.Element) -> None:
    """Escape what XML cannot hold, wherever a target's words may have got."""
    if element.text:
        element.text = _FORBIDDEN.sub(_escape, element.text)
    for name, value in element.items():
        element.set(name, _FORBIDDEN.sub(_escape, value))


def _escape(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
