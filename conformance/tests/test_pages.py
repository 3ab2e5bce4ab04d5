"""Pages of the documentation whose tables and outputs come from commands say what the commands say now."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from iha_conformance.corpus import corpus_sha256
from iha_conformance.power.mutants import MUTANTS
from iha_core import SPEC_VERSION

ROOT = Path(__file__).resolve().parents[2]


def test_the_power_tables_are_of_this_corpus() -> None:
    text = (ROOT / "docs" / "power.md").read_text(encoding="utf-8")
    assert f"IHA {SPEC_VERSION}, corpus `{corpus_sha256()[:12]}`" in text, "it has changed: run `make power`"
    for name, mutant in MUTANTS.items():
        assert f"| {name} | {', '.join(mutant.requirements)} | " in text, "run `make power`"


@pytest.mark.skipif(
    shutil.which("node") is None, reason="the page runs a port on node, which is not installed"
)
def test_porting_shows_what_its_commands_print() -> None:
    script = ROOT / "conformance" / "tools" / "porting_page.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr + "PORTING.md has changed: run `make porting`"


@pytest.mark.requirement("INIT-5", "INIT-6")
def test_the_tables_of_the_initialisers_are_what_they_measure() -> None:
    pytest.importorskip("torch", reason="the page measures the layer of PyTorch")
    script, page = "conformance/tools/initialisation_page.py", "docs/initialisation.md"
    done = subprocess.run(
        [sys.executable, str(ROOT / script), str(ROOT / page), "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_porting_has_five_steps_with_output() -> None:
    text = (ROOT / "PORTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^## (\d) ", text, re.MULTILINE)
    assert steps == ["1", "2", "3", "4", "5"]
    for section in re.split(r"^## \d ", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"```text\n\$ [^\n]+\n.+?\(exit status \d\)\n```", section, re.DOTALL), section[:40]
