"""Checkpoints of a layer: arrays of JAX to and from the files that all backends share. SPEC.md 10.2.

safetensors hands both ways through NumPy, so these are its functions for NumPy, and the checks of
`iha_core.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import jax.numpy as jnp
import numpy as np
from jax import Array

from iha_core.checkpoint import load_checkpoint as load_arrays
from iha_core.checkpoint import save_checkpoint as save_arrays
from iha_core.errors import DTypeError
from iha_core.layer_config import LayerConfig
from iha_jax.layer import Params, check_params, has_float64


def save_checkpoint(path: str | PathLike[str], params: Mapping[str, Array], config: LayerConfig) -> None:
    """Write the parameters of a layer as a safetensors file ([CKPT-1] to [CKPT-3]).

    Args:
        path: the file, which is replaced.
        params: arrays by the names of [CKPT-1].
        config: the layer.

    Raises:
        IHAError: parameters that are not those of the configuration; else as `iha_core.checkpoint` does.
    """
    check_params(params, config)
    save_arrays(path, {name: np.asarray(x) for name, x in params.items()}, config)


def load_checkpoint(path: str | PathLike[str]) -> tuple[LayerConfig, Params]:
    """Configuration and parameters of a safetensors file, bit for bit ([CKPT-4]), on the default device.

    Raises:
        IHAError: no checkpoint of a layer, or one with missing, further, misshapen or mistyped tensors, or of
            float64 where JAX would narrow it.
        OSError: the file cannot be read.
    """
    config, tensors = load_arrays(path)
    if tensors["q_proj.weight"].dtype == np.float64 and not has_float64():  # then so are all
        expected = "a dtype that JAX keeps (float64 only with jax.enable_x64)"
        raise DTypeError("q_proj.weight", "dtype", expected=expected, found="float64")
    return config, {name: jnp.array(tensors[name]) for name in config.parameter_shapes()}
