"""The ports of conformance/ports that are commands: the whole corpus, bad files, and planted faults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from iha_conformance.corpus import build_inputs, load_cases
from iha_conformance.runner import make_job
from iha_conformance.vectors.exchange import input_file
from iha_core import SPEC_VERSION, STAGES

PORTS = Path(__file__).resolve().parents[1] / "ports"
SOURCES = {"javascript": PORTS / "javascript" / "iha.mjs", "cpp": PORTS / "cpp" / "iha.cpp"}
DTYPES = ("float64", "float32", "float16", "bfloat16")
COMPILER_FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
GOOD, BAD = "core.paper.float32", "core.bad.float32"  # the bad one is the first in the order of names
SECONDS = 120  # for a command that takes one or two


# The languages


@functools.cache
def node() -> str:
    """A program that runs JavaScript; skips the test if there is none."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("the port in JavaScript needs Node 20 or later: no node in PATH")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        pytest.skip(f"the port in JavaScript needs Node 20 or later: {found} is {version}")
    return found


@functools.cache
def compiler() -> str:
    """A C++ compiler; skips the test if there is none for C++17."""
    for name in ("c++", "g++", "clang++"):
        if (found := shutil.which(name)) is not None:
            program = '#include <filesystem>\nint main() { return std::filesystem::exists("") ? 1 : 0; }'
            words = [found, *COMPILER_FLAGS, "-fsyntax-only", "-x", "c++", "-"]
            made = subprocess.run(words, input=program, capture_output=True, text=True, check=False)
            if made.returncode == 0:
                return found
    pytest.skip("the port in C++ needs a compiler for C++17: no c++, g++ or clang++ in PATH that is one")


