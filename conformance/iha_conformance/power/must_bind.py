"""The must-bind gate: whatever a port may ignore or mistake has to move some output of the corpus.

An item is an argument, an index along an axis of a parameter, a head or lane of q, k or v, or a value of the
configuration. It is *bound* in a dtype if changing it moves an output of some case by `FACTOR` limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from iha_conformance.corpus import Case, build_inputs
from iha_conformance.power.measure import Problem, corpus
from iha_conformance.protocol import Inputs
from iha_core import AttentionConfig, attention
from iha_core.layer_config import MIXING

FACTOR = 10.0
"""How many limits an output must move by."""

AXES: Mapping[str, tuple[str, ...]] = {
    "alpha_q": ("source", "target", "pseudo"),
    "alpha_k": ("source", "target", "pseudo"),
    "alpha_v": ("source", "target", "pseudo"),
    "collapse": ("out", "source", "pseudo"),
    "r": ("head", "pseudo of a head"),
}
MOST_TOKENS = 16
"""Cases with more tokens are not needed to bind each of them."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "causal": ("virtual", "token", "none"),
    "window_unit": ("virtual", "token"),
    "rope": ("virtual", "token", "none"),
    "rope_pairing": ("half", "adjacent"),
    "normalisation": ("softmax", "none"),
}


@dataclasses.dataclass(frozen=True)
class Change:
    """An item, the call with it changed, and the feature that it is a part of, if it is one of `LEVELS`."""

    item: str
    inputs: Mapping[str, Any]
    config: Mapping[str, Any]
    feature: str = ""


def changes(case: Case, inputs: Inputs) -> Iterator[Change]:
    """Every item of a case, changed one at a time."""
    for make in (_parameters, _tensors, _arguments, _offset, _configuration):
        yield from make(case, inputs)


def moves(problem: Problem, change: Change) -> bool:
    """Whether a change moves an output by `FACTOR` limits, by the reference."""
    limits = problem.expectation.limits
    exact, limit = limits.stages["output"], limits.limits["output"]
    with np.errstate(all="ignore"):
        found = attention(**change.inputs, config=AttentionConfig.from_dict(change.config))
        moved = np.isfinite(found) & (np.abs(found - exact) >= FACTOR * limit)
        return bool(np.any(moved))


Level = tuple[str, str]
"""A feature and the value that it has."""

LEVELS: Mapping[str, tuple[str, ...]] = {
    "causal": ("virtual", "token", "none"),
    "window": ("none", "virtual", "token"),
    "rope": ("virtual", "token", "none"),
    "rope_pairing": ("half", "adjacent"),
    "normalisation": ("softmax", "none"),
    "scale": ("default", "given"),
    "collapse": ("global", "per head"),
    "heads": ("equal", "grouped"),
    "key_mask": ("given",),
    "segment_ids": ("alone", "both"),
    "positions": ("alone", "both"),
    "query_offset": ("int", "list"),
}
"""What a case can combine; a port may get each right and two of them together wrong."""

MEANINGLESS = {("rope_pairing", "rope"), ("positions", "rope")}
"""Features that mean nothing beside another one's "none"."""


def levels(case: Case) -> dict[str, str]:
    """The features of a case."""
    config, arguments = case.config, case.arguments
    found = {name: config[name] for name in ("causal", "rope", "normalisation")}
    if config["rope"] != "none":
        found["rope_pairing"] = config["rope_pairing"]
    found["window"] = "none" if config["window"] is None else config["window_unit"]
    found["scale"] = "default" if config["scale"] is None else "given"
    found["collapse"] = "per head" if case.parameters.get("collapse") == "per_head" else "global"
    found["heads"] = "grouped" if case.sizes["G"] < case.sizes["H"] else "equal"
    if "key_mask" in arguments:
        found["key_mask"] = "given"
    for name, keys in (("segment_ids", "kv_segment_ids"), ("positions", "kv_positions")):
        if name in arguments:
            found[name] = "both" if keys in arguments else "alone"
    if "query_offset" in arguments:
        found["query_offset"] = "int" if isinstance(arguments["query_offset"], int) else "list"
    return found


def meaningful(one: Level, other: Level) -> bool:
    """Whether two features can have these values in one case, and the first still has an effect."""
    (name, _), (beside, value) = one, other
    return name != beside and not ((name, beside) in MEANINGLESS and value == "none")


def pair_item(one: Level, other: Level) -> str:
    """The item for a feature that has to matter beside another one."""
    return f"{' '.join(one)} beside {' '.join(other)}"


def all_pairs() -> Iterator[str]:
    """The items of all features, each beside every value of every other one."""
    every = [(name, value) for name, values in LEVELS.items() for value in values]
    for one in every:
        for other in every:
            if meaningful(one, other) and meaningful(other, one):
                yield pair_item(one, other)


def items(case: Case, change: Change) -> list[str]:
    """What a change of a case binds: its own item, and its feature beside every other one of the case."""
    found = levels(case)
    if change.feature not in found:
        return [change.item]
    one = change.feature, found[change.feature]
    return [change.item, *(pair_item(one, other) for other in found.items() if meaningful(one, other))]


