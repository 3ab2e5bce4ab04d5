"""Independent derivations of the operation from SPEC.md, to hold the reference to.

`loops` follows the equations literally in float64; `precise` evaluates them with 50 digits and another
structure. Neither shares code with `iha_core.reference` or with the other, and neither validates.
"""
