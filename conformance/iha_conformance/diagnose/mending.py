"""What a deviation means for weights, how to mend the port, and which weights make up for it.

Every axis on which a port deviates has a `Mending` in words (`wording`). Some have a `Step` too: a change of
the arguments after which the port computes what SPEC.md asks for. Steps are applied in the order of
`APPLIED`: what undoes a choice that comes late in the port is done to the canonical tensors first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.diagnose.diagnosis import Diagnosis
from iha_conformance.diagnose.dialect import AXES, WITHOUT_COLLAPSE, Dialect, Scale
from iha_conformance.diagnose.wording import Mending, describe_scale, in_words, lacking

Array = NDArray[Any]
Inputs = Mapping[str, Any]
Change = Callable[[Inputs], dict[str, Any]]
"""Arguments of the operation, by name -> those that change."""

APPLIED = (
    "scale",
    "qk_multiplier",
    "order",
    "alpha_q_axes",
    "alpha_k_axes",
    "alpha_v_axes",
    "collapse_axes",
    "rope_pairing",
    "rope_sign",
    "key_mask",
    "alignment",
)
"""Axes that a step can make up for, in the order of application."""

MIXING, COLLAPSE = ("source", "target", "pseudo"), ("out", "source", "pseudo")
"""Canonical axes of the tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A change of the canonical arguments that makes up for one axis.

    Attributes:
        axis: name of the axis.
        change: what becomes of the arguments; it touches no array that it is given.
        numpy: the same as lines of NumPy, on variables named like the arguments.
        checkpoint: the same on a dict `weights` of a layer's tensors by their names, q_proj.weight (H*d, D)
            and k_proj.weight (G*d, D) among them; empty where no weight changes.
        needs: an argument that the port has to take and was not asked for, or "".
    """

    axis: str
    change: Change
    numpy: tuple[str, ...]
    checkpoint: tuple[str, ...]
    needs: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a port and canonical weights come together.

    Attributes:
        mendings: one for each axis that deviates, in the order of `AXES`.
        steps: what there is to make up for them, in the order of application.
        without: axes that deviate and have no step.
        complete: whether the port is canonical on all that it was asked once every step is applied; False
            too where that rests on an argument that it was not asked for.
    """

    mendings: tuple[Mending, ...]
    steps: tuple[Step, ...]
    without: tuple[str, ...]
    complete: bool

    def apply(self, inputs: Inputs) -> dict[str, Any]:
        """Canonical arguments -> those that the port must be given; a new dict with new arrays."""
        given = dict(inputs)
        for step in self.steps:
            given |= step.change(given)
        return given


def plan(diagnosis: Diagnosis) -> Plan:
    """How to mend a port that has been diagnosed. Ambiguous axes do not count."""
    found, asked = spoken(diagnosis), diagnosis.asked
    deviates = [name for name in AXES if name in diagnosis.deviates]
    untaken = {*diagnosis.ignores, *(refusal.what for refusal in diagnosis.refuses)}
    steps = [step for name in APPLIED if name in deviates and (step := _step(name, found, asked, untaken))]
    having = {step.axis for step in steps}
    without = tuple(name for name in deviates if name not in having)
    return Plan(
        mendings=tuple(in_words(name, found, asked, name in having) for name in deviates),
        steps=tuple(steps),
        without=without,
        complete=diagnosis.matched and not without and not any(step.needs for step in steps),
    )


def spoken(diagnosis: Diagnosis) -> Dialect:
    """The dialect found; where there is none, the nearest one with every value that is certain."""
    if diagnosis.found is not None:
        return diagnosis.found
    near = diagnosis.asked if diagnosis.nearest is None else diagnosis.nearest.dialect
    certain = {name: value for name, value in diagnosis.certain.items() if near.axes()[name] != value}
    if "scale" in certain:
        certain["scale"] = Scale(float(certain["scale"]), 0.0)  # type: ignore[assignment]
    return near.having(**certain)


# Steps


