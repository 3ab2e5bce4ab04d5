"""Faults planted in a copy of each backend's own code, and caught by `iha run` in the case made for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "order": "window/virtual-virtual-edge",
    "offset": "cross/late-edge-window",
    "window": "window/virtual-virtual-edge",
    "rope": "rope/virtual",
    "collapse": "core/cube",
}
"""A case for each kind of fault."""

WIDER = ("causal, window, P, n=n", "causal, window and window + 1, P, n=n")
BACKWARDS = ("(x1 * cos - x2 * sin, x2 * cos + x1 * sin)", "(x1 * cos + x2 * sin, x2 * cos - x1 * sin)")
FAULTS: dict[str, dict[str, tuple[str, str, str]]] = {
    "torch": {
        "order": (
            "masking.py",
            "(index[..., None] * P + torch",
            "(index[..., None] + index.shape[1] * torch",
        ),
        "offset": ("masking.py", "return queries + offset,", "return queries,"),
        "window": ("masking.py", *WIDER),
        "rope": ("rope.py", *BACKWARDS),
        "collapse": ("mixing.py", "collapse.permute(0, 2, 1)", "collapse.permute(1, 2, 0)"),
    },
    "jax": {
        "order": ("masking.py", "index[..., None] * P + jnp", "index[..., None] + index.shape[1] * jnp"),
        "offset": ("masking.py", "jnp.int32)[None] + offset,", "jnp.int32)[None],"),
        "window": ("masking.py", *WIDER),
        "rope": ("rope.py", BACKWARDS[0].strip("()"), BACKWARDS[1].strip("()")),
        "collapse": ("mixing.py", "bnpse,osp->bnoe", "bnpse,sop->bnoe"),
    },
    "mlx": {
        "order": ("masking.py", "(index[..., None] * P + mx", "(index[..., None] + index.shape[1] * mx"),
        "offset": ("masking.py", "return queries + offset,", "return queries,"),
        "window": ("masking.py", *WIDER),
        "rope": ("rope.py", BACKWARDS[0].strip("()"), BACKWARDS[1].strip("()")),
        "collapse": ("mixing.py", "collapse.transpose(0, 2, 1)", "collapse.transpose(1, 2, 0)"),
    },
    "array-api:numpy": {
        "order": ("masking.py", "index[:, :, None] * P + wide", "index[:, :, None] + tokens * wide"),
        "offset": ("masking.py", "return queries + offset,", "return queries,"),
        "window": ("masking.py", *WIDER),
        "rope": ("rope.py", BACKWARDS[0].strip("()"), BACKWARDS[1].strip("()")),
        "collapse": ("mixing.py", "permute_dims(collapse, (0, 2, 1))", "permute_dims(collapse, (1, 2, 0))"),
    },
}
"""By backend and kind: the file, what it says, and what is put in its place."""


def run(backend: str, backends: Path, *kinds: str) -> subprocess.CompletedProcess[str]:
    """Run the cases of these kinds on the backends in a folder."""
    cases = [argument for kind in kinds for argument in ("--case", CASES[kind])]
    command = [
        sys.executable,
        "-m",
        "iha_conformance",
        "run",
        "--backend",
        backend,
        "--dtype",
        "float32",
        *cases,
    ]
    path = os.pathsep.join(str(folder) for folder in (backends, ROOT, ROOT / "conformance"))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def requires(backend: str) -> None:
    module = {"array-api:numpy": "array_api_compat", "mlx": "mlx.core"}.get(backend, backend)
    pytest.importorskip(module)


@pytest.mark.parametrize("backend", FAULTS)
def test_a_copy_without_a_fault_passes(backend: str, tmp_path: Path) -> None:
    requires(backend)
    shutil.copytree(ROOT / "backends", tmp_path / "backends")
    done = run(backend, tmp_path / "backends", *CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("backend", FAULTS)
def test_a_planted_fault_is_caught(backend: str, kind: str, tmp_path: Path) -> None:
    requires(backend)
    file, right, wrong = FAULTS[backend][kind]
    shutil.copytree(ROOT / "backends", tmp_path / "backends")
    package = "iha_" + backend.partition(":")[0].replace("-", "_")
    path = tmp_path / "backends" / package / file
    source = path.read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{path.name} does not say {right!r}"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    done = run(backend, tmp_path / "backends", kind)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {backend}: {CASES[kind]}, float32: " in done.stdout
    assert "raised" not in done.stdout
