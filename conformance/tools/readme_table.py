"""Write the support table of README.md from the JSON report of a run.

python conformance/tools/readme_table.py REPORT.json README.md
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from pages import replace

from iha_conformance.protocol import DTYPES

BEGIN = "<!-- support table: made by `make readme`, do not edit -->"
END = "<!-- end of support table -->"


def table(report: dict[str, Any]) -> str:
    """The table in Markdown: one row a target, one column a dtype."""
    lines = [
        f"IHA {report['spec_version']}, corpus `{report['corpus_sha256'][:12]}`: cases passed, worst ratio.",
        "",
        "| target | version, device | " + " | ".join(DTYPES) + " | kernels |",
        "|---" * (len(DTYPES) + 3) + "|",
    ]
    for entry in report["targets"]:
        target = entry["target"]
        cells = [_cell([row for row in entry["results"] if row["dtype"] == dtype]) for dtype in DTYPES]
        kernels = Counter(row["kernel"] for row in entry["results"] if row["kernel"])
        named = ", ".join(f"{kernel} {count}" for kernel, count in kernels.most_common())
        about = f"{target['framework']} {target['version']}, {target['device']}"
        lines.append("| " + " | ".join([f"`{target['name']}`", about, *cells, named]) + " |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]]) -> str:
    executed = [row for row in rows if row["status"] in ("passed", "failed")]
    if not executed:
        reasons = sorted({row["reason"] for row in rows if row["reason"]})
        return reasons[0] if reasons else "not run"
    passed = sum(row["status"] == "passed" for row in executed)
    ratios = [row["ratio"] for row in executed if row["ratio"] is not None or row["status"] == "failed"]
    worst = max((math.inf if ratio is None else ratio for ratio in ratios), default=0.0)
    refused = len([row for row in rows if row["status"] in ("refused", "skipped")])
    return f"{passed} of {len(executed)}, {worst:.2f}" + (f", {refused} skipped" if refused else "")


def main() -> None:
    """Replace what stands between the markers."""
    report, readme = Path(sys.argv[1]), Path(sys.argv[2])
    replace(readme, BEGIN, END, table(json.loads(report.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