def make(name: str, source: Path, folder: Path, *flags: str) -> list[str]:
    """Words of the command of a port, compiled into the folder if need be."""
    if name == "javascript":
        return [node(), str(source)]
    program = folder / "iha"
    made = subprocess.run(
        [compiler(), *COMPILER_FLAGS, *flags, "-o", str(program), str(source)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return [str(program)]


@pytest.fixture(scope="session")
def javascript(tmp_path_factory) -> list[str]:
    return make("javascript", SOURCES["javascript"], tmp_path_factory.mktemp("javascript"))


@pytest.fixture(scope="session")
def cpp(tmp_path_factory) -> list[str]:
    return make("cpp", SOURCES["cpp"], tmp_path_factory.mktemp("cpp"), "-O2")


@pytest.fixture(params=SOURCES)
def name(request) -> str:
    return request.param


@pytest.fixture
def port(request, name) -> list[str]:
    """The command of a port; skips the test if its language is not here."""
    return request.getfixturevalue(name)


def call(command: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)


def iha_run(report: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "iha_conformance", "run", *words, "--json", str(report)],
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# The corpus


@dataclasses.dataclass(frozen=True)
class Judged:
    """What `iha run` said of one port."""

    run: subprocess.CompletedProcess[str]
    summary: dict[str, int]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="session")
def all_judged(request, tmp_path_factory) -> dict[str, Judged]:
    """The whole corpus in all dtypes, by all ports whose language is here, in one run."""
    commands = {}
    for name in SOURCES:
        with contextlib.suppress(pytest.skip.Exception):
            commands[name] = shlex.join(request.getfixturevalue(name))
    if not commands:
        pytest.skip("there is neither Node 20 nor a compiler for C++17")
    words = [word for command in commands.values() for word in ("--exec", command)]
    report = tmp_path_factory.mktemp("report") / "report.json"
    run = iha_run(report, *words, *(word for dtype in DTYPES for word in ("--dtype", dtype)))
    assert report.exists(), run.stderr
    targets = json.loads(report.read_text())["targets"]
    return {
        name: Judged(run, target["summary"], target["results"])
        for name, target in zip(commands, targets, strict=True)
    }


@pytest.fixture
def judged(port, name, all_judged) -> Judged:
    return all_judged[name]


def test_every_case_is_executed_and_passes(judged):
    """Every one that needs no capability, none of which a command has."""
    expected = sum(len(case.dtypes) for case in load_cases() if case.capability is None)
    assert expected > 900
    assert [row for row in judged.rows if row["status"] not in ("passed", "not_applicable")] == []
    assert judged.summary == {
        "expected": expected,
        "executed": expected,
        "passed": expected,
        "failed": 0,
        "skipped": 0,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_result_stays_at_or_below_half_of_every_limit(judged, dtype):
    rows = [row for row in judged.rows if row["dtype"] == dtype and row["status"] == "passed"]
    cases = [case.id for case in load_cases() if dtype in case.dtypes and case.capability is None]
    assert sorted(row["id"] for row in rows) == sorted(cases)
    ratios = {row["id"]: row["ratio"] for row in rows}
    assert {id: ratio for id, ratio in ratios.items() if ratio is None or ratio > 0.5} == {}


def test_the_run_passes(all_judged):
    """That of all ports that are here."""
    for judged in all_judged.values():
        assert judged.run.returncode == 0, judged.run.stdout


# Files by hand


Header = dict[str, Any]


@functools.cache
def good_file(case_id: str = "core/paper", dtype: str = "float32") -> bytes:
    (case,) = (case for case in load_cases() if case.id == case_id)
    return input_file(make_job(case, dtype, build_inputs(case, dtype)))


def split(data: bytes) -> tuple[Header, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


def about(header: Header) -> dict[str, Any]:
    return json.loads(header["__metadata__"]["iha"])


def changed(change: Callable[[Header], None], file: bytes | None = None) -> bytes:
    """A good file with another header."""
    header, data = split(good_file() if file is None else file)
    change(header)
    return join(header, data)


def with_about(text: str) -> bytes:
    """A good file with another metadata text."""
    return changed(lambda header: header.update({"__metadata__": {"iha": text}}))


def with_field(field: str, value: object, *, config: bool = False) -> bytes:
    """A good file with another value in its metadata, one that JSON or Python's form of it has."""
    fields = about(split(good_file())[0])
    (fields["config"] if config else fields)[field] = value
    return with_about(json.dumps(fields))


def with_config_text(field: str, text: str) -> bytes:
    """A good file in whose metadata a field of the configuration is written in a certain way."""
    fields = about(split(good_file())[0])
    fields["config"][field] = "HERE"
    return with_about(json.dumps(fields).replace('"HERE"', text))


def with_entry(name: str, **values: object) -> bytes:
    return changed(lambda header: header[name].update(values))


def write(folder: Path, **files: bytes) -> tuple[Path, Path]:
    """IN_DIR with these files and a new OUT_DIR."""
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    for name, data in files.items():
        (folder / "in" / f"{name}.safetensors").write_bytes(data)
    return folder / "in", folder / "out"


def overlapping(header: Header) -> None:
    """Two tensors of one size at one place, and as many bytes that are nobody's."""
    header["alpha_k"]["data_offsets"] = header["alpha_v"]["data_offsets"]


def with_gap() -> bytes:
    """A good file with bytes before the first tensor."""
    header, data = split(good_file())
    for name in header.keys() - {"__metadata__"}:
        header[name]["data_offsets"] = [place + 8 for place in header[name]["data_offsets"]]
    return join(header, bytes(8) + data)


def wrapping_around() -> bytes:
    """A file with a shape of 12 times 2^64 elements and no bytes."""
    header, data = split(removed("q"))
    header["q"] = {"dtype": "F32", "shape": [2**32, 2**32, 3, 4], "data_offsets": [0, 0]}
    return join(header, data)


def removed(name: str) -> bytes:
    """A good file without one of its tensors."""
    header, data = split(good_file())
    begin, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [place - (end - begin) for place in entry["data_offsets"]]
    return join(header, data[:begin] + data[end:])


def masked(byte: int) -> bytes:
    """A file whose key mask has a byte that is neither 0 nor 1."""
    header, data = split(good_file("keymask/random"))
    begin = header["key_mask"]["data_offsets"][0]
    return join(header, data[:begin] + bytes([byte]) + data[begin + 1 :])


DEEP = "[" * 10**6 + "]" * 10**6
UNREADABLE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"1234567",
    "truncated data": lambda: good_file()[:-3],
    "truncated header": lambda: good_file()[:100],
    "more data": lambda: good_file() + b"\0",
    "header beyond the file": lambda: (10**6).to_bytes(8, "little") + good_file()[8:],
    "header of 2^64 - 1 bytes": lambda: b"\xff" * 8 + good_file()[8:],
    "header of 2^63 bytes": lambda: (2**63).to_bytes(8, "little") + good_file()[8:],
    "no header": lambda: bytes(8),
    "header no JSON": lambda: join("\x00\ufffd{", b""),
    "header a list": lambda: join([], b""),
    "header null": lambda: join("null", b""),
    "header cut": lambda: join('{"q": {"dtype": "F32", "shape": [1', b""),
    "header nested": lambda: join(DEEP, b""),
    "nested in an entry": lambda: join('{"q": ' + DEEP + "}", b""),
    "no metadata": lambda: changed(lambda header: header.pop("__metadata__")),
    "metadata null": lambda: changed(lambda header: header.update(__metadata__=None)),
    "metadata of another key": lambda: changed(lambda header: header.update(__metadata__={"aha": "{}"})),
    "metadata no text": lambda: changed(lambda header: header.update(__metadata__={"iha": {}})),
    "iha no JSON": lambda: with_about("{"),
    "iha null": lambda: with_about("null"),
    "iha nested": lambda: with_about(DEEP),
    "overlap": lambda: changed(overlapping),
    "gap": with_gap,
    "huge shape": lambda: with_entry("q", shape=[2**40, 2**40, 3, 4]),
    "shape that wraps around": wrapping_around,
    "shape of other size": lambda: with_entry("q", shape=[2, 7, 3, 5]),
    "shape of other order": lambda: with_entry("q", shape=[2, 7, 4, 3]),
    "shape of fewer axes": lambda: with_entry("q", shape=[2, 7, 12]),
    "shape negative": lambda: with_entry("q", shape=[-2, -7, 3, 4]),
    "shape a fraction": lambda: with_entry("q", shape=[1.5, 7, 4, 4]),
    "shape a text": lambda: with_entry("q", shape="2734"),
    "shape missing": lambda: changed(lambda header: header["q"].pop("shape")),
    "offsets a number": lambda: with_entry("q", data_offsets=0),
    "offsets negative": lambda: with_entry("q", data_offsets=[-672, 0]),
    "offsets infinite": lambda: with_entry("q", data_offsets=[0, 10**400]),
    "unknown dtype": lambda: with_entry("q", dtype="F8"),
    "dtype null": lambda: with_entry("q", dtype=None),
    "dtype of another array": lambda: with_entry("alpha_q", dtype="F64", shape=[3, 3, 1]),
    "dtype of another case": lambda: with_field("dtype", "float16"),
    "unknown key of a tensor": lambda: with_entry("q", strides=[1]),
    "tensor missing": lambda: removed("collapse"),
    "mask of another byte": lambda: masked(2),
    "field missing": lambda: with_about(json.dumps({"spec_version": SPEC_VERSION})),
    "version a number": lambda: with_field("spec_version", 1.1),
    "theta a text": lambda: with_field("rope_theta", "NaN", config=True),
    "theta NaN": lambda: with_field("rope_theta", float("nan"), config=True),
    "theta zero": lambda: with_field("rope_theta", 0, config=True),
    "theta beyond float64": lambda: with_config_text("rope_theta", "1e999"),
    "theta two numbers": lambda: with_config_text("rope_theta", "1-2"),
    "scale infinite": lambda: with_field("scale", float("-inf"), config=True),
    "window zero": lambda: with_field("window", 0, config=True),
    "window a fraction": lambda: with_field("window", 2.5, config=True),
    "no such choice": lambda: with_field("causal", "past\n\x1b[31mline", config=True),
    "config a list": lambda: with_field("config", []),
    "offset a fraction": lambda: with_field("query_offset", 0.5),
    "offset huge": lambda: with_field("query_offset", 10**30),
    "offsets too many": lambda: with_field("query_offset", [0, 0, 0]),
    "wanted a text": lambda: with_field("wanted", "output"),
    "wanted no texts": lambda: with_field("wanted", [5]),
}


@pytest.mark.requirement("EXC-6")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_cannot_be_read_stops_no_other(port, kind, tmp_path):
    into, out = write(tmp_path, **{BAD: UNREADABLE[kind](), GOOD: good_file()})
    run = call(port, into, out)
    expect_one_complaint(run, BAD)
    assert [path.name for path in out.iterdir()] == [f"{GOOD}.safetensors"]


def expect_one_complaint(run: subprocess.CompletedProcess[str], name: str) -> None:
    assert run.returncode == 1, run.stderr
    assert run.stdout == ""
    (line,) = run.stderr.removesuffix("\n").split("\n")
    assert f"{name}.safetensors: " in line
    assert line.isprintable()
    assert len(line) < 1000


@pytest.mark.requirement("EXC-6")
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_only_files_are_read(port, make, tmp_path):
    """A pipe would be waited for."""
    into, out = write(tmp_path, **{GOOD: good_file()})
    make(into / f"{BAD}.safetensors")
    expect_one_complaint(call(port, into, out), BAD)
    assert [path.name for path in out.iterdir()] == [f"{GOOD}.safetensors"]


@pytest.mark.requirement("EXC-5", "ERR-2")
def test_a_file_too_large_to_be_read_is_refused(port, tmp_path):
    into, out = write(tmp_path, **{GOOD: good_file()})
    with (into / f"{BAD}.safetensors").open("wb") as file:
        file.truncate(2**40)
    run = call(port, into, out)
    assert run.returncode == 0, run.stderr
    assert "is not read here" in (out / f"{BAD}.skip").read_text()


@pytest.mark.requirement("EXC-2")
def test_a_name_that_occurs_twice_is_an_error_in_cpp(cpp, tmp_path):
    """JavaScript's JSON.parse takes the last one."""
    header, data = split(good_file())
    text = json.dumps(header)[:-1] + f', "q": {json.dumps(header["q"])}}}'
    into, out = write(tmp_path, **{BAD: join(text, data), GOOD: good_file()})
    expect_one_complaint(call(cpp, into, out), BAD)


def test_bad_files_have_no_undefined_behaviour_in_cpp(tmp_path):
    """All of them, and the quick cases, with a program that watches itself."""
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    made = call([compiler(), *SANITIZERS, "-o", str(tmp_path / "probe"), str(probe)])
    if made.returncode or call([str(tmp_path / "probe")]).returncode:
        pytest.skip(f"{compiler()} has no {SANITIZERS[0]} here")
    command = make("cpp", SOURCES["cpp"], tmp_path, "-O1", *SANITIZERS)
    bad = {f"bad.{index}.float32": data() for index, data in enumerate(UNREADABLE.values())}
    quick = {
        f"{case.id.replace('/', '.')}.{dtype}": good_file(case.id, dtype)
        for case in load_cases()
        if "quick" in case.flags and case.capability is None
        for dtype in case.dtypes
    }
    into, out = write(tmp_path, **bad, **quick)
    run = call(command, into, out)
    assert run.returncode == 1, run.stderr
    assert [line for line in run.stderr.splitlines() if not line.startswith("iha: ")] == []
    assert len(run.stderr.splitlines()) == len(bad)
    assert sorted(path.stem for path in out.iterdir()) == sorted(quick)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "version": (lambda: with_field("spec_version", "2.0"), r"2\.0"),
    "version of other keys": (lambda: with_about('{"spec_version": "10.1"}'), r"10\.1"),
    "version in two lines": (lambda: with_field("spec_version", "2\n0"), r"2\?0"),
    "key": (lambda: with_field("dropout", 0.5), "`dropout`"),
    "field": (lambda: with_field("softcap", None, config=True), "`softcap`"),
    "argument": (lambda: changed(lambda header: header.update(sinks=header.pop("alpha_v"))), "`sinks`"),
    "2^28 logits": (lambda: large(2**14), r"1, 1, 16384, 16384\b"),
    "2^27 tokens of no batch element": (lambda: large(2**27, empty=True), r"\d{6}|\^"),
}


def large(N: int, *, empty: bool = False) -> bytes:
    """A file of one head, whose arrays are 0, or have no batch element."""
    header, _ = split(good_file())
    header, place = {"__metadata__": header["__metadata__"]}, 0
    fields = about(header) | {"dtype": "float16"}
    for name in ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse"):
        shape = [0 if empty else 1, N, 1, 2] if len(name) == 1 else [1, 1, 1]
        end = place + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [place, end]}
        place = end
    return join(header | {"__metadata__": {"iha": json.dumps(fields)}}, bytes(place))


