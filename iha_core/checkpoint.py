"""Checkpoints of a layer: names, metadata, and what a reader refuses. SPEC.md 10.2.

Backends read and write with their framework's own functions, and hold what they find to this. Here are also
`save_checkpoint` and `load_checkpoint` for NumPy, which need safetensors and, for bfloat16, ml_dtypes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError, ArgumentValueError, ConfigError, DTypeError
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.validation import FLOAT_DTYPES, check_array, dtype_name, parameter_dtypes
from iha_core.version import SPEC_VERSION

_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")

METADATA_KEY = "iha"
"""Key of the safetensors metadata that holds version and configuration ([CKPT-3])."""


def metadata(config: LayerConfig) -> dict[str, str]:
    """The metadata of a file: spec version and configuration as JSON ([CKPT-3])."""
    return {METADATA_KEY: json.dumps({"spec_version": SPEC_VERSION, "config": config.to_dict()})}


def read_metadata(found: Mapping[str, str] | None) -> LayerConfig:
    """The configuration that a file's metadata holds.

    Raises:
        ArgumentValueError: there is none, it cannot be read, or it is of a version that is not known.
        ConfigError, ArgumentTypeError: the configuration is not an allowed one.
    """
    if not found or METADATA_KEY not in found:
        expected = f"metadata with the key {METADATA_KEY!r}"
        raise ArgumentValueError("checkpoint", "", expected=expected, found=f"keys {sorted(found or {})}")
    try:
        entry = json.loads(found[METADATA_KEY], object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not {"spec_version", "config"} <= set(entry):
        expected = "a JSON object with spec_version and config"
        raise ArgumentValueError(METADATA_KEY, "metadata", expected=expected, found=found[METADATA_KEY])
    _check_version(entry["spec_version"])
    _check_fields("config", entry["config"], LayerConfig)
    _check_fields("attention", entry["config"]["attention"], AttentionConfig)
    return LayerConfig.from_dict(entry["config"])


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys occur once: of two, one would be lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _check_fields(name: str, found: object, cls: type) -> None:
    """Refuse a configuration that lacks a field: its default may be another function ([CKPT-3])."""
    if not isinstance(found, dict):
        expected = "a JSON object with the fields of the configuration"
        raise ArgumentTypeError(name, "", expected=expected, found=type(found).__name__)
    for field in dataclasses.fields(cls):
        if field.name not in found:
            expected = f"a value, as a checkpoint has for every field of {name}"
            raise ConfigError(field.name, "", expected=expected, found="none")


def _check_version(found: object) -> None:
    """Refuse a version of another first part, or one that is newer than ours ([CKPT-4])."""
    match = _VERSION.fullmatch(found) if isinstance(found, str) else None
    major, minor = map(int, SPEC_VERSION.split("."))
    if match is None:
        raise ArgumentValueError("spec_version", "", expected="two numbers like 1.2", found=repr(found))
    if int(match[1]) != major or int(match[2]) > minor:
        expected = f"{major}.0 to {SPEC_VERSION}, the versions that this package knows"
        raise ArgumentValueError("spec_version", "", expected=expected, found=match[0])


def check_tensors(tensors: Mapping[str, Any], config: LayerConfig) -> None:
    """Hold the tensors of a file to its configuration: names, shapes, dtypes ([CKPT-1], [CKPT-2]).

    Reads nothing but `.shape` and `.dtype`.

    Raises:
        ArgumentValueError: a tensor is missing, or one too many.
        ShapeError: a tensor has another shape.
        DTypeError: a dtype that is no float, or that does not go with the others.
    """
    if not isinstance(config, LayerConfig):
        raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)
    config.check_parameters({name: tensor.shape for name, tensor in tensors.items()})
    storage = dtype_name(tensors["q_proj.weight"])
    if storage not in FLOAT_DTYPES:
        expected = "one of " + ", ".join(FLOAT_DTYPES)
        raise DTypeError("q_proj.weight", "dtype", expected=expected, found=storage)
    parameter = dtype_name(tensors[MIXING[0]]) if config.kind == "iha" else storage
    allowed = parameter_dtypes(storage)
    if parameter not in allowed:
        raise DTypeError(MIXING[0], "dtype", expected=" or ".join(allowed), found=parameter)
    for name, tensor in tensors.items():
        first, wanted = (MIXING[0], parameter) if name in MIXING else ("q_proj.weight", storage)
        if dtype_name(tensor) != wanted:
            expected = f"{wanted}, the dtype of `{first}`"
            raise DTypeError(name, "dtype", expected=expected, found=dtype_name(tensor))


def save_checkpoint(
    path: str | PathLike[str], parameters: Mapping[str, np.ndarray[Any, Any]], config: LayerConfig
) -> None:
    """Write the parameters of a layer, NumPy arrays by name, as a safetensors file ([CKPT-1] to [CKPT-3]).

    Raises:
        IHAError: parameters that are not those of the configuration.
        OSError: the file cannot be written.
    """
    from safetensors.numpy import save

    if not isinstance(parameters, Mapping):
        expected, found = "a mapping of numpy arrays by name", type(parameters).__name__
        raise ArgumentTypeError("parameters", "", expected=expected, found=found)
    for name, tensor in parameters.items():
        check_array(str(name), tensor)
        if not isinstance(tensor, np.ndarray):
            raise ArgumentTypeError(name, "", expected="a numpy array", found=type(tensor).__name__)
    check_tensors(parameters, config)
    # Contiguous copies: safetensors writes the memory of a view as it lies.
    data = save({name: np.ascontiguousarray(x) for name, x in parameters.items()}, metadata(config))
    write(path, data)


def write(path: str | PathLike[str], data: bytes) -> None:
    """Write a file, as `open` does; safetensors' own function would replace a link and its permissions.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        file.write(data)


def load_checkpoint(path: str | PathLike[str]) -> tuple[LayerConfig, dict[str, np.ndarray[Any, Any]]]:
    """Configuration and parameters, NumPy arrays by name, of a safetensors file.

    Raises:
        IHAError: no checkpoint of a layer, or one with missing, further, misshapen or mistyped tensors.
        OSError: the file cannot be read.
    """
    import ml_dtypes  # noqa: F401 - NumPy has bfloat16 by it

    with opened(path, "numpy") as file:
        config = read_header(file)
        return config, {name: file.get_tensor(name) for name in config.parameter_shapes()}


class Entry(NamedTuple):
    """A tensor as the header of a file describes it."""

    shape: tuple[int, ...]
    dtype: str


def read_header(file: Any) -> LayerConfig:
    """The configuration of a file of `opened`; its header is held to it before a tensor is read ([CKPT-4]).

    Raises:
        IHAError: no checkpoint of a layer, or one with missing, further, misshapen or mistyped tensors.
    """
    config = read_metadata(file.metadata())
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    entries = {
        name: Entry(tuple(part.get_shape()), names.get(part.get_dtype(), part.get_dtype()))
        for name, part in slices.items()
    }
    check_tensors(entries, config)
    return config


def opened(path: str | PathLike[str], framework: str) -> Any:
    """A safetensors file, opened for a framework; a context manager.

    Raises:
        ArgumentValueError: it is no safetensors file.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = os.fsdecode(path)
    with open(path, "rb"):  # whose errors name the file
        pass
    try:
        return safe_open(path, framework)
    except SafetensorError as error:
        raise ArgumentValueError("checkpoint", "", expected="a safetensors file", found=str(error)) from None
