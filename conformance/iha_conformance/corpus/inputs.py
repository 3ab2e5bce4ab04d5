"""Inputs of a case, from its row in the table."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.cases import Case
from iha_conformance.corpus.recipes import RECIPES
from iha_conformance.corpus.streams import cast, integers, uniform
from iha_core.layer_config import MIXING


def build_inputs(case: Case, dtype: str) -> dict[str, Any]:
    """Arguments of `attention` by name, those that the case has, rounded to a storage dtype.

    Returns:
        numpy arrays (bfloat16 as ml_dtypes.bfloat16; ids and positions int64; key_mask bool), and
        query_offset as an int or an int64 array (B,). For a case of gradients also the cotangent.
    """
    options = dict(case.parameters)
    collapse_kind = options.pop("collapse", "global")
    same_batch = options.pop("same_batch", False)
    wide_parameters = options.pop("float32_parameters", False)
    poison = options.pop("poison", None)
    nan = options.pop("nan", {})
    cotangent = options.pop("cotangent", "uniform")
    tensors = RECIPES[case.recipe](case.id, case.sizes, **options)
    if collapse_kind == "per_head":
        tensors["collapse"] = _per_head(tensors["collapse"], case.recipe)
    inputs: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if same_batch and name in ("q", "k", "v"):
            tensor = np.repeat(tensor[:1], len(tensor), axis=0)
        inputs[name] = cast(tensor, "float32" if wide_parameters and name in MIXING else dtype)
    if case.operation == "gradient":
        inputs["cotangent"] = cast(_cotangent(case, cotangent), dtype)
    inputs |= {name: _argument(name, written, case) for name, written in case.arguments.items()}
    if poison is not None:
        dropped = ~inputs["key_mask"]
        for name in ("k", "v"):
            inputs[name][dropped] = float(poison)
    for name, index in nan.items():
        inputs[name][tuple(index)] = np.nan
    inputs |= {name: _replacement(written) for name, written in case.replace.items()}
    return inputs


def _cotangent(case: Case, kind: Literal["uniform", "small", "whole", "positive"]) -> NDArray[np.float64]:
    """The derivative of a loss by the output, (B, N, H, e); a "positive" one makes sums that only grow."""
    shape = [case.sizes[letter] for letter in "BNHe"]
    stream = f"{case.id}/cotangent"
    if kind in ("uniform", "small"):
        return uniform(stream, shape, 2.0 if kind == "uniform" else 2.0**-12)
    return integers(stream, shape, 1, 7) if kind == "positive" else integers(stream, shape, -3, 3)


def _per_head(collapse: NDArray[np.float64], recipe: str) -> NDArray[np.float64]:
    """A per-head collapse (H, P): a random one's diagonal, a choosing one's choice of pseudo-head."""
    if recipe in ("random", "probe"):
        return np.ascontiguousarray(np.moveaxis(np.diagonal(collapse, axis1=0, axis2=1), -1, 0))
    chosen: NDArray[np.float64] = collapse.sum(axis=1)
    return chosen


def _argument(name: str, written: Any, case: Case) -> Any:
    """An optional argument as the table writes it.

    key_mask is one string of 0 and 1 for each batch element; ids and positions are lists of numbers
    for each batch element, or {start, step} with one number for each; query_offset is a number, or a
    list of one for each.
    """
    if name == "key_mask":
        width = case.sizes["M"]
        return np.array([[mark == "1" for mark in row] for row in written], dtype=np.bool_).reshape(-1, width)
    if name == "query_offset" and isinstance(written, int):
        return written
    if isinstance(written, dict):
        count = case.sizes["M" if name.startswith("kv_") else "N"]
        start = np.array(written["start"], dtype=np.int64)[:, None]
        return start + np.array(written.get("step", 1), dtype=np.int64) * np.arange(count)
    return np.array(written, dtype=np.int64)


def _replacement(written: Any) -> Any:
    """A wrong argument: {shape, dtype} for zeros of them, or {value} for the value itself."""
    if "value" in written:
        return written["value"]
    return cast(np.zeros(written["shape"]), written["dtype"])