@pytest.mark.requirement("EXC-3", "EXC-5")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_port_does_not_know_it_refuses(port, kind, tmp_path):
    file, expected = REFUSED[kind]
    into, out = write(tmp_path, **{BAD: file(), GOOD: good_file()})
    run = call(port, into, out)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert sorted(path.name for path in out.iterdir()) == [f"{BAD}.skip", f"{GOOD}.safetensors"]
    reason = (out / f"{BAD}.skip").read_text(encoding="utf-8")
    assert reason.endswith("\n")
    assert reason[:-1].isprintable()
    assert re.search(expected, reason)


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    header, data = split(path.read_bytes())
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def escaped(text: str) -> str:
    """A text of JSON in which every character is written by its number."""
    return '"' + "".join(f"\\u{ord(character):04X}" for character in text) + '"'


def with_escapes() -> bytes:
    header, data = split(good_file())
    text = escaped(header.pop("__metadata__")["iha"])
    metadata = f'{{"iha": {text}, "more": "\\u00e9\\ud83d\\ude00 \\n\\/é"}}'
    return join(json.dumps(header)[:-1] + f", {escaped('__metadata__')}: {metadata}}}   ", data)


def reordered() -> bytes:
    """The same tensors, the last of them first in the header and in the data."""
    header, data = split(good_file())
    names = [name for name in header if name != "__metadata__"]
    new, parts, place = {}, [], 0
    for name in reversed(names):
        part = data[slice(*header[name]["data_offsets"])]
        new[name] = header[name] | {"data_offsets": [place, place + len(part)]}
        place += len(part)
        parts.append(part)
    return join(new | {"__metadata__": header["__metadata__"]}, b"".join(parts))


