"""Exported vectors: the same bytes each time, whole or not at all; results judged by what the kit makes."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from iha_conformance import cli
from iha_conformance.corpus import build_inputs, corpus_sha256, load_cases
from iha_conformance.errors import CommandError
from iha_conformance.judge import expect
from iha_conformance.runner import make_job
from iha_conformance.selection import Filters
from iha_conformance.targets.folder import FolderTarget
from iha_conformance.targets.messages import Launch
from iha_conformance.vectors import export as exporting
from iha_conformance.vectors import frozen, manifest
from iha_conformance.vectors.exchange import Awaited, about, collect, input_file, stem
from iha_conformance.vectors.export import export, make_vectors
from iha_conformance.vectors.safetensors_file import encode, parse
from iha_conformance.vectors.untrusted import FormatError
from iha_conformance.vectors.verify import LIMITS, VALUES, check_close, verify
from iha_core import SPEC_VERSION, STAGES
from iha_core.bounds import Companion
from iha_core.spec_files import spec_path

HERE = Path(__file__).parent
CASE = "core/paper"
NAME = "core.paper.bfloat16.safetensors"
FILTERS = Filters(case=(CASE, "core/linear", "cross/per-row", "keymask/nan"), dtype=("float32", "bfloat16"))
FEW = Filters(case=(CASE,), dtype=("float32", "bfloat16"))


def schema(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(spec_path(f"schemas/{name}.schema.json").read_text()))


def job(case_id: str, dtype: str = "float32"):
    case = next(case for case in load_cases() if case.id == case_id)
    return make_job(case, dtype, build_inputs(case, dtype))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """An export of a few cases; not to be changed."""
    folder = tmp_path_factory.mktemp("vectors") / "made"
    export(str(folder), FILTERS)
    return folder


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """An export of one case in `vectors`, and what an honest port writes for it in `results`."""
    folder = tmp_path_factory.mktemp("honest")
    export(str(folder / "vectors"), FEW)
    (folder / "results").mkdir()
    words = [
        sys.executable,
        HERE / "exec_port.py",
        folder / "vectors" / "inputs",
        folder / "results",
    ]
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(words, env=env, check=True, timeout=60)
    return folder


@pytest.fixture
def vectors(honest, tmp_path) -> Path:
    """A copy of the export, to be changed."""
    return shutil.copytree(honest / "vectors", tmp_path / "vectors")


@pytest.fixture
def results(honest, tmp_path) -> Path:
    """A copy of the results, to be changed."""
    return shutil.copytree(honest / "results", tmp_path / "results")


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rewrite(folder: Path, change, *, hashed: bool = True) -> None:
    """Change a manifest, its own hash too unless that is to be wrong."""
    path = folder / manifest.NAME
    document = json.loads(path.read_text())
    change(document)
    if hashed:
        document["vectors_sha256"] = manifest.hash_of(document["entries"])
    path.write_bytes(manifest.as_bytes(document))


def replace_file(folder: Path, kind: str, data: bytes) -> None:
    """Put other bytes into a file, and their hash into the manifest."""
    key = {"inputs": "input", "expected": "expected"}[kind]
    (folder / kind / NAME).write_bytes(data)

    def change(document):
        (entry,) = [entry for entry in document["entries"] if entry[key]["file"] == NAME]
        entry[key]["sha256"] = manifest.sha256(data)

    rewrite(folder, change)


def command(*arguments: object, capfd) -> tuple[int, str, str]:
    status = cli.main(["vectors", *map(str, arguments)])
    out, err = capfd.readouterr()
    return status, out, err


# What is exported


@pytest.mark.requirement("EXC-1", "VEC-1")
def test_an_export_has_every_file_of_its_manifest_and_no_other(made):
    document = json.loads((made / manifest.NAME).read_text())
    schema("vectors-manifest").validate(document)
    assert (document["spec_version"], document["corpus_sha256"]) == (SPEC_VERSION, corpus_sha256())
    assert document["filters"]["case"] == list(FILTERS.case)
    assert (document["counts"], document["precision"]) == ({"cases": 4, "files": 8}, "highest")
    listed = {manifest.NAME}
    by_id = {case.id: case for case in load_cases()}
    for entry in document["entries"]:
        case = by_id[entry["id"]]
        assert (entry["why"], entry["requirements"]) == (case.why, list(case.requirements))
        assert (entry["family"], entry["layout"]) == (case.family, case.layout)
        for kind, key in (("inputs", "input"), ("expected", "expected")):
            name = f"{kind}/{entry[key]['file']}"
            assert manifest.sha256((made / name).read_bytes()) == entry[key]["sha256"]
            assert entry[key]["file"] == f"{entry['id'].replace('/', '.')}.{entry['dtype']}.safetensors"
            listed.add(name)
    assert set(files(made)) == listed
    assert document["vectors_sha256"] == manifest.hash_of(document["entries"])


@pytest.mark.requirement("EXC-2", "EXC-3", "GEN-2")
def test_input_files_have_the_arguments_of_the_case_and_nothing_expected():
    dtypes = {"float32": "F32", "bfloat16": "BF16"}
    for case_id, dtype in (
        ("cross/per-row", "bfloat16"),
        ("core/float32-parameters", "bfloat16"),
        (CASE, "float32"),
    ):
        inputs = job(case_id, dtype).inputs
        tensors = dict(deserialize(input_file(job(case_id, dtype))))
        assert set(tensors) == set(inputs) - {"query_offset"}
        for name, tensor in tensors.items():
            assert tensor["dtype"] == dtypes[inputs[name].dtype.name]
            assert bytes(tensor["data"]) == inputs[name].tobytes()
            assert tuple(tensor["shape"]) == inputs[name].shape
    masked = dict(deserialize(input_file(job("keymask/random"))))
    assert masked["key_mask"]["dtype"] == "BOOL"
    assert dict(deserialize(input_file(job("positions/restart"))))["positions"]["dtype"] == "I64"


@pytest.mark.requirement("EXC-3")
def test_every_input_file_says_what_it_is():
    validator = schema("exchange")
    kinds = set()
    for case in load_cases():
        if case.capability is None and case.family not in ("gain", "tiles", "accumulation"):
            told = about(make_job(case, case.dtypes[0], build_inputs(case, case.dtypes[0])))
            validator.validate(json.loads(json.dumps(told, allow_nan=False)))
            kinds.add(type(told["query_offset"]))
            assert told["config"] == dict(case.config)
            assert ("lse" in told["wanted"]) == (case.config["normalisation"] == "softmax")
    assert kinds == {int, list, type(None)}
    told = about(job("cross/per-row"))
    assert (told["case_id"], told["dtype"], told["spec_version"]) == (
        "cross/per-row",
        "float32",
        SPEC_VERSION,
    )
    assert told["query_offset"] == job("cross/per-row").inputs["query_offset"].tolist()
    metadata = json.loads(parse(input_file(job(CASE))).metadata["iha"])
    assert metadata == about(job(CASE))


@pytest.mark.parametrize("name", ["exchange", "vectors-manifest"])
def test_schemas_are_closed(name, made):
    """A key too many is refused wherever there is an object."""
    document = about(job(CASE)) if name == "exchange" else json.loads((made / manifest.NAME).read_text())
    document = json.loads(json.dumps(document))
    validator = schema(name)
    validator.check_schema(validator.schema)
    assert validator.is_valid(document)

    def objects(value):
        if isinstance(value, dict):
            yield value
            for inner in value.values():
                yield from objects(inner)
        elif isinstance(value, list):
            for inner in value[:1]:
                yield from objects(inner)

    found = list(objects(document))
    assert len(found) == {"exchange": 2, "vectors-manifest": 6}[name]
    for value in found:
        value["more"] = 1
        assert not validator.is_valid(document)
        del value["more"]
        for key in list(value):
            kept = value.pop(key)
            assert not validator.is_valid(document), key
            value[key] = kept
    assert validator.is_valid(document)


def test_patterns_of_schemas_take_no_line_break_at_the_end():
    """In Python `$` matches before one too; in ECMA-262, whose patterns these are, it does not."""

    def patterns(value):
        if isinstance(value, dict):
            yield from [value["pattern"]] if isinstance(value.get("pattern"), str) else []
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from patterns(inner)

    names = [path.name.removesuffix(".schema.json") for path in spec_path("schemas").glob("*.schema.json")]
    found = [pattern for name in names for pattern in patterns(schema(name).schema)]
    assert len(found) >= 13
    texts = ["1.1", "0" * 64, "a/b", "ab", "AB-1", NAME]
    for pattern in found:
        fitting = [text for text in texts if re.search(pattern, text)]
        assert fitting, pattern
        assert not [text for text in fitting if re.search(pattern, text + "\n")], pattern


def test_filters_are_each_in_the_manifest_once(tmp_path):
    twice = Filters(case=(CASE, CASE), dtype=("float32",) * 3)
    export(str(tmp_path / "v"), twice)
    assert manifest.read(tmp_path / "v")["filters"]["case"] == [CASE]
    assert verify(str(tmp_path / "v"), twice).differences == ()


@pytest.mark.requirement("VEC-2", "NUM-6")
def test_expected_files_have_values_limits_and_companions(made):
    case = next(case for case in load_cases() if case.id == CASE)
    limits = expect(case, "float32", build_inputs(case, "float32")).limits
    tensors = load_file(made / "expected" / "core.paper.float32.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float64)}
    for stage in STAGES:
        np.testing.assert_array_equal(tensors.pop(stage), limits.stages[stage])
        np.testing.assert_array_equal(tensors.pop(f"limit.{stage}"), limits.limits[stage])
    for companion in limits.companions:
        name = f"companion.{companion.kind.replace(' ', '_')}"
        limit, weights = tensors.pop(f"{name}.limit"), tensors.pop(f"{name}.weights", None)
        again = Companion(companion.kind, weights, limit)
        error = np.random.default_rng(0).standard_normal(limits.stages["output"].shape)
        np.testing.assert_array_equal(again.measure(error), companion.measure(error))
    assert tensors == {}
    assert any("total_mean" in name for name in load_file(made / "expected" / NAME))
    linear = load_file(made / "expected" / "core.linear.float32.safetensors")
    assert set(STAGES) - set(linear) == {"lse"}
    masked = load_file(made / "expected" / "keymask.nan.float32.safetensors")
    assert np.isneginf(masked["logits"]).any()
    assert np.isposinf(masked["limit.mixed_k"]).any()


@pytest.mark.requirement("VEC-1")
def test_a_second_export_has_the_same_bytes(made, tmp_path):
    export(str(tmp_path / "again"), FILTERS)
    assert files(tmp_path / "again") == files(made)


def test_bad_input_is_not_exported(tmp_path):
    written = export(str(tmp_path / "v"), Filters(case=("invalid/window-zero", CASE), dtype=("float32",)))
    assert written.manifest["counts"] == {"cases": 1, "files": 1}
    with pytest.raises(CommandError, match="got none that matches --family invalid"):
        export(str(tmp_path / "w"), Filters(family=("invalid",)))
    assert os.listdir(tmp_path) == ["v"]


def test_stages_can_be_chosen(tmp_path):
    written = export(str(tmp_path / "v"), FEW, ("lse", "mixed_v"))
    assert written.manifest["stages"] == ["mixed_v", "lse", "output"]
    assert {name for name in load_file(tmp_path / "v" / "expected" / NAME) if "." not in name} == {
        "mixed_v",
        "lse",
        "output",
    }
    assert verify(str(tmp_path / "v"), Filters()).differences == ()
    with pytest.raises(CommandError, match="--stage: expected one of mixed_q"):
        export(str(tmp_path / "w"), FEW, ("logit",))


def test_names_of_files_cannot_lead_elsewhere():
    assert stem("core/paper", "float32") == "core.paper.float32"
    for wrong in ("../x", "core/../x", "core/paper\n", "/etc", "core", "core/a.b", ""):
        with pytest.raises(ValueError, match="case id"):
            stem(wrong, "float32")


# Where it is written


def test_an_earlier_export_is_replaced_as_a_whole(vectors):
    os.chmod(vectors, 0o750)
    export(str(vectors), Filters(case=("core/linear",), dtype=("float64",)))
    assert set(files(vectors)) == {
        manifest.NAME,
        "inputs/core.linear.float64.safetensors",
        "expected/core.linear.float64.safetensors",
    }
    assert os.listdir(vectors.parent) == ["vectors"]


def test_folders_have_the_permissions_of_new_ones(vectors):
    mask = os.umask(0o077)
    os.umask(mask)
    assert stat.S_IMODE(vectors.stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((vectors / manifest.NAME).stat().st_mode) == 0o666 & ~mask


def test_an_empty_folder_and_a_link_to_one_are_written_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export(str(tmp_path / "link"), FEW)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / manifest.NAME).exists()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder.mkdir(), (folder / "thesis.tex").touch()), "found 'thesis.tex'"),
        (
            lambda folder: (folder.mkdir(), (folder / manifest.NAME).write_text("{}")),
            f"found '{manifest.NAME}'",
        ),
        (lambda folder: folder.touch(), "expected a folder or nothing, found a file"),
        (lambda folder: (export(str(folder), FEW), (folder / "out").mkdir()), "no more, found 'out'"),
        (lambda folder: (export(str(folder), FEW), (folder / "inputs/mine").touch()), "found 'inputs/mine'"),
        (
            lambda folder: (
                export(str(folder), FEW),
                (folder / "expected" / NAME).unlink(),
                (folder / "expected" / NAME).mkdir(),
                (folder / "expected" / NAME / "thesis.tex").touch(),
            ),
            f"found 'expected/{NAME}' that is no file",
        ),
        (
            lambda folder: (
                export(str(folder), FEW),
                (folder / "inputs" / NAME).unlink(),
                (folder / "inputs" / NAME).symlink_to(__file__),
            ),
            f"found 'inputs/{NAME}' that is no file",
        ),
        (
            lambda folder: (
                export(str(folder), FEW),
                shutil.rmtree(folder / "expected"),
                (folder / "expected").write_text("thesis"),
            ),
            "found 'expected' that is no folder",
        ),
    ],
)
def test_what_is_not_ours_is_left_alone(tmp_path, prepare, message):
    folder = tmp_path / "folder"
    prepare(folder)
    before = files(tmp_path)
    with pytest.raises(CommandError) as caught:
        export(str(folder), FEW)
    assert message in str(caught.value)
    assert files(tmp_path) == before


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="expected another folder than the working directory"):
        export(".", FEW)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), SystemExit])
@pytest.mark.parametrize("at", ["start", "middle", "first rename", "second rename"])
def test_an_interrupted_export_leaves_what_was_there(vectors, monkeypatch, error, at):
    before = files(vectors.parent)
    renames = []
    real_make, real_rename = exporting.make_vectors, Path.rename

    def interrupted(pairs, stages):
        if at == "start":
            raise error
        yield from list(real_make(pairs, stages))[:1]
        if at == "middle":
            raise error

    def rename(self, target):
        renames.append(target)
        if (at, len(renames)) in (("first rename", 1), ("second rename", 2)):
            raise error
        return real_rename(self, target)

    monkeypatch.setattr(exporting, "make_vectors", interrupted)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((KeyboardInterrupt, CommandError, SystemExit)) as caught:
        export(str(vectors), FEW)
    if caught.type is CommandError:
        assert str(caught.value) == f"cannot write vectors to {str(vectors)!r}: No space left on device"
    assert files(vectors.parent) == before
    assert os.listdir(vectors.parent) == ["vectors"]


def test_folders_of_others_beside_an_export_are_left_alone(vectors, monkeypatch):
    """Their names might be those of an export's own folders."""
    parent = vectors.parent
    for name in (".vectors.tmp", ".vectors.old", ".vectors"):
        (parent / name).mkdir()
        (parent / name / "thesis.tex").write_text("mine")
    before = {name: data for name, data in files(parent).items() if name.startswith(".")}

    def interrupted(pairs, stages):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "make_vectors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(str(vectors), FEW)
    export(str(vectors), FEW)
    assert {name: data for name, data in files(parent).items() if name.startswith(".")} == before
    assert sorted(os.listdir(parent)) == [".vectors", ".vectors.old", ".vectors.tmp", "vectors"]


