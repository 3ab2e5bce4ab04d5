"""The reference and its independent derivations on answers that were derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from iha_core import STAGES, attention_stages
from iha_core.known_answers import KnownAnswer, load_known_answers
from oracles.loops import attention_loops
from oracles.precise import attention_precise

ANSWERS = load_known_answers()
ULPS = 4
"""Units in the last place of float64: a few roundings lie between an input and its answer."""


@pytest.mark.requirement(*sorted({requirement for answer in ANSWERS for requirement in answer.requirements}))
@pytest.mark.parametrize("derivation", [attention_stages, attention_loops, attention_precise])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.id)
def test_known_answer(answer: KnownAnswer, derivation: Callable[..., Any]) -> None:
    found = derivation(**answer.inputs, config=answer.config)[answer.stage]
    assert found.shape == answer.expected.shape
    finite = np.isfinite(answer.expected)
    np.testing.assert_array_equal(found[~finite], answer.expected[~finite])
    error = np.abs(found[finite] - answer.expected[finite])
    assert np.all(error <= ULPS * np.spacing(np.abs(answer.expected[finite])))


def test_answers_are_complete() -> None:
    assert len(ANSWERS) >= 15
    ids = [answer.id for answer in ANSWERS]
    assert len(set(ids)) == len(ids)
    assert {answer.stage for answer in ANSWERS} <= set(STAGES)
    for answer in ANSWERS:
        assert len(answer.derivation) > 20, answer.id
        assert answer.requirements, answer.id
        assert {"q", "k", "v", "alpha_q", "alpha_k", "alpha_v", "collapse"} <= set(answer.inputs), answer.id


def test_answers_tell_different_operations_apart() -> None:
    """No answer is that of an operation with one field of the configuration changed for all of them."""
    for field, other in (
        ("causal", {"virtual": "token", "token": "virtual", "none": "token"}),
        ("window_unit", {"virtual": "token", "token": "virtual"}),
        ("rope_pairing", {"half": "adjacent", "adjacent": "half"}),
        ("rope", {"virtual": "token", "token": "virtual", "none": "virtual"}),
        ("normalisation", {"softmax": "none", "none": "softmax"}),
    ):
        differing = 0
        for answer in ANSWERS:
            config = type(answer.config)(
                **{**answer.config.to_dict(), field: other[getattr(answer.config, field)]}
            )
            if answer.inputs["q"].shape[-1] % 2 and config.rope != "none":
                continue
            found = attention_stages(**answer.inputs, config=config).get(answer.stage)
            differing += found is None or not np.allclose(found, answer.expected)
        assert differing, field