SAME: dict[str, Callable[[], bytes]] = {
    "theta 5e5": lambda: with_config_text("rope_theta", "5e5"),
    "theta 500000": lambda: with_config_text("rope_theta", "500000"),
    "theta 0.5E+6": lambda: with_config_text("rope_theta", "0.5E+6"),
    "theta 5000000e-1": lambda: with_config_text("rope_theta", "5000000e-1"),
    "scale 1/2": lambda: with_config_text("scale", "5e-1"),
    "window beyond 32 bits": lambda: with_config_text("window", str(2**33)),
    "window beyond 64 bits": lambda: with_config_text("window", str(2**70)),
    "window beyond float64": lambda: with_config_text("window", "1" + "0" * 400),
    "offset 0": lambda: with_field("query_offset", 0),
    "offsets 0": lambda: with_field("query_offset", [0, 0]),
    "version 1.99": lambda: with_field("spec_version", "1.99"),
    "unknown stages": lambda: with_field("wanted", ["speed", *STAGES, "größe"]),
    "escapes": with_escapes,
    "other order": reordered,
}


@pytest.mark.requirement("EXC-2", "EXC-3", "EXC-4")
@pytest.mark.parametrize("kind", SAME)
def test_other_files_that_say_the_same_give_the_same(port, kind, tmp_path):
    into, out = write(tmp_path, **{"a.same.float32": SAME[kind](), GOOD: good_file()})
    run = call(port, into, out)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert tensors(out / "a.same.float32.safetensors") == tensors(out / f"{GOOD}.safetensors")