def test_a_link_beside_an_export_is_left_alone(vectors, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for name in (".vectors.old", ".vectors.tmp"):
        (tmp_path / name).symlink_to("mine")
    export(str(vectors), FEW)
    assert (tmp_path / ".vectors.old").is_symlink()
    assert (tmp_path / ".vectors.tmp").is_symlink()
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_a_folder_with_the_longest_of_names_is_written(tmp_path):
    for name in ("v" * 255, "\U0001f600" * 63):
        export(str(tmp_path / name), Filters(case=(CASE,), dtype=("float32",)))
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("existing", [False, True])
def test_parallel_exports_leave_one_whole_export(tmp_path, existing):
    folder = tmp_path / "v"
    if existing:
        export(str(folder), FEW)
    words = [sys.executable, "-m", "iha_conformance", "vectors", "export", str(folder), "--case"]
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen([*words, case], env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for case in (CASE, "core/linear", CASE, "core/linear")
    ]
    said = [process.communicate(timeout=60)[1].decode() for process in running]
    statuses = [process.returncode for process in running]
    assert 0 in statuses, said
    for status, errors in zip(statuses, said, strict=True):
        assert (status, len(errors.splitlines())) in {(0, 0), (2, 1)}, errors
    assert verify(str(folder), Filters()).differences == ()
    assert os.listdir(tmp_path) == ["v"]


def hooked_rename(monkeypatch, number: int, hook) -> None:
    """Do something just before that renaming of an export."""
    real, count = Path.rename, []

    def rename(self, target):
        count.append(target)
        if len(count) == number:
            hook(self, target)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_an_export_that_another_one_overtakes_leaves_the_other(vectors, monkeypatch):
    other = Filters(case=("core/linear",), dtype=("float32",))
    hooked_rename(monkeypatch, 2, lambda source, target: export(str(target), other))
    with pytest.raises(CommandError, match="expected to write there alone, found what somebody else"):
        export(str(vectors), FEW)
    assert verify(str(vectors), other).differences == ()
    assert os.listdir(vectors.parent) == ["vectors"]


def test_a_folder_that_another_export_moves_away_is_none(vectors, monkeypatch):
    """Between any two looks at it; the renaming at the end decides."""
    real, old = manifest.read, vectors.parent / "old"

    def read(folder):
        monkeypatch.setattr(manifest, "read", real)
        Path.rename(folder, old)
        return real(folder)

    monkeypatch.setattr(manifest, "read", read)
    exporting.check_replaceable(vectors, "v")
    monkeypatch.setattr(manifest, "read", read)
    old.rename(vectors)
    export(str(vectors), FEW)
    assert verify(str(vectors), FEW).differences == ()
    assert sorted(os.listdir(vectors.parent)) == ["old", "vectors"]


def test_what_others_write_into_the_folder_meanwhile_is_kept(vectors, monkeypatch):
    real = exporting.make_vectors

    def slow(pairs, stages):
        (vectors / "inputs" / "mine").write_text("mine")
        yield from real(pairs, stages)

    monkeypatch.setattr(exporting, "make_vectors", slow)
    before = files(vectors) | {"inputs/mine": b"mine"}
    with pytest.raises(CommandError, match="expected an export and no more, found 'inputs/mine'"):
        export(str(vectors), FEW)
    assert files(vectors) == before
    assert os.listdir(vectors.parent) == ["vectors"]


def test_what_others_write_at_the_last_moment_is_put_back(vectors, monkeypatch):
    hooked_rename(monkeypatch, 1, lambda source, target: (source / "mine").write_text("mine"))
    before = files(vectors) | {"mine": b"mine"}
    with pytest.raises(CommandError, match="expected an export and no more, found 'mine'"):
        export(str(vectors), FEW)
    assert files(vectors) == before
    assert os.listdir(vectors.parent) == ["vectors"]


def test_what_others_write_even_later_is_not_removed(vectors, monkeypatch):
    """By a handle on the folder that has been moved away: the new one is there then, and the old one too."""
    hooked_rename(monkeypatch, 2, lambda source, target: (source.parent / "old" / "mine").write_text("mine"))
    with pytest.raises(CommandError, match="found 'mine'; what was there is kept in '") as caught:
        export(str(vectors), FEW)
    kept = Path(str(caught.value).rsplit("'", 2)[1])
    assert (kept / "mine").read_text() == "mine"
    assert verify(str(vectors), FEW).differences == ()


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(errno.EBUSY, "Device or resource busy"), "found one in use, such as a mount point: Device"),
        (PermissionError(errno.EACCES, "Permission denied"), "whose parent folder can be written to: Perm"),
        (OSError(errno.EROFS, "Read-only file system"), "whose parent folder can be written to: Read-only"),
    ],
)
def test_what_an_export_needs_of_its_folder_is_said(vectors, monkeypatch, error, part):
    def failing(*args, **kwargs):
        raise error

    before = files(vectors)
    if error.errno == errno.EBUSY:
        monkeypatch.setattr(Path, "rename", failing)
    else:
        monkeypatch.setattr(exporting.tempfile, "mkdtemp", failing)
    with pytest.raises(CommandError) as caught:
        export(str(vectors), FEW)
    assert f"cannot write vectors to {str(vectors)!r}: expected " in str(caught.value)
    assert part in str(caught.value)
    assert files(vectors) == before
    assert os.listdir(vectors.parent) == ["vectors"]


