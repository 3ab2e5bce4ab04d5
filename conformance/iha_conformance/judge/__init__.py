"""The judge: what is expected of a case, and whether a result meets it."""

from iha_conformance.judge.comparator import Comparison, compare
from iha_conformance.judge.expectation import Expectation, expect
from iha_conformance.judge.verdict import judge

__all__ = ["Comparison", "Expectation", "compare", "expect", "judge"]
