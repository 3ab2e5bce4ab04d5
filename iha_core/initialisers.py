"""Start values of a layer, and which of them compute what multi-head attention does: SPEC.md chapter 11."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from iha_core.config import AttentionConfig, check_choice, whole_number
from iha_core.errors import ArgumentTypeError, ConfigError
from iha_core.layer_config import MIXING, LayerConfig

Array = NDArray[np.float64]

Initialiser = Literal[
    "noisy-average",
    "replicated-average",
    "replicated-first",
    "replicated-last",
    "random",
    "zero-mixing",
    "zero-pseudo-keys",
]
INITIALISERS: tuple[Initialiser, ...] = get_args(Initialiser)
"""Names of the initialisers ([INIT-2] to [INIT-5]), the recommended one first."""

NOISE = 0.1
"""What the noise of "noisy-average" adds to a mixed head, as a part of its size ([INIT-3])."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Start value of a parameter: independent normal numbers.

    Attributes:
        mean: their means, in the parameter's shape.
        deviation: their standard deviation; 0 where the parameter starts at its mean.
    """

    mean: Array
    deviation: float


def starts(config: LayerConfig, initialiser: Initialiser = "noisy-average") -> dict[str, Start]:
    """Start values of all parameters of a layer, by their names in a checkpoint.

    Args:
        config: the layer.
        initialiser: how the mixing tensors start; of no effect with kind "mha".

    Raises:
        ConfigError: no such initialiser, or one that replicates where G does not divide H.
        ArgumentTypeError: a name that is no text.

    Source: SPEC.md [INIT-1] to [INIT-5].
    """
    check_choice("initialiser", initialiser, INITIALISERS)
    if not isinstance(config, LayerConfig):
        raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)
    found = {}
    for name, shape in config.parameter_shapes().items():
        if name.endswith("_proj.weight"):  # [INIT-1]
            found[name] = Start(np.zeros(shape), 1 / math.sqrt(shape[1]))
        elif name.endswith("_norm.weight"):
            found[name] = Start(np.ones(shape), 0.0)
        elif name.endswith(".bias"):
            found[name] = Start(np.zeros(shape), 0.0)
    if config.kind == "iha":
        means = _mixing_means(config, initialiser)
        terms = _terms(config)
        parts = {"noisy-average": NOISE, "random": 1.0}
        for name in MIXING:
            deviation = parts.get(initialiser, 0.0) / math.sqrt(terms[name])  # [INIT-3], [INIT-4]
            found[name] = Start(means[name], deviation)
    return {name: found[name] for name in config.parameter_shapes()}


def sample(
    config: LayerConfig, initialiser: Initialiser = "noisy-average", *, seed: int = 0
) -> dict[str, Array]:
    """Parameters drawn by NumPy's generator, in float64; backends draw by their framework's own.

    Args:
        config: the layer.
        initialiser: how the mixing tensors start.
        seed: of NumPy's default generator.

    Returns:
        All parameters by their names in a checkpoint.

    Raises:
        ConfigError, ArgumentTypeError: as from `starts`.
    """
    generator = np.random.default_rng(seed)
    return {
        name: start.mean + start.deviation * generator.standard_normal(start.mean.shape)
        for name, start in starts(config, initialiser).items()
    }


def one_hot_mixing(config: LayerConfig) -> dict[str, Array]:
    """Mixing tensors by which every pseudo-head copies its head ([INIT-2]), without the collapse.

    Raises:
        ConfigError: G does not divide H, so that heads have no source of their own.
    """
    H, G, P = config.num_heads, config.num_kv_heads, config.num_pseudo_heads
    if H % G:
        expected = f"a divisor of num_heads={H}, to copy heads (initialiser 'random' copies none)"
        raise ConfigError("num_kv_heads", "", expected=expected, found=str(G))
    own = np.repeat(np.eye(H)[:, :, None], P, axis=2)  # (H, H, P)
    grouped = np.repeat(np.repeat(np.eye(G), H // G, axis=1)[:, :, None], P, axis=2)  # (G, H, P)
    return {"alpha_q": own, "alpha_k": grouped, "alpha_v": grouped.copy()}


def fixed_mixing(config: LayerConfig) -> dict[str, Array]:
    """Mixing tensors and collapse of a layer of kind "mha", which are no parameters ([LAY-6])."""
    return one_hot_mixing(config) | {"collapse": np.eye(config.num_heads)[:, :, None]}


def _terms(config: LayerConfig) -> dict[str, int]:
    """How many terms each sum with a mixing tensor has."""
    H, G, P = config.num_heads, config.num_kv_heads, config.num_pseudo_heads
    collapse = P if config.collapse == "per_head" else H * P
    return {"alpha_q": H, "alpha_k": G, "alpha_v": G, "collapse": collapse}


def _mixing_means(config: LayerConfig, initialiser: Initialiser) -> dict[str, Array]:
    H, P = config.num_heads, config.num_pseudo_heads
    shapes = config.parameter_shapes()
    if initialiser == "random":  # [INIT-4]
        return {name: np.zeros(shapes[name]) for name in MIXING}
    # [INIT-5]: no pseudo-head at all, or no pseudo-head beyond the first
    if initialiser == "zero-mixing":
        mixing = {name: np.zeros(shapes[name]) for name in MIXING}
    else:
        mixing = one_hot_mixing(config)  # [INIT-2]
    if initialiser == "zero-pseudo-keys":
        mixing["alpha_k"][:, :, 1:] = 0.0
        mixing["alpha_v"][:, :, 1:] = 0.0
    chosen = np.full(P, 1 / P)
    if initialiser in ("replicated-first", "zero-pseudo-keys"):
        chosen = np.eye(P)[0]
    elif initialiser == "replicated-last":
        chosen = np.eye(P)[-1]
    per_head = np.broadcast_to(chosen, (H, P))
    is_global = config.collapse == "global"
    mixing["collapse"] = np.eye(H)[:, :, None] * chosen if is_global else per_head.copy()
    return mixing


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Why a layer does not start as multi-head attention.

    Attributes:
        field: the field of the configuration that is to blame, or "initialiser".
        found: its value.
        reason: why, and what would do.
    """

    field: str
    found: str
    reason: str


