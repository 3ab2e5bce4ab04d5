"""What is expected of a case: the exact stages and their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iha_conformance.corpus.cases import Case
from iha_conformance.protocol import Inputs
from iha_core.bounds import HIGHEST, Limits, derive_gradient_limits, derive_limits
from iha_core.layer_config import MIXING
from iha_core.validation import dtype_name


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """The reference's answer to one case in one dtype.

    Attributes:
        limits: exact values and limits.
        dtypes: the least dtype of a result by its name, where that is not the storage dtype.
    """

    limits: Limits
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def stages(self) -> dict[str, NDArray[Any]]:
        """Exact values by the name of a stage or, for gradients, of an argument; in float64."""
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
    config = case.attention_config
    with np.errstate(all="ignore"):
        if case.operation == "gradient":
            gradients = derive_gradient_limits(**inputs, config=config, storage=dtype, precision=precision)
            parameters = dict.fromkeys(MIXING, dtype_name(inputs["alpha_q"]))
            return Expectation(limits=gradients, dtypes=parameters)
        random = "random" in case.flags
        forward = derive_limits(**inputs, config=config, storage=dtype, precision=precision, random=random)
    return Expectation(limits=forward)
