"""The operation in every dialect: exact values; `allowance` has how far rounding may move them.

Stages are those of SPEC.md chapter 4, their rows in the order in which the dialect has them. Where a
step does not depend on the dialect it is the reference's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.diagnose.dialect import WITHOUT_COLLAPSE, Dialect
from iha_core import AttentionConfig, reference
from iha_core.bounds.worst import as_global

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Stages = dict[str, Array]


class UnreadableError(Exception):
    """The dialect cannot read tensors of these shapes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The virtual tokens of one side, in the dialect's order.

    Attributes:
        token: index of the token of each, (T,).
        pseudo: its pseudo index.
        index: what masks and virtual RoPE count it as.
    """

    token: Integers
    pseudo: Integers
    index: Integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call as a dialect takes them; everything in float64.

    Attributes:
        q, k, v: (B, N, H, d), (B, M, G, d), (B, M, G, e), normalised before mixing if the dialect does so.
        alpha_q, alpha_k, alpha_v: (source, H, P).
        R: (H, H, P).
        queries, keys: the virtual tokens.
        visible: (B, T, S).
        turn_q, turn_k: angles (1, T, 1, d/2), None without RoPE.
        scale: factor of the logits.
        plain: q and k before they were normalised, if they were before mixing.
        config: what the reference's rotation needs.
    """

    dialect: Dialect
    q: Array
    k: Array
    v: Array
    alpha_q: Array
    alpha_k: Array
    alpha_v: Array
    R: Array
    queries: Rows
    keys: Rows
    visible: Booleans
    turn_q: Array | None
    turn_k: Array | None
    scale: float
    plain: Mapping[str, Array]
    config: AttentionConfig


