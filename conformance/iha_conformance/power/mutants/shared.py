"""What mutants of several parts of the operation are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from iha_conformance.power.port import Integers, Port

Config = dict[str, Any]


def other_value(field: str, values: dict[Any, Any], port: Port, config: Config) -> Config:
    """A value of the configuration taken for another one."""
    return config | {field: values.get(config[field], config[field])}


def wrapped(x: Any) -> Integers:
    """An integer as 32 bits keep it."""
    return np.asarray(x, dtype=np.int64).astype(np.int32).astype(np.int64)
