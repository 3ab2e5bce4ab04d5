"""Interleaved Head Attention: configuration, validation and the golden reference, NumPy only.

`attention` is the specification in executable form, `attention_vjp` its gradient, `layer` the layer around
it; `bounds` derives how far a conforming implementation may be from them. Backends import the submodules
`config`, `conditions`, `validation`, `errors`, `layer_config`, `initialisers` and `checkpoint`, never the
reference.
"""

from iha_core.checkpoint import load_checkpoint, save_checkpoint
from iha_core.config import PROFILES, AttentionConfig, Profile
from iha_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ConfigError,
    DTypeError,
    IHAError,
    ShapeError,
)
from iha_core.gradient import GRADIENTS, attention_vjp
from iha_core.layer_config import LayerConfig
from iha_core.reference import STAGES, attention, attention_stages
from iha_core.reference_layer import layer
from iha_core.validation import Dims, dtype_name, validate
from iha_core.version import SPEC_VERSION

__all__ = [
    "GRADIENTS",
    "PROFILES",
    "SPEC_VERSION",
    "STAGES",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AttentionConfig",
    "ConfigError",
    "DTypeError",
    "Dims",
    "IHAError",
    "LayerConfig",
    "Profile",
    "ShapeError",
    "attention",
    "attention_stages",
    "attention_vjp",
    "dtype_name",
    "layer",
    "load_checkpoint",
    "save_checkpoint",
    "validate",
]
