"""Offsets, positions, ids and masks as arguments: ignored, exchanged, narrowed (SPEC.md chapter 2)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.port import Integers, Port

Inputs = dict[str, Any]


def ignored(names: tuple[str, ...], port: Port, inputs: Inputs) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}


for _names, _requirement in (
    (("query_offset",), "ARG-1"),
    (("positions", "kv_positions"), "POS-3"),
    (("segment_ids", "kv_segment_ids"), "SEG-1"),
    (("key_mask",), "KEY-1"),
):
    add(f"{_names[0]} ignored", _requirement, step="change_inputs", function=partial(ignored, _names))


@mutant("queries aligned to the first keys", "ARG-1", step="query_index")
def aligned_first(port: Port, offset: Any) -> Integers:
    return port.query_index(0 if offset is None else offset)


@mutant("offset with the opposite sign", "ARG-1", step="query_index")
def opposite_offset(port: Port, offset: Any) -> Integers:
    return port.query_index(port.dims.N - port.dims.M if offset is None else -np.asarray(offset))


@mutant("offset one too large", "ARG-1", step="query_index")
def late_offset(port: Port, offset: Any) -> Integers:
    return port.query_index(offset) + 1


@mutant("negative offset taken for 0", "ARG-1", step="query_index")
def clamped_offset(port: Port, offset: Any) -> Integers:
    return port.query_index(np.maximum(0, port.dims.M - port.dims.N if offset is None else offset))


@mutant("first element's offset for all", "ARG-2", step="query_index")
def first_offset(port: Port, offset: Any) -> Integers:
    index = port.query_index(offset)
    return np.broadcast_to(index[:1], index.shape)


@mutant("kv_segment_ids ignored", "ARG-3", step="change_inputs")
def key_segments_ignored(port: Port, inputs: Inputs) -> Inputs:
    """The queries' segment ids used for the keys, repeated or cut to their number."""
    if "kv_segment_ids" not in inputs:
        return inputs
    B, M = inputs["kv_segment_ids"].shape
    return inputs | {"kv_segment_ids": np.resize(inputs["segment_ids"].T, (M, B)).T}


@mutant("kv_positions ignored", "ARG-4", step="change_inputs")
def key_positions_ignored(port: Port, inputs: Inputs) -> Inputs:
    """Keys rotated in index order although they have positions of their own."""
    if "kv_positions" not in inputs:
        return inputs
    B, M = inputs["kv_positions"].shape
    return inputs | {"kv_positions": np.broadcast_to(np.arange(M), (B, M))}


@mutant("positions of the queries alone", "ARG-4", step="change_inputs")
def positions_of_queries_alone(port: Port, inputs: Inputs) -> Inputs:
    """`positions` alone not applied to the keys."""
    if "positions" not in inputs or "kv_positions" in inputs:
        return inputs
    B, M = inputs["positions"].shape
    return inputs | {"kv_positions": np.broadcast_to(np.arange(M), (B, M))}


@mutant("segment ids in float32", "TYP-3", "SEG-1", step="change_inputs")
def narrow_ids(port: Port, inputs: Inputs) -> Inputs:
    ids = {name: inputs[name] for name in ("segment_ids", "kv_segment_ids") if name in inputs}
    return inputs | {name: x.astype(np.float32).astype(np.int64) for name, x in ids.items()}


@mutant(
    "inputs cast to float32",
    "TYP-1",
    "NUM-1",
    step="change_inputs",
    dtypes=("float64",),
    because="inputs of the other dtypes are numbers of float32 already",
)
def float32_inputs(port: Port, inputs: Inputs) -> Inputs:
    floats = {name: x for name, x in inputs.items() if getattr(x, "dtype", None) == np.float64}
    return inputs | {name: x.astype(np.float32).astype(np.float64) for name, x in floats.items()}


@mutant("inverted key mask", "KEY-1", step="change_inputs")
def inverted_key_mask(port: Port, inputs: Inputs) -> Inputs:
    return inputs | {"key_mask": ~inputs["key_mask"]} if "key_mask" in inputs else inputs


@mutant("stale padding", "KEY-2", "DIM-1", step="change_inputs")
def stale_padding(port: Port, inputs: Inputs) -> Inputs:
    """Keys and values padded by one token, which holds what an earlier call left, and no mask over it."""
    dims = port.dims
    if dims.M == 0 or port.config.causal != "none" or "kv_positions" in inputs or "positions" in inputs:
        return inputs
    longer = {name: inputs[name][:, [*range(dims.M), 0]] for name in ("k", "v")}
    for name in ("key_mask", "kv_segment_ids"):
        if name in inputs:
            longer[name] = inputs[name][:, [*range(dims.M), dims.M - 1]]
    if "segment_ids" in inputs and "kv_segment_ids" not in inputs:
        longer["kv_segment_ids"] = inputs["segment_ids"][:, [*range(dims.M), dims.M - 1]]
    return inputs | longer | {"query_offset": inputs.get("query_offset", dims.M - dims.N)}