def difference_from_mha(
    attention: AttentionConfig, initialiser: Initialiser, *, num_pseudo_heads: int
) -> Difference | None:
    """Why a layer does not compute what multi-head attention does at its start; None where it does.

    The multi-head attention that is meant has the same projections, is causal over tokens with either causal
    kind, has the same window in tokens, and rotates at token positions. Trivial coincidences of windows that
    hide nothing, or all but one key, are not counted, nor is "zero-pseudo-keys" without softmax.

    Source: SPEC.md [INIT-6]; erratum 2.
    """
    check_choice("initialiser", initialiser, INITIALISERS)
    if not isinstance(attention, AttentionConfig):
        found = type(attention).__name__
        raise ArgumentTypeError("attention", "", expected="an AttentionConfig", found=found)
    whole_number("num_pseudo_heads", num_pseudo_heads, "a whole number >= 1")
    copies = initialiser.startswith("replicated")
    if num_pseudo_heads == 1 and (copies or initialiser == "zero-pseudo-keys"):
        return None
    last = initialiser == "replicated-last"
    virtual_window = attention.window is not None and attention.window_unit == "virtual"
    if not copies:
        field, reason = "initialiser", "it does not copy heads: only the replicated ones do"
    elif attention.normalisation == "none":
        field, reason = "normalisation", "without softmax each key counts once for every pseudo-head"
    elif attention.rope == "virtual":
        field, reason = (
            "rope",
            "copies of a head are turned to different positions: use 'token' or 'none'",
        )
    elif attention.causal == "virtual" and not last:
        field = "causal"
        reason = (
            "later pseudo-keys of its own token are hidden from every pseudo-query but the last:"
            " use initialiser 'replicated-last', or causal 'token'"
        )
    elif virtual_window and attention.causal == "none":
        field, reason = "window_unit", "a two-sided virtual window ends within a token: use 'token'"
    elif virtual_window and not last:
        field = "window_unit"
        reason = (
            "earlier pseudo-queries see keys of one token more:"
            " use initialiser 'replicated-last', or window_unit 'token'"
        )
    else:
        return None
    return Difference(field, initialiser if field == "initialiser" else getattr(attention, field), reason)