@dataclasses.dataclass(frozen=True)
class Bound:
    """What was found in a dtype: the items of the corpus, and those of them that no case binds."""

    checked: tuple[str, ...]
    unbound: tuple[str, ...]


def bind(dtype: str, cases: Sequence[Case] | None = None, expected: Iterable[str] | None = None) -> Bound:
    """Try the items of cases until each has moved an output.

    Args:
        dtype: storage dtype.
        cases: by default the whole corpus.
        expected: items that there have to be; by default all pairs of features, if it is the whole corpus.
    """
    if expected is None:
        expected = all_pairs() if cases is None else ()
    bound = dict.fromkeys(expected, False)
    for case in corpus() if cases is None else cases:
        if dtype not in case.dtypes:
            continue
        inputs = build_inputs(case, dtype)
        problem: Problem | None = None
        for change in changes(case, inputs):
            unbound = [item for item in items(case, change) if not bound.get(item)]
            if unbound:
                problem = problem or Problem.of(case, dtype)
                bound |= dict.fromkeys(unbound, moves(problem, change))
    return Bound(tuple(bound), tuple(item for item, moved in bound.items() if not moved))


def _parameters(case: Case, inputs: Inputs) -> Iterator[Change]:
    """Each index along each axis of the parameters, for each size that the axis has in the corpus."""
    for name in MIXING:
        array = inputs[name]
        for axis, label in enumerate(AXES["r" if array.ndim == 2 else name]):
            for i in range(array.shape[axis]):
                changed = np.array(array)
                changed[(slice(None),) * axis + (i,)] += 1
                yield _with(case, inputs, f"{name}[{label} {i} of {array.shape[axis]}]", name, changed)


def _tensors(case: Case, inputs: Inputs) -> Iterator[Change]:
    """Each head and lane of q, k and v, changed by as much as the largest number there.

    Up and down in turn, token by token: softmax ignores what all keys share.
    """
    for name in "qkv":
        array = inputs[name]
        largest = np.max(np.abs(np.asarray(array, np.float64)), initial=0.0, where=np.isfinite(array)) or 1.0
        turn = largest * (-1.0) ** np.arange(array.shape[1])[None, :, None]
        for axis, label in ((2, "head"), (3, "lane")):
            for i in range(array.shape[axis]):
                changed = np.array(array)
                with np.errstate(over="ignore"):
                    changed[(slice(None),) * axis + (i,)] += turn.astype(array.dtype)
                yield _with(case, inputs, f"{name}[{label} {i} of {array.shape[axis]}]", name, changed)


def _arguments(case: Case, inputs: Inputs) -> Iterator[Change]:
    """Masks, ids and positions: each token's, in any batch element."""
    for name in ("key_mask", "segment_ids", "kv_segment_ids", "positions", "kv_positions"):
        if name not in inputs or inputs[name].shape[1] > MOST_TOKENS:
            continue
        for i in range(inputs[name].shape[1]):
            changed = np.array(inputs[name])
            changed[:, i] = ~changed[:, i] if name == "key_mask" else changed[:, i] + 1
            yield _with(case, inputs, f"{name}[token {i}]", name, changed)


def _offset(case: Case, inputs: Inputs) -> Iterator[Change]:
    """query_offset: the default, an int, and that of each batch element."""
    offset: Any = inputs.get("query_offset")
    if np.ndim(offset) == 1:
        for b in range(len(offset)):
            changed = np.array(offset)
            changed[b] += 1
            yield _with(case, inputs, f"query_offset[batch element {b}]", "query_offset", changed)
    else:
        default = case.sizes["M"] - case.sizes["N"]
        item = "query_offset, default" if offset is None else "query_offset, int"
        yield _with(case, inputs, item, "query_offset", (default if offset is None else offset) + 1)


def _configuration(case: Case, inputs: Inputs) -> Iterator[Change]:
    """Every value of a field that the corpus has, in place of every other choice, or of some other number."""
    config = case.config
    idle = {
        "window_unit": config["window"] is None,
        "rope_pairing": config["rope"] == "none",
        "rope_theta": config["rope"] == "none",
        "rope": case.sizes["d"] % 2 == 1,  # [ROPE-6]
    }
    others: dict[str, Sequence[Any]] = {
        field: [value for value in values if value != config[field]] for field, values in CHOICES.items()
    }
    base, W = AttentionConfig().rope_theta, config["window"]
    scale = AttentionConfig.from_dict(config).resolve_scale(case.sizes["d"])
    others["rope_theta"] = [10000.0 if config["rope_theta"] == base else base]
    others["scale"] = [2.0 * scale if scale < 1 else scale / 2.0]
    others["window"] = [1] if W is None else [2, None] if W == 1 else [*{1, W // 2}, None]
    for field, values in others.items():
        for value in () if idle.get(field) else values:
            was = config[field]
            item = f"{field} {was!r}, not {value!r}" if field in CHOICES else f"{field} {was!r}"
            feature = "window" if field == "window_unit" else field
            yield Change(item, inputs, {**config, field: value}, feature)


def _with(case: Case, inputs: Inputs, item: str, name: str, value: Any) -> Change:
    feature = "heads" if name in ("alpha_k", "alpha_v") else name
    return Change(item, {**inputs, name: value}, case.config, feature)
