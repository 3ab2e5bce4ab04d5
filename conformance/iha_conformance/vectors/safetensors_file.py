"""The safetensors format ([EXC-2]): files from strangers are read here, ours are written by the library.

The library writes. It does not read: its NumPy reader has no bfloat16, it takes dtypes and headers that
this exchange has not, and all that it checks has to be checked before anything is handed to it. What is
left then is to view bytes as numbers. Whatever is accepted here the library accepts too; a test holds
both together.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from iha_conformance.vectors.untrusted import FormatError, parse_json, shown

MAX_HEADER = 2**16
"""Bytes of a header; the largest of the whole corpus has 2232."""

MAX_RANK = 8
MAX_ELEMENTS = 2**48
"""Bounds of a shape, its empty axes left out: beyond them NumPy has no arrays, not even empty ones."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")
"""A tensor's name; whether it is one of a stage is for the judge to say."""

_METADATA = "__metadata__"
_ENTRY = {"dtype", "shape", "data_offsets"}
_LENGTH = 8

_DTYPES: Mapping[str, tuple[str, Any]] = {
    "F64": ("<f8", np.float64),
    "F32": ("<f4", np.float32),
    "F16": ("<f2", np.float16),
    "BF16": ("<u2", ml_dtypes.bfloat16),
    "I64": ("<i8", np.int64),
    "BOOL": ("|u1", np.bool_),
}
"""How elements lie in the file, and what they are."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What is in a file: tensors by name, writable and aligned, and texts by name."""

    tensors: dict[str, np.ndarray[Any, Any]]
    metadata: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor as the header has it, checked."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse(data: bytes) -> Contents:
    """Read a file.

    Raises:
        FormatError: it is not in the format; nothing else is raised, whatever the bytes.
    """
    header, start = _header(data)
    metadata = _metadata(header.pop(_METADATA, {}))
    entries = [_entry(name, found) for name, found in header.items()]
    _check_cover(entries, len(data) - start)
    return Contents({entry.name: _array(entry, data, start) for entry in entries}, metadata)


def encode(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write a file; the same tensors and texts give the same bytes, whatever their order.

    Args:
        tensors: NumPy arrays of a dtype of [EXC-2], by name.
        metadata: texts by name; one at most, since the library leaves the order of more open.
    """
    from safetensors.numpy import save

    # The library takes memory as it lies; np.ascontiguousarray would give scalars an axis.
    dense = {name: np.array(tensors[name], order="C", copy=True) for name in sorted(tensors)}
    return save(dense, None if metadata is None else dict(metadata))


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    if len(data) < _LENGTH:
        raise FormatError(f"expected {_LENGTH} bytes with the length of the header, found {len(data)}")
    length = int.from_bytes(data[:_LENGTH], "little")
    if length > MAX_HEADER:
        raise FormatError(f"expected a header of at most {MAX_HEADER} bytes, found a length of {length}")
    if length > len(data) - _LENGTH:
        raise FormatError(f"expected a header of {length} bytes, found {len(data) - _LENGTH}")
    try:
        header = parse_json(data[_LENGTH : _LENGTH + length])
    except FormatError as error:
        raise FormatError(f"header: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"header: expected an object, found {shown(header)}")
    return header, _LENGTH + length


def _metadata(found: object) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise FormatError(f"{_METADATA}: expected an object of texts, found {shown(found)}")
    return found


def _entry(name: str, found: object) -> _Entry:
    if NAME.fullmatch(name) is None:
        raise FormatError(f"expected names of letters, digits, _ and dots, found {shown(name)}")
    if not isinstance(found, dict) or found.keys() != _ENTRY:
        keys = sorted(found) if isinstance(found, dict) else found
        raise FormatError(f"`{name}`: expected dtype, shape and data_offsets, found {shown(keys)}")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FormatError(f"`{name}` dtype: expected one of {', '.join(_DTYPES)}, found {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise FormatError(f"`{name}` shape: expected up to {MAX_RANK} sizes >= 0, found {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"`{name}` data_offsets: expected two whole numbers >= 0, found {shown(offsets)}")
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise FormatError(f"`{name}` shape: expected at most {MAX_ELEMENTS} elements, found {shown(shape)}")
    begin, end = offsets
    needed = math.prod(shape) * np.dtype(_DTYPES[dtype][0]).itemsize
    if end - begin != needed:
        raise FormatError(
            f"`{name}` data_offsets: expected {needed} bytes for {dtype} {shown(shape)},"
            f" found {shown(offsets)}"
        )
    return _Entry(name, dtype, tuple(shape), begin, end)


def _are_sizes(found: object) -> bool:
    """Whether that is a list of whole numbers, none negative; True is none of them."""
    return isinstance(found, list) and all(type(size) is int and size >= 0 for size in found)


def _check_cover(entries: list[_Entry], size: int) -> None:
    """Tensors lie one after the other from the first byte of the data to the last."""
    reached, last = 0, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != reached:
            kind = "a gap" if entry.begin > reached else "an overlap"
            raise FormatError(
                f"`{entry.name}` data_offsets: expected to begin at {reached}, after {last}, found {kind}"
                f" at {entry.begin}"
            )
        reached, last = entry.end, f"`{entry.name}`"
    if reached != size:
        raise FormatError(f"expected {reached} bytes of data after the header, found {size}")


def _array(entry: _Entry, data: bytes, start: int) -> np.ndarray[Any, Any]:
    stored, dtype = _DTYPES[entry.dtype]
    flat = np.frombuffer(data[start + entry.begin : start + entry.end], dtype=stored)
    if entry.dtype == "BOOL" and np.any(flat > 1):
        raise FormatError(f"`{entry.name}`: expected bytes 0 and 1 for BOOL, found {int(flat.max())}")
    # A copy, in this machine's byte order, that may be written to.
    native = flat.astype(flat.dtype.newbyteorder("="))
    return (native if native.dtype == dtype else native.view(dtype)).reshape(entry.shape)