def _step(axis: str, found: Dialect, asked: Dialect, untaken: Collection[str]) -> Step | None:
    """What makes up for an axis that deviates, or None."""
    if axis.startswith("alpha_"):
        return _mixing_axes(axis, getattr(found, axis))
    if axis == "collapse_axes":
        return _collapse_axes(found, asked)
    if axis == "order":
        return _reshaped(found, asked)
    if axis == "scale":
        return _scale(found, asked)
    if axis == "qk_multiplier":
        return _multiplier(found)
    if axis == "rope_pairing":
        return _pairing(found, asked)
    if axis == "rope_sign":
        return _sign(found)
    if axis == "key_mask" and found.key_mask == "drop":
        return _inverted_key_mask()
    if axis == "alignment" and "query_offset" not in untaken:
        return _explicit_offset()
    return None


def _transposition(axes: str, canonical: tuple[str, ...]) -> tuple[int, ...]:
    """Axes of the canonical tensor in the order in which a port reads them."""
    return tuple(canonical.index(name) for name in axes.split(","))


def _weights(name: str, expression: str) -> str:
    """A line that replaces the tensor `name` of a checkpoint."""
    return f'weights["{name}"] = ' + expression.replace(name, f'weights["{name}"]')


def _mixing_axes(axis: str, axes: str) -> Step:
    """(source, H, P) -> the same with its axes as the port reads them."""
    name = axis.removesuffix("_axes")
    order = _transposition(axes, MIXING)
    expression = f"{name}.transpose{order}"

    def change(inputs: Inputs) -> dict[str, Any]:
        return {name: inputs[name].transpose(order)}

    return Step(
        axis=axis,
        change=change,
        numpy=(f"{name} = {expression}",),
        checkpoint=(_weights(name, expression),),
    )


def _collapse_axes(found: Dialect, asked: Dialect) -> Step | None:
    """(H, H, P) with its axes as the port reads them; (H, P) transposed where it reads pseudo first."""
    if found.collapse_kind in WITHOUT_COLLAPSE:
        return None
    order = _transposition(found.collapse_axes, COLLAPSE)
    if asked.collapse_kind == "per_head":
        order = tuple(COLLAPSE.index(name) - 1 for name in found.collapse_axes.split(",") if name != "out")
        if order == (0, 1):
            return None
    expression = f"collapse.transpose{order}"

    def change(inputs: Inputs) -> dict[str, Any]:
        return {"collapse": inputs["collapse"].transpose(order)}

    return Step(
        axis="collapse_axes",
        change=change,
        numpy=(f"collapse = {expression}",),
        checkpoint=(_weights("collapse", expression),),
    )


def _reshaped(found: Dialect, asked: Dialect) -> Step | None:
    """The last two axes (H, P) of each tensor filled in the order of (P, H).

    Pseudo-head (h, p) of the port lies at h*P + p, and is read back as virtual token p', head h', with
    p'*H + h' = h*P + p. So it has to be the canonical (h', p'). A port without a collapse of its own for
    every (out, h, p) adds up virtual tokens of different heads, and nothing makes up for that; nor
    for values that are not mixed.
    """
    if found.order != "reshaped" or found.values != "mixed":
        return None
    if (found.collapse_kind, asked.collapse_kind) != ("global", "global"):
        return None
    names = ("alpha_q", "alpha_k", "alpha_v", "collapse")

    def change(inputs: Inputs) -> dict[str, Any]:
        return {name: inputs[name].transpose(0, 2, 1).reshape(inputs[name].shape) for name in names}

    expressions = {name: f"{name}.transpose(0, 2, 1).reshape({name}.shape)" for name in names}
    return Step(
        axis="order",
        change=change,
        numpy=tuple(f"{name} = {expression}" for name, expression in expressions.items()),
        checkpoint=tuple(_weights(name, expression) for name, expression in expressions.items()),
    )


def _scale(found: Dialect, asked: Dialect) -> Step | None:
    """alpha_q times what the port's factor lacks; a norm after mixing would take it away again."""
    if found.qk_norm == "after_mix":
        return None
    missing = lacking(found, asked)

    def change(inputs: Inputs) -> dict[str, Any]:
        return {"alpha_q": _times(inputs["alpha_q"], missing.at(inputs["q"].shape[-1]))}

    expression = f"alpha_q * {describe_scale(missing)}"
    return Step(
        axis="scale",
        change=change,
        numpy=(f"alpha_q = {expression}",),
        checkpoint=(_weights("alpha_q", expression),),
    )


