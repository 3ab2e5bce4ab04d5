"""Checkpoints of a layer, the same files for every backend. SPEC.md 10.2."""

from __future__ import annotations

from os import PathLike

import mlx.core as mx
import numpy as np

from iha_core.checkpoint import check_tensors, metadata, opened, read_header
from iha_core.checkpoint import save_checkpoint as save_arrays
from iha_core.errors import ArgumentTypeError
from iha_core.layer_config import LayerConfig
from iha_mlx.layer import InterleavedHeadAttention, named_parameters


def save_checkpoint(path: str | PathLike[str], layer: InterleavedHeadAttention) -> None:
    """Write the configuration and the parameters of a layer as a safetensors file ([CKPT-1] to [CKPT-3]).

    Raises:
        IHAError: no such layer, or parameters that do not fit its configuration.
        OSError: the file cannot be written.
    """
    if not isinstance(layer, InterleavedHeadAttention):
        expected = "an InterleavedHeadAttention of iha_mlx"
        raise ArgumentTypeError("layer", "", expected=expected, found=type(layer).__name__)
    tensors = named_parameters(layer)
    check_tensors(tensors, layer.config)
    mx.eval(tensors)  # before the file is opened, which they may have to be read from
    if any(tensor.dtype == mx.float64 for tensor in tensors.values()):  # MLX writes none
        arrays = {name: np.array(tensor) for name, tensor in tensors.items()}
        save_arrays(path, arrays, layer.config)
        return
    with open(path, "wb") as file:  # to a path of another suffix MLX would add its own
        mx.save_safetensors(file, tensors, metadata=metadata(layer.config))


def load_checkpoint(path: str | PathLike[str]) -> InterleavedHeadAttention:
    """A layer with the configuration and, bit for bit, the parameters of a safetensors file.

    Raises:
        IHAError: no checkpoint of a layer, or one with missing, further, misshapen or mistyped tensors.
        OSError: the file cannot be read.
    """
    config, tensors = _read(path)
    # The one initialiser that any configuration allows. Nothing that it draws is ever computed.
    layer = InterleavedHeadAttention(config, initialiser="random")
    layer.load_weights(list(tensors.items()))
    return layer


def _read(path: str | PathLike[str]) -> tuple[LayerConfig, dict[str, mx.array]]:
    """Configuration and tensors of a file, which safetensors opens, as MLX lets some broken ones pass."""
    with opened(path, "numpy") as file:
        config = read_header(file)
        if file.get_slice("q_proj.weight").get_dtype() == "F64":  # MLX reads none
            names = config.parameter_shapes()
            return config, {name: mx.array(file.get_tensor(name), dtype=mx.float64) for name in names}
    with open(path, "rb") as stream:
        # All at once; of a path, MLX would read a tensor when it is needed, by when the file may be another.
        tensors: dict[str, mx.array] = mx.load(stream, format="safetensors")  # type: ignore[assignment]
    return config, tensors
