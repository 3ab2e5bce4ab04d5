"""Splash attention of the JAX backend, interpreted: JAX's Pallas kernel for TPUs, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_cases import FLOATS, Call, plain_call

from iha_conformance.corpus import Case, build_inputs, load_cases
from iha_conformance.judge import expect, judge
from iha_conformance.protocol import Job
from iha_conformance.targets.backends import load
from iha_conformance.targets.worker import run_job
from iha_core import AttentionConfig

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import iha_jax  # noqa: E402

TILES = [case for case in load_cases() if case.family == "tiles"]
assert len(TILES) >= 12
SIZES: Call = {"B": 1, "N": 64, "M": 64, "d": 4, "e": 3}


@pytest.fixture(scope="module")
def target() -> Any:
    return load("jax:splash")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", TILES, ids=lambda case: case.id)
def test_named_cases_pass(target: Any, case: Case, dtype: str) -> None:
    inputs = build_inputs(case, dtype)
    result = run_job(target, Job(case_id=case.id, dtype=dtype, inputs=inputs, config=dict(case.config)))
    assert result.kernel == "splash_attention"
    verdict = judge(case, dtype, expect(case, dtype, inputs), result)
    assert verdict.status == "passed", verdict.reason
    assert verdict.ratio is not None
    assert verdict.ratio <= 0.5


def test_gradients_are_those_of_the_composition() -> None:
    # Some queries see nothing, for their index or for their segment: one tile has both.
    segments = np.repeat(np.arange(4), 16)[None]
    keys = np.where(segments == 2, 9, segments)
    call = plain_call(
        **SIZES, segment_ids=segments, kv_segment_ids=keys, config=AttentionConfig(causal="token")
    )
    call = {name: jnp.asarray(x, jnp.float32) if name in FLOATS else x for name, x in call.items()}
    call |= {name: jnp.asarray(call[name], jnp.int32) for name in ("segment_ids", "kv_segment_ids")}
    rest = {name: x for name, x in call.items() if name not in FLOATS} | {"query_offset": -8}

    def gradients(implementation: Any) -> Any:
        def loss(floats: Call) -> Any:
            return jnp.square(iha_jax.attention(**floats, **rest, implementation=implementation)).sum()

        return jax.jit(jax.grad(loss))({name: call[name] for name in FLOATS})

    have, want = gradients("splash"), gradients(None)
    for name in FLOATS:
        assert jnp.any(want[name] != 0), name
        np.testing.assert_allclose(
            have[name], want[name], rtol=1e-4, atol=1e-4 * float(jnp.abs(want[name]).max())
        )


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({"N": 63, "M": 63}, "float32", "multiples of 128 and B > 0, got 126, 126 and 1"),
        ({"B": 0}, "float32", "got 128, 128 and 0"),
        ({}, "float16", "expected float32 or bfloat16, got float16"),
        ({"config": AttentionConfig(normalisation="none")}, "float32", "expected normalisation 'softmax'"),
        ({"config": AttentionConfig(scale=2.0)}, "float32", "expected a scale of at most 1, got 2.0"),
        ({"query_offset": jnp.array(0)}, "float32", "expected a plain int as query_offset"),
        (
            {"segment_ids": jnp.zeros((1, 64), jnp.int32), "key_mask": jnp.ones((1, 64), bool)},
            "float32",
            "expected segment_ids or key_mask, got both",
        ),
        ({"segment_ids": jnp.zeros((1, 64), jnp.uint32)}, "float32", "within int32, got uint32"),
    ],
)
def test_what_it_does_not_take_is_refused(options: Call, dtype: str, expected: str) -> None:
    call = plain_call(**{**SIZES, **options})
    call |= {name: jnp.asarray(call[name], dtype) for name in FLOATS}
    with pytest.raises(NotImplementedError, match=f"^splash attention: .*{expected}"):
        iha_jax.attention(**call, implementation="splash")


def test_another_implementation_is_bad_input() -> None:
    call = {name: jnp.asarray(x, jnp.float32) for name, x in plain_call().items() if name in FLOATS}
    with pytest.raises(ValueError, match=r"^`implementation`: expected None or 'splash', got 'fast'$"):
        iha_jax.attention(**call, config=AttentionConfig(), implementation="fast")  # type: ignore[arg-type]
