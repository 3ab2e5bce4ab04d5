"""What is shipped: a source distribution that builds and tests itself, and a wheel that works alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("iha_core", "iha_conformance", "iha_torch", "iha_jax", "iha_mlx", "iha_array_api")
FRAMEWORKS = ("torch", "jax", "mlx", "array_api_strict", "array_api_compat")
VECTORS = "iha_conformance/vectors/core/"
QUICK = ("run", "--backend", "array-api:numpy", "--quick", "--dtype", "float32")

pytest.importorskip("hatchling")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a distribution of what is in `source`, as a build frontend without isolation does."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=120,
    )
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution."""
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; everything else is that of this one."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    here = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    # A line of a .pth is a folder to import from; .pth files in there, such as that of an editable
    # install of this project, are not read.
    (Path(here) / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return folder


def in_environment(
    folder: Path, words: Sequence[str], cwd: Path, **changes: str
) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))
    }
    return subprocess.run(
        [str(folder / "bin" / words[0]), *words[1:]],
        cwd=cwd,
        env=inherited | changes,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# The source distribution


def test_the_source_distribution_is_the_repository(sources):
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no repository, but such a distribution itself")
    expected = {name for name in listed if (ROOT / name).exists()}
    assert names(sources) - {"PKG-INFO"} == expected


def test_the_source_distribution_has_no_caches(sources):
    for name in names(sources):
        assert not re.search(r"(__pycache__|_cache|\.hypothesis|\.venv|\.egg-info|dist)(/|$)|\.pyc$", name), (
            name
        )


def test_the_source_distribution_is_complete(sources):
    """What `make` and its tests read beside the packages."""
    for name in (
        ".ci/run",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "conformance/tests/test_packaging.py",
        "conformance/tests/oracles/loops.py",
        "conformance/tools/readme_table.py",
        "constraints.txt",
        "pyproject.toml",
        "spec/SPEC.md",
    ):
        assert (sources / name).is_file(), name


# The wheel


def test_the_wheel_has_what_it_needs_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        text = archive.read("iha_core/spec_files/SPEC.md")
    assert text == (ROOT / "spec" / "SPEC.md").read_bytes()
    spec = {f"iha_core/spec_files/{name}" for name in names(ROOT / "spec")}
    expected = {f"{package}/py.typed" for package in PACKAGES} | spec
    expected |= {"iha_conformance/corpus/frozen.toml", "iha_conformance/suite/test_cases.py"}
    expected |= {VECTORS + name for name in names(ROOT / "conformance" / VECTORS)}
    assert f"{VECTORS}manifest.json" in expected
    assert expected <= found
    about = {name for name in found if ".dist-info/" in name}
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    for name in found - about:
        assert name.startswith(tuple(f"{package}/" for package in PACKAGES)), name
        assert name.endswith((".py", "/py.typed", ".toml")) or name in spec or name.startswith(VECTORS), name
    tests = [name for name in found if re.search(r"(^|/)(tests?/|test_|oracles)", name)]
    assert tests == ["iha_conformance/suite/test_cases.py"]


def test_every_package_of_the_house_is_shipped_typed_and_checked():
    folders = [ROOT / "iha_core", *(ROOT / "backends").glob("iha_*"), *(ROOT / "conformance").glob("iha_*")]
    packages = {path.name: path for path in folders if (path / "__init__.py").exists()}
    assert sorted(packages) == sorted(PACKAGES)
    tools = PROJECT["tool"]
    shipped = {
        entry.rpartition("/")[2] for entry in tools["hatch"]["build"]["targets"]["wheel"]["only-include"]
    }
    assert shipped == set(PACKAGES)
    assert set(tools["mypy"]["packages"]) == set(PACKAGES)
    assert set(tools["ruff"]["lint"]["isort"]["known-first-party"]) >= set(PACKAGES)
    for name, path in packages.items():
        assert (path / "py.typed").is_file(), name


def test_extras_name_each_framework_and_all_of_them():
    extras = PROJECT["project"]["optional-dependencies"]
    backends = {"torch", "jax", "flax", "mlx", "array-api"}
    assert set(extras) >= backends | {"pytest", "all", "dev"}
    (everything,) = extras["all"]
    assert set(re.search(r"\[(.+)\]", everything)[1].split(",")) == backends
    required = " ".join(PROJECT["project"]["dependencies"])
    assert not re.search("torch|jax|mlx|array-api|pytest", required)


# The wheel, installed


def traps(folder: Path, names: Iterable[str] = FRAMEWORKS) -> dict[str, str]:
    """An environment in which importing one of these leaves a note; looking for it does not."""
    modules = folder / "traps"
    modules.mkdir()
    note = folder / "note"
    for name in names:
        (modules / name).mkdir()
        (modules / name / "__init__.py").write_text(
            "from pathlib import Path\n"
            f"with Path({str(note)!r}).open('a') as note: note.write({name!r} + '\\n')\n"
            "raise ImportError('nobody asked for it')\n"
        )
    return {"PYTHONPATH": str(modules)}


def test_the_installed_command_runs(environment, tmp_path):
    run = in_environment(environment, ["iha", *QUICK], tmp_path)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    assert "array-api:numpy" in run.stdout
    assert os.listdir(tmp_path) == []
    version = in_environment(environment, ["iha", "--version"], tmp_path)
    assert version.stdout.startswith(f"iha {PROJECT['project']['version']}, specification IHA ")
    where = "import iha_core, iha_conformance; print(iha_core.__file__, iha_conformance.__file__)"
    files = in_environment(environment, ["python", "-c", where], tmp_path).stdout.split()
    assert len(files) == 2
    assert all(Path(file).is_relative_to(environment) for file in files)


def test_a_run_imports_no_framework_that_nobody_asked_for(environment, tmp_path):
    """Neither in the command's process nor in that of the target."""
    trapped = traps(tmp_path)
    (tmp_path / "port.py").write_text(
        "from iha_core import AttentionConfig, attention\n"
        "def fn(inputs, config):\n"
        "    return attention(**inputs, config=AttentionConfig.from_dict(config))\n"
    )
    run = in_environment(environment, ["iha", "run", "--target", "port:fn", *QUICK[3:]], tmp_path, **trapped)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not (tmp_path / "note").exists(), (tmp_path / "note").read_text()
    asked = in_environment(environment, ["iha", "run", "--backend", "torch", *QUICK[3:]], tmp_path, **trapped)
    assert "nobody asked for it" in asked.stderr
    assert (tmp_path / "note").read_text() == "torch\n"


def test_one_backend_needs_its_own_framework_alone(environment, tmp_path):
    trapped = traps(tmp_path, [name for name in FRAMEWORKS if name != "array_api_compat"])
    run = in_environment(environment, ["iha", *QUICK], tmp_path, **trapped)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not (tmp_path / "note").exists(), (tmp_path / "note").read_text()


def test_the_installed_suite_runs_under_pytest(environment, tmp_path):
    """Its options are there without any -p."""
    words = ["--pyargs", "iha_conformance.suite", "--iha-target", "array-api:numpy", "-k", "core/paper"]
    run = in_environment(
        environment, ["python", "-m", "pytest", *words, "-q", "-p", "no:cacheprovider"], tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed, 1 skipped" in run.stdout
    assert os.listdir(tmp_path) == []
    twice = ["-p", "iha_conformance.suite.plugin", *words, "--collect-only", "-q", "-p", "no:cacheprovider"]
    run = in_environment(environment, ["python", "-m", "pytest", *twice], tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_wheel_works_without_pytest(environment, tmp_path):
    modules = tmp_path / "traps"
    modules.mkdir()
    (modules / "pytest.py").write_text("raise ImportError('no pytest')\n")
    run = in_environment(
        environment, ["iha", *QUICK, "--case", "core/paper"], tmp_path, PYTHONPATH=str(modules)
    )
    assert run.returncode == 0, run.stdout + run.stderr