def test_a_working_directory_that_is_gone_is_said(tmp_path, monkeypatch, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    few = ("--case", CASE, "--dtype", "float32")
    status, _, err = command("export", "v", *few, capfd=capfd)
    assert (status, len(err.splitlines()), "it has been deleted" in err) == (2, 1, True)
    status, _, err = command("check", "v", "out", capfd=capfd)
    assert (status, len(err.splitlines()), "it has been deleted" in err) == (2, 1, True)
    status, _, err = command("export", tmp_path / "v", *few, capfd=capfd)
    assert (status, err) == (0, ""), "a name from the root needs none"
    status, _, err = command("export", tmp_path / "v", *few, capfd=capfd)
    assert (status, err) == (0, ""), "nor to replace it"


def test_the_help_says_what_is_needed_and_what_is_not_seen(capfd):
    for name, parts in {
        "export": ("its parent folder has to be writable", "a report inside DIR"),
        "check": ("also files of an earlier run", "The exit status of the port is not seen here"),
    }.items():
        _, out, _ = command(name, "--help", capfd=capfd)
        for part in parts:
            assert part in " ".join(out.split())


def test_reports_are_not_written_into_the_vectors(vectors, results, tmp_path, capfd):
    (tmp_path / "link").symlink_to("vectors")
    before = files(tmp_path)
    inside = (vectors / manifest.NAME, vectors / "inputs" / "r", tmp_path / "link" / "r", vectors)
    for name in inside:
        for arguments in (
            ("export", vectors, "--json", name),
            ("export", vectors, "--check", "--json", name),
            ("check", vectors, results, "--json", name),
            ("check", vectors, results, "--junit", name),
        ):
            status, out, err = command(*arguments, capfd=capfd)
            assert (status, out, len(err.splitlines())) == (2, "", 1), arguments
            assert f"{arguments[-2]}: expected a file outside of {str(vectors)!r}, got " in err
    assert files(tmp_path) == before
    status, _, err = command("export", tmp_path / "new", "--json", tmp_path / "new" / "r", capfd=capfd)
    assert (status, "--json: expected a file outside of" in err) == (2, True)
    assert not (tmp_path / "new").exists()


def test_an_empty_name_is_not_the_working_directory(vectors, results, monkeypatch, capfd):
    for working in (vectors, results):
        monkeypatch.chdir(working)
        for arguments, what in {
            ("export", ""): "DIR",
            ("export", "", "--check"): "DIR",
            ("check", "", results): "DIR",
            ("check", vectors, ""): "OUT_DIR",
        }.items():
            status, out, err = command(*arguments, capfd=capfd)
            assert (status, out) == (2, "")
            assert err == f"iha: error: {what}: expected the name of a folder, got ''\n"


def test_errors_of_usage_are_one_line(tmp_path, capfd):
    for arguments, part in {
        ("export", tmp_path / "no" / "v", "--case", CASE): "No such file or directory",
        ("export", tmp_path / "v", "--dtype", "f32"): "--dtype: expected one of",
        (
            "export",
            tmp_path / "v",
            "--check",
        ): "expected a folder of `iha vectors export`, found no such folder",
        ("export", tmp_path, "--check"): "found no manifest.json in it",
        ("check", tmp_path / "v", tmp_path): "found no such folder",
        ("check", tmp_path / "v", tmp_path / "w"): "OUT_DIR: expected a folder of results, found nothing",
        ("check", tmp_path / "v", tmp_path, "--precision", "fp8"): "--precision: expected one of",
        (): "expected a command, vectors export or vectors check",
        ("export",): "DIR",
    }.items():
        status, out, err = command(*arguments, capfd=capfd)
        assert (status, out, len(err.splitlines())) == (2, "", 1), arguments
        assert part in err
    assert os.listdir(tmp_path) == []


def test_export_as_a_command(tmp_path, capfd):
    folder = tmp_path / "gr\u00f6\u00dfe v"
    few = ["--case", CASE, "--dtype", "float32"]
    status, out, err = command("export", folder, *few, "--json", tmp_path / "x.json", capfd=capfd)
    assert (status, err) == (0, "")
    assert f"1 files of 1 cases in {folder}" in out
    assert json.loads((tmp_path / "x.json").read_text())["counts"] == {"cases": 1, "files": 1}
    status, out, _ = command("export", folder, "--check", "--json", tmp_path / "x.json", capfd=capfd)
    assert (status, out.startswith("EQUAL 1 file: ")) == (0, True)
    assert json.loads((tmp_path / "x.json").read_text())["differences"] == []
    (folder / "inputs" / "core.paper.float32.safetensors").unlink()
    before = files(folder)
    status, out, _ = command("export", folder, "--check", "--json", tmp_path / "x.json", capfd=capfd)
    assert status == 1
    assert "DIFFERS inputs/core.paper.float32.safetensors: expected a file, found none" in out
    assert "another version of the specification" in out
    assert len(json.loads((tmp_path / "x.json").read_text())["differences"]) == 1
    assert files(folder) == before


# Whether it is still what this machine makes


def differences(folder: Path, filters: Filters | None = None) -> list[str]:
    return list(map(str, verify(str(folder), filters or Filters()).differences))


@pytest.mark.requirement("VEC-3")
def test_last_bits_of_expectations_may_differ(vectors):
    tensors = load_file(vectors / "expected" / NAME)
    tensors["output"] = np.nextafter(tensors["output"], np.inf)
    tensors["limit.output"] *= 1 + 1e-12
    replace_file(vectors, "expected", encode(tensors))
    assert differences(vectors) == []
    tensors["output"].flat[-1] += 3 * VALUES * np.abs(tensors["output"]).max()
    replace_file(vectors, "expected", encode(tensors))
    (line,) = differences(vectors)
    assert line.startswith(f"expected/{NAME}: `output`[1, 6, 2, 3]: expected ")


def test_the_measure_of_expectations():
    exact = np.array([1.0, -8.0, 1e-30, np.nan, np.inf, -np.inf])
    check_close("output", exact.copy(), exact)
    for name, allowed in (("output", VALUES), ("limit.output", LIMITS)):
        check_close(name, exact + np.array([0, 0, 7.9 * allowed, 0, 0, 0]), exact)
        with pytest.raises(FormatError, match=r"\[2\]: expected 1.0000000000000000e-30, found|\[2\]"):
            check_close(name, exact + np.array([0, 0, 8.1 * allowed, 0, 0, 0]), exact)
    for index in range(len(exact)):
        for wrong in (np.nan, np.inf, -np.inf, 2.0):
            found = exact.copy()
            found[index] = wrong
            if not np.array_equal(found, exact, equal_nan=True):
                with pytest.raises(FormatError, match="1 of 6 elements differ"):
                    check_close("output", found, exact)
    with pytest.raises(FormatError, match="float64"):
        check_close("output", exact.astype(np.float32), exact)
    with pytest.raises(FormatError, match=r"\(6,\)"):
        check_close("output", exact[None], exact)
    check_close("output", np.zeros((0, 2)), np.zeros((0, 2)))
    with pytest.raises(FormatError):
        check_close("output", np.array([1e-300]), np.array([0.0]))


def test_inputs_are_the_same_to_the_last_bit(vectors):
    contents = parse((vectors / "inputs" / NAME).read_bytes())
    bits = contents.tensors["q"].view(np.uint16)
    bits.flat[-1] ^= 1
    replace_file(vectors, "inputs", encode(contents.tensors, contents.metadata))
    assert differences(vectors) == [
        f"inputs/{NAME}: `q`: expected the bits that this kit makes, found others"
    ]


def test_inputs_may_be_laid_out_otherwise(vectors):
    data = (vectors / "inputs" / NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), indent=1).encode()
    replace_file(vectors, "inputs", len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert differences(vectors) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda f: (f / "inputs" / NAME).unlink(), f"inputs/{NAME}: expected a file, found none"),
        (lambda f: (f / "expected" / NAME).unlink(), f"expected/{NAME}: expected a file, found none"),
        (
            lambda f: (f / "expected" / NAME).write_bytes((f / "expected" / NAME).read_bytes() + b"x"),
            f"expected/{NAME}: expected the SHA-256 of manifest.json, found another",
        ),
        (
            lambda f: (f / "expected" / "core.papre.float32.safetensors").touch(),
            "expected/core.papre.float32.safetensors: expected files of these cases alone",
        ),
        (
            lambda f: rewrite(f, lambda m: m.update(corpus_sha256="0" * 64)),
            "manifest.json: corpus_sha256: expected ",
        ),
        (lambda f: rewrite(f, lambda m: m["entries"].pop()), f"manifest.json: expected an entry for {NAME}"),
        (
            lambda f: rewrite(f, lambda m: m["entries"][0].update(why="no reason")),
            "manifest.json: entries: expected those of this corpus",
        ),
        (
            lambda f: replace_file(
                f, "expected", encode({"output": np.zeros(2), **load_and_drop(f, "output", "lse")})
            ),
            f"expected/{NAME}: expected the tensors of the case; `lse`: found none",
        ),
        (
            lambda f: replace_file(f, "expected", encode({"zzz": np.zeros(2), **load_and_drop(f)})),
            f"expected/{NAME}: expected the tensors of the case; `zzz`: which is too much",
        ),
    ],
)
def test_every_difference_is_named(vectors, change, part):
    change(vectors)
    found = differences(vectors)
    assert any(line.startswith(part) for line in found), found