@pytest.mark.requirement("EXC-4")
def test_only_what_is_wanted_is_written_and_always_the_output(port, tmp_path):
    into, out = write(
        tmp_path,
        **{
            "a.one.float32": with_field("wanted", ["output"]),
            "a.two.float32": with_field("wanted", ["lse", "output"]),
            "a.none.float32": with_field("wanted", []),
        },
    )
    assert call(port, into, out).returncode == 0
    found = {path.name.split(".")[1]: set(tensors(path)) for path in out.iterdir()}
    assert found == {"one": {"output"}, "two": {"lse", "output"}, "none": {"output"}}


@pytest.mark.requirement("EXC-4", "TYP-1")
def test_the_output_is_in_the_storage_dtype(port, tmp_path):
    into, out = write(tmp_path, **{f"core.paper.{dtype}": good_file("core/paper", dtype) for dtype in DTYPES})
    assert call(port, into, out).returncode == 0
    found = {path.name.split(".")[2]: tensors(path)["output"][0] for path in out.iterdir()}
    assert found == {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


# Usage


@pytest.mark.parametrize("words", [(), ("in",), ("in", "out", "more")])
def test_wrong_usage_is_status_2(port, words):
    run = call(port, *words)
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"usage: .*IN_DIR OUT_DIR\n", run.stderr)


