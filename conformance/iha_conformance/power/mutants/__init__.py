"""Known-wrong implementations, one small function each, composed from the reference's pieces.

A file for each part of the operation. A new rule of SPEC.md gets a case that shows it and a mutant that
breaks it.
"""

# The order of these imports is that of the operation, and so of the tables.
from iha_conformance.power.mutants import (  # isort: skip
    mixing,
    order,
    arguments,
    masks,
    rotation,
    logits,
    softmax,
    sums,
    collapse,
    outputs,
    gradient,
)
from iha_conformance.power.mutants.registry import PORTS, Mutant, registered

_PARTS = (mixing, order, arguments, masks, rotation, logits, softmax, sums, collapse, outputs, gradient)

MUTANTS = registered()
"""All of them by name."""

__all__ = ["MUTANTS", "PORTS", "Mutant"]