def load_and_drop(folder: Path, *names: str) -> dict[str, np.ndarray]:
    tensors = load_file(folder / "expected" / NAME)
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_other_filters_than_those_of_the_folder_are_a_difference(vectors):
    found = differences(vectors, Filters(case=(CASE,), dtype=("float32",)))
    assert any(line.startswith("manifest.json: filters: ") for line in found)
    assert f"inputs/{NAME}: expected files of these cases alone" in found
    more = differences(vectors, Filters(case=(CASE,)))
    assert "manifest.json: expected an entry for core.paper.float64.safetensors, found none" in more


@pytest.mark.parametrize("kind", ["inputs", "expected"])
def test_a_folder_that_cannot_be_listed_is_a_difference(vectors, monkeypatch, kind):
    """Nobody can say what else is in it."""
    forbid(monkeypatch, "scandir", vectors / kind)
    assert differences(vectors) == [f"{kind}: expected a folder that can be listed, found: Permission denied"]


def forbid(monkeypatch, function: str, path: str | Path) -> None:
    """No right to do that to the path; who runs the tests may have all rights."""
    real = getattr(os, function)

    def forbidden(name, *args, **kwargs):
        if not isinstance(name, int) and os.path.join(name, "") == os.path.join(path, ""):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, function, forbidden)


