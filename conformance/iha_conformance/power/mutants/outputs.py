"""Faults of a part of the output: a head, a batch element, a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from iha_conformance.power.mutants.registry import mutant
from iha_conformance.power.port import Port
from iha_conformance.power.steps import Array


def scaled(output: Array, part: Any, factor: float) -> Array:
    """The output with a part of it multiplied."""
    changed = np.array(output)
    changed[part] *= factor
    return changed


@mutant("one head off by 2%", "COL-1", step="change_output")
def one_head_off(port: Port, output: Array) -> Array:
    return scaled(output, np.s_[:, :, -1], 1.02)


@mutant("one batch element off by 2%", "COL-1", step="change_output")
def one_batch_element_off(port: Port, output: Array) -> Array:
    return scaled(output, np.s_[-1:], 1.02)


@mutant("one row off by 5%", "COL-1", step="change_output")
def one_row_off(port: Port, output: Array) -> Array:
    return scaled(output, np.s_[:1, -1:, 0], 1.05)


@mutant("one lane off by 5%", "COL-1", step="change_output")
def one_lane_off(port: Port, output: Array) -> Array:
    return scaled(output, np.s_[..., -1], 1.05)


@mutant("last batch element a copy of the first", "COL-1", step="change_output")
def last_batch_element_replaced(port: Port, output: Array) -> Array:
    return output[[*range(len(output) - 1), 0]] if len(output) > 1 else output


@mutant("last token a copy of the one before", "COL-1", step="change_output")
def last_token_replaced(port: Port, output: Array) -> Array:
    """What a tile leaves that is one row short."""
    N = output.shape[1]
    return output[:, [*range(N - 1), N - 2]] if N > 1 else output


@mutant("heads in reverse", "COL-1", step="change_output")
def heads_in_reverse(port: Port, output: Array) -> Array:
    return output[:, :, ::-1]
