"""The order of the house: who imports whom, what may be named how, what has to agree."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import iha_core
from iha_conformance.corpus import corpus_sha256

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "iha_core": ROOT / "iha_core",
    "iha_torch": ROOT / "backends" / "iha_torch",
    "iha_jax": ROOT / "backends" / "iha_jax",
    "iha_mlx": ROOT / "backends" / "iha_mlx",
    "iha_array_api": ROOT / "backends" / "iha_array_api",
    "iha_conformance": ROOT / "conformance" / "iha_conformance",
}
BACKENDS = ("iha_torch", "iha_jax", "iha_mlx", "iha_array_api")
MAY_IMPORT = {
    "iha_core": {"iha_core", "ml_dtypes", "numpy", "safetensors"},  # in functions of checkpoint.py
    "iha_torch": {"iha_core", "iha_torch", "safetensors", "torch"},
    "iha_jax": {"flax", "iha_core", "iha_jax", "jax", "numpy", "safetensors"},  # flax: in flax_layer.py alone
    "iha_mlx": {"iha_core", "iha_mlx", "mlx", "numpy"},
    "iha_array_api": {"iha_core", "iha_array_api", "array_api_compat", "numpy"},
    "iha_conformance": {
        "iha_core",
        "iha_conformance",
        "array_api_compat",
        "click",
        "jsonschema",
        "ml_dtypes",
        "numpy",
        "pytest",  # under suite/ alone
        "rich",
        "safetensors",
    },
}
SHARED_WITH_BACKENDS = {
    f"iha_core.{name}"
    for name in (
        "checkpoint",
        "conditions",
        "config",
        "errors",
        "initialisers",
        "layer_config",
        "validation",
    )
}


def _imports(package: str) -> Iterator[tuple[Path, str]]:
    """Every module that a package imports, with the file that does."""
    for path in PACKAGES[package].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | set(sys.stdlib_module_names)
    for path, module in _imports(package):
        assert module.partition(".")[0] in allowed, f"{path} imports {module}"


def test_only_the_suite_under_pytest_imports_pytest() -> None:
    """The kit works without it."""
    found = {path.parent.name for path, module in _imports("iha_conformance") if module == "pytest"}
    assert found == {"suite"}
    for path, module in _imports("iha_conformance"):
        if module.startswith("iha_conformance.suite"):
            assert path.parent.name == "suite", path


@pytest.mark.parametrize("package", BACKENDS)
def test_backends_never_use_the_reference(package: str) -> None:
    for path, module in _imports(package):
        if module.startswith("iha_core"):
            assert module in SHARED_WITH_BACKENDS, f"{path} imports {module}"


def test_backends_have_the_same_files() -> None:
    layers = {"layer.py", "checkpoint.py"}
    further = {  # what only one framework has
        "iha_torch": layers | {"convert.py", "decoder.py", "sources.py"},
        "iha_jax": layers | {"flax_layer.py", "splash.py"},
        "iha_mlx": layers,
    }
    names = {name: {path.name for path in PACKAGES[name].iterdir() if path.is_file()} for name in BACKENDS}
    for name in BACKENDS:
        assert names[name] - further.get(name, set()) == names["iha_array_api"], name
        assert further.get(name, set()) <= names[name], name


def test_nothing_is_named_like_a_framework() -> None:
    """Such a folder or module would shadow the framework under test runners."""
    for path in ROOT.rglob("*"):
        if ".venv" not in path.parts:
            assert path.name.removesuffix(".py") not in ("torch", "jax", "mlx"), path


def test_the_specification_is_of_the_version_that_the_code_says() -> None:
    text = (ROOT / "spec" / "SPEC.md").read_text(encoding="utf-8")
    assert f"**IHA {iha_core.SPEC_VERSION}.**" in text
    assert f"specification {iha_core.SPEC_VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_text_of_every_version_stays() -> None:
    """A change of the text is a new version, whose text is added beside the others."""
    folder = ROOT / "spec" / "released"
    listed = dict(
        reversed(line.split()) for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    )
    assert set(listed) == {path.name for path in folder.glob("*.md")}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    versions = re.findall(r"specification (\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert {f"SPEC-{version}.md" for version in versions} == set(listed)
    current = (folder / f"SPEC-{iha_core.SPEC_VERSION}.md").read_text(encoding="utf-8")
    assert (ROOT / "spec" / "SPEC.md").read_text(encoding="utf-8") == current, (
        "SPEC.md differs from the text of its version: raise it, or put its text into spec/released"
    )


def test_every_requirement_of_gradients_and_layers_is_cited_by_the_reference() -> None:
    """A reader finds each rule in iha_core."""
    text = (ROOT / "spec" / "SPEC.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "iha_core").rglob("*.py"))
    cited = set()
    for family, first, last in re.findall(r"\[([A-Z]+)-(\d+)\](?: to \[\1-(\d+)\])?", sources):
        cited |= {f"{family}-{i}" for i in range(int(first), int(last or first) + 1)}
    ids = re.findall(r"^- \[((?:GRAD|LAY|CKPT|INIT)-\d+|NUM-9|NUM-10)\]", text, re.MULTILINE)
    assert not set(ids) - cited


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {project['version']}\n" in citation
    assert f"Package {project['version']}," in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_pinned_tool_is_one_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())}
    names = {re.split(r"[\[>=<]", line)[0].lower().replace("_", "-") for line in asked}
    names.discard(project["name"])
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert pinned == names


def test_erratum_tests_and_cases_exist() -> None:
    text = (ROOT / "spec" / "ERRATA.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "conformance/tests").glob("*.py"))
    for name in re.findall(r"\btest_\w+(?!\w*\.py)", text):
        assert f"def {name}(" in sources or (ROOT / "conformance/tests" / f"{name}.py").exists(), name
    cases = (ROOT / "spec" / "cases.toml").read_text(encoding="utf-8")
    ids = re.findall(r'^id = "(.+)"$', cases, re.MULTILINE)
    for pattern in re.findall(r"`((?!conformance)[a-z]+/[a-z0-9*-]+)`", text):
        assert any(re.fullmatch(pattern.replace("*", ".*"), id) for id in ids), pattern


def test_importing_the_core_imports_no_more_than_numpy() -> None:
    script = "import sys, iha_core; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    others = ("array_api_compat", "rich", "click", "ml_dtypes", "mpmath", "safetensors")
    for framework in ("torch", "jax", "mlx", *others):
        assert framework not in loaded.stdout.split()


@pytest.mark.parametrize("package", BACKENDS)
def test_importing_one_backend_imports_no_other_framework(package: str) -> None:
    own = MAY_IMPORT[package]
    others = {"torch", "jax", "mlx", "array_api_compat", *BACKENDS} - own
    for name in own & {"torch", "jax", "mlx", "array_api_compat"}:
        pytest.importorskip(name)
    script = f"import sys, {package}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not others & set(loaded.stdout.split())


def test_the_support_table_is_of_this_corpus() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"corpus `{corpus_sha256()[:12]}`" in text, "the corpus has changed: run `make readme`"


def test_examples_of_the_readme_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    library, layer, port = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for example in (library, layer):
        shown = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
        assert f"# {shown.stdout.strip()}\n" in example
    (tmp_path / "port.py").write_text(port, encoding="utf-8")
    command = [sys.executable, "-m", "iha_conformance", "run", "--target", "port:attention"]
    run = subprocess.run(
        [*command, "--dtype", "float32", "--family", "mask"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "mask/virtual-edge" in run.stdout
    assert "mask/token-edge" not in run.stdout
