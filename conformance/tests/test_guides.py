"""The guides in docs/: their examples run, and print what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iha_conformance.diagnose.dialect import AXES
from iha_core.spec_files import spec_path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "pytorch": ("torch",),
    "jax": ("jax", "flax", "optax"),
    "mlx": ("mlx.core",),
    "array-api": ("array_api_compat",),
    "conversion": ("torch", "transformers"),
    "initialisation": ("torch",),
}
"""Modules that the examples of a guide import."""


@pytest.mark.parametrize("guide", NEEDS)
def test_examples_run_and_print_what_the_guide_says(guide: str, tmp_path: Path) -> None:
    for module in NEEDS[guide]:
        pytest.importorskip(module)
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
    assert pages == {*NEEDS, "diagnose", "power"}
    assert pages == set(re.findall(r"\(docs/([a-z-]+)\.md\)", readme))


# The guide to diagnoses


DIAGNOSE = ROOT / "docs" / "diagnose.md"


def test_the_guide_to_diagnoses_shows_what_its_commands_print() -> None:
    script = ROOT / "conformance" / "tools" / "porting_page.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check", str(DIAGNOSE)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, (
        done.stdout + done.stderr + "it has changed: run conformance/tools/porting_page.py docs/diagnose.md"
    )


def test_the_guide_to_diagnoses_has_all_axes() -> None:
    """By name, values and requirements, in the order of the kit."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \| ((?:\[[A-Z]+-\d+\] ?)+) \| [^|]+ \|$",
        DIAGNOSE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [name for name, _, _ in rows] == list(AXES)
    for name, values, requirements in rows:
        axis = AXES[name]
        assert tuple(re.findall(r"\[([A-Z]+-\d+)\]", requirements)) == axis.requirements, name
        shown = re.findall(r"`([^`]+)`", values)
        if "other orders" in values:
            assert shown == [axis.values[0]], name
            assert len(axis.values) == 6
        else:
            assert shown == [str(value) for value in axis.values], name
            assert bool(axis.values) or values.startswith("a number")


def test_the_guide_to_diagnoses_names_every_key_of_its_json() -> None:
    schema = json.loads(spec_path("schemas/diagnose.schema.json").read_text(encoding="utf-8"))
    section = DIAGNOSE.read_text(encoding="utf-8").partition("## JSON")[2].partition("\n## ")[0]
    assert set(schema["required"]) <= set(re.findall(r"`(\w+)`", section))
