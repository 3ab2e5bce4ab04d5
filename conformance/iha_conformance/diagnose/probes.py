"""The calls of a diagnosis. Each is made so that it depends on few axes, whatever the others are.

Sizes are equal (H = G = P) where that can be, so that a tensor can be read in any order of its axes and the
order has to show in the values. Letters are those of SPEC.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.recipes import shapes
from iha_conformance.corpus.streams import bits24, uniform
from iha_conformance.diagnose.asking import Probe
from iha_conformance.diagnose.dialect import HEAD_WIDTH

Array = NDArray[np.float64]
Inputs = dict[str, Any]

HEADS = 3

QUERY_LANES, KEY_LANES = (0, 1, 8, 9), (6, 7, 14, 15)
"""Lanes of d = 16 that rotation keeps among themselves in either pairing: queries of the one and keys of the
other have logits 0, whatever is mixed, rotated, scaled or normalised."""

SLOW_LANE = 15
"""A lane of the pair that turns slowest, in either pairing: d/2 - 1 with d - 1, or d - 2 with d - 1."""

FAR_LANES = [2, 10]
"""A pair of lanes, or two single lanes of other pairs, none of which turns fastest."""

FAR_TOKENS = 24

RUNGS = tuple(2.0**j for j in range(-3, 6))
"""Sizes of the queries and keys from which the scale is read, a batch element each."""

COSINES = tuple(2.0**-j for j in range(2, 10))
"""Parts of a key that point along the query, from which the scale of normalised ones is read."""


@dataclasses.dataclass(frozen=True)
class Amplitude:
    """How large random queries and keys are made.

    Attributes:
        size: factor of both.
        ballast: number that fills lanes of the keys where queries then have none: of keys that are normalised
            less is then along any query.
    """

    size: float = 1.0
    ballast: float = 0.0

    def of(self, inputs: Inputs) -> Inputs:
        """The arguments with queries and keys of this amplitude."""
        q, k = inputs["q"] * self.size, inputs["k"] * self.size
        if self.ballast:
            lanes = [lane for lane in KEY_LANES if lane < k.shape[-1]]
            q[..., lanes], k[..., lanes] = 0.0, self.ballast
        return inputs | {"q": q, "k": k}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a port takes, and so how it is asked.

    Attributes:
        config: all fields of the configuration.
        P: pseudo-heads, as many as heads or 1.
        per_head: whether the collapse has the shape (H, P).
        more: tokens that all calls have more, for a port whose own window shows little of short ones.
    """

    config: Mapping[str, Any]
    P: int = HEADS
    per_head: bool = False
    more: int = 0

    def inputs(self, name: str, **sizes: int) -> Inputs:
        """Random tensors; sizes are the usual ones unless given."""
        z = {"B": 1, "N": 2, "H": HEADS, "P": self.P, "d": HEAD_WIDTH} | sizes
        z |= {letter: z[letter] + self.more for letter in ("N", "M") if letter in z}
        z = {"M": z["N"], "G": z["H"], "e": z["d"]} | z
        of = shapes(z) | ({"collapse": (z["H"], z["P"])} if self.per_head else {})
        return {tensor: uniform(f"diagnose/{name}/{tensor}", shape, 1.0) for tensor, shape in of.items()}

    def probe(self, name: str, inputs: Inputs, *, about: str = "", **config: Any) -> Probe:
        """A call with these arguments, and other fields of the configuration if given."""
        return Probe(name=name, inputs=inputs, config={**self.config, **config}, about=about)

    def even(self, name: str, *, linear: bool, **sizes: int) -> Inputs:
        """All visible keys weigh alike; the rest is generic, and values name their tokens and heads.

        Under softmax all logits are 0. Linear attention needs other ones: nearly equal, in the slowest lanes.
        """
        inputs = self.inputs(name, **sizes)
        for tensor, lanes in (("q", QUERY_LANES), ("k", KEY_LANES)):
            inputs[tensor] = np.zeros(inputs[tensor].shape)
            inputs[tensor][..., [SLOW_LANE] if linear else list(lanes)] = 1.0
        for tensor in ("alpha_q", "alpha_k"):
            inputs[tensor] = np.ones(inputs[tensor].shape)
        for tensor in ("alpha_v", "collapse"):
            inputs[tensor] = different(f"{name}/{tensor}", inputs[tensor].shape)
        _, M, G, e = inputs["v"].shape
        inputs["v"] = (np.arange(M * G)[:, None] % e == np.arange(e)).astype(np.float64).reshape(1, M, G, e)
        return inputs


