"""Interleaved Head Attention: configuration, validation and the golden reference, NumPy only.

`attention` is the specification in executable form; `bounds` derives how far a conforming
implementation may be from it. Backends import the submodules `config`, `conditions`, `validation`
and `errors`, and never the reference.
"""

from iha_core.config import PROFILES, AttentionConfig, Profile
from iha_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ConfigError,
    DTypeError,
    IHAError,
    ShapeError,
)
from iha_core.reference import STAGES, attention, attention_stages
from iha_core.validation import Dims, dtype_name, validate

SPEC_VERSION = "1.1"

__all__ = [
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
    "Profile",
    "ShapeError",
    "attention",
    "attention_stages",
    "dtype_name",
    "validate",
]
