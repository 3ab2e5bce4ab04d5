"""`AttentionConfig`: every choice the operation leaves open, validated once."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any, Literal, get_args

from iha_core.errors import ArgumentTypeError, ConfigError

Causal = Literal["virtual", "token", "none"]
WindowUnit = Literal["virtual", "token"]
Rope = Literal["virtual", "token", "none"]
RopePairing = Literal["half", "adjacent"]
Normalisation = Literal["softmax", "none"]
CollapseKind = Literal["global", "per_head"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Configuration of the operation (SPEC.md [CFG-1]); immutable and hashable.

    Args:
        causal: which keys a virtual query may see. "virtual": none of a later virtual index;
            "token": none of a later token; "none": no condition.
        window: None, or the width W >= 1 of the window in tokens, own token included.
        window_unit: distance that the window limits: "virtual" (below W*P virtual tokens) or
            "token" (below W tokens).
        rope: position that rotates queries and keys: "virtual" (token position * P + p),
            "token" (token position) or "none" (no rotation).
        rope_theta: base of the rotation frequencies, finite and > 0.
        rope_pairing: lanes rotated together: "half" (i, i + d/2) or "adjacent" (2i, 2i + 1).
        scale: factor of the logits, finite and > 0; None means 1/sqrt(d).
        normalisation: "softmax", or "none" for linear attention.

    Raises:
        ConfigError: a value that is not allowed (a ValueError).
        ArgumentTypeError: a value of the wrong type (a TypeError).
    """

    causal: Causal = "virtual"
    window: int | None = None
    window_unit: WindowUnit = "virtual"
    rope: Rope = "virtual"
    rope_theta: float = 500000.0
    rope_pairing: RopePairing = "half"
    scale: float | None = None
    normalisation: Normalisation = "softmax"

    def __post_init__(self) -> None:
        check_choice("causal", self.causal, get_args(Causal))
        check_choice("window_unit", self.window_unit, get_args(WindowUnit))
        check_choice("rope", self.rope, get_args(Rope))
        check_choice("rope_pairing", self.rope_pairing, get_args(RopePairing))
        check_choice("normalisation", self.normalisation, get_args(Normalisation))
        # Normalised to plain int and float, so that equal configurations compare and hash equal.
        if self.window is not None:
            expected = "None or a whole number of tokens >= 1"
            object.__setattr__(self, "window", whole_number("window", self.window, expected))
        object.__setattr__(self, "rope_theta", positive_real("rope_theta", self.rope_theta))
        if self.scale is not None:
            object.__setattr__(self, "scale", positive_real("scale", self.scale))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AttentionConfig:
        """Build a configuration from plain values; absent fields take their defaults.

        Raises:
            ConfigError: an unknown field, or a value that is not allowed (a ValueError).
            ArgumentTypeError: no mapping, or a value of the wrong type (a TypeError).
        """
        return cls(**known_fields(cls, fields))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values, defaults included."""
        return dataclasses.asdict(self)

    def resolve_scale(self, head_width: int) -> float:
        """The factor of the logits: `scale`, or 1/sqrt(d) where that is None ([LOG-2])."""
        return 1.0 / math.sqrt(head_width) if self.scale is None else self.scale

    def rope_frequencies(self, head_width: int) -> tuple[float, ...]:
        """Angle for each step of position, theta^(-2i/d) for i < d/2 ([ROPE-4], [ROPE-5]).

        For backends; the reference has its own. Rounding the exponent alone may cost ln(theta)
        roundoffs, so it is split into a part of 24 bits, whose products are exact, and the small rest.
        """
        frequencies = []
        for lane in range(0, head_width, 2):
            coarse = round(2**24 * lane / head_width) / 2**24
            rest = (lane - coarse * head_width) / head_width
            try:
                frequencies.append(self.rope_theta**-coarse * self.rope_theta**-rest)
            except OverflowError:
                expected = f"frequencies within float64 for a head width d={head_width}"
                raise ConfigError("rope_theta", "", expected=expected, found=repr(self.rope_theta)) from None
        return tuple(frequencies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A named configuration together with the collapse tensors it allows ([PROF-1]).

    Attributes:
        config: the configuration.
        collapse: kinds of collapse: "global" is (H, H, P), "per_head" is (H, P).
    """

    config: AttentionConfig
    collapse: tuple[CollapseKind, ...]


def known_fields(cls: type, fields: Any) -> dict[str, Any]:
    """Plain values as keyword arguments of a configuration class; refuses other fields than it has."""
    if not isinstance(fields, Mapping):
        expected = "a mapping of configuration fields"
        raise ArgumentTypeError("config", "", expected=expected, found=describe(fields))
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            expected = "one of " + ", ".join(known)
            raise ConfigError(str(name), "field of config", expected=expected, found=repr(name))
    return dict(fields)


def describe(value: object) -> str:
    """A value that was found, with its type, for an error; never raises."""
    try:
        return f"{type(value).__name__} {value!r}"
    except Exception:
        return type(value).__name__


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a field that is not one of some texts."""
    expected = "one of " + ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise ArgumentTypeError(field, "", expected=expected, found=describe(value))
    if value not in choices:
        raise ConfigError(field, "", expected=expected, found=repr(value))


def whole_number(field: str, value: object, expected: str) -> int:
    """A field as a plain int of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(field, "", expected=expected, found=describe(value))
    try:
        whole = operator.index(value)
    except TypeError:  # as arrays of floats or of several numbers raise
        raise ArgumentTypeError(field, "", expected=expected, found=describe(value)) from None
    if whole < 1:
        raise ConfigError(field, "", expected=expected, found=describe(whole))
    return whole


def positive_real(field: str, value: object) -> float:
    """A field as a plain finite float above 0."""
    expected = "a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(field, "", expected=expected, found=describe(value))
    try:
        real = float(value)
    except OverflowError:
        raise ConfigError(field, "", expected=expected, found="a number beyond float64") from None
    if not (math.isfinite(real) and real > 0):
        raise ConfigError(field, "", expected=expected, found=repr(real))
    return real


PROFILES: Mapping[str, Profile] = {
    "paper": Profile(config=AttentionConfig(), collapse=("global",)),
    "algorithm1": Profile(config=AttentionConfig(), collapse=("per_head",)),
    "theory": Profile(config=AttentionConfig(causal="none", rope="none"), collapse=("global",)),
    "mha-preserving": Profile(
        config=AttentionConfig(causal="token", rope="token", window_unit="token"),
        collapse=("global", "per_head"),
    ),
}
"""Profiles by name, as in "profile `paper`" of a version of IHA."""
