"""Checkpoints of a layer as safetensors files, which travel between backends unchanged: SPEC.md 10.2."""

from __future__ import annotations

from os import PathLike

import torch
from safetensors.torch import save

from iha_core.checkpoint import check_tensors, metadata, opened, read_header, write
from iha_core.errors import ArgumentTypeError
from iha_torch.layer import InterleavedHeadAttention, layer_of


def save_checkpoint(path: str | PathLike[str], layer: InterleavedHeadAttention) -> None:
    """Write a layer to a file ([CKPT-1] to [CKPT-3]).

    Args:
        path: the file; an existing one is replaced.
        layer: the layer, on any device.

    Raises:
        ArgumentTypeError: `layer` is another module.
        IHAError: its parameters are not those of its configuration, or their dtypes do not go together.
        OSError: the file cannot be written.
    """
    if not isinstance(layer, InterleavedHeadAttention):
        expected = "an InterleavedHeadAttention"
        raise ArgumentTypeError("layer", "", expected=expected, found=type(layer).__name__)
    tensors = layer.state_dict()
    check_tensors(tensors, layer.config)
    # Copies, as safetensors takes no tensors that share memory, nor any that are not contiguous.
    copies = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    write(path, save(copies, metadata(layer.config)))


def load_checkpoint(
    path: str | PathLike[str], *, device: torch.device | str | None = None
) -> InterleavedHeadAttention:
    """Read a layer from a file, bit for bit, in the dtypes of the file; draws no random number.

    Args:
        path: the file.
        device: where the layer is to be; None means PyTorch's default device.

    Raises:
        IHAError: no checkpoint of a layer, or one with missing, further, misshapen or mistyped tensors.
        OSError: the file cannot be read.

    Source: SPEC.md [CKPT-4].
    """
    with opened(path, "pt") as file:
        config = read_header(file)
        tensors = {name: file.get_tensor(name) for name in config.parameter_shapes()}
    return layer_of(config, tensors, device=torch.get_default_device() if device is None else device)
