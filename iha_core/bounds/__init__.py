"""How far a conforming result may be from the golden reference, derived per element.

`derive_limits` runs the reference and carries the error of every allowed rounding along with it;
`derive_gradient_limits` does so for the backward pass, `derive_layer_limits` for a layer.
The derivation is SPEC.md chapter 6; `formats` has the arithmetic, `worst` the worst case stage by
stage, `statistics` the standard deviations on random data.
"""

from iha_core.bounds.formats import HIGHEST, Arithmetic, Format, arithmetic, precision_classes, tolerances
from iha_core.bounds.gradient_limits import derive_gradient_limits
from iha_core.bounds.layer_limits import derive_layer_limits
from iha_core.bounds.limits import Companion, ForwardLimits, Limits, derive_limits

__all__ = [
    "HIGHEST",
    "Arithmetic",
    "Companion",
    "Format",
    "ForwardLimits",
    "Limits",
    "arithmetic",
    "derive_gradient_limits",
    "derive_layer_limits",
    "derive_limits",
    "precision_classes",
    "tolerances",
]