def different(name: str, shape: tuple[int, ...]) -> Array:
    """The numbers 1/8, 2/8 ... in random order."""
    order = np.argsort(bits24(f"diagnose/{name}", (math.prod(shape),)), kind="stable")
    return ((np.argsort(order, kind="stable") + 1) / 8).reshape(shape)


def even_probes(setting: Setting) -> Iterator[Probe]:
    """Of values, collapse, order and visibility, with all logits alike."""
    for kind in ("softmax", "linear"):
        linear = kind == "linear"
        inputs = setting.even("values", linear=linear, N=1)
        yield setting.probe(f"generic-values-{kind}", inputs)
        yield setting.probe(f"equal-values-{kind}", {**inputs, "alpha_v": np.ones(inputs["alpha_v"].shape)})
        yield setting.probe(f"order-{kind}", setting.even("order", linear=linear, N=3))
        # More tokens than a fixed window lets through; three lanes a token are enough of them.
        inputs = setting.even("reach", linear=linear, N=12)
        inputs["v"] = np.eye(12, HEAD_WIDTH)[None, :, None, :] * np.ones((1, 1, HEADS, 1))
        yield setting.probe(f"reach-{kind}", inputs)


def scale_probe(setting: Setting) -> Probe:
    """Tokens whose keys have, in turn, logit 0 and one that grows from batch element to batch element.

    It grows with the sizes of queries and keys, or with the angle between them where these are normalised.
    """
    inputs = setting.even("scale", linear=False, N=2)
    size = np.array([*RUNGS, *np.ones(len(COSINES))])[:, None, None]
    along = np.array([*np.ones(len(RUNGS)), *COSINES])[:, None, None]
    B, N = len(size), inputs["q"].shape[1]
    odd = np.arange(N)[:, None] % 2 == 1
    for tensor in ("q", "k"):
        inputs[tensor] = np.zeros((B, N, HEADS, HEAD_WIDTH))
    inputs["q"][..., SLOW_LANE] = size
    inputs["k"][..., QUERY_LANES[0]] = size * np.where(odd & (along == 1.0), 0.0, 1.0)
    inputs["k"][..., SLOW_LANE] = size * along * odd
    inputs["v"] = np.tile(inputs["v"], (B, 1, 1, 1))
    inputs["alpha_v"] = np.ones(inputs["alpha_v"].shape)
    return setting.probe("scale", inputs)


def logit_probes(setting: Setting, amplitude: Amplitude) -> Iterator[Probe]:
    """Of rotation and of the mixing of queries and keys; `amplitude` makes logits of about 1."""
    for name, generic in (("rope", ""), ("alpha-q", "alpha_q"), ("alpha-k", "alpha_k")):
        inputs = setting.inputs(name, N=3)
        for tensor in ("alpha_q", "alpha_k"):
            shape = inputs[tensor].shape
            inputs[tensor] = different(f"{name}/{tensor}", shape) / 2 if tensor == generic else np.ones(shape)
        yield setting.probe(name, amplitude.of(inputs))


def confirming_probes(setting: Setting, amplitude: Amplitude) -> Iterator[Probe]:
    """Everything random, at several sizes."""
    P = setting.P
    usual = {"confirm-1": {"B": 2, "N": 4}, "confirm-2": {"B": 1, "N": 5}, "confirm-3": {"B": 2, "N": 7}}
    for name, sizes in usual.items():
        yield setting.probe(name, amplitude.of(setting.inputs(name, **sizes)))
    small = {"H": 2, "P": min(P, 2), "N": 5}
    yield setting.probe("confirm-4", amplitude.of(setting.inputs("confirm-4", **small)), about="H = 2")


def far_probe(setting: Setting, amplitude: Amplitude) -> Probe:
    """Tokens far apart, in pairs of lanes that turn slowly: small differences of their frequencies show.

    Everything but rotation is exact: numbers are powers of two, and each pseudo-head is one head.
    """
    inputs = setting.inputs("far", N=FAR_TOKENS)
    signs = {name: np.where(inputs[name] < 0, -1.0, 1.0) for name in ("q", "k", "v")}
    for name in ("q", "k"):
        inputs[name] = np.zeros(inputs[name].shape)
        inputs[name][..., FAR_LANES] = 2.0 * amplitude.size * signs[name][..., FAR_LANES]
    inputs["v"] = signs["v"]
    for name in ("alpha_q", "alpha_k", "alpha_v"):
        # The same whichever way its axes are read, and never nothing.
        inputs[name] = _one_source(inputs[name].shape)
    inputs["collapse"] = np.ones(inputs["collapse"].shape) / 8
    return setting.probe("far", inputs)


