"""Rotary position embedding: positions, frequencies, pairs, sign, precision (SPEC.md 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.mutants.shared import other_value, wrapped
from iha_conformance.power.port import Booleans, Integers, Port, Side
from iha_conformance.power.steps import Array
from iha_core import AttentionConfig, reference

for _name, _requirement, _field, _values in (
    ("token for virtual positions", "POS-1", "rope", {"virtual": "token"}),
    ("virtual for token positions", "POS-2", "rope", {"token": "virtual"}),
    ("not rotated", "ROPE-1", "rope", {"virtual": "none", "token": "none"}),
    ("adjacent pairs for half", "ROPE-2", "rope_pairing", {"half": "adjacent"}),
    ("half pairs for adjacent", "ROPE-3", "rope_pairing", {"adjacent": "half"}),
    ("base 10000", "ROPE-4", "rope_theta", {500000.0: 10000.0}),
):
    add(_name, _requirement, step="change_config", function=partial(other_value, _field, _values))


@mutant("rotated where rope is none", "POS-2", "CFG-2", step="change_config")
def rotated_nevertheless(port: Port, config: dict[str, Any]) -> dict[str, Any]:
    """Where the width is even."""
    return config | {"rope": "virtual"} if config["rope"] == "none" and port.dims.d % 2 == 0 else config


@mutant("base 500000, whatever is configured", "ROPE-4", "CFG-1", step="change_config")
def default_base(port: Port, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"rope_theta": AttentionConfig().rope_theta}


@mutant("base in float32", "ROPE-4", "ROPE-5", step="change_config")
def narrow_base(port: Port, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"rope_theta": float(np.float32(config["rope_theta"]))}


@mutant("opposite rotation", "ROPE-1", step="angles")
def opposite(port: Port, side: Side, position: Integers) -> Array | None:
    angles = port.angles(side, position)
    return None if angles is None else -angles


@mutant("queries and keys rotated apart", "ROPE-1", step="angles")
def apart(port: Port, side: Side, position: Integers) -> Array | None:
    """Keys rotated in the opposite direction."""
    angles = port.angles(side, position)
    return angles if angles is None or side == "q" else -angles


@mutant("keys not rotated", "ROPE-1", step="angles")
def keys_not_rotated(port: Port, side: Side, position: Integers) -> Array | None:
    return port.angles(side, position) if side == "q" else None


@mutant("offset not rotated", "POS-3", step="angles")
def offset_not_rotated(port: Port, side: Side, position: Integers) -> Array | None:
    """Queries rotated from 0 on, whatever their offset, unless they have positions."""
    if side == "q" and "positions" not in port.inputs:
        position = np.broadcast_to(np.arange(port.dims.N), position.shape)
    return port.angles(side, position)


@mutant("positions counted from the first of the call", "POS-3", step="angles")
def relative_positions(port: Port, side: Side, position: Integers) -> Array | None:
    """Queries and keys each counted from their own first token."""
    return port.angles(side, position - position[:, :1])


@mutant("negative positions taken for 0", "POS-3", "ARG-1", step="angles")
def clamped_positions(port: Port, side: Side, position: Integers) -> Array | None:
    return port.angles(side, np.maximum(0, position))


def from_positions(virtual: Array | Integers, frequencies: Array) -> Array:
    """Angles of virtual positions, (B, T), (d/2,) -> (B, T, 1, d/2)."""
    return np.asarray(virtual, dtype=np.float64)[:, :, None, None] * frequencies


def virtual_positions(port: Port, position: Integers) -> Integers:
    """[POS-1] or [POS-2]: (B, N) -> (B, T)."""
    P = port.dims.P
    if port.config.rope == "virtual":
        return reference.virtual(position, P)
    return np.repeat(position, P, axis=1)


def changed_positions(
    change: Callable[[Port, Integers], Array | Integers], port: Port, side: Side, position: Integers
) -> Array | None:
    """Virtual positions changed by a function (port, (B, T)) -> (B, T)."""
    if port.config.rope == "none":
        return None
    frequencies = reference.rope_frequencies(port.dims.d, port.config.rope_theta)
    return from_positions(change(port, virtual_positions(port, position)), frequencies)


for _name, _requirements, _change in (
    (
        "position n + p",
        ("POS-1",),
        lambda port, t: t // port.dims.P + t % port.dims.P if port.config.rope == "virtual" else t,
    ),
    (
        "position n*P",
        ("POS-1",),
        lambda port, t: t - t % port.dims.P if port.config.rope == "virtual" else t,
    ),
    (
        "position p*M + n",
        ("POS-1", "MIX-4"),
        lambda port, t: (
            t % port.dims.P * port.dims.M + t // port.dims.P if port.config.rope == "virtual" else t
        ),
    ),
    ("table of the tokens' length", ("POS-1",), lambda port, t: np.minimum(t, max(0, port.dims.M - 1))),
    ("table of 8192 rows", ("POS-3",), lambda port, t: np.minimum(t, 8191)),
    ("positions in bfloat16", ("ROPE-5",), lambda port, t: cast(t, "bfloat16").astype(np.float64)),
    ("positions in float16", ("ROPE-5",), lambda port, t: cast(t, "float16").astype(np.float64)),
    ("virtual positions wrap at 32 bits", ("IDX-2",), lambda port, t: wrapped(t)),
):
    add(_name, *_requirements, step="angles", function=partial(changed_positions, _change))


@mutant("positions of the keys from 1", "POS-3", step="angles")
def keys_from_one(port: Port, side: Side, position: Integers) -> Array | None:
    return port.angles(side, position + 1 if side == "k" else position)


@mutant("angles in float32", "ROPE-5", step="angles")
def float32_angles(port: Port, side: Side, position: Integers) -> Array | None:
    angles = port.angles(side, position)
    return None if angles is None else angles.astype(np.float32).astype(np.float64)


def changed_frequencies(
    change: Callable[[Port, Array], Array], port: Port, side: Side, position: Integers
) -> Array | None:
    """Frequencies changed by a function (port, (d/2,)) -> (d/2,)."""
    if port.config.rope == "none":
        return None
    frequencies = reference.rope_frequencies(port.dims.d, port.config.rope_theta)
    return from_positions(virtual_positions(port, position), change(port, frequencies))


def power(exponents: Callable[[Any, int], Array]) -> Callable[[Port, Array], Array]:
    """Frequencies theta ** -exponent(i, d)."""
    return lambda port, f: port.config.rope_theta ** -exponents(np.arange(len(f)), port.dims.d)


for _name, _requirement, _change_f in (
    ("frequencies in float32", "ROPE-5", lambda port, f: f.astype(np.float32).astype(np.float64)),
    ("exponent i/(d/2 - 1)", "ROPE-4", power(lambda i, d: i / max(1, d // 2 - 1))),
    ("exponent (2i + 1)/d", "ROPE-4", power(lambda i, d: (2 * i + 1) / d)),
    ("exponent i/d", "ROPE-4", power(lambda i, d: i / d)),
    ("exponent 2(i + 1)/d", "ROPE-4", power(lambda i, d: 2 * (i + 1) / d)),
    ("frequencies in reverse", "ROPE-4", lambda port, f: f[::-1]),
    ("exponent of the value's width", "ROPE-4", lambda port, f: f ** (port.dims.d / port.dims.e)),
):
    add(_name, _requirement, step="angles", function=partial(changed_frequencies, _change_f))


@mutant("sine without its minus", "ROPE-1", step="rotate")
def reflected(port: Port, side: Side, x: Array, angles: Array | None) -> Array:
    """(x1 cos + x2 sin, x2 cos + x1 sin)."""
    if angles is None:
        return x
    first, second = reference.lane_pairs(x.shape[-1], port.config.rope_pairing)
    turned = np.array(port.rotate(side, x, angles))
    turned[..., first] = x[..., first] * np.cos(angles) + x[..., second] * np.sin(angles)
    return turned


@mutant("rotated lanes side by side", "ROPE-3", step="rotate")
def not_in_place(port: Port, side: Side, x: Array, angles: Array | None) -> Array:
    """Queries of adjacent pairs with their first lanes in the lower half and their second in the upper."""
    turned = port.rotate(side, x, angles)
    if angles is None or port.config.rope_pairing == "half" or side == "k":
        return turned
    return np.concatenate([turned[..., 0::2], turned[..., 1::2]], axis=-1)


@mutant("only the first half of the pairs rotated", "ROPE-1", step="rotate")
def partly_rotated(port: Port, side: Side, x: Array, angles: Array | None) -> Array:
    """Partial rotation: the later half of the pairs is left as it is."""
    if angles is None:
        return x
    pairs = angles.shape[-1]
    return port.rotate(side, x, np.where(np.arange(pairs) < (pairs + 1) // 2, angles, 0.0))


@mutant("values rotated", "ROPE-1", step="weighted_sum")
def values_rotated(port: Port, weights: Array, mixed_v: Array, visible: Booleans) -> Array:
    """Values rotated like the keys, where they are as wide."""
    angles = port.angles("k", port.positions[1])
    if angles is not None and port.dims.e == port.dims.d:
        mixed_v = port.rotate("v", mixed_v, angles)
    return port.weighted_sum(weights, mixed_v, visible)