@pytest.mark.parametrize("name", ["inputs/.DS_Store", "expected/README"])
def test_files_of_any_name_that_belong_to_no_case_are_a_difference(vectors, name):
    (vectors / name).touch()
    assert differences(vectors) == [f"{name}: expected files of these cases alone"]


# The frozen vectors that are shipped


@pytest.mark.requirement("VEC-1", "VEC-3")
def test_the_frozen_vectors_are_what_this_machine_makes():
    checked = verify(str(frozen.FOLDER), frozen.FILTERS, frozen.STAGES)
    assert checked.differences == (), checked.render() + "new cases: run `make vectors`"


def test_the_frozen_vectors_are_small_and_of_every_dtype_and_family():
    assert sum(len(data) for data in files(frozen.FOLDER).values()) < 8_000_000
    document = manifest.read(frozen.FOLDER)
    assert {entry["dtype"] for entry in document["entries"]} == {"float64", "float32", "float16", "bfloat16"}
    quick = {case.family for case in load_cases() if "quick" in case.flags}
    left_out = quick - {entry["family"] for entry in document["entries"]}
    assert left_out == {*frozen.LARGE, "gradient", "invalid"}


def test_frozen_values_change_with_the_specification_only(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("tool", HERE.parent / "tools" / "core_vectors.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "FILTERS", FEW)
    folder = tmp_path / "core"

    def run(*more: str) -> object:
        """What the tool ends with: None, or an error."""
        monkeypatch.setattr(sys, "argv", ["core_vectors.py", str(folder), *more])
        try:
            tool.main()
        except SystemExit as error:
            return error.code
        return None

    assert run() is None
    before = files(folder)
    assert verify(str(folder), FEW, frozen.STAGES).differences == ()
    rewrite(folder, lambda m: m["entries"].pop())
    assert f"expected an export and no more, found 'expected/{NAME}'" in run()
    for kind in ("inputs", "expected"):
        (folder / kind / NAME).unlink()
    assert run() is None, "a new case is taken up"
    assert files(folder) == before
    tensors = load_file(folder / "expected" / NAME)
    replace_file(folder, "expected", encode(tensors | {"lse": np.nextafter(tensors["lse"], 9)}))
    kept = files(folder)
    assert run() is None
    assert files(folder) == kept, "what is the same but for last bits is not written again"
    replace_file(folder, "expected", encode(tensors | {"output": tensors["output"] + 1}))
    assert f"first expected/{NAME}: `output`" in run()
    assert run("--change-values") is None
    assert files(folder) == before


# Judging results


def test_honest_results_pass_by_the_same_report(vectors, results, tmp_path, capfd):
    reports = ["--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml"]
    status, out, err = command("check", vectors, results, *reports, "--precision", "tf32", capfd=capfd)
    assert (status, err) == (0, ""), out
    assert "2 of 2 cases executed, 2 passed" in out
    document = json.loads((tmp_path / "r.json").read_text())
    schema("report").validate(document)
    assert document["filters"]["case"] == [CASE]
    (entry,) = document["targets"]
    assert entry["target"] == {
        "name": str(results),
        "framework": "files",
        "version": "unknown",
        "device": "unknown",
        "precision": "tf32",
    }
    assert {row["seconds"] for row in entry["results"]} == {0}
    assert all(row["ratio"] < 0.5 for row in entry["results"])


@pytest.mark.requirement("EXC-5")
def test_faults_of_the_port_fail_its_cases(vectors, results, tmp_path, capfd):
    path = results / NAME
    good = path.read_bytes()
    shutil.copy(vectors / "inputs" / NAME, path)
    status, out, _ = command("check", vectors, results, "--junit", tmp_path / "r.xml", capfd=capfd)
    assert (status, "missing: no `output`" in out or "unknown stage" in out) == (1, True)
    assert f"iha vectors check {vectors} {results}" in (tmp_path / "r.xml").read_text()
    path.write_bytes(good[:100])
    assert command("check", vectors, results, capfd=capfd)[0] == 1
    path.unlink()
    status, out, _ = command("check", vectors, results, capfd=capfd)
    assert (status, f"missing: expected the file {NAME}, found none" in out) == (1, True)
    path.with_suffix(".skip").write_text("no bfloat16")
    status, out, _ = command("check", vectors, results, capfd=capfd)
    assert (status, "PASSED what was executed; 1 skipped" in out) == (0, True)
    (results / "other.safetensors").touch()
    status, out, _ = command("check", vectors, results, capfd=capfd)
    assert (status, "expected files of these cases alone, found 'other.safetensors'" in out) == (1, True)
    os.remove(results / "other.safetensors")
    (results / NAME.replace("bfloat16", "float32")).unlink()
    (results / NAME.replace("bfloat16", "float32")).with_suffix(".skip").write_text("nor this")
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "expected at least one executed case, got 0" in err) == (2, True)
    path.write_bytes(good)
    status, out, _ = command("check", vectors, results, capfd=capfd)
    assert (status, "expected either it or" in out) == (1, True)


@pytest.mark.parametrize("function", ["scandir", "lstat"])
def test_results_that_cannot_be_read_are_no_fault_of_the_port(vectors, results, monkeypatch, capfd, function):
    forbid(monkeypatch, function, results if function == "scandir" else os.path.join(results, "."))
    status, out, err = command("check", vectors, results, capfd=capfd)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "OUT_DIR: expected a folder of results, found one that cannot be read: Permission denied" in err
    assert repr(str(results)) in err


def test_results_that_cannot_be_read_any_more_are_no_fault_of_the_port(results, monkeypatch):
    port = FolderTarget(Launch(kind="files", name=str(results)))
    forbid(monkeypatch, "scandir", results)
    with pytest.raises(CommandError, match="found one that cannot be read"):
        list(port.evaluate([job(CASE)]))


def test_a_folder_that_cannot_be_listed_fails_every_case(results, monkeypatch):
    awaited = [Awaited.of(job(CASE, dtype)) for dtype in FEW.dtype]
    assert [result.kind for result in collect(results, awaited)] == ["arrays", "arrays"]
    forbid(monkeypatch, "scandir", results)
    found = [(result.kind, result.failure, result.reason) for result in collect(results, awaited)]
    reason = "cannot list the folder of results: Permission denied"
    assert found == [("failed", "unreadable", reason)] * 2


def test_a_file_that_cannot_be_looked_at_is_not_missing(results, monkeypatch):
    for ending in (".safetensors", ".skip"):
        forbid(monkeypatch, "lstat", (results / NAME).with_suffix(ending))
    result, _ = collect(results, [Awaited.of(job(CASE, dtype)) for dtype in ("bfloat16", "float32")])
    assert result.failure == "unreadable"
    assert result.reason == f"{NAME}: expected a file that can be read, found: Permission denied"


def test_an_input_too_many_is_a_fault_of_the_vectors(vectors, results, monkeypatch, capfd):
    """A port that does what it is told would read it, and fail."""
    (vectors / "inputs" / "other.safetensors").touch()
    status, out, err = command("check", vectors, results, capfd=capfd)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "inputs: expected files of its entries alone, found 'other.safetensors'" in err
    (vectors / "inputs" / "other.safetensors").rename(vectors / "inputs" / "notes\n.txt")
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "alone, found 'notes\\n.txt'" in err) == (2, True)
    (vectors / "inputs" / "notes\n.txt").unlink()
    forbid(monkeypatch, "scandir", vectors / "inputs")
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "inputs: expected a folder that can be read" in err) == (2, True)