def _multiplier(found: Dialect) -> Step | None:
    """alpha_q and alpha_k divided by it; a norm after mixing would take that away again."""
    if found.qk_norm != "before_mix":
        return None
    names = ("alpha_q", "alpha_k")

    def change(inputs: Inputs) -> dict[str, Any]:
        return {name: _times(inputs[name], 1 / found.qk_multiplier) for name in names}

    expressions = {name: f"{name} / {float(found.qk_multiplier)!r}" for name in names}
    return Step(
        axis="qk_multiplier",
        change=change,
        numpy=tuple(f"{name} = {expression}" for name, expression in expressions.items()),
        checkpoint=tuple(_weights(name, expression) for name, expression in expressions.items()),
    )


def _times(array: Array, factor: float) -> Array:
    return np.asarray(array * factor, dtype=array.dtype)


def _pairing(found: Dialect, asked: Dialect) -> Step | None:
    """Lanes of every head of q and k where the port looks for them."""
    if {found.rope_pairing, asked.rope_pairing} != {"half", "adjacent"}:
        return None
    to_adjacent = found.rope_pairing == "adjacent"

    def change(inputs: Inputs) -> dict[str, Any]:
        d = inputs["q"].shape[-1]
        lanes = np.arange(d).reshape((2, d // 2) if to_adjacent else (d // 2, 2)).T.ravel()
        return {"q": inputs["q"][..., lanes], "k": inputs["k"][..., lanes]}

    sizes = "2, d // 2" if to_adjacent else "d // 2, 2"
    lanes = f"lanes = np.arange(d).reshape({sizes}).T.ravel()"
    return Step(
        axis="rope_pairing",
        change=change,
        numpy=(lanes, "q, k = q[..., lanes], k[..., lanes]"),
        checkpoint=(
            lanes,
            "rows = [(np.arange(heads)[:, None] * d + lanes).ravel() for heads in (H, G)]",
            'weights["q_proj.weight"] = weights["q_proj.weight"][rows[0]]',
            'weights["k_proj.weight"] = weights["k_proj.weight"][rows[1]]',
            "# the same for q_proj.bias, k_proj.bias, and the lanes of q_norm.weight, k_norm.weight",
        ),
    )


def _sign(found: Dialect) -> Step:
    """The second lane of every pair of q and k negated: then opposite rotations turn alike."""
    adjacent = found.rope_pairing == "adjacent"

    def change(inputs: Inputs) -> dict[str, Any]:
        d = inputs["q"].shape[-1]
        sign = np.ones(d, inputs["q"].dtype)
        sign[slice(1, None, 2) if adjacent else slice(d // 2, None)] = -1
        return {"q": inputs["q"] * sign, "k": inputs["k"] * sign}

    second = "1::2" if adjacent else "d // 2 :"
    return Step(
        axis="rope_sign",
        change=change,
        numpy=("sign = np.ones(d, q.dtype)", f"sign[{second}] = -1", "q, k = q * sign, k * sign"),
        checkpoint=(
            'sign = np.ones(d, weights["q_proj.weight"].dtype)',
            f"sign[{second}] = -1",
            'weights["q_proj.weight"] = weights["q_proj.weight"] * np.tile(sign, H)[:, None]',
            'weights["k_proj.weight"] = weights["k_proj.weight"] * np.tile(sign, G)[:, None]',
            "# the same for q_proj.bias and k_proj.bias",
        ),
    )


def _inverted_key_mask() -> Step:
    def change(inputs: Inputs) -> dict[str, Any]:
        mask = inputs.get("key_mask")
        return {} if mask is None else {"key_mask": ~mask}

    return Step(
        axis="key_mask",
        change=change,
        numpy=("key_mask = ~key_mask",),
        checkpoint=(),
    )


def _explicit_offset() -> Step:
    def change(inputs: Inputs) -> dict[str, Any]:
        if inputs.get("query_offset") is not None:
            return {}
        return {"query_offset": inputs["k"].shape[1] - inputs["q"].shape[1]}

    return Step(
        axis="alignment",
        change=change,
        numpy=("query_offset = k.shape[1] - q.shape[1]  # if the port takes it",),
        checkpoint=(),
        needs="query_offset",
    )
