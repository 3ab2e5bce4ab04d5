"""Checkpoints: what is written, what is refused, and that every backend reads what any other has written."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
from layers import CONFIGS, assert_within_limits, example

import iha_core
from iha_conformance.corpus.streams import cast
from iha_core import IHAError, LayerConfig
from iha_core.checkpoint import load_checkpoint, metadata, read_metadata, save_checkpoint
from iha_core.layer_config import MIXING

Tensors = Mapping[str, np.ndarray[Any, Any]]

DTYPES = ("float64", "float32", "float16", "bfloat16")
MIXED = [*((dtype, None) for dtype in DTYPES), ("float16", "float32"), ("bfloat16", "float32")]
"""Storage dtype, and parameter dtype where it is another."""
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MAJOR, MINOR = (int(part) for part in iha_core.SPEC_VERSION.split("."))

each_config = pytest.mark.parametrize("name", CONFIGS)


class Backend(Protocol):
    """A backend as these tests use it: a loaded layer is whatever `load` gives."""

    def load(self, path: Any) -> Any: ...

    def save(self, path: Any, layer: Any) -> None: ...

    def config(self, layer: Any) -> LayerConfig: ...

    def tensors(self, layer: Any) -> Tensors: ...

    def run(self, layer: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...


class Numpy:
    """The reference."""

    def load(self, path: Any) -> Any:
        return load_checkpoint(path)

    def save(self, path: Any, layer: Any) -> None:
        save_checkpoint(path, layer[1], layer[0])

    def config(self, layer: Any) -> LayerConfig:
        return layer[0]  # type: ignore[no-any-return]

    def tensors(self, layer: Any) -> Tensors:
        return layer[1]  # type: ignore[no-any-return]

    def run(self, layer: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        output = iha_core.layer(layer[1], x, config=layer[0])
        return cast(output, layer[1]["q_proj.weight"].dtype.name)


class Torch:
    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.module = pytest.importorskip("iha_torch.checkpoint")

    def load(self, path: Any) -> Any:
        return self.module.load_checkpoint(path)

    def save(self, path: Any, layer: Any) -> None:
        self.module.save_checkpoint(path, layer)

    def config(self, layer: Any) -> LayerConfig:
        return layer.config  # type: ignore[no-any-return]

    def tensors(self, layer: Any) -> Tensors:
        return {name: self._numpy(tensor) for name, tensor in layer.state_dict().items()}

    def run(self, layer: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        wide = self.torch.from_numpy(x.astype(np.float64))
        with self.torch.no_grad():
            output = layer(wide.to(layer.q_proj.weight.dtype))
        return self._numpy(output)

    def _numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        tensor = tensor.detach()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
        return tensor.numpy()  # type: ignore[no-any-return]


class Jax:
    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        self.module = pytest.importorskip("iha_jax.checkpoint")
        self.layer = pytest.importorskip("iha_jax.layer")

    def load(self, path: Any) -> Any:
        with self.jax.enable_x64(True):
            return self.module.load_checkpoint(path)

    def save(self, path: Any, layer: Any) -> None:
        with self.jax.enable_x64(True):
            self.module.save_checkpoint(path, layer[1], layer[0])

    def config(self, layer: Any) -> LayerConfig:
        return layer[0]  # type: ignore[no-any-return]

    def tensors(self, layer: Any) -> Tensors:
        return {name: np.asarray(tensor) for name, tensor in layer[1].items()}

    def run(self, layer: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        config, params = layer
        with self.jax.enable_x64(True):
            output = self.layer.apply(params, self.jax.numpy.asarray(x), config=config)
        return np.asarray(output)


class Mlx:
    def __init__(self) -> None:
        self.mx = pytest.importorskip("mlx.core")
        self.module = pytest.importorskip("iha_mlx.checkpoint")

    def load(self, path: Any) -> Any:
        return self.module.load_checkpoint(path)

    def save(self, path: Any, layer: Any) -> None:
        self.module.save_checkpoint(path, layer)

    def config(self, layer: Any) -> LayerConfig:
        return layer.config  # type: ignore[no-any-return]

    def tensors(self, layer: Any) -> Tensors:
        from mlx.utils import tree_flatten

        found = tree_flatten(layer.parameters(), destination={})
        return {name: self._numpy(tensor) for name, tensor in found.items()}

    def run(self, layer: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with self.mx.stream(self.mx.cpu):
            wide = self.mx.array(x.astype(np.float64), dtype=self.mx.float64)
            output = layer(wide.astype(layer.q_proj.weight.dtype))
            return self._numpy(output)

    def _numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        if tensor.dtype == self.mx.bfloat16:
            return np.array(tensor.view(self.mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(tensor)


BACKENDS: Mapping[str, Callable[[], Backend]] = {"numpy": Numpy, "torch": Torch, "jax": Jax, "mlx": Mlx}

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def written(path: Path, name: str = "grouped", dtype: str = "float32", mixing: str | None = None) -> Tensors:
    """A checkpoint of random parameters, and those."""
    tensors, _ = example(CONFIGS[name], dtype, parameter_dtype=mixing)
    save_checkpoint(path, tensors, CONFIGS[name])
    return tensors


def assert_equal_bits(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), name


# Format


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def assemble(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.requirement("CKPT-1", "CKPT-2", "CKPT-3")
@pytest.mark.parametrize(("dtype", "mixing"), MIXED)
@each_config
@each_backend
def test_a_file_is_what_the_specification_says(
    backend: str, name: str, dtype: str, mixing: str | None, tmp_path: Path
) -> None:
    """Read by hand: length, JSON, and numbers that are little-endian, row by row."""
    port, config = BACKENDS[backend](), CONFIGS[name]
    tensors = written(tmp_path / "first", name, dtype, mixing)
    port.save(tmp_path / "layer", port.load(tmp_path / "first"))
    header, data = parts(tmp_path / "layer")
    entry = json.loads(header.pop("__metadata__")["iha"])
    assert entry == {"spec_version": iha_core.SPEC_VERSION, "config": config.to_dict()}
    assert set(header) == set(config.parameter_shapes())
    for key, found in header.items():
        assert tuple(found["shape"]) == config.parameter_shapes()[key]
        assert found["dtype"] == NAMES[mixing if mixing and key in MIXING else dtype], key
        start, end = found["data_offsets"]
        assert data[start:end] == tensors[key].tobytes(), key


@pytest.mark.requirement("CKPT-3")
@each_config
def test_metadata_holds_every_field(name: str) -> None:
    config = CONFIGS[name]
    assert list(metadata(config)) == ["iha"]
    assert read_metadata(metadata(config)) == config
    fields = json.loads(metadata(config)["iha"])["config"]
    assert {**fields, "attention": None}.keys() == config.to_dict().keys()
    assert fields["attention"].keys() == config.attention.to_dict().keys()


@pytest.mark.requirement("CKPT-2", "CKPT-4")
@pytest.mark.parametrize(("dtype", "mixing"), MIXED)
@each_config
def test_numpy_reads_what_it_wrote(name: str, dtype: str, mixing: str | None, tmp_path: Path) -> None:
    tensors = written(tmp_path / "a", name, dtype, mixing)
    config, found = load_checkpoint(str(tmp_path / "a"))
    assert config == CONFIGS[name]
    assert_equal_bits(found, tensors)


@pytest.mark.requirement("CKPT-4")
@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_changes_no_bit(dtype: str, backend: str, tmp_path: Path) -> None:
    """Signed zeros, infinities, NaN with its payload, subnormal and largest numbers."""
    tensors, _ = example(CONFIGS["paper"], dtype)
    info = ml_dtypes.finfo(tensors["alpha_q"].dtype)
    odd = [-0.0, math.inf, -math.inf, info.max, info.smallest_normal, info.smallest_subnormal, info.eps]
    tensors["alpha_q"] = np.resize(np.array(odd, dtype=tensors["alpha_q"].dtype), (3, 3, 2))
    bits = tensors["q_proj.weight"].view(f"u{tensors['q_proj.weight'].dtype.itemsize}")
    bits[0, 0] = np.array(math.nan, dtype=info.dtype).view(bits.dtype) | 1
    save_checkpoint(tmp_path / "a", tensors, CONFIGS["paper"])
    port = BACKENDS[backend]()
    layer = port.load(tmp_path / "a")
    assert_equal_bits(port.tensors(layer), tensors)
    port.save(tmp_path / "b", layer)
    assert_equal_bits(load_checkpoint(tmp_path / "b")[1], tensors)


def test_bfloat16_is_read_without_further_imports(tmp_path: Path) -> None:
    written(tmp_path / "a", dtype="bfloat16")
    script = (
        "import sys; from iha_core.checkpoint import load_checkpoint; print(load_checkpoint(sys.argv[1])[0])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.requirement("CKPT-2")
def test_arrays_of_any_layout_are_written_as_they_read(tmp_path: Path) -> None:
    tensors, _ = example(CONFIGS["paper"], "float32")
    spread = np.full((6, 6, 4), math.nan, dtype=np.float32)
    spread[::2, ::2, ::2] = tensors["alpha_q"]
    views = {**tensors, "alpha_q": spread[::2, ::2, ::2]}
    views["q_proj.weight"] = np.asfortranarray(tensors["q_proj.weight"])
    views["k_proj.weight"] = tensors["k_proj.weight"].astype(">f4")
    save_checkpoint(tmp_path / "a", views, CONFIGS["paper"])
    assert_equal_bits(load_checkpoint(tmp_path / "a")[1], tensors)


# Exchange


@pytest.mark.requirement("CKPT-1", "CKPT-2", "CKPT-3", "CKPT-4")
@each_config
@pytest.mark.parametrize(
    ("dtype", "mixing"), [("float32", None), ("bfloat16", None), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("reader", BACKENDS)
@pytest.mark.parametrize("writer", BACKENDS)
def test_every_backend_reads_every_other(
    writer: str, reader: str, dtype: str, mixing: str | None, name: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    tensors, x = example(config, dtype, parameter_dtype=mixing)
    save_checkpoint(tmp_path / "first", tensors, config)
    source, target = BACKENDS[writer](), BACKENDS[reader]()
    source.save(tmp_path / "second", source.load(tmp_path / "first"))
    layer = target.load(tmp_path / "second")
    assert target.config(layer) == config
    assert_equal_bits(target.tensors(layer), tensors)
    assert_within_limits(target.run(layer, x), tensors, x, config=config, storage=dtype)


# What a reader refuses


def refused(path: Path, backend: str) -> IHAError:
    """The error of a reader: one line, and of the kind and about the argument that NumPy's names."""
    with pytest.raises(IHAError) as expected:
        load_checkpoint(path)
    with pytest.raises(IHAError) as caught:
        BACKENDS[backend]().load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert type(caught.value) is type(expected.value)
    assert caught.value.argument == expected.value.argument
    return caught.value


