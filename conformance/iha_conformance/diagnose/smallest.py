"""Small inputs of whole numbers, to show a fault in a way that can be followed by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.recipes import shapes
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


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """An input that may show a fault."""

    name: str
    inputs: Mapping[str, Any]
    window: int | None = None

    def probe(self, config: Mapping[str, Any]) -> Probe:
        """The call with these arguments, under a configuration but for its window."""
        return Probe(name=self.name, inputs=self.inputs, config={**config, "window": self.window})


def candidates(*, per_head: bool) -> Iterator[Draft]:
    """Whole numbers from -2 to 2 at growing sizes; then some of them with a window or a key mask."""
    plain = list(_plain_candidates(per_head))
    yield from plain
    for draft in plain:
        N = draft.inputs["k"].shape[1]
        if N > 1 and draft.name.endswith("-0"):
            for window in range(1, N):
                yield Draft(f"{draft.name}-window-{window}", draft.inputs, window)
            for dropped in range(1, N):  # never the first, without which some query would see nothing
                mask = (np.arange(N) != dropped)[None]
                yield Draft(f"{draft.name}-mask-{dropped}", {**draft.inputs, "key_mask": mask})


def _plain_candidates(per_head: bool) -> Iterator[Draft]:
    for H, P, N in SIZES:
        for seed in range(SEEDS):
            name = f"small-{H}-{P}-{N}-{seed}"
            z = {"B": 1, "N": N, "M": N, "H": H, "G": H, "P": P, "d": HEAD_WIDTH, "e": HEAD_WIDTH}
            of = shapes(z) | ({"collapse": (H, P)} if per_head else {})
            yield Draft(
                name, {tensor: integers(f"{name}/{tensor}", shape, -2, 2) for tensor, shape in of.items()}
            )


def simpler(draft: Draft, turn: int) -> Iterator[Draft]:
    """The draft with one tensor replaced by a plainer one, the plainest first."""
    for tensor, array in draft.inputs.items():
        plainer = {"zeros": np.zeros(array.shape), "ones": np.ones(array.shape), "one": _one(array)}
        for kind, plain in plainer.items() if tensor != "key_mask" else ():
            if not np.array_equal(plain, array) and np.count_nonzero(plain) <= _weight(array):
                name = f"{draft.name}-{turn}-{tensor.replace('_', '-')}-{kind}"
                yield Draft(name, {**draft.inputs, tensor: plain}, draft.window)


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
