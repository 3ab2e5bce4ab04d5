"""Interleaving and its inverse, and who attends to whom ([MIX-4])."""

from __future__ import annotations

import numpy as np

from iha_conformance.power.mutants.registry import mutant
from iha_conformance.power.port import Booleans, Integers, Masks, Port
from iha_conformance.power.steps import Array


def rows(x: Array, *sizes: int) -> Array:
    """The rows of (B, T, H, width), taken as an array of these sizes, in the order of its transpose."""
    B, _, H, width = x.shape
    return x.reshape(B, *sizes, H, width).swapaxes(1, 2).reshape(x.shape)


@mutant("pseudo-major", "MIX-4", step="order")
def pseudo_major(port: Port, x: Array, inverse: bool) -> Array:
    """Virtual index p*N + n."""
    P = port.dims.P
    N = x.shape[1] // P
    return rows(x, P, N) if inverse else rows(x, N, P)


@mutant("interleaved, not undone", "MIX-4", "COL-1", step="order")
def not_undone(port: Port, x: Array, inverse: bool) -> Array:
    """Token-major attention whose result is taken for pseudo-major."""
    P = port.dims.P
    return rows(x, P, x.shape[1] // P) if inverse else x


@mutant("undone, not interleaved", "MIX-4", "COL-1", step="order")
def not_interleaved(port: Port, x: Array, inverse: bool) -> Array:
    """Pseudo-major attention whose result is taken for token-major."""
    P = port.dims.P
    return x if inverse else rows(x, x.shape[1] // P, P)


@mutant("reshaped without transposing", "MIX-4", step="order")
def reshaped(port: Port, x: Array, inverse: bool) -> Array:
    """(N, H, P) read as (N*P, H), undone by the inverse."""
    B, T, H, width = x.shape
    P = port.dims.P
    sizes = (H, P) if inverse else (P, H)
    return x.reshape(B, T // P, *sizes, width).swapaxes(2, 3).reshape(x.shape)


@mutant("pseudo-heads as separate heads", "MIX-4", step="visible")
def pseudo_heads_apart(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """(h, p) attends to the keys of its own p alone."""
    dims = port.dims
    same = np.arange(dims.T)[:, None] % dims.P == np.arange(dims.S) % dims.P
    return np.asarray(port.visible(query_index, key_index, masks) & same)


@mutant("a pseudo-head sees the keys of its own and of pseudo 0", "MIX-4", step="visible")
def own_and_first(port: Port, query_index: Integers, key_index: Integers, masks: Masks) -> Booleans:
    """Later pseudo-keys taken for copies."""
    dims = port.dims
    pseudo = np.arange(dims.S) % dims.P
    seen = (np.arange(dims.T)[:, None] % dims.P == pseudo) | (pseudo == 0)
    return np.asarray(port.visible(query_index, key_index, masks) & seen)