def in_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of a file's header, its data left alone."""

    def apply(path: Path) -> None:
        header, data = parts(path)
        change(header)
        assemble(path, header, data)

    return apply


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return apply


BROKEN: Mapping[str, Callable[[Path], None]] = {
    "empty": with_bytes(lambda raw: b""),
    "a few bytes": with_bytes(lambda raw: raw[:5]),
    "header cut": with_bytes(lambda raw: raw[:100]),
    "data cut": with_bytes(lambda raw: raw[:-1]),
    "data cut by half": with_bytes(lambda raw: raw[: len(raw) // 2 + 1000]),
    "data added": with_bytes(lambda raw: raw + b"\0"),
    "header of 2^62 bytes": with_bytes(lambda raw: struct.pack("<Q", 2**62) + raw[8:]),
    "header of 8 GiB": with_bytes(lambda raw: struct.pack("<Q", 2**33) + raw[8:]),
    "header of -1 bytes": with_bytes(lambda raw: b"\xff" * 8 + raw[8:]),
    "header of no bytes": with_bytes(lambda raw: bytes(8)),
    "text": with_bytes(lambda raw: b"# not a checkpoint\n" * 50),
    "zip": with_bytes(lambda raw: b"PK\x03\x04" + bytes(400)),
    "no JSON": with_bytes(lambda raw: raw[:8] + b"!" + raw[9:]),
    "deep JSON": lambda path: assemble(path, b'{"a":' + b"[" * 100_000, b""),
    "a list": lambda path: assemble(path, b"[]", b""),
    "no text": lambda path: assemble(path, b"\xff\xfe\xfd", b""),
    "offsets beyond the data": in_header(lambda h: h["alpha_q"].update(data_offsets=[0, 10**9])),
    "offsets reversed": in_header(lambda h: h["alpha_q"]["data_offsets"].reverse()),
    "offsets shared": in_header(lambda h: h["alpha_k"].update(data_offsets=h["alpha_v"]["data_offsets"])),
    "no shape": in_header(lambda h: h["alpha_q"].pop("shape")),
    "a negative shape": in_header(lambda h: h["alpha_q"].update(shape=[-4, -4, 3])),
    "a shape beyond 64 bits": in_header(lambda h: h["alpha_q"].update(shape=[2**62, 2**62, 3])),
    "an unknown dtype": in_header(lambda h: h["alpha_q"].update(dtype="F12")),
    "metadata that is no text": in_header(lambda h: h["__metadata__"].update(iha={})),
    "metadata that is no object": in_header(lambda h: h.update(__metadata__="iha")),
}


@pytest.mark.requirement("CKPT-2", "ERR-1")
@each_backend
@pytest.mark.parametrize("fault", BROKEN)
def test_no_safetensors_file(fault: str, backend: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    written(path)
    BROKEN[fault](path)
    error = refused(path, backend)
    assert str(error).startswith("`checkpoint`: expected a safetensors file, got ")


@pytest.mark.requirement("CKPT-4")
@each_backend
def test_no_file(backend: str, tmp_path: Path) -> None:
    port = BACKENDS[backend]()
    with pytest.raises(FileNotFoundError, match="missing"):
        port.load(tmp_path / "missing")
    with pytest.raises(OSError):  # noqa: PT011 - in whatever words
        port.load(tmp_path)


def metadata_of(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the JSON object under the key `iha`."""

    def apply(header: dict[str, Any]) -> None:
        entry = json.loads(header["__metadata__"]["iha"])
        change(entry)
        header["__metadata__"]["iha"] = json.dumps(entry)

    return in_header(apply)


def text_of(text: str) -> Callable[[Path], None]:
    """Another text under the key `iha`."""
    return in_header(lambda header: header["__metadata__"].update(iha=text))


def field(value: Any, *names: str) -> Callable[[Path], None]:
    """Another value of a field of the configuration; `...` drops it."""

    def apply(entry: dict[str, Any]) -> None:
        for name in names[:-1]:
            entry = entry[name]
        if value is ...:
            del entry[names[-1]]
        else:
            entry[names[-1]] = value

    return metadata_of(apply)


REFUSED_METADATA: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "none": (in_header(lambda h: h.pop("__metadata__")), "checkpoint"),
    "another key": (in_header(lambda h: h.update(__metadata__={"format": "pt"})), "checkpoint"),
    "no text": (text_of(""), "iha"),
    "no JSON": (text_of("{'spec_version': '1.2'}"), "iha"),
    "cut": (text_of('{"spec_version": "1.2", "config": {"mod'), "iha"),
    "a long text": (text_of("x" * 100_000), "iha"),
    "deep JSON": (text_of("[" * 100_000), "iha"),
    "deep objects": (text_of('{"a":' * 100_000), "iha"),
    "a number of 5000 digits": (
        text_of('{"spec_version": "1.2", "config": {"num_heads": ' + "1" * 5000 + "}}"),
        "iha",
    ),
    "a list": (text_of("[]"), "iha"),
    "null": (text_of("null"), "iha"),
    "no version": (metadata_of(lambda entry: entry.pop("spec_version")), "iha"),
    "no config": (metadata_of(lambda entry: entry.pop("config")), "iha"),
    "a newer version": (field(f"{MAJOR}.{MINOR + 1}", "spec_version"), "spec_version"),
    "the next major version": (field(f"{MAJOR + 1}.0", "spec_version"), "spec_version"),
    "an older major version": (field(f"{MAJOR - 1}.{MINOR}", "spec_version"), "spec_version"),
    "a version of three parts": (field(f"{MAJOR}.{MINOR}.0", "spec_version"), "spec_version"),
    "a version of one part": (field(f"{MAJOR}", "spec_version"), "spec_version"),
    "a version with a line break": (field(f"{MAJOR}.{MINOR}\n", "spec_version"), "spec_version"),
    "a version of many digits": (field(f"{MAJOR}." + "1" * 5000, "spec_version"), "spec_version"),
    "a version that is a number": (field(1.2, "spec_version"), "spec_version"),
    "a version that is null": (field(None, "spec_version"), "spec_version"),
    "a version that is a list": (field([1, 2], "spec_version"), "spec_version"),
    "config is null": (field(None, "config"), "config"),
    "config is a list": (field([], "config"), "config"),
    "an unknown field": (field(0.1, "config", "dropout"), "dropout"),
    "a missing size": (field(..., "config", "model_width"), "model_width"),
    "a size of 0": (field(0, "config", "num_pseudo_heads"), "num_pseudo_heads"),
    "a size that is a text": (field("4", "config", "num_heads"), "num_heads"),
    "a size that is not whole": (field(4.0, "config", "num_heads"), "num_heads"),
    "an unknown kind": (field("mqa", "config", "kind"), "kind"),
    "epsilon is NaN": (field(math.nan, "config", "qk_norm_epsilon"), "qk_norm_epsilon"),
    "epsilon is infinite": (field(math.inf, "config", "qk_norm_epsilon"), "qk_norm_epsilon"),
    "bias is a number": (field(1, "config", "bias"), "bias"),
    "attention is null": (field(None, "config", "attention"), "attention"),
    "no rope": (field(..., "config", "attention", "rope"), "rope"),
    "no value_width": (field(..., "config", "value_width"), "value_width"),
    "no attention": (field(..., "config", "attention"), "attention"),
    "an unknown field of attention": (field(1, "config", "attention", "softcap"), "softcap"),
    "a window of 0": (field(0, "config", "attention", "window"), "window"),
    "an unknown rotation": (field("yarn", "config", "attention", "rope"), "rope"),
}


@pytest.mark.requirement("CKPT-3", "CKPT-4", "ERR-1")
@each_backend
@pytest.mark.parametrize("fault", REFUSED_METADATA)
def test_refused_metadata(fault: str, backend: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    written(path)
    change, argument = REFUSED_METADATA[fault]
    change(path)
    assert refused(path, backend).argument == argument


@pytest.mark.requirement("CKPT-4")
@each_backend
@pytest.mark.parametrize("minor", range(MINOR + 1))
def test_versions_up_to_its_own_are_read(minor: int, backend: str, tmp_path: Path) -> None:
    tensors = written(tmp_path / "a")
    field(f"{MAJOR}.{minor}", "spec_version")(tmp_path / "a")
    port = BACKENDS[backend]()
    assert_equal_bits(port.tensors(port.load(tmp_path / "a")), tensors)


@pytest.mark.requirement("CKPT-3")
@each_backend
def test_further_metadata_is_passed_over(backend: str, tmp_path: Path) -> None:
    """Other keys beside `iha`, and other entries of its object."""
    tensors = written(tmp_path / "a", "paper")
    in_header(lambda header: header["__metadata__"].update(format="pt", note="ä\n∑"))(tmp_path / "a")
    field({"step": 7}, "training")(tmp_path / "a")
    port = BACKENDS[backend]()
    layer = port.load(tmp_path / "a")
    assert port.config(layer) == CONFIGS["paper"]
    assert_equal_bits(port.tensors(layer), tensors)


def rewritten(path: Path, tensors: Tensors) -> None:
    """A file of other tensors under the same metadata."""
    from safetensors.numpy import save_file

    save_file(dict(tensors), path, metadata(CONFIGS["grouped"]))


def as_type(dtype: Any, *names: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: tensors[name].astype(dtype) for name in names})


REFUSED_TENSORS: Mapping[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    **{
        f"no {name}": (lambda tensors, name=name: tensors.pop(name), name)  # type: ignore[misc]
        for name in CONFIGS["grouped"].parameter_shapes()
    },
    "one too many": (lambda tensors: tensors.update(rope=tensors["alpha_q"]), "rope"),
    "one of a longer name": (
        lambda tensors: tensors.update({"layer.alpha_q": tensors.pop("alpha_q")}),
        "alpha_q",
    ),
    "none at all": (lambda tensors: tensors.clear(), "q_proj.weight"),
    "a transposed weight": (
        lambda tensors: tensors.update({"q_proj.weight": tensors["q_proj.weight"].T.copy()}),
        "q_proj.weight",
    ),
    "keys as many as queries": (
        lambda tensors: tensors.update(alpha_k=np.zeros((4, 4, 3), np.float32)),
        "alpha_k",
    ),
    "a further axis": (lambda tensors: tensors.update(collapse=tensors["collapse"][None]), "collapse"),
    "no axis": (lambda tensors: tensors.update({"q_norm.weight": np.float32(1)}), "q_norm.weight"),
    "no element": (lambda tensors: tensors.update({"o_proj.bias": np.zeros(0, "f4")}), "o_proj.bias"),
    "integers": (as_type(np.int32, *CONFIGS["grouped"].parameter_shapes()), "q_proj.weight"),
    "an integer tensor": (as_type(np.int8, "v_proj.weight"), "v_proj.weight"),
    "truth values": (as_type(np.bool_, "collapse"), "collapse"),
    "one in float16": (as_type(np.float16, "k_norm.weight"), "k_norm.weight"),
    "one in float64": (as_type(np.float64, "v_proj.bias"), "v_proj.bias"),
    "narrower mixing": (as_type(np.float16, *MIXING), "alpha_q"),
    "wider mixing": (as_type(np.float64, *MIXING), "alpha_q"),
    "one wider mixing tensor": (as_type(np.float64, "alpha_v"), "alpha_v"),
    "8-bit floats": (as_type(ml_dtypes.float8_e4m3fn, "q_proj.weight"), "q_proj.weight"),
    "8-bit mixing": (as_type(ml_dtypes.float8_e5m2, *MIXING), "alpha_q"),
}


@pytest.mark.requirement("CKPT-1", "CKPT-2", "CKPT-4", "ERR-1")
@each_backend
@pytest.mark.parametrize("fault", REFUSED_TENSORS)
def test_refused_tensors(fault: str, backend: str, tmp_path: Path) -> None:
    tensors, _ = example(CONFIGS["grouped"], "float32")
    change, argument = REFUSED_TENSORS[fault]
    change(tensors)
    rewritten(tmp_path / "a", {name: np.asarray(tensor) for name, tensor in tensors.items()})
    assert refused(tmp_path / "a", backend).argument == argument


@pytest.mark.requirement("CKPT-2", "TYP-2", "ERR-1")
@each_backend
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixing_tensors_are_float32_together(dtype: str, backend: str, tmp_path: Path) -> None:
    tensors, _ = example(CONFIGS["grouped"], dtype)
    rewritten(tmp_path / "a", {**tensors, "alpha_v": tensors["alpha_v"].astype(np.float32)})
    assert refused(tmp_path / "a", backend).argument == "alpha_v"
    mixed, _ = example(CONFIGS["grouped"], dtype, parameter_dtype="float32")
    rewritten(tmp_path / "a", {**mixed, "collapse": tensors["collapse"]})
    assert refused(tmp_path / "a", backend).argument == "collapse"
    other = np.float16 if dtype == "bfloat16" else ml_dtypes.bfloat16
    rewritten(tmp_path / "a", {**tensors, **{name: tensors[name].astype(other) for name in MIXING}})
    assert refused(tmp_path / "a", backend).argument == "alpha_q"


# What a writer refuses


@pytest.mark.requirement("CKPT-1", "CKPT-2", "ERR-1")
@pytest.mark.parametrize("fault", [fault for fault in REFUSED_TENSORS if fault != "no axis"])
def test_nothing_is_written_that_is_refused(fault: str, tmp_path: Path) -> None:
    tensors, _ = example(CONFIGS["grouped"], "float32")
    change, argument = REFUSED_TENSORS[fault]
    change(tensors)
    with pytest.raises(IHAError) as caught:
        save_checkpoint(tmp_path / "a", tensors, CONFIGS["grouped"])
    assert caught.value.argument == argument
    assert not list(tmp_path.iterdir())


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("value", [[1.0], 1.0, None, memoryview(b"1234")])
def test_only_arrays_are_written(value: Any, tmp_path: Path) -> None:
    tensors, _ = example(CONFIGS["paper"], "float32")
    with pytest.raises(IHAError, match=r"^`collapse`: expected an array, got \w+$"):
        save_checkpoint(tmp_path / "a", {**tensors, "collapse": value}, CONFIGS["paper"])
    assert not list(tmp_path.iterdir())


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("parameters", "config", "argument"),
    [
        (None, CONFIGS["paper"], "parameters"),
        ([], CONFIGS["paper"], "parameters"),
        ({}, CONFIGS["paper"].to_dict(), "config"),
        ({"q_proj.weight": np.ma.zeros((12, 12))}, CONFIGS["paper"], "q_proj.weight"),
    ],
)
def test_what_is_no_layer_is_not_written(parameters: Any, config: Any, argument: str, tmp_path: Path) -> None:
    with pytest.raises(IHAError) as error:
        save_checkpoint(tmp_path / "a", parameters, config)
    assert error.value.argument == argument
    assert not list(tmp_path.iterdir())


@each_backend
@pytest.mark.parametrize("text", ['"num_heads": 3', '"spec_version": "1.2"'])
def test_a_key_that_occurs_twice_is_refused(text: str, backend: str, tmp_path: Path) -> None:
    """Of two, a reader would take one, and it may be the wrong one."""
    written(tmp_path / "a", "paper")

    def repeat(header: dict[str, Any]) -> None:
        entry = header["__metadata__"]["iha"]
        assert text in entry
        header["__metadata__"]["iha"] = entry.replace(text, f"{text}, {text}")

    in_header(repeat)(tmp_path / "a")
    with pytest.raises(IHAError, match=r"^`iha` metadata: expected a JSON object"):
        BACKENDS[backend]().load(tmp_path / "a")


@each_backend
def test_errors_of_files_name_them(backend: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=path.name):
            BACKENDS[backend]().load(path)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_that_cannot_be_written(dtype: str, backend: str, tmp_path: Path) -> None:
    written(tmp_path / "a", dtype=dtype)
    port = BACKENDS[backend]()
    layer = port.load(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "a", tmp_path / "folder", tmp_path / "a" / "b"):
        with pytest.raises(OSError):  # noqa: PT011 - in whatever words
            port.save(path, layer)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "folder"}
    assert not list((tmp_path / "folder").iterdir())


@each_backend
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission(backend: str, tmp_path: Path) -> None:
    written(tmp_path / "a")
    port = BACKENDS[backend]()
    layer = port.load(tmp_path / "a")
    (tmp_path / "folder").mkdir(mode=0o555)
    with pytest.raises(OSError):  # noqa: PT011 - in whatever words
        port.save(tmp_path / "folder" / "a", layer)


@each_backend
def test_links_are_followed(backend: str, tmp_path: Path) -> None:
    tensors = written(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    port = BACKENDS[backend]()
    layer = port.load(tmp_path / "link")
    assert_equal_bits(port.tensors(layer), tensors)
    port.save(tmp_path / "link", layer)
    assert_equal_bits(load_checkpoint(tmp_path / "link")[1], tensors)
    with pytest.raises(FileNotFoundError):
        port.load(tmp_path / "dangling")


@each_backend
def test_an_existing_file_is_replaced(backend: str, tmp_path: Path) -> None:
    written(tmp_path / "a", "grouped")
    tensors = written(tmp_path / "b", "paper")
    port = BACKENDS[backend]()
    larger, smaller = port.load(tmp_path / "a"), port.load(tmp_path / "b")
    port.save(tmp_path / "a", smaller)
    assert_equal_bits(port.tensors(port.load(tmp_path / "a")), tensors)
    port.save(str(tmp_path / "a"), larger)
    port.save(tmp_path / "a", port.load(tmp_path / "a"))  # over what it has been read from
    assert load_checkpoint(tmp_path / "a")[0] == CONFIGS["grouped"]


def test_files_of_other_writers_of_the_format_are_read(tmp_path: Path) -> None:
    """In any order of tensors, with spaces after the header, as the format allows."""
    tensors = written(tmp_path / "a", "paper")
    header, data = parts(tmp_path / "a")
    shuffled = dict(sorted(header.items(), reverse=True))
    text = json.dumps(shuffled, indent=1).encode()
    assemble(tmp_path / "b", text + b" " * (-len(text) % 64), data)
    assert_equal_bits(load_checkpoint(tmp_path / "b")[1], tensors)