def read(dialect: Dialect, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Call:
    """The arguments as the dialect takes them; of the configuration it knows the window only.

    Raises:
        UnreadableError: tensors have no shape that it can read.
    """
    x = {name: np.asarray(inputs[name], np.float64) for name in ("q", "k", "v")}
    H, G = x["q"].shape[2], x["k"].shape[2]
    alphas = {}
    unmixed = dialect.values == "unmixed"
    if unmixed and G != H:
        raise UnreadableError
    for side, sources in (("q", H), ("k", G), *(() if unmixed else (("v", G),))):
        axes = getattr(dialect, f"alpha_{side}_axes").split(",")
        alpha = _ordered(inputs[f"alpha_{side}"], axes, ["source", "target", "pseudo"])
        if alpha.shape[:2] != (sources, H):
            raise UnreadableError
        alphas[side] = alpha
    P = alphas["q"].shape[2]
    if any(alpha.shape[2] != P for alpha in alphas.values()):
        raise UnreadableError
    if unmixed:
        alphas["v"] = np.broadcast_to(np.eye(H)[:, :, None], (H, H, P))
    N, M = x["q"].shape[1], x["k"].shape[1]
    offset = M - N if dialect.alignment == "last" else 0
    queries = _rows(dialect, N, P, offset=offset, block=M)
    keys = _rows(dialect, M, P, offset=0, block=M)
    plain = {name: x[name] for name in "qk"}
    if dialect.qk_norm == "before_mix":
        x |= {name: normalised(x[name], dialect.qk_multiplier) for name in "qk"}
    d = x["q"].shape[3]
    rotation = AttentionConfig(
        rope="none" if dialect.rope == "none" else "virtual",
        rope_theta=dialect.rope_theta,
        rope_pairing=dialect.rope_pairing,  # type: ignore[arg-type]
    )
    visible = visibility(dialect, queries, keys, P, N, config.get("window"))[None]
    key_mask = inputs.get("key_mask")
    if key_mask is not None and dialect.key_mask != "ignored":
        kept = np.asarray(key_mask) if dialect.key_mask == "keep" else ~np.asarray(key_mask)
        visible = visible & kept[:, None, keys.token]
    return Call(
        dialect=dialect,
        **x,
        **{f"alpha_{side}": alpha for side, alpha in alphas.items()},
        R=_collapse_tensor(dialect, inputs["collapse"], H, P),
        queries=queries,
        keys=keys,
        visible=np.broadcast_to(visible, (len(x["q"]), *visible.shape[1:])),
        turn_q=_angles(dialect, queries, P, d),
        turn_k=_angles(dialect, keys, P, d),
        scale=dialect.scale.at(d),
        plain=plain,
        config=rotation,
    )


def _ordered(tensor: Any, axes: list[str], wanted: list[str]) -> Array:
    """A tensor whose axes are read as these, with its axes as wanted."""
    array = np.asarray(tensor, np.float64)
    if array.ndim != len(axes):
        raise UnreadableError
    return array.transpose([axes.index(name) for name in wanted])


def _collapse_tensor(dialect: Dialect, tensor: Any, H: int, P: int) -> Array:
    """The collapse as the tensor (H, H, P) of [COL-1] that does the same."""
    if dialect.collapse_kind in WITHOUT_COLLAPSE:
        pick = np.zeros(P)
        pick[{"first": slice(1), "last": slice(P - 1, P)}.get(dialect.collapse_kind, slice(P))] = 1.0
        return as_global(np.tile(pick / (P if dialect.collapse_kind == "mean" else 1), (H, 1)))
    axes = dialect.collapse_axes.split(",")
    if np.ndim(tensor) == 2:
        r = _ordered(tensor, [name for name in axes if name != "out"], ["source", "pseudo"])
        if r.shape != (H, P):
            raise UnreadableError
        return as_global(r)
    R = _ordered(tensor, axes, ["out", "source", "pseudo"])
    if R.shape != (H, H, P):
        raise UnreadableError
    return R if dialect.collapse_kind == "global" else np.eye(H)[:, :, None] * R


def _rows(dialect: Dialect, N: int, P: int, *, offset: int, block: int) -> Rows:
    """The virtual tokens of N tokens that begin at the offset; blocks of one pseudo index are so long."""
    if dialect.order == "pseudo_major":
        pseudo, token = np.divmod(np.arange(N * P), N)
        length = block if dialect.ragged == "block" else N
        index = pseudo * length + token + offset * (P if dialect.ragged == "flat" else 1)
    else:
        token, pseudo = np.divmod(np.arange(N * P), P)
        index = (token + offset) * P + pseudo
    return Rows(token=token + offset, pseudo=pseudo, index=index)


def visibility(dialect: Dialect, queries: Rows, keys: Rows, P: int, N: int, window: int | None) -> Booleans:
    """Which virtual keys each virtual query sees, but for the key mask: (T, S)."""
    by_index = queries.index[:, None] - keys.index[None, :]
    by_token = queries.token[:, None] - keys.token[None, :]
    visible = np.ones(by_index.shape, np.bool_)
    if dialect.causal != "none":
        visible &= (by_index if dialect.causal == "virtual" else by_token) >= 0
    kind, virtual = dialect.window.kind, dialect.window_unit == "virtual"
    reach = None  # the farthest that is seen
    if kind == "config" and window is not None:
        reach = window * (P if virtual else 1) - (dialect.window_bound == "exclusive")
    elif kind == "fixed":
        reach = dialect.window.reach
    elif kind == "half":
        reach = N // (2 * P)
    if reach is not None:
        distance = by_index if virtual else by_token
        visible &= (np.abs(distance) if dialect.causal == "none" else distance) <= reach
    if dialect.order == "extra_heads":
        visible &= queries.pseudo[:, None] == keys.pseudo[None, :]
    return visible


def _angles(dialect: Dialect, rows: Rows, P: int, d: int) -> Array | None:
    if dialect.rope == "none":
        return None
    position = rows.token
    if dialect.rope == "virtual":
        position = rows.index if dialect.rope_when == "after" else rows.token * P
    frequencies = _frequencies(d, dialect.rope_theta)
    return np.asarray(dialect.rope_sign * position[None, :, None, None] * frequencies)


_frequencies = functools.lru_cache(maxsize=4096)(reference.rope_frequencies)


def normalised(x: Array, multiplier: float) -> Array:
    """x with root mean square `multiplier` over its last axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(multiplier * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True)))


def lay(dialect: Dialect, x: Array, P: int) -> Array:
    """Virtual tokens (B, T, H, width) in the canonical order -> in the dialect's."""
    B, T, H, width = x.shape
    pseudo = x.reshape(B, T // P, P, H, width)
    if dialect.order == "pseudo_major":
        pseudo = pseudo.swapaxes(1, 2)
    elif dialect.order == "reshaped":
        pseudo = pseudo.swapaxes(2, 3)
    return pseudo.reshape(x.shape)


def unlay(dialect: Dialect, x: Array, P: int) -> Array:
    """Virtual tokens in the dialect's order -> in the canonical one."""
    B, T, H, width = x.shape
    if dialect.order == "pseudo_major":
        x = x.reshape(B, P, T // P, H, width).swapaxes(1, 2)
    elif dialect.order == "reshaped":
        x = x.reshape(B, T // P, H, P, width).swapaxes(2, 3)
    return x.reshape(B, T, H, width)


def speak(dialect: Dialect, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Stages:
    """All stages as the dialect has them.

    Raises:
        UnreadableError: tensors have no shape that it can read.
    """
    return carried_out(read(dialect, inputs, config))


def carried_out(call: Call) -> Stages:
    """All stages of a call."""
    stages: Stages = {}
    for stage in ("mixed_q", "mixed_k", "mixed_v"):
        stages[stage] = mixed(call, stage[-1])
    for stage in ("rotated_q", "rotated_k"):
        stages[stage] = rotated(call, stage[-1], stages[f"mixed_{stage[-1]}"])
    stages["logits"] = logits(call, stages["rotated_q"], stages["rotated_k"])
    weights = stages["logits"]
    if call.dialect.normalisation == "softmax":
        weights, stages["lse"] = reference.softmax(stages["logits"])
    stages["virtual_out"] = weighted_sum(weights, stages["mixed_v"])
    stages["output"] = collapsed(call, stages["virtual_out"])
    return stages


def mixed(call: Call, side: str) -> Array:
    """Queries, keys or values after mixing, before rotation and whatever is normalised after mixing."""
    alpha = getattr(call, f"alpha_{side}")
    return lay(call.dialect, reference.mix(getattr(call, side), alpha), alpha.shape[2])


def rotated(call: Call, side: str, x: Array) -> Array:
    """Mixed queries or keys, normalised if the dialect does so now, after rotation."""
    if call.dialect.qk_norm == "after_mix":
        x = normalised(x, call.dialect.qk_multiplier)
    return reference.rotate(x, call.turn_q if side == "q" else call.turn_k, call.config)


def logits(call: Call, q: Array, k: Array) -> Array:
    """(B, T, H, d), (B, S, H, d) -> (B, H, T, S), hidden ones as the normalisation has them."""
    hidden = -np.inf if call.dialect.normalisation == "softmax" else 0.0
    return np.where(call.visible[:, None], reference.scaled_products(q, k, call.scale), hidden)


def weighted_sum(weights: Array, v: Array) -> Array:
    """(B, H, T, S), (B, S, H, e) -> (B, T, H, e); nothing here is NaN, so a product does."""
    return np.swapaxes(weights @ np.swapaxes(v, 1, 2), 1, 2)


def collapsed(call: Call, virtual_out: Array) -> Array:
    """(B, T, H, e) -> (B, N, H, e)."""
    return reference.collapse_heads(unlay(call.dialect, virtual_out, call.R.shape[2]), call.R)
