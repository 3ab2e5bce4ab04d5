"""Small inputs of whole numbers, to show a fault in a way that can be followed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.streams import integers
from iha_conformance.diagnose.asking import Probe

Array = NDArray[np.float64]

SIZES = (
    (1, 1, 1),
    (1, 2, 1),
    (2, 1, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
    (3, 3, 1),
    (3, 3, 2),
    (3, 3, 4),
)
"""Heads, pseudo-heads and tokens, the fewest numbers first."""

HEAD_WIDTH = 2
"""The least that rotation allows."""

SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Draft:
    """An input that may show a fault; compared by identity."""

    name: str
    inputs: Mapping[str, Array]

    def probe(self, config: Mapping[str, Any]) -> Probe:
        return Probe(name=self.name, inputs=self.inputs, config=config)


def candidates() -> Iterator[Draft]:
    """Whole numbers from -2 to 2 at growing sizes."""
    for H, P, N in SIZES:
        for seed in range(SEEDS):
            name = f"small-{H}-{P}-{N}-{seed}"
            shapes = {
                "q": (1, N, H, HEAD_WIDTH),
                "k": (1, N, H, HEAD_WIDTH),
                "v": (1, N, H, HEAD_WIDTH),
                "alpha_q": (H, H, P),
                "alpha_k": (H, H, P),
                "alpha_v": (H, H, P),
                "collapse": (H, H, P),
            }
            yield Draft(
                name, {tensor: integers(f"{name}/{tensor}", shape, -2, 2) for tensor, shape in shapes.items()}
            )


def simpler(draft: Draft, turn: int) -> Iterator[Draft]:
    """The draft with one tensor replaced by a plainer one, the plainest first."""
    for tensor, array in draft.inputs.items():
        for kind, plain in (
            ("zeros", np.zeros(array.shape)),
            ("ones", np.ones(array.shape)),
            ("one", _one(array)),
        ):
            if not np.array_equal(plain, array) and np.count_nonzero(plain) <= _weight(array):
                name = f"{draft.name}-{turn}-{tensor.replace('_', '-')}-{kind}"
                yield Draft(name, {**draft.inputs, tensor: plain})


def _weight(array: Array) -> float:
    """How hard an array is on a reader: numbers other than 0 and 1 count more."""
    return float(np.count_nonzero(array) + np.count_nonzero((array != 0) & (array != 1)))


def _one(array: Array) -> Array:
    """Only the first number that is not zero."""
    plain = np.zeros(array.shape)
    first = np.argwhere(array != 0)
    if len(first):
        plain[tuple(first[0])] = array[tuple(first[0])]
    return plain
