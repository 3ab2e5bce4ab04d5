"""The collapse: its axes and its kinds ([COL-1], [COL-2])."""

from __future__ import annotations

from functools import partial

import numpy as np

from iha_conformance.power.mutants.mixing import WRONG_ORDERS
from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.port import Port
from iha_conformance.power.steps import Array

AXES = ("out", "source", "pseudo")


def exchanged_axes(axes: tuple[int, int, int], port: Port, virtual_out: Array, R: Array) -> Array:
    """R read with its axes in another order, wherever its shape allows that."""
    if R.ndim == 3 and R.transpose(axes).shape == R.shape:
        R = R.transpose(axes)
    return port.collapse(virtual_out, R)


for _axes in WRONG_ORDERS:
    add(
        f"collapse [{', '.join(AXES[axis] for axis in _axes)}]",
        "COL-1",
        step="collapse",
        function=partial(exchanged_axes, _axes),
    )


def fixed(weights: str, port: Port, virtual_out: Array, R: Array) -> Array:
    """A collapse that nobody has learned."""
    H, P = port.dims.H, port.dims.P
    rows = {
        "mean": np.full(P, 1 / P),
        "sum": np.ones(P),
        "first": (np.arange(P) == 0).astype(np.float64),
        "last": (np.arange(P) == P - 1).astype(np.float64),
    }
    return port.collapse(virtual_out, np.tile(rows[weights], (H, 1)))


for _kind in ("mean", "sum", "first", "last"):
    add(f"{_kind} for collapse", "COL-1", "COL-2", step="collapse", function=partial(fixed, _kind))


@mutant("global collapse read as per head", "COL-1", step="collapse")
def global_as_per_head(port: Port, virtual_out: Array, R: Array) -> Array:
    """The diagonal of R alone."""
    return port.collapse(virtual_out, np.einsum("hhp->hp", R) if R.ndim == 3 else R)


@mutant("column p*H + h of the collapse", "COL-1", step="collapse")
def pseudo_major_columns(port: Port, virtual_out: Array, R: Array) -> Array:
    """R as a matrix (H, H*P) applied to pseudo outputs in pseudo-major order."""
    if R.ndim == 3:
        H, _, P = R.shape
        R = R.reshape(H, P, H).swapaxes(1, 2)
    return port.collapse(virtual_out, R)


@mutant("per-head collapse transposed", "COL-2", step="collapse")
def per_head_transposed(port: Port, virtual_out: Array, R: Array) -> Array:
    """r read as [pseudo, head], wherever its shape allows that or by its numbers in order."""
    return port.collapse(virtual_out, R.T.ravel().reshape(R.shape) if R.ndim == 2 else R)


@mutant("per-head collapse of the mean head", "COL-2", step="collapse")
def per_head_of_the_mean(port: Port, virtual_out: Array, R: Array) -> Array:
    if R.ndim == 2:
        virtual_out = np.broadcast_to(virtual_out.mean(axis=2, keepdims=True), virtual_out.shape)
    return port.collapse(virtual_out, R)


@mutant("per-head collapse normalised", "COL-2", step="collapse")
def per_head_normalised(port: Port, virtual_out: Array, R: Array) -> Array:
    """Softmax over the pseudo-heads of each row."""
    if R.ndim == 2:
        R = np.exp(R) / np.exp(R).sum(axis=1, keepdims=True)
    return port.collapse(virtual_out, R)
