"""Small answers that were derived by hand, from spec/known_answers.toml."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_core.config import AttentionConfig
from iha_core.spec_files import load_toml

_SIZES = "BNMHGPde"
_SHAPES = {
    "q": "BNHd",
    "k": "BMGd",
    "v": "BMGe",
    "alpha_q": "HHP",
    "alpha_k": "GHP",
    "alpha_v": "GHP",
    "collapse": "HHP",
    "key_mask": "BM",
    "segment_ids": "BN",
    "kv_segment_ids": "BM",
    "positions": "BN",
    "kv_positions": "BM",
    "query_offset": "B",
    "mixed_q": "BTHd",
    "mixed_k": "BSHd",
    "mixed_v": "BSHe",
    "rotated_q": "BTHd",
    "rotated_k": "BSHd",
    "logits": "BHTS",
    "lse": "BHT",
    "virtual_out": "BTHe",
    "output": "BNHe",
}
_TENSORS = ("q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownAnswer:
    """One small call and what it must give.

    Attributes:
        id: permanent name.
        derivation: how the answer follows, in words.
        requirements: ids of SPEC.md that it shows.
        inputs: arguments of `attention` by name, floating-point ones in float64.
        config: the configuration.
        stage: name of the stage that is known ([STG-1]).
        expected: its values.
    """

    id: str
    derivation: str
    requirements: tuple[str, ...]
    inputs: Mapping[str, Any]
    config: AttentionConfig
    stage: str
    expected: NDArray[np.float64]


@cache
def load_known_answers() -> tuple[KnownAnswer, ...]:
    """All answers in the order of the file."""
    return tuple(_answer(row) for row in load_toml("known_answers.toml")["answer"])


def _answer(row: Mapping[str, Any]) -> KnownAnswer:
    sizes = dict(zip(_SIZES, row["sizes"], strict=True))
    sizes |= {"T": sizes["N"] * sizes["P"], "S": sizes["M"] * sizes["P"]}

    def shape(name: str, values: Any) -> tuple[int, ...]:
        letters = _SHAPES[name]
        # A collapse of H*P numbers is the per-head one; of H*H*P numbers, or of a single one, the global.
        if name == "collapse" and isinstance(values, list) and len(values) == sizes["H"] * sizes["P"]:
            letters = "HP" if sizes["H"] > 1 else letters
        return tuple(sizes[letter] for letter in letters)

    inputs: dict[str, Any] = {}
    for name, values in row["inputs"].items():
        if name == "query_offset" and isinstance(values, int):
            inputs[name] = values
            continue
        kind = np.float64 if name in _TENSORS else np.bool_ if name == "key_mask" else np.int64
        inputs[name] = _filled(values, shape(name, values)).astype(kind)
    return KnownAnswer(
        id=row["id"],
        derivation=row["derivation"],
        requirements=tuple(row["requirements"]),
        inputs=MappingProxyType(inputs),
        config=AttentionConfig.from_dict(row.get("config", {})),
        stage=row["stage"],
        expected=_filled(row["expected"], shape(row["stage"], None)),
    )


def _filled(values: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """An array of a shape from its numbers in row-major order, or from the one that fills it."""
    if not isinstance(values, list):
        return np.full(shape, _number(values))
    return np.array([_number(value) for value in values], dtype=np.float64).reshape(shape)


def _number(value: float | str) -> float:
    """A number, or one written as a fraction ("7/3") or as "ln 3"."""
    if not isinstance(value, str):
        return float(value)
    if value.startswith("ln "):
        return math.log(float(value.removeprefix("ln ")))
    return float(Fraction(value))
