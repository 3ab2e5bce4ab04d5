"""The version of SPEC.md that this package carries out."""

SPEC_VERSION = "1.2"