def test_folders_that_are_not_there_are_one_line_each(port, tmp_path):
    into, out = write(tmp_path)
    for wrong in (into, tmp_path / "nowhere"):  # the first is empty
        run = call(port, wrong, out)
        assert run.returncode == 1
        assert run.stderr.count("\n") == 1
        assert f"{wrong}: " in run.stderr
    (into / f"{GOOD}.safetensors").write_bytes(good_file())
    expect_one_complaint(call(port, into, tmp_path / "nowhere"), GOOD)


# Planted faults


FAULTS = {
    ("javascript", "causal"): ("return s <= tHat;", "return s < tHat;", "logits"),
    ("javascript", "mixing"): ("at3(alpha, g, h, p)", "at3(alpha, h, g, p)", "mixed_q"),
    ("javascript", "interleaving"): ("b, n * P + p, h, j)", "b, p * N + n, h, j)", "mixed_q"),
    ("javascript", "collapse"): ("at3(weights, i, h, p)", "at3(weights, h, i, p)", "output"),
    ("cpp", "causal"): ("return key.row <= query.row;", "return key.row < query.row;", "logits"),
    ("cpp", "mixing"): ("alpha.at(g, h, p)", "alpha.at(h, g, p)", "mixed_q"),
    ("cpp", "interleaving"): ("mixed.row(b, n * P + p, h)", "mixed.row(b, p * tokens + n, h)", "mixed_q"),
    ("cpp", "collapse"): ("in.collapse.at(i, h, p)", "in.collapse.at(h, i, p)", "output"),
}


@pytest.mark.parametrize(("language", "fault"), FAULTS)
def test_a_planted_fault_is_found(language, fault, tmp_path):
    """In one line of a port; the report names the case and the stage."""
    right, wrong, stage = FAULTS[language, fault]
    text = SOURCES[language].read_text(encoding="utf-8")
    assert text.count(right) == 1
    source = tmp_path / SOURCES[language].name
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    report = tmp_path / "report.json"
    command = shlex.join(make(language, source, tmp_path, "-O0"))
    run = iha_run(report, "--exec", command, "--case", "core/paper", "--dtype", "float32")
    assert run.returncode == 1, run.stdout + run.stderr
    (row,) = json.loads(report.read_text())["targets"][0]["results"]
    assert (row["id"], row["status"], row["stage"]) == ("core/paper", "failed", stage)
    assert f"core/paper, float32: first wrong stage {stage}: " in run.stdout


# The text of the ports


@pytest.mark.parametrize(("language", "width"), [("javascript", 120), ("cpp", 110)])
def test_a_port_is_one_file_without_dependencies(language, width):
    source = SOURCES[language]
    assert [path.name for path in source.parent.iterdir()] == [source.name]
    lines = source.read_text(encoding="utf-8").splitlines()
    assert f" {SPEC_VERSION}" in lines[0]
    assert "IHA" in lines[0]
    assert [line for line in lines if len(line) > width or line != line.rstrip()] == []
    if language == "javascript":
        imports = [line for line in lines if re.search(r"\bimport\b|\brequire\(", line.partition("//")[0])]
        only = r'import \{.*\} from "node:\w+";'
    else:
        imports = [line for line in lines if "#include" in line]
        only = r"#include <[a-z]+>"
    assert imports
    assert [line for line in imports if re.fullmatch(only, line) is None] == []


def test_every_requirement_that_a_port_cites_exists():
    """And every requirement of chapter 3 is cited."""
    specification = (PORTS.parents[1] / "spec" / "SPEC.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^- \[([A-Z]+-\d)\]", specification, re.MULTILINE))
    chapter = specification.partition("## 3 The operation")[2].partition("## 4 Stages")[0]
    of_operation = set(re.findall(r"^- \[([A-Z]+-\d)\]", chapter, re.MULTILINE))
    cited = re.compile(r"\b([A-Z]{3,4}-\d)\b(?:(?:\]?,? to \[?)([A-Z]{3,4}-\d)\b)?")
    for source in SOURCES.values():
        found = set()
        for first, last in cited.findall(source.read_text(encoding="utf-8")):
            stem, _, low = first.partition("-")
            high = last.partition("-")[2] or low
            found |= {f"{stem}-{number}" for number in range(int(low), int(high) + 1)}
        assert found - there == set(), source
        assert of_operation - found == {"KEY-4"}, f"{source}: that one requires nothing"