def test_no_result_at_all_is_a_failure(vectors, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    assert command("check", vectors, tmp_path / "empty", capfd=capfd)[0] == 1


def test_wrong_values_fail_at_the_first_wrong_stage(vectors, results, capfd):
    tensors = load_file(results / "core.paper.float32.safetensors")
    save_file(tensors | {"lse": tensors["lse"] + 1}, results / "core.paper.float32.safetensors")
    status, out, _ = command("check", vectors, results, capfd=capfd)
    assert (status, "first wrong stage lse" in out) == (1, True)


def test_expectations_in_the_folder_are_not_believed(vectors, results, capfd):
    """A port that fails still fails when they are made to agree with it, and passes without any."""
    wrong = {"output": load_file(results / "core.paper.float32.safetensors")["output"] + 1}
    save_file(wrong, results / "core.paper.float32.safetensors")
    for name in ("core.paper.float32.safetensors", NAME):
        save_file(
            {"output": wrong["output"], "limit.output": wrong["output"] * 0 + 9}, vectors / "expected" / name
        )
    replace_file(vectors, "expected", (vectors / "expected" / NAME).read_bytes())
    assert command("check", vectors, results, capfd=capfd)[0] == 1
    shutil.rmtree(vectors / "expected")
    right = {"output": wrong["output"] - 1}
    save_file(right, results / "core.paper.float32.safetensors")
    assert command("check", vectors, results, capfd=capfd)[0] == 0


def test_tampered_inputs_are_a_fault_of_the_vectors(vectors, results, capfd):
    contents = parse((vectors / "inputs" / NAME).read_bytes())
    tensors = contents.tensors | {"q": np.zeros_like(contents.tensors["q"])}
    (vectors / "inputs" / NAME).write_bytes(encode(tensors, contents.metadata))
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "fault of the vectors" in err, "expected the SHA-256" in err) == (2, True, True)
    replace_file(vectors, "inputs", encode(tensors, contents.metadata))
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "`q`: expected the bits" in err) == (2, True)
    metadata = json.loads(contents.metadata["iha"])
    metadata["config"]["causal"] = "none"
    replace_file(vectors, "inputs", encode(contents.tensors, {"iha": json.dumps(metadata)}))
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "metadata 'iha': expected that of the case" in err) == (2, True)
    wide = {name: tensor.astype(np.float32) for name, tensor in contents.tensors.items()}
    assert wide["q"].dtype != ml_dtypes.bfloat16
    replace_file(vectors, "inputs", encode(wide, contents.metadata))
    assert command("check", vectors, results, capfd=capfd)[0] == 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            lambda m: m.update(spec_version="9.9"),
            f"spec_version: expected this kit's, {SPEC_VERSION}, found '9.9'",
        ),
        (lambda m: m.update(corpus_sha256="0" * 64), "corpus_sha256: expected this kit's"),
        (lambda m: m["entries"].pop(), "expected 2 entries, as its filters select, found 1"),
        (
            lambda m: m["entries"].append(m["entries"][0]),
            "expected 2 entries, as its filters select, found 3",
        ),
        (lambda m: m.update(entries=[]), "should be non-empty"),
        (lambda m: m["entries"].reverse(), "dtype: expected 'float32', found 'bfloat16'"),
        (lambda m: m.update(filters=None), "as its filters select, found 2"),
        (lambda m: m["filters"].update(case=["core/none"]), "--case: expected one of"),
        (lambda m: m["filters"].update(family=["invalid"], case=None), "got none that matches"),
        (lambda m: m["entries"][0].update(why="because"), "entry of core/paper in float32, why: expected "),
        (lambda m: m["entries"][0]["input"].update(file="../../etc/passwd"), "entries/0/input/file"),
        (lambda m: m["entries"][0]["input"].update(file=NAME + "\n"), "entries/0/input/file"),
        (lambda m: m.update(more=1), "'more' was unexpected"),
        (
            lambda m: m["entries"][0].update(more=1),
            "entries/0: expected what vectors-manifest.schema.json says",
        ),
        (lambda m: m["counts"].update(files=-1), "counts/files"),
        (lambda m: m["counts"].update(files=1.5), "counts/files"),
        (
            lambda m: m["counts"].update(files=3),
            "counts: expected {'cases': 1, 'files': 2}, found {'cases': 1,",
        ),
        (
            lambda m: m["counts"].update(cases=2),
            "counts: expected {'cases': 1, 'files': 2}, found {'cases': 2,",
        ),
        (lambda m: m["stages"].reverse(), "stages: expected ['mixed_q', "),
        (lambda m: m.update(spec_version=SPEC_VERSION + "\n"), "spec_version: expected what"),
        (lambda m: m["filters"].update(case=[CASE, CASE]), "filters/case: expected what"),
        (lambda m: m["filters"].update(dtype=["float32"] * 5), "filters/dtype: expected what"),
        (lambda m: m["filters"].update(case=[f"a/{i}" for i in range(10001)]), "filters/case: expected what"),
        (lambda m: m["filters"].update(case=[1, "a"] * 10**5), "filters/case: expected what"),
    ],
)
def test_a_manifest_of_something_else_is_a_fault_of_the_vectors(vectors, results, capfd, change, part):
    rewrite(vectors, change)
    status, out, err = command("check", vectors, results, capfd=capfd)
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert part in err
    assert len(err) < 1000


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "expected JSON"),
        (b"[" * 10**6, "levels of JSON"),
        (b"[1, 2]", "is not of type 'object'"),
        (b'{"spec_version": "1.0", "spec_version": "1.0"}', "found 'spec_version' twice"),
        (b'{"counts": 1e999}', "expected a finite number"),
        (b'{"counts": ' + b"9" * 10000 + b"}", "digits"),
        (b"\xff", "expected UTF-8"),
        (b" " * (2**22 + 1), "expected at most 4194304 bytes"),
    ],
)
def test_a_manifest_that_is_none_is_an_error_in_one_line(vectors, results, capfd, data, part):
    (vectors / manifest.NAME).write_bytes(data)
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, len(err.splitlines())) == (2, 1)
    assert part in err


def test_a_manifest_whose_own_hash_is_wrong_is_refused(vectors, results, capfd):
    rewrite(vectors, lambda m: m["entries"][0].update(flags=[]), hashed=False)
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "vectors_sha256: expected the hash of the entries" in err) == (2, True)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(vectors, results, capfd):
    (vectors / manifest.NAME).unlink()
    os.mkfifo(vectors / manifest.NAME)
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, "expected a regular file, found a named pipe" in err) == (2, True)


def test_a_frozen_case_that_changes_is_a_fault_of_the_kit(vectors, results, capfd, monkeypatch):
    from iha_conformance.corpus import CorpusError

    def changed(cases):
        raise CorpusError("case 'core/paper': expected the frozen one")

    monkeypatch.setattr(exporting, "check_frozen", changed)
    status, _, err = command("check", vectors, results, capfd=capfd)
    assert (status, err.startswith("iha: error: fault of the kit: case 'core/paper'")) == (2, True)


def test_vectors_are_made_one_at_a_time():
    one = next(iter(make_vectors(exporting.exported_pairs(FILTERS), STAGES)))
    assert one.entry["id"] == CASE
