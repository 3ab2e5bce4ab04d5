"""What is visible: causality, windows, segments, key mask; every rule in both directions (SPEC.md 3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.mutants.shared import Config, other_value, wrapped
from iha_conformance.power.port import Booleans, Integers, Masks, Port
from iha_core import AttentionConfig, reference

for _name, _requirement, _field, _values in (
    ("causal token for virtual", "MASK-1", "causal", {"virtual": "token"}),
    ("causal virtual for token", "MASK-2", "causal", {"token": "virtual"}),
    ("causal virtual ignored", "MASK-1", "causal", {"virtual": "none"}),
    ("causal token ignored", "MASK-2", "causal", {"token": "none"}),
    ("causal where there is no mask", "MASK-3", "causal", {"none": "token"}),
    ("window_unit token for virtual", "WIN-1", "window_unit", {"virtual": "token"}),
    ("window_unit virtual for token", "WIN-2", "window_unit", {"token": "virtual"}),
):
    add(_name, _requirement, step="change_config", function=partial(other_value, _field, _values))


@mutant("window ignored", "WIN-1", "WIN-2", step="change_config")
def window_ignored(port: Port, config: Config) -> Config:
    return config | {"window": None}


@mutant("window makes causal", "WIN-3", step="change_config")
def window_makes_causal(port: Port, config: Config) -> Config:
    return config | {"causal": "token"} if config["window"] and config["causal"] == "none" else config


@mutant("window needs causality", "WIN-3", step="change_config")
def window_needs_causality(port: Port, config: Config) -> Config:
    """A window that vanishes where there is no causal mask."""
    return config | {"window": None} if config["causal"] == "none" else config


@mutant("two-sided window of half on each side", "WIN-3", step="change_config")
def half_window(port: Port, config: Config) -> Config:
    if config["causal"] != "none" or not config["window"]:
        return config
    return config | {"window": config["window"] // 2 + 1}


# Conditions that are written anew.


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Virtual indices t, s and token indices n, m of every pair, (B, T, S) after broadcasting."""

    t: Integers
    s: Integers
    n: Integers
    m: Integers


