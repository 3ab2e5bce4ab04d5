"""A call in steps, every one of which can be replaced: what `port` and `backward` have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import cast
from iha_core import AttentionConfig, Dims, reference
from iha_core.bounds import HIGHEST, arithmetic
from iha_core.config import RopePairing

Array = NDArray[np.float64]
Rounding = Literal["once", "stages"]
Replacement = Callable[..., Any]
Trace = Sequence[Any]
"""Results of the steps of a call, in order."""

ROUNDINGS: tuple[Rounding, ...] = ("once", "stages")


def to_bits(x: Any, bits: int) -> Any:
    """x rounded to nearest with so many significant bits; shape and dtype of x."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, bits)), exponent - bits).astype(x.dtype)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two results of a step have the same bits."""
    if ours is theirs:
        return True
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def turn(x: Any, angles: Array, pairing: RopePairing) -> Any:
    """Rotation in the dtype of x (..., d), with tables rounded to it."""
    first, second = reference.lane_pairs(x.shape[-1], pairing)
    cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    turned = np.empty_like(x)
    turned[..., first] = x[..., first] * cosine - x[..., second] * sine
    turned[..., second] = x[..., second] * cosine + x[..., first] * sine
    return turned


class Steps:
    """A callable target that is made of steps; each is a method.

    A replacement is called as `function(port, *arguments of the step)`. It finds the step as it should be
    under `port.<step>`, and what is known of the call in the attributes below.

    Args:
        rounding: "once" rounds results only; "stages" rounds wherever 6.1 and 9.2 allow it.
        stages: whether to return all stages, where there are any beside the result.
        precision: precision class of the products ([NUM-8]).
        replace: functions by the name of the step that they replace.
        known: what the steps of an honest port gave for the same call and rounding (`record`). Steps are
            taken from there until a replaced one gives something else.

    Raises:
        ValueError: something else than a step is to be replaced.

    Attributes:
        deviates: whether, in the last call, a replaced step gave something else than `known` has.
        dtype: storage dtype of the call.
        inputs, config, dims: its arguments, configuration and sizes.
    """

    STEPS: ClassVar[tuple[str, ...]]
    """What may be replaced, in the order in which it happens."""

    dtype: str
    inputs: dict[str, Any]
    config: AttentionConfig
    dims: Dims

    def __init__(
        self,
        rounding: Rounding = "once",
        *,
        stages: bool = False,
        precision: str = HIGHEST,
        replace: Mapping[str, Replacement] | None = None,
        known: Trace | None = None,
    ) -> None:
        self.rounding = rounding
        self.stages = stages
        self.precision = precision
        self._replaced = dict(replace or {})
        self._known = known
        self._trace: list[Any] = []
        self.deviates = known is None
        unknown = sorted(set(self._replaced) - set(self.STEPS))
        if unknown:
            raise ValueError(f"replace: expected steps among {', '.join(self.STEPS)}, got {unknown[0]!r}")

    def __call__(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        """The results of a call."""
        raise NotImplementedError

    def begin(self, dtype: str) -> None:
        """Forget the last call."""
        self.dtype = dtype
        self.deviates = self._known is None
        self._trace = []

    # What steps are made of.

    def store(self, x: Array) -> Array:
        """What storing leaves of a stage."""
        return cast(x, self.dtype).astype(np.float64) if self.rounding == "stages" else x

    def accumulator(self) -> type[np.floating[Any]]:
        """The narrowest format that sums may have ([NUM-1])."""
        return np.float64 if arithmetic(self.dtype).accumulator.name == "float64" else np.float32

    def multiply(self, product: Callable[[Any, Any], Array], x: Any, y: Any) -> Array:
        """Sums of products of x and y, as a matrix unit of the class forms them."""
        if self.precision == HIGHEST or self.dtype == "float64":
            return product(x, y)
        if self.precision != "bf16x3":
            bits = {"tf32": 11, "bf16x1": 8}[self.precision]
            return product(to_bits(x, bits), to_bits(y, bits))
        high_x, high_y = to_bits(x, 8), to_bits(y, 8)
        low_x, low_y = to_bits(x - high_x, 8), to_bits(y - high_y, 8)
        return product(high_x, high_y) + product(high_x, low_y) + product(low_x, high_y)

    def record(self, inputs: Mapping[str, Any], config: Mapping[str, Any]) -> Trace:
        """What each step gives for a call, in order; not to be written to."""
        self(inputs, config)
        for array in itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in self._trace):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return self._trace

    def do(self, step: str, *arguments: Any) -> Any:
        """Carry out a step, or what replaces it."""
        replacement = self._replaced.get(step)
        known = None if self.deviates or self._known is None else self._known[len(self._trace)]
        if replacement is not None:
            result = replacement(self, *arguments)
            self.deviates = self.deviates or not _same(result, known)
        else:
            result = getattr(self, step)(*arguments) if self.deviates else known
        self._trace.append(result)
        return result
