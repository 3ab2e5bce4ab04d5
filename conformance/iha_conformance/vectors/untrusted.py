"""Files from strangers: regular ones alone, of bounded size, and JSON that cannot surprise its reader.

Whatever is in them, reading ends soon, with a value or with `FormatError`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from iha_conformance.targets.messages import one_line
from iha_core.spec_files import spec_path

MAX_LEVELS = 16
"""Arrays and objects inside each other; no document of ours has more than six."""

MAX_DIGITS = 18
"""Digits of a whole number; none of more is a size, and all of these fit into 64 bits."""

SHOWN = 80
"""Characters of a stranger's words that an error repeats."""

# What opening must not do: follow a link, wait for the writer of a pipe, take over a terminal. A
# system without one of these has no such files either.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_MARK = re.compile(r'["\\\[\]{}]')
"""What decides how deep a place in JSON lies: one character each, so that nothing is tried twice."""


class FormatError(ValueError):
    """A file is not what it has to be: one line with what was expected and what was found."""


def shown(value: object) -> str:
    """A stranger's value in an error: printable, in one line, short."""
    text = one_line(repr(value))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def read_regular(path: Path, *, at_most: int) -> bytes:
    """Contents of a regular file, if there are no more than `at_most` bytes.

    Raises:
        FileNotFoundError: there is nothing of that name.
        FormatError: a link, folder, pipe or device, unreadable, or too large; nothing was read then.
    """
    try:
        _check_kind(os.lstat(path).st_mode)  # before it is opened: to open a device may have effects
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FormatError(f"expected a file that can be read, found: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_kind(status.st_mode)  # again: another file may have taken its place
        if status.st_size > at_most:
            raise FormatError(f"expected at most {at_most} bytes, found {status.st_size}")
        try:
            data = file.read(status.st_size + 1)
        except OSError as error:
            raise FormatError(f"expected a file that can be read, found: {error.strerror}") from error
    if len(data) != status.st_size:
        raise FormatError(f"expected {status.st_size} bytes, found another number while reading them")
    return data


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(f"expected a regular file, found {_KINDS.get(stat.S_IFMT(mode), 'something else')}")


def parse_json(data: bytes) -> Any:
    """A JSON document in UTF-8, as plain Python values.

    Stricter than Python's own reader: no second key of one name, no NaN or infinity, written out or by
    overflow, no number of more than `MAX_DIGITS` digits, and nothing deeper than `MAX_LEVELS`.

    Raises:
        FormatError: it is none, or not such a one.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"expected UTF-8, found the byte {data[error.start]:#04x}") from error
    _check_levels(text)
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
        )
    except json.JSONDecodeError as error:
        raise FormatError(f"expected JSON, found {one_line(error.msg)} at character {error.pos}") from error


def _check_levels(text: str) -> None:
    """Refuse what is too deep for a reader that calls itself, in time and memory that no text can raise."""
    level, inside, position = 0, False, 0
    while found := _MARK.search(text, position):
        mark, position = found[0], found.end()
        if mark == "\\":
            position += inside  # what follows is no mark
        elif mark == '"':
            inside = not inside
        elif not inside:
            level += 1 if mark in "[{" else -1
            if level > MAX_LEVELS:
                raise FormatError(f"expected at most {MAX_LEVELS} levels of JSON, found more")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise FormatError(f"expected each key once, found {shown(key)} twice")
        keys[key] = value
    return keys


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise FormatError(f"expected a number of at most {MAX_DIGITS} digits, found {len(text)} characters")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"expected a finite number, found {shown(text)}")
    return value


def _no_constant(text: str) -> float:
    raise FormatError(f"expected a finite number, found {text}")


def check_schema(document: object, name: str) -> None:
    """Hold a document to a closed schema of the specification.

    Args:
        document: as `parse_json` gives it.
        name: of the schema, such as "vectors-manifest".

    Raises:
        FormatError: it does not conform; names where.
    """
    validator = _validator(name)
    for error in validator.iter_errors(document):
        where = "/".join(map(str, error.absolute_path)) or "the document"
        raise FormatError(f"{one_line(where)}: expected what {name}.schema.json says: {_objection(error)}")


def _objection(error: Any) -> str:
    """What a schema objects to, short even where a whole document is at fault."""
    message = one_line(error.message)
    return message if len(message) <= 2 * SHOWN else f"{error.validator}, found {shown(error.instance)}"


@cache
def _validator(name: str) -> Any:
    import jsonschema  # takes a while, and most commands need none

    schema = json.loads(spec_path(f"schemas/{name}.schema.json").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)