def pairs(port: Port, query_index: Integers, key_index: Integers) -> Pairs:
    P = port.dims.P
    t = reference.virtual(query_index, P)[:, :, None]
    s = reference.virtual(key_index, P)[None, None]
    return Pairs(t, s, t // P, s // P)


def unmasked(port: Port, query_index: Integers, key_index: Integers, masks: Masks, **config: Any) -> Booleans:
    """Visibility under the arguments and these fields of the configuration alone."""
    plain = AttentionConfig(**({"causal": "none"} | config))
    return reference.visibility(query_index, key_index, port.dims, plain, **masks)


Condition = Callable[[Port, Pairs], Booleans]


def shifted_causality(
    kind: str, condition: Condition, port: Port, query_index: Integers, key_index: Integers, masks: Masks
) -> Booleans:
    """Another condition in place of one kind of causality, without a window."""
    if port.config.causal != kind or port.config.window is not None:
        return port.visible(query_index, key_index, masks)
    found = condition(port, pairs(port, query_index, key_index))
    return unmasked(port, query_index, key_index, masks) & found


for _name, _requirement, _kind, _condition in (
    ("causal virtual, one key later", "MASK-1", "virtual", lambda port, at: at.s <= at.t + 1),
    ("causal virtual, own key hidden", "MASK-1", "virtual", lambda port, at: at.s < at.t),
    ("causal token, one token later", "MASK-2", "token", lambda port, at: at.m <= at.n + 1),
    ("causal token, own token hidden", "MASK-2", "token", lambda port, at: at.m < at.n),
    ("causal reversed", "MASK-1", "virtual", lambda port, at: at.s >= at.t),
):
    add(_name, _requirement, step="visible", function=partial(shifted_causality, _kind, _condition))


def changed_window(
    applies: Callable[[AttentionConfig], bool],
    condition: Callable[[int, Port, Pairs], Booleans],
    port: Port,
    query_index: Integers,
    key_index: Integers,
    masks: Masks,
) -> Booleans:
    """Another condition in place of a window, causality as it should be."""
    config = port.config
    if config.window is None or not applies(config):
        return port.visible(query_index, key_index, masks)
    found = condition(config.window, port, pairs(port, query_index, key_index))
    return unmasked(port, query_index, key_index, masks, causal=config.causal) & found


def distance(port: Port, at: Pairs, unit: str) -> Integers:
    """Distance in a unit, without its sign where the window has two sides."""
    plain = at.t - at.s if unit == "virtual" else at.n - at.m
    return np.abs(plain) if port.config.causal == "none" else plain


def of_unit(unit: str) -> Callable[[AttentionConfig], bool]:
    return lambda config: config.window_unit == unit


for _name, _requirements, _applies, _bound in (
    (
        "virtual window one wider (inclusive)",
        ("WIN-1",),
        of_unit("virtual"),
        lambda W, port, at: distance(port, at, "virtual") < W * port.dims.P + 1,
    ),
    (
        "virtual window one narrower",
        ("WIN-1",),
        of_unit("virtual"),
        lambda W, port, at: distance(port, at, "virtual") < W * port.dims.P - 1,
    ),
    (
        "virtual window of W virtual keys",
        ("WIN-1",),
        of_unit("virtual"),
        lambda W, port, at: distance(port, at, "virtual") < W,
    ),
    (
        "token window one wider (inclusive)",
        ("WIN-2",),
        of_unit("token"),
        lambda W, port, at: distance(port, at, "token") < W + 1,
    ),
    (
        "token window one narrower",
        ("WIN-2",),
        of_unit("token"),
        lambda W, port, at: distance(port, at, "token") < W - 1,
    ),
    (
        "token window of W*P tokens",
        ("WIN-2",),
        of_unit("token"),
        lambda W, port, at: distance(port, at, "token") < W * port.dims.P,
    ),
    (
        "window one-sided without causality",
        ("WIN-3",),
        lambda config: config.causal == "none",
        lambda W, port, at: (
            at.t - at.s < W * port.dims.P if port.config.window_unit == "virtual" else at.n - at.m < W
        ),
    ),
    (
        "virtual window hides later pseudo-keys of the own token",
        ("WIN-3",),
        lambda config: config.causal == "token" and config.window_unit == "virtual",
        lambda W, port, at: (at.t - at.s < W * port.dims.P) & (at.s <= at.t),
    ),
    (
        "window counted from the last key",
        ("WIN-1", "WIN-2"),
        lambda config: True,
        lambda W, port, at: at.s >= port.dims.S - W * port.dims.P,
    ),
    (
        "window in blocks",
        ("WIN-2",),
        of_unit("token"),
        lambda W, port, at: at.n // W == at.m // W,
    ),
    (
        "W*P wraps at 32 bits",
        ("IDX-2",),
        of_unit("virtual"),
        lambda W, port, at: distance(port, at, "virtual") < wrapped(W * port.dims.P),
    ),
):
    add(_name, *_requirements, step="visible", function=partial(changed_window, _applies, _bound))


@mutant("virtual indices wrap at 32 bits", "IDX-2", step="visible")
def indices_wrap(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    P = port.dims.P
    start = wrapped(reference.virtual(query_index, P)[:, ::P])
    return port.visible(np.floor_divide(start, P), key_index, masks)


@mutant("positions used for masks", "IDX-1", step="visible")
def positions_for_masks(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    given = port.inputs.get("positions")
    return port.visible(query_index if given is None else np.asarray(given), key_index, masks)


@mutant("last key dropped", "MASK-3", step="visible")
def last_key_dropped(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """The last virtual key, as a loop that ends one early leaves it out."""
    visible = port.visible(query_index, key_index, masks)
    visible[:, :, -1:] = False
    return visible


@mutant("first key always visible", "MASK-1", "WIN-1", step="visible")
def first_key_always_visible(
    port: Port, query_index: Integers, key_index: Integers, masks: Masks
) -> Booleans:
    """The first token's first pseudo-key kept for every query, as a sink."""
    visible = port.visible(query_index, key_index, masks)
    visible[:, :, :1] = True
    return visible


@mutant("segments in order, not equal", "SEG-1", step="visible")
def segments_in_order(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """A query sees its own segment and those with smaller ids."""
    if masks.get("segment_ids") is None:
        return port.visible(query_index, key_index, masks)
    queries = masks["segment_ids"]
    keys = queries if masks["kv_segment_ids"] is None else masks["kv_segment_ids"]
    without = {**masks, "segment_ids": None, "kv_segment_ids": None}
    ordered = np.repeat(keys, port.dims.P, 1)[:, None] <= np.repeat(queries, port.dims.P, 1)[:, :, None]
    return np.asarray(port.visible(query_index, key_index, without) & ordered)


@mutant("segments over virtual tokens", "SEG-1", "MIX-4", step="visible")
def segments_tiled(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """Ids laid over the virtual tokens P times, not over the P tokens of each."""
    if masks.get("segment_ids") is None:
        return port.visible(query_index, key_index, masks)
    queries = masks["segment_ids"]
    keys = queries if masks["kv_segment_ids"] is None else masks["kv_segment_ids"]
    without = {**masks, "segment_ids": None, "kv_segment_ids": None}
    equal = np.tile(keys, port.dims.P)[:, None] == np.tile(queries, port.dims.P)[:, :, None]
    return np.asarray(port.visible(query_index, key_index, without) & equal)


@mutant("segments instead of causality", "SEG-1", "MASK-1", step="visible")
def segments_instead(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """Within a segment everything is visible."""
    if masks.get("segment_ids") is None:
        return port.visible(query_index, key_index, masks)
    return unmasked(port, query_index, key_index, masks)


@mutant("key mask over virtual keys", "KEY-1", "MIX-4", step="visible")
def key_mask_tiled(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """The key mask laid over the virtual keys P times, not over the P keys of each token."""
    key_mask = masks["key_mask"]
    visible = port.visible(query_index, key_index, {**masks, "key_mask": None})
    return visible if key_mask is None else visible & np.tile(key_mask, port.dims.P)[:, None]


@mutant("key mask drops queries, too", "KEY-1", step="visible")
def key_mask_drops_queries(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """A query of a dropped token sees nothing, where queries and keys are the same tokens."""
    visible = port.visible(query_index, key_index, masks)
    key_mask = masks["key_mask"]
    if key_mask is None or port.dims.N != port.dims.M:
        return visible
    return np.asarray(visible & np.repeat(key_mask, port.dims.P, axis=1)[:, :, None])


@mutant("first element's key mask for all", "KEY-1", step="visible")
def first_key_mask(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    key_mask = masks["key_mask"]
    if key_mask is None:
        return port.visible(query_index, key_index, masks)
    first = np.broadcast_to(key_mask[:1], key_mask.shape)
    return port.visible(query_index, key_index, {**masks, "key_mask": first})
