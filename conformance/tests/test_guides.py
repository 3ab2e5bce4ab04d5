"""The guides in docs/: their examples run, and print what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"pytorch": "torch", "jax": "jax", "mlx": "mlx.core", "array-api": "array_api_compat"}


@pytest.mark.parametrize("guide", NEEDS)
def test_examples_run_and_print_what_the_guide_says(guide: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[guide])
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    script = "\n".join(body for language, body in blocks if language == "python")
    shown = "".join(body for language, body in blocks if language == "text")
    assert shown
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_every_backend_has_a_guide_that_the_readme_links() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*NEEDS, "power"}
    assert pages == set(re.findall(r"\(docs/([a-z-]+)\.md\)", readme))
