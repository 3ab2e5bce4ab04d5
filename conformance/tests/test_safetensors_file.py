"""Files and documents from strangers: any bytes give a value or one class of error, and soon."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
from exec_port import raw
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from iha_conformance.vectors import frozen
from iha_conformance.vectors.manifest import MAX_MANIFEST
from iha_conformance.vectors.safetensors_file import MAX_HEADER, encode, parse
from iha_conformance.vectors.untrusted import MAX_LEVELS, FormatError, check_schema, parse_json, read_regular

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_)
TENSORS = {f"t{i}": np.arange(6).reshape(2, 3).astype(dtype) for i, dtype in enumerate(DTYPES)}
TENSORS |= {
    "none": np.zeros((3, 0, 2)),
    "scalar": np.array(2.5),
    "special": np.array([np.nan, -np.inf, -0.0]),
}
WHOLE = encode(TENSORS, {"iha": '{"a": "\u00e9"}'})


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


def one(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


# The format, with the library on the other side


def test_what_is_written_is_read_back():
    contents = parse(WHOLE)
    assert contents.metadata == {"iha": '{"a": "\u00e9"}'}
    assert contents.tensors.keys() == TENSORS.keys()
    for name, tensor in contents.tensors.items():
        assert same(tensor, TENSORS[name]), name
        assert tensor.flags.writeable
        assert tensor.flags.aligned
        assert tensor.flags.owndata or tensor.base.flags.owndata


def test_the_library_reads_what_is_written():
    read = dict(safetensors.deserialize(WHOLE))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (read[name]["shape"], bytes(read[name]["data"])) == (list(tensor.shape), tensor.tobytes())


def test_what_the_library_writes_is_read():
    contents = parse(save({name: np.array(tensor) for name, tensor in TENSORS.items()}, {"x": "y", "z": ""}))
    assert contents.metadata == {"x": "y", "z": ""}
    assert all(same(contents.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert parse(save({})).tensors == {}


def test_the_order_of_tensors_and_their_layout_change_no_byte():
    backwards = {name: TENSORS[name] for name in reversed(TENSORS)}
    backwards["t0"] = np.asfortranarray(TENSORS["t0"])
    backwards["t1"] = np.repeat(TENSORS["t1"], 2, axis=1)[:, ::2]
    assert encode(backwards, {"iha": '{"a": "\u00e9"}'}) == WHOLE


def test_bytes_that_are_written_are_frozen():
    """Another version of the library that writes otherwise would change the files of every export."""
    written = encode({"b": np.array([1.5]), "a": np.array([True])}, {"iha": "x"})
    header = (
        b'{"__metadata__":{"iha":"x"},"b":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},'
        b'"a":{"dtype":"BOOL","shape":[1],"data_offsets":[8,9]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    assert written == len(padded).to_bytes(8, "little") + padded + np.array([1.5]).tobytes() + b"\1"


def test_tensors_may_lie_in_any_order_and_be_empty():
    header = {
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "none": {"dtype": "F64", "shape": [0, 5], "data_offsets": [4, 4]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
    }
    tensors = parse(raw(header, np.array([1, 2], np.float32).tobytes())).tensors
    assert (tensors["a"], tensors["b"].tolist(), tensors["none"].shape) == (2, [1], (0, 5))


# What is refused


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 8 bytes with the length of the header, found 0"),
        (b"\xff" * 8, f"expected a header of at most {MAX_HEADER} bytes, found a length of {2**64 - 1}"),
        ((MAX_HEADER + 1).to_bytes(8, "little") + b" " * (MAX_HEADER + 1), "expected a header of at most"),
        (b"\x03" + bytes(7) + b"{}", "expected a header of 3 bytes, found 2"),
        (bytes(8), "header: expected JSON"),
        (b"\x02" + bytes(7) + b"[]", "header: expected an object, found []"),
        (b"\x02" + bytes(7) + b"\xff\xfe", "header: expected UTF-8, found the byte 0xff"),
        (b"\x06" + bytes(7) + "{}".encode("utf-16"), "header: expected UTF-8"),
        (b"\x03" + bytes(7) + b"{}x", "header: expected JSON, found Extra data at character 2"),
        (raw({}, b"x"), "expected 0 bytes of data after the header, found 1"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__: expected an object of texts"),
        (raw({"__metadata__": None}), "__metadata__: expected an object of texts"),
        (raw(one(), bytes(7)), "expected 8 bytes of data after the header, found 7"),
        (raw(one(), bytes(9)), "expected 8 bytes of data after the header, found 9"),
        (raw({"a": 3}), "`a`: expected dtype, shape and data_offsets, found 3"),
        (raw(one(more=1), bytes(8)), "found ['data_offsets', 'dtype', 'more', 'shape']"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "found ['dtype', 'shape']"),
        (
            raw(one(dtype="F8_E4M3"), bytes(8)),
            "`a` dtype: expected one of F64, F32, F16, BF16, I64, BOOL, found",
        ),
        (raw(one(dtype=["F32"]), bytes(8)), "`a` dtype: expected one of"),
        (raw(one(dtype="f32"), bytes(8)), "`a` dtype: expected one of"),
        (raw(one(shape=2), bytes(8)), "`a` shape: expected up to 8 sizes >= 0, found 2"),
        (raw(one(shape=[-2]), bytes(8)), "`a` shape: expected up to 8 sizes >= 0, found [-2]"),
        (raw(one(shape=[2.0]), bytes(8)), "`a` shape: expected up to 8 sizes >= 0, found [2.0]"),
        (raw(one(shape=[True, 2]), bytes(8)), "`a` shape: expected up to 8 sizes >= 0, found [True, 2]"),
        (raw(one(shape=[1] * 8 + [2]), bytes(8)), "`a` shape: expected up to 8 sizes"),
        (
            raw(one(shape=[0, 2**50], data_offsets=[0, 0])),
            "`a` shape: expected at most 281474976710656 elements",
        ),
        (raw(one(shape=[2**32, 2**32]), bytes(8)), "`a` shape: expected at most"),
        (raw(one(shape=[3]), bytes(8)), "`a` data_offsets: expected 12 bytes for F32 [3], found [0, 8]"),
        (raw(one(data_offsets=[8, 0]), bytes(8)), "`a` data_offsets: expected 8 bytes"),
        (raw(one(data_offsets=[-8, 0]), bytes(8)), "`a` data_offsets: expected two whole numbers >= 0"),
        (raw(one(data_offsets=[0, 4, 8]), bytes(8)), "`a` data_offsets: expected two whole numbers >= 0"),
        (raw(one(data_offsets=[8, 16]), bytes(16)), "after the header, found a gap at 8"),
        (raw(one(data_offsets=[0, 8]) | {"b": one()["a"]}, bytes(16)), "after `a`, found an overlap at 0"),
        (
            raw(one(dtype="BOOL", data_offsets=[0, 2]), b"\1\2"),
            "`a`: expected bytes 0 and 1 for BOOL, found 2",
        ),
        (raw({"../a": one()["a"]}, bytes(8)), "expected names of letters, digits, _ and dots, found '../a'"),
        (raw({"a\n": one()["a"]}, bytes(8)), "found 'a\\n'"),
        (raw({"": one()["a"]}, bytes(8)), "expected names of letters"),
        (raw({"a" * 101: one()["a"]}, bytes(8)), "expected names of letters"),
        (raw({"\ud800": one()["a"]}, bytes(8)), "expected names of letters"),
        (b"\x0f" + bytes(7) + b'{"a":1,"a":{}} ', "header: expected each key once, found 'a' twice"),
    ],
)
def test_files_that_are_refused(data, message):
    with pytest.raises(FormatError) as caught:
        parse(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10**6, f"expected at most {MAX_LEVELS} levels of JSON"),
        ('{"a":' * 10**5, f"expected at most {MAX_LEVELS} levels of JSON"),
        ('"' + '\\"' * 10**6, "expected JSON, found Unterminated string"),
        ("9" * 10**6, "expected a number of at most 18 digits"),
        ("1e999", "expected a finite number, found '1e999'"),
        ("NaN", "expected a finite number, found NaN"),
        ("[-Infinity]", "expected a finite number, found -Infinity"),
        ("\ufeff{}", "expected JSON"),
        ("", "expected JSON"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "expected each key once, found 'c' twice"),
        ('{"\\u0061": 1, "a": 2}', "expected each key once, found 'a' twice"),
        ('"a\nb"', "expected JSON"),
        ("\0", "expected JSON"),
    ],
)
def test_documents_that_are_refused(text, message):
    start = time.monotonic()
    with pytest.raises(FormatError) as caught:
        parse_json(text.encode())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "text",
    [
        '"' + '\\"' * 2**20 + "\\",
        '"' + "\\" * (2**21 + 1),
        '"' + "x" * 2**21,
        '["' + "[" * 2**21 + '"',
        '"' * (2**21 + 1),
        "[]" * 2**20,
        "{" + '"a' * 2**20,
    ],
)
def test_no_document_takes_long_or_much_memory(text):
    """2 MiB each, half of what a manifest may have."""
    data = text.encode()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            parse_json(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(data)
    start = time.monotonic()
    with pytest.raises(FormatError):
        parse_json(data)
    assert time.monotonic() - start < 5


def test_the_limits_are_four_times_what_the_kit_writes():
    header = 2232  # the largest of the whole corpus, whose manifest has half a million bytes
    assert (4 * header <= MAX_HEADER, MAX_MANIFEST >= 4 * 523050) == (True, True)
    most = max(
        int.from_bytes(path.read_bytes()[:8], "little") for path in frozen.FOLDER.glob("*/*.safetensors")
    )
    assert most <= header
    assert (frozen.FOLDER / "manifest.json").stat().st_size * 4 <= MAX_MANIFEST


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet='[]{}"\\a', max_size=60))
def test_depth_is_that_of_brackets_outside_of_strings(text):
    outside = re.sub(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', "", text)
    depths = [outside[:end].count("[") + outside[:end].count("{") for end in range(len(outside) + 1)]
    closed = [outside[:end].count("]") + outside[:end].count("}") for end in range(len(outside) + 1)]
    deep = max(opened - shut for opened, shut in zip(depths, closed, strict=True)) > MAX_LEVELS
    said = ""
    try:
        parse_json(text.encode())
    except FormatError as error:
        said = str(error)
    assert ("levels of JSON" in said) == deep


def test_documents_that_are_read():
    assert parse_json(b'{"a": [1, -2.5, "[[[[{", null, true]}') == {"a": [1, -2.5, "[[[[{", None, True]}
    deep = "[" * MAX_LEVELS + "]" * MAX_LEVELS
    assert json.dumps(parse_json(deep.encode())) == deep
    many = json.dumps(["]" * 3, "\\", '"', "[" * 99] * 1000)
    assert parse_json(many.encode()) == json.loads(many)


def test_a_schema_says_where_and_what():
    with pytest.raises(FormatError) as caught:
        check_schema({"spec_version": 1}, "exchange")
    assert "exchange.schema.json says" in str(caught.value)
    with pytest.raises(FormatError) as caught:
        check_schema([["x" * 10**5]] * 10, "exchange")
    assert len(str(caught.value)) < 300


# Fuzzing


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_files_give_arrays_or_one_error(data):
    """What is read has the bits that the library finds, and the library refuses nothing of it."""
    mutated = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "copy"]))
        where = data.draw(st.integers(0, max(0, min(len(mutated) - 1, 900))))
        if kind == "flip" and mutated:
            mutated[where] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del mutated[where : where + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            mutated[where:where] = data.draw(
                st.sampled_from([b"[", b"{", b'"', b"9", b"-", b"\0", b",", b"null"])
            )
        else:
            mutated[where:where] = mutated[where : where + 30]
    check_against_library(bytes(mutated))


HEADERS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**70)
    | st.floats()
    | st.sampled_from(["F32", "BOOL", "I64", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
SIZES = st.lists(st.integers(0, 3) | st.integers(0, 2**63), max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F64", "F32", "BF16", "BOOL", "I32"]),
        "shape": SIZES,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 24)).map(list),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    HEADERS | st.dictionaries(st.sampled_from(["a", "b", "c"]), ENTRIES, max_size=3), st.binary(max_size=24)
)
def test_any_header_gives_arrays_or_one_error(header, data):
    check_against_library(raw(header, data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_arrays_or_one_error(data):
    check_against_library(data)
    check_against_library(len(data).to_bytes(8, "little") + data)


def check_against_library(data: bytes) -> None:
    try:
        contents = parse(data)
    except FormatError:
        return
    read = dict(safetensors.deserialize(data))
    assert read.keys() == contents.tensors.keys()
    for name, tensor in contents.tensors.items():
        assert bytes(read[name]["data"]) == tensor.tobytes()
        assert tuple(read[name]["shape"]) == tensor.shape


# Files


def test_regular_files_are_read_as_far_as_allowed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, at_most=5) == b"12345"
    with pytest.raises(FormatError, match="expected at most 4 bytes, found 5"):
        read_regular(path, at_most=4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", at_most=5)


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        start = time.monotonic()
        for name, kind in {
            "folder": "a folder",
            "link": "a symbolic link",
            "dangling": "a symbolic link",
            "loop": "a symbolic link",
            "pipe": "a named pipe",
            "socket": "a socket",
        }.items():
            with pytest.raises(FormatError, match=f"expected a regular file, found {kind}"):
                read_regular(tmp_path / name, at_most=100)
    with pytest.raises(FormatError, match="a device"):
        read_regular(tmp_path.joinpath("/dev/zero"), at_most=100)
    assert time.monotonic() - start < 5


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    """Between the look and the opening: neither pipes nor links are followed then."""
    path = tmp_path / "file"
    os.mkfifo(path)
    regular = os.stat(__file__)
    monkeypatch.setattr("iha_conformance.vectors.untrusted.os.lstat", lambda path: regular)
    with pytest.raises(FormatError, match="expected a regular file, found a named pipe"):
        read_regular(path, at_most=100)
    path.unlink()
    path.symlink_to(__file__)
    with pytest.raises(FormatError, match="expected a file that can be read"):
        read_regular(path, at_most=10**9)


def test_a_file_below_a_file_is_an_error_of_its_own(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="expected a file that can be read"):
        read_regular(tmp_path / "file" / "below", at_most=1)
