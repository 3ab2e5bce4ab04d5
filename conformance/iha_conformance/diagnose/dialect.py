"""The axes on which ports of the operation differ, and a dialect: a value on each of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from iha_core import AttentionConfig

Value = str | int | float
Ragged = Literal["flat", "shifted", "block"]

HEAD_WIDTH = 16
"""Head width at which numbers that depend on it, such as the scale, are given."""


def _orders(*axes: str) -> tuple[str, ...]:
    return tuple(",".join(order) for order in itertools.permutations(axes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A choice that ports make differently.

    Attributes:
        name: field of `Dialect`.
        values: what is told apart, canonical first; empty for a positive number.
        requirements: ids of what settles it in SPEC.md.
    """

    name: str
    values: tuple[Value, ...]
    requirements: tuple[str, ...]


MIXING_ORDERS = _orders("source", "target", "pseudo")
COLLAPSE_ORDERS = _orders("out", "source", "pseudo")

AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(name="alpha_q_axes", values=MIXING_ORDERS, requirements=("MIX-1", "DIM-1")),
        Axis(name="alpha_k_axes", values=MIXING_ORDERS, requirements=("MIX-2", "DIM-1")),
        Axis(name="alpha_v_axes", values=MIXING_ORDERS, requirements=("MIX-3", "DIM-1")),
        Axis(name="collapse_axes", values=COLLAPSE_ORDERS, requirements=("COL-1", "DIM-1")),
        Axis(
            name="collapse_kind",
            values=("global", "per_head", "mean", "first", "last", "sum"),
            requirements=("COL-1", "COL-2"),
        ),
        Axis(
            name="order",
            values=("token_major", "pseudo_major", "reshaped", "extra_heads"),
            requirements=("MIX-4",),
        ),
        Axis(name="causal", values=("virtual", "token", "none"), requirements=("MASK-1", "MASK-2", "MASK-3")),
        Axis(name="window_unit", values=("virtual", "token"), requirements=("WIN-1", "WIN-2")),
        Axis(name="rope", values=("virtual", "token", "none"), requirements=("POS-1", "POS-2")),
        Axis(name="rope_pairing", values=("half", "adjacent"), requirements=("ROPE-2", "ROPE-3")),
        Axis(name="rope_theta", values=(), requirements=("ROPE-4",)),
        Axis(name="scale", values=(), requirements=("LOG-2",)),
        Axis(name="normalisation", values=("softmax", "none"), requirements=("SOFT-1", "LIN-1")),
        Axis(name="window_bound", values=("exclusive", "inclusive"), requirements=("WIN-1", "WIN-2")),
        Axis(name="rope_sign", values=(1, -1), requirements=("ROPE-1",)),
        Axis(name="rope_when", values=("after", "before"), requirements=("POS-1",)),
        Axis(name="qk_norm", values=("none", "before_mix", "after_mix"), requirements=("LOG-1",)),
        Axis(name="qk_multiplier", values=(), requirements=("LOG-1", "LOG-2")),
        Axis(name="alignment", values=("last", "first"), requirements=("ARG-1",)),
        Axis(name="key_mask", values=("keep", "drop"), requirements=("KEY-1",)),
        Axis(name="values", values=("mixed", "unmixed"), requirements=("MIX-3",)),
    )
}
"""All axes by name, in the order in which they are reported."""

NUMBERS = tuple(name for name, axis in AXES.items() if not axis.values)

ROPE_DETAILS = ("rope_pairing", "rope_theta", "rope_sign", "rope_when")
"""Axes that have no effect without RoPE."""

WITHOUT_COLLAPSE = ("mean", "first", "last", "sum")
"""Kinds of collapse that read no tensor."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Factor of the logits as a function of the head width: factor * d**power."""

    factor: float = 1.0
    power: float = -0.5

    def at(self, d: int) -> float:
        return float(self.factor * d**self.power)


