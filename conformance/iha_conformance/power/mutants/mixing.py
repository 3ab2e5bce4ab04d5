"""Mixing: axes of the tensors, which tensor, which heads, and their format ([MIX-1] to [MIX-3], [TYP-2])."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.port import Port, Side
from iha_conformance.power.steps import Array
from iha_core.layer_config import MIXING
from iha_core.validation import NARROW_DTYPES

REQUIREMENT: dict[Side, str] = {"q": "MIX-1", "k": "MIX-2", "v": "MIX-3"}
AXES = ("source", "target", "pseudo")
WRONG_ORDERS = ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def exchanged_axes(
    wrong: Side, axes: tuple[int, int, int], port: Port, side: Side, x: Array, alpha: Array
) -> Array:
    """A tensor read with its axes in another order, wherever its shape allows that."""
    read = alpha.transpose(axes)
    return port.mix(side, x, read if side == wrong and read.shape == alpha.shape else alpha)


for _side, _axes in itertools.product(REQUIREMENT, WRONG_ORDERS):
    add(
        f"alpha_{_side} [{', '.join(AXES[axis] for axis in _axes)}]",
        REQUIREMENT[_side],
        step="mix",
        function=partial(exchanged_axes, _side, _axes),
    )


def not_mixed(wrong: Side, port: Port, side: Side, x: Array, alpha: Array) -> Array:
    """Heads copied to the pseudo-heads in place of mixing: repeated where there are fewer."""
    if side == wrong:
        G, H, P = alpha.shape
        x, alpha = x[:, :, np.arange(H) * G // H], np.repeat(np.eye(H)[:, :, None], P, axis=2)
    return port.mix(side, x, alpha)


add("queries not mixed", "MIX-1", step="mix", function=partial(not_mixed, "q"))
add("keys repeated, not mixed", "MIX-2", step="mix", function=partial(not_mixed, "k"))
add("values repeated, not mixed", "MIX-3", step="mix", function=partial(not_mixed, "v"))


def other_tensor(wrong: Side, used: Side, port: Port, side: Side, x: Array, alpha: Array) -> Array:
    """The tensor of another side, wherever their shapes agree."""
    other = np.asarray(port.inputs[f"alpha_{used}"], np.float64)
    return port.mix(side, x, other if side == wrong and other.shape == alpha.shape else alpha)


add("alpha_k used for queries", "MIX-1", step="mix", function=partial(other_tensor, "q", "k"))
add("alpha_q used for keys", "MIX-2", step="mix", function=partial(other_tensor, "k", "q"))
add("alpha_v used for keys", "MIX-2", step="mix", function=partial(other_tensor, "k", "v"))
add("alpha_k used for values", "MIX-3", step="mix", function=partial(other_tensor, "v", "k"))


@mutant("only the own group is mixed", "MIX-2", "MIX-3", step="mix")
def own_group_only(port: Port, side: Side, x: Array, alpha: Array) -> Array:
    """Grouped heads as in grouped-query attention: target head h takes source head h*G // H alone."""
    G, H, _ = alpha.shape
    own = np.arange(G)[:, None] == np.arange(H) * G // H
    return port.mix(side, x, alpha if side == "q" else np.where(own[:, :, None], alpha, 0.0))


@mutant("groups in turn, not side by side", "MIX-2", "MIX-3", step="mix")
def groups_in_turn(port: Port, side: Side, x: Array, alpha: Array) -> Array:
    """Key heads repeated to H in the order 0 1 0 1, and mixed by tensors repeated as 0 0 1 1."""
    G, H, _ = alpha.shape
    if side == "q" or H <= G:
        return port.mix(side, x, alpha)
    count = np.bincount(np.arange(H) * G // H, minlength=G)
    shared = (alpha / count[:, None, None])[np.arange(H) * G // H]
    return port.mix(side, x[:, :, np.arange(H) % G], shared)


@mutant("heads of values in reverse", "MIX-3", step="mix")
def reversed_values(port: Port, side: Side, x: Array, alpha: Array) -> Array:
    return port.mix(side, x[:, :, ::-1] if side == "v" else x, alpha)


@mutant("first pseudo-head for all", "MIX-1", "MIX-2", "MIX-3", step="mix")
def first_pseudo_head(port: Port, side: Side, x: Array, alpha: Array) -> Array:
    return port.mix(side, x, np.repeat(alpha[..., :1], alpha.shape[-1], axis=-1))


@mutant(
    "parameters rounded to storage",
    "TYP-2",
    step="change_inputs",
    dtypes=NARROW_DTYPES,
    because="parameters are wider than the storage dtype only where that has 16 bits",
)
def parameters_rounded(port: Port, inputs: dict[str, Any]) -> dict[str, Any]:
    """Float32 parameters rounded to the storage dtype first."""
    return inputs | {name: cast(inputs[name], port.dtype) for name in MIXING}