def _one_source(shape: tuple[int, ...]) -> Array:
    """1 where indices add up to a multiple of the first size: one source for each target and pseudo index."""
    sources, targets, pseudos = np.indices(shape)
    return np.asarray((sources + targets + pseudos) % shape[0] == 0, np.float64)


def scope_probes(setting: Setting, amplitude: Amplitude) -> Iterator[Probe]:
    """Other sizes and arguments, each of which a port may refuse."""

    def inputs(name: str, **sizes: int) -> Inputs:
        return amplitude.of(setting.inputs(name, **sizes))

    for window in (1, 2, 3):
        name = f"window-{window}"
        yield setting.probe(name, inputs(name, N=6), about="window", window=window)
    yield setting.probe("alignment", inputs("alignment", N=3, M=5), about="N < M")
    fewer = inputs("alignment-window", N=3, M=6)
    yield setting.probe("alignment-window", fewer, about="N < M with a window", window=2)
    masked = inputs("key-mask", B=2, N=4)
    masked["key_mask"] = np.ones(masked["k"].shape[:2], np.bool_)
    masked["key_mask"][[0, 1], [1, 3]] = False
    yield setting.probe("key-mask", masked, about="key_mask")
    yield setting.probe("width", inputs("width", N=3, d=8), about="d = 8")
    yield setting.probe("value-width", inputs("value-width", N=3, e=5), about="e other than d")
    if setting.P > 1:
        yield setting.probe("pseudo", inputs("pseudo", N=3, P=2), about="P other than H")
    grouped = {"N": 3, "H": 4, "G": 2, "P": min(setting.P, 2)}
    yield setting.probe("grouped", inputs("grouped", **grouped), about="G < H")
    other = dataclasses.replace(setting, per_head=not setting.per_head)
    shape = "(H, P)" if other.per_head else "(H, H, P)"
    collapse = amplitude.of(other.inputs("collapse", N=3))
    yield other.probe("collapse", collapse, about=f"a collapse of shape {shape}")


def own_probes(
    setting: Setting, number: int, orders: Mapping[str, str], amplitude: Amplitude
) -> Iterator[Probe]:
    """Sizes that differ, with each tensor stored in the order in which it is read.

    Args:
        setting: how the port is asked.
        number: tells these calls from others.
        orders: axes of the mixing tensors and of the collapse, separated by commas.
        amplitude: of queries and keys.
    """
    for sizes in ({"H": 3, "P": 2}, {"H": 4, "G": 2, "P": 3}):
        inputs = amplitude.of(setting.inputs("own", N=3, **sizes))
        for tensor, order in orders.items():
            usual = ["out", "source", "pseudo"] if tensor == "collapse" else ["source", "target", "pseudo"]
            stored = order.split(",")
            if inputs[tensor].ndim == 2:
                usual, stored = usual[1:], [name for name in stored if name != "out"]
            inputs[tensor] = inputs[tensor].transpose([usual.index(name) for name in stored])
        yield setting.probe(f"own-{number}-{sizes['P']}", inputs)


OTHER_CONFIGS: Mapping[str, tuple[Any, ...]] = {
    "causal": ("virtual", "token", "none"),
    "rope": ("virtual", "token", "none"),
    "rope_theta": (100.0,),
    "rope_pairing": ("half", "adjacent"),
    "scale": (0.6,),
    "normalisation": ("softmax", "none"),
}
"""Values that tell whether a field of the configuration is heeded; `window_unit` goes with a window."""


def config_probes(setting: Setting, amplitude: Amplitude) -> Iterator[tuple[str, Any, Probe]]:
    """A call for each other value of a field of the configuration, with field and value."""
    inputs = amplitude.of(setting.inputs("config", N=5))
    for field, values in OTHER_CONFIGS.items():
        for number, value in enumerate(values):
            if value != setting.config[field]:
                name = f"config-{field.replace('_', '-')}-{number}"
                yield field, value, setting.probe(name, inputs, about=f"{field}={value!r}", **{field: value})
    other = "token" if setting.config["window_unit"] == "virtual" else "virtual"
    about = f"window_unit={other!r}"
    probe = setting.probe("config-window-unit", inputs, about=about, window=2, window_unit=other)
    yield "window_unit", other, probe