@dataclasses.dataclass(frozen=True)
class Window:
    """Which window a port keeps to.

    Attributes:
        kind: "config": that of the configuration, if it has one; "none": never one; "fixed": always
            one that reaches `reach` units back, the farthest that it still sees; "half": always one that
            reaches N // (2*P) virtual tokens back.
        reach: in tokens or virtual tokens, as `window_unit` says.
    """

    kind: Literal["config", "none", "fixed", "half"] = "config"
    reach: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dialect:
    """One way to read the operation; the defaults are the canonical one, under the default configuration.

    The fields that are axes have the values of `AXES`, but for `scale`. `key_mask` may also be "ignored".

    Attributes:
        window: which window is kept to.
        ragged: index of virtual query (n, p) where order is "pseudo_major" and N is not M, with o = M - N for
            queries that are the last ones: "flat" p*N + n + o*P, "shifted" p*N + n + o, "block" p*M + n + o.
    """

    alpha_q_axes: str = MIXING_ORDERS[0]
    alpha_k_axes: str = MIXING_ORDERS[0]
    alpha_v_axes: str = MIXING_ORDERS[0]
    collapse_axes: str = COLLAPSE_ORDERS[0]
    collapse_kind: str = "global"
    order: str = "token_major"
    causal: str = "virtual"
    window_unit: str = "virtual"
    rope: str = "virtual"
    rope_pairing: str = "half"
    rope_theta: float = 500000.0
    scale: Scale = Scale()
    normalisation: str = "softmax"
    window_bound: str = "exclusive"
    rope_sign: int = 1
    rope_when: str = "after"
    qk_norm: str = "none"
    qk_multiplier: float = 1.0
    alignment: str = "last"
    key_mask: str = "keep"
    values: str = "mixed"
    window: Window = Window()
    ragged: Ragged = "flat"

    @classmethod
    def of(cls, config: AttentionConfig, *, per_head: bool = False) -> Dialect:
        """What SPEC.md asks for under a configuration, with that kind of collapse."""
        scale = Scale() if config.scale is None else Scale(config.scale, 0.0)
        return cls(
            collapse_kind="per_head" if per_head else "global",
            causal=config.causal,
            window_unit=config.window_unit,
            rope=config.rope,
            rope_pairing=config.rope_pairing,
            rope_theta=config.rope_theta,
            scale=scale,
            normalisation=config.normalisation,
        )

    def having(self, **values: Any) -> Dialect:
        """The same with other values."""
        return dataclasses.replace(self, **values)

    def axes(self) -> dict[str, Value]:
        """The value on each axis, the scale as a number at `HEAD_WIDTH`."""
        found = {name: getattr(self, name) for name in AXES}
        return found | {"scale": self.scale.at(HEAD_WIDTH)}

    def neighbours(self, axis: str) -> Iterable[Dialect]:
        """The dialects that differ on this axis alone; for a number two other numbers stand for all."""
        if axis == "scale":
            factors = (self.scale.factor * 1.25, self.scale.factor * 0.8)
            return [self.having(scale=Scale(factor, self.scale.power)) for factor in factors]
        if axis in NUMBERS:
            return [self.having(**{axis: getattr(self, axis) * factor}) for factor in (1.25, 0.8)]
        return [self.having(**{axis: value}) for value in AXES[axis].values if value != getattr(self, axis)]

    def exchanged(self) -> Dialect:
        """The same with out and source exchanged in the collapse: one function, if that is a diagonal."""
        swap = {"out": "source", "source": "out", "pseudo": "pseudo"}
        return self.having(collapse_axes=",".join(swap[name] for name in self.collapse_axes.split(",")))

    def settled(self, P: int) -> Dialect:
        """The same function for P pseudo-heads, with one value wherever several plainly have one effect."""
        plain: dict[str, Any] = {}
        if self.collapse_kind in WITHOUT_COLLAPSE:
            plain["collapse_axes"] = COLLAPSE_ORDERS[0]
        elif self.collapse_kind == "per_head":
            out, source = (self.collapse_axes.index(name) for name in ("out", "source"))
            plain["collapse_axes"] = self.collapse_axes if out < source else self.exchanged().collapse_axes
        if self.values == "unmixed":
            plain["alpha_v_axes"] = MIXING_ORDERS[0]
        if self.rope == "none":
            plain |= {"rope_pairing": "half", "rope_sign": 1, "rope_when": "after"}
        if self.rope == "token":
            plain["rope_when"] = "after"
        if self.order == "extra_heads":  # only equal pseudo indices meet
            plain |= {"rope_when": "after", "window_unit": "virtual"}
            if self.causal == "token":
                plain["causal"] = "virtual"
        if self.order != "pseudo_major":
            plain["ragged"] = "flat"
        if self.window.kind == "none":
            plain |= {"window_unit": "virtual", "window_bound": "exclusive"}
        if P == 1:
            plain |= {
                "order": "token_major",
                "rope_when": "after",
                "window_unit": "virtual",
                "ragged": "flat",
            }
            plain["causal"] = "none" if self.causal == "none" else "virtual"
            plain["rope"] = "none" if self.rope == "none" else "virtual"
            if self.collapse_kind in WITHOUT_COLLAPSE:
                plain["collapse_kind"] = "mean"
        return self.having(**plain)
