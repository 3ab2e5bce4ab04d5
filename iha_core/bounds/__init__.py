"""How far a conforming result may be from the golden reference, derived per element.

`derive_limits` runs the reference and carries the error of every allowed rounding along with it.
The derivation is SPEC.md chapter 6; `formats` has the arithmetic, `worst` the worst case stage by
stage, `statistics` the standard deviations on random data.
"""

from iha_core.bounds.formats import HIGHEST, Arithmetic, Format, arithmetic, precision_classes, tolerances
from iha_core.bounds.limits import Companion, Limits, derive_limits

__all__ = [
    "HIGHEST",
    "Arithmetic",
    "Companion",
    "Format",
    "Limits",
    "arithmetic",
    "derive_limits",
    "precision_classes",
    "tolerances",
]
