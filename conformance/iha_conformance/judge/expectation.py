"""What is expected of a case: the exact stages and their limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.cases import Case
from iha_conformance.protocol import Inputs
from iha_core.bounds import HIGHEST, Limits, derive_limits


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """The reference's answer to one case in one dtype."""

    limits: Limits

    @property
    def stages(self) -> dict[str, NDArray[Any]]:
        """Exact values by stage name, in float64."""
        return dict(self.limits.stages)


def expect(case: Case, dtype: str, inputs: Inputs, precision: str = HIGHEST) -> Expectation | None:
    """Run the reference on a case and derive its limits; None for a case of bad input.

    Args:
        case: the case.
        dtype: its storage dtype.
        inputs: its inputs, in that dtype.
        precision: precision class of the products to be judged ([NUM-8]).
    """
    if case.invalid is not None:
        return None
    with np.errstate(all="ignore"):
        limits = derive_limits(
            **inputs,
            config=case.attention_config,
            storage=dtype,
            precision=precision,
            random="random" in case.flags,
        )
    return Expectation(limits=limits)
