"""The JAX backend against the reference, and what holds for it alone: kernels, transformations, platforms."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
from backend_cases import (
    BAD_INPUTS,
    EXACT,
    FLOATS,
    SCALES,
    Call,
    assert_conforms,
    bare_call,
    call_of_scale,
    convert,
    plain_call,
    random_call,
    with_value_width,
)

import iha_core
from iha_core import AttentionConfig, IHAError
from iha_core.conditions import index_conditions

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import iha_jax  # noqa: E402
from iha_jax.masking import nearby  # noqa: E402

DTYPES = ("float64", "float32", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")
NATIVE = "dot_product_attention"

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _float64_where_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Float64 is enabled for tests of that dtype alone: most programs run without it."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    with jax.enable_x64(parameters.get("dtype") == "float64"):
        yield


def arrays(call: Call, dtype: str = "float32", parameters: str | None = None) -> Call:
    """The call in arrays of JAX, floats in `dtype` (the mixing and collapse in `parameters`, where given)."""
    call = convert(call, jnp.asarray)
    for name in FLOATS:
        to = parameters if parameters and name in FLOATS[3:] else dtype
        call[name] = call[name].astype(to)
    return call


def split(call: Call) -> tuple[Call, Call]:
    """What is traced, and what is not: the configuration, and an offset that is a plain number."""
    traced = {name: x for name, x in call.items() if isinstance(x, jax.Array)}
    return traced, {name: x for name, x in call.items() if name not in traced}


def run(call: Call) -> Any:
    traced, static = split(call)
    return jax.jit(functools.partial(iha_jax.attention, **static))(**traced)


def run_stages(call: Call) -> tuple[dict[str, Any], str]:
    traced, static = split(call)
    kernels = []

    def stages(**traced: Any) -> Any:
        stages, kernel = iha_jax.attention_stages(**traced, **static)
        kernels.append(kernel)
        return stages

    return jax.jit(stages)(**traced), kernels[0]


def gradients(call: Call) -> dict[str, Any]:
    """Gradients of the sum of squares of the output with respect to all float arguments."""
    rest = {name: x for name, x in call.items() if name not in FLOATS}

    def loss(floats: Call) -> Any:
        return jnp.square(iha_jax.attention(**floats, **rest).astype(jnp.float32)).sum()

    found: dict[str, Any] = jax.jit(jax.grad(loss))({name: call[name] for name in FLOATS})
    return found


def as_wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_stages_agree_with_the_reference(seed: int, dtype: str) -> None:
    call = random_call(3 * seed + DTYPES.index(dtype))
    native = arrays(call, dtype)
    rounded = {**call, **{name: as_wide(native[name]) for name in FLOATS}}
    expected = iha_core.attention_stages(**rounded)
    stages, kernel = run_stages(native)
    composed = dtype == "float64" or call["config"].normalisation == "none"
    assert kernel == ("composed" if composed else NATIVE)
    formed = [name for name in expected if composed or name not in ("logits", "lse")]
    assert sorted(stages) == sorted(formed)
    assert_conforms({name: np.asarray(stage) for name, stage in stages.items()}, rounded, dtype)


@each_dtype
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_stages_do_not_change_the_output(dtype: str, normalisation: str) -> None:
    call = arrays(plain_call(config=AttentionConfig(normalisation=normalisation)), dtype)
    stages, _ = run_stages(call)
    output = run(call)
    assert output.dtype == dtype
    assert all(stage.dtype == dtype for name, stage in stages.items() if name not in ("logits", "lse"))
    assert jnp.array_equal(output, stages["output"])


# Kernels


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Queries, keys, values and keyword arguments of every call of JAX's function."""
    calls: list[tuple[Any, ...]] = []
    kernel = jax.nn.dot_product_attention

    def record(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q, k, v, options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(jax.nn, NATIVE, record)
    return calls


@pytest.mark.parametrize(
    ("options", "mask", "flag"),
    [
        ({}, False, True),
        ({"query_offset": 0, "M": 5}, False, True),
        ({"query_offset": np.array(0)}, True, False),
        ({"query_offset": 1}, True, False),
        ({"M": 5}, True, False),
        ({"causal": "token"}, True, False),
        ({"window": 2}, True, False),
        ({"window": 3}, False, True),
        ({"causal": "none"}, False, False),
        ({"causal": "none", "window": 3, "M": 4}, True, False),
        ({"causal": "token", "N": 1, "M": 5}, False, False),
        ({"causal": "virtual", "N": 1, "M": 5}, True, False),
        ({"key_mask": np.ones((2, 3), dtype=np.bool_)}, True, False),
        ({"segment_ids": np.zeros((2, 3), dtype=np.int64)}, True, False),
    ],
)
def test_mask_or_causal_flag_or_neither(
    kernel_calls: list[tuple[Any, ...]], options: Call, mask: bool, flag: bool
) -> None:
    fields = {name: options[name] for name in options if name in ("causal", "window", "window_unit")}
    rest = {name: options[name] for name in options if name not in fields}
    call = plain_call(config=AttentionConfig(**fields), **rest)
    native = arrays(call)
    output = run(native)
    rounded = {**call, **{name: as_wide(native[name]) for name in FLOATS}}
    assert_conforms({"output": np.asarray(output)}, rounded, "float32")
    ((_, _, _, given),) = kernel_calls
    assert (given["mask"] is not None, given["is_causal"]) == (mask, flag)
    assert given["scale"] == 0.5


@each_dtype
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize("e", [3, 4, 6])
def test_the_kernel_that_is_named_is_the_one_that_runs(
    kernel_calls: list[tuple[Any, ...]], dtype: str, normalisation: str, e: int
) -> None:
    call = arrays(plain_call(e=e, config=AttentionConfig(normalisation=normalisation)), dtype)
    _, kernel = run_stages(call)
    assert kernel == (NATIVE if kernel_calls else "composed")
    assert bool(kernel_calls) == (normalisation == "softmax" and dtype != "float64")
    for q, k, v, _ in kernel_calls:
        assert q.shape == k.shape == v.shape == (2, 6, 2, max(e, 4))
    if dtype in NARROW and kernel_calls:  # one trace for platforms that multiply it, one for the rest
        assert {str(q.dtype) for q, *_ in kernel_calls} == {dtype, "float32"}


@pytest.mark.parametrize(
    ("platform", "dtype", "operands"),
    [
        ("cpu", "bfloat16", "f32"),
        ("cuda", "float16", "f16"),
        ("tpu", "float16", "f32"),
        ("cuda", "bfloat16", "bf16"),
        ("tpu", "bfloat16", "bf16"),
    ],
)
def test_platforms_multiply_what_they_can(platform: str, dtype: str, operands: str) -> None:
    call = arrays(plain_call(N=5, M=5, P=1, d=8, e=8, config=AttentionConfig(rope="none")), dtype)
    traced, static = split(call)
    function = jax.jit(functools.partial(iha_jax.attention, **static))
    text = jax.export.export(function, platforms=[platform])(**traced).mlir_module()
    logits = re.findall(
        r"dot_general .*\(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) -> tensor<\S+x5x1x5xf32>", text
    )
    assert logits == [(operands, operands)]


def test_products_are_of_the_precision_that_is_asked_for() -> None:
    call = arrays(plain_call(N=5, M=5))
    traced, static = split(call)

    def precisions(**options: Any) -> set[str]:
        function = jax.jit(functools.partial(iha_jax.attention, **static, **options))
        return set(re.findall(r"precision = \[(\w+), \w+\]", function.lower(**traced).as_text()))

    assert precisions() == {"HIGHEST"}
    assert precisions(precision="tensorfloat32") == {"HIGH"}
    with jax.default_matmul_precision("bfloat16"):
        assert precisions() == {"HIGHEST"}
        assert precisions(precision=None) == {"DEFAULT"}
    for same in (jax.lax.Precision.HIGH, "high", "bfloat16_3x"):
        assert precisions(precision=same) == {"HIGH"}
    assert precisions(precision=jax.lax.Precision.DEFAULT) == {"DEFAULT"}


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("precision", ["x", 3, ("highest", "default"), object()])
def test_what_is_no_precision_is_refused_by_name(precision: Any) -> None:
    with pytest.raises(IHAError, match=r"^`precision`: expected None, or a word of JAX") as error:
        iha_jax.attention(**arrays(plain_call(N=5, M=5)), precision=precision)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", ["virtual", "none"])
def test_no_64_bits_reach_a_device_that_was_not_given_them(dtype: str, causal: Any) -> None:
    config = AttentionConfig(causal=causal, window=2)
    call = arrays(plain_call(config=config, query_offset=np.array(1, dtype=np.int32)), dtype)
    traced, static = split(call)
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(functools.partial(iha_jax.attention, **static))(**traced))
    assert not re.findall(r"[fiu]64\[\d", text)  # numbers of Python are scalars of 64 bits, and are narrowed


# Numerics


@pytest.mark.requirement("SOFT-1", "LOG-2")
@each_dtype
@pytest.mark.parametrize("same_width", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name: str, same_width: bool, dtype: str) -> None:
    call, expected = EXACT[name]
    d = call["q"].shape[3]
    call, expected = with_value_width(call, expected, d if same_width else d + 1)
    assert np.array_equal(as_wide(run(arrays(call, dtype)))[0, :, 0], expected)


@pytest.mark.requirement("SOFT-1")
@each_dtype
@pytest.mark.parametrize("width", [1, 2])
def test_logits_that_16_bits_cannot_tell_apart(dtype: str, width: int) -> None:
    # q (1, 1), k (256, 0) and (256, 1); one final rounding and one of the weights
    call = bare_call([[1, 1]], [[256, 0], [256, 1]], [[0] * width, [1] * width])
    share = 1 / (1 + math.exp(-1))
    error = np.abs(as_wide(run(arrays(call, dtype))) - share)
    assert np.all(error <= 2 * float(jnp.finfo(dtype).eps) * share)


@pytest.mark.requirement("COL-1", "MIX-3")
@each_dtype
def test_long_sums_do_not_stick(dtype: str) -> None:
    H = P = 64
    call = plain_call(B=1, N=1, M=1, H=H, G=1, P=P, d=2, e=2, config=AttentionConfig(causal="none"))
    ones = {name: np.ones_like(call[name]) for name in ("v", "alpha_v", "collapse")}
    assert jnp.all(run(arrays({**call, **ones}, dtype)) == H * P)


@pytest.mark.requirement("MIX-1")
@pytest.mark.parametrize("dtype", NARROW)
def test_mixing_is_rounded_once(dtype: str) -> None:
    call = plain_call(B=1, N=1, M=1, H=2, G=2, P=1, d=2)
    call["q"] = np.full_like(call["q"], 1.0) * np.array([1.764, 0.4001])[:, None]
    call["alpha_q"] = np.full_like(call["alpha_q"], 1.0) * np.array([1.764, 0.4001])[:, None, None]
    call = arrays(call, dtype)
    exact = as_wide(call["q"][0, 0, :, 0]) @ as_wide(call["alpha_q"][:, 0, 0])
    assert jnp.all(run_stages(call)[0]["mixed_q"] == exact.astype(call["q"].dtype))


@pytest.mark.requirement("TYP-2")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("per_head", [False, True])
def test_parameters_of_float32_are_not_rounded(dtype: str, per_head: bool) -> None:
    # 4096 (1 + 2^-12) - 4096 = 1; a rounded parameter gives 0
    fine = np.array([1 + 2.0**-12, -1.0])
    call = plain_call(B=1, N=1, M=1, H=1, G=2, P=2, d=2, config=AttentionConfig(causal="none", rope="none"))
    call["k"] = np.full_like(call["k"], 4096)
    call["v"] = np.full_like(call["v"], 2048)
    call["alpha_k"] = np.broadcast_to(fine[:, None, None], (2, 1, 2))
    call["alpha_v"] = np.ones((2, 1, 2))
    call["collapse"] = fine[None, :] if per_head else fine[None, None, :]
    call["alpha_q"] = np.zeros((1, 1, 2))
    stages, _ = run_stages(arrays(call, dtype, "float32"))
    assert jnp.all(stages["mixed_k"] == 1)
    assert jnp.all(stages["output"] == 1)
    assert stages["output"].dtype == dtype


@pytest.mark.requirement("ROPE-4", "ROPE-5", "POS-1", "IDX-2")
@pytest.mark.parametrize("theta", [500000.0, 10.0, 1e12])
@pytest.mark.parametrize("d", [6, 80])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_angles_of_large_positions(theta: float, d: int, dtype: str) -> None:
    P = 3
    positions = np.array([[1, -1, 5, -1000, 2**26 + 1, 2**31 - 1, -(2**31), -(2**31) + 12345]])
    config = AttentionConfig(rope_theta=theta)
    call = plain_call(B=1, N=8, M=8, H=1, G=1, P=P, d=d, config=config, positions=positions)
    call["q"] = np.broadcast_to(np.concatenate([np.ones(d // 2), np.zeros(d // 2)]), (1, 8, 1, d))
    call["alpha_q"] = np.ones_like(call["alpha_q"])
    call["positions"] = positions.astype(np.int32)
    rotated = as_wide(run_stages(arrays(call, dtype))[0]["rotated_q"][0, :, 0]).reshape(8, P, d)
    unit = float(jnp.finfo(dtype).eps) / 2
    with mpmath.workdps(40):
        for n, p, i in np.ndindex(8, P, d // 2):
            angle = (int(positions[0, n]) * P + p) * mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / d)
            slack = 4 * 2.0**-53 * abs(float(angle)) * (1 + math.log(theta))
            for have, want in (
                (rotated[n, p, i], mpmath.cos(angle)),
                (rotated[n, p, i + d // 2], mpmath.sin(angle)),
            ):
                assert abs(have - float(want)) <= slack + 4 * unit * abs(float(want)), (n, p, i)


@pytest.mark.requirement("IDX-2", "WIN-1", "WIN-2", "WIN-3")
@pytest.mark.parametrize("causal", ["virtual", "token", "none"])
@pytest.mark.parametrize("unit", ["virtual", "token"])
@pytest.mark.parametrize("P", [1, 3])
def test_queries_brought_near_see_the_same_keys(causal: Any, unit: Any, P: int) -> None:
    M = 5
    ends = [-(2**31), -(2**31) + 1, *range(-12, 20), 2**30, 2**31 - 2, 2**31 - 1]
    keys = np.arange(M)

    def visible(index: Any, window: int | None) -> Any:
        n, m = np.repeat(index, P)[:, None], np.repeat(keys, P)[None]
        t = (index[:, None] * P + np.arange(P)).reshape(-1, 1)
        s = np.arange(M * P)[None]
        config = AttentionConfig(causal=causal, window=window, window_unit=unit)
        conditions = index_conditions(config, causal, window, P, n=n, m=m, t=t, s=s)
        return np.all(np.broadcast_arrays(np.ones((len(n), M * P), dtype=np.bool_), *conditions), axis=0)

    for window in (None, 1, 2, 4, 6, 7, 8, 11, 2**30, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**33 - 1):
        far = {n + window * sign for n in range(-8, 9) for sign in (-1, 1)} if window else set()
        index = np.array([*ends, *(n for n in sorted(far) if -(2**31) <= n < 2**31)])
        near, width = nearby(jnp.asarray(index, dtype=jnp.int32)[None], M, window)
        assert near.dtype == jnp.int32
        assert np.abs(near).max() <= 2 * M + 4
        have = visible(np.asarray(near, dtype=np.int64)[0], width)
        assert np.array_equal(have, visible(index, window)), window


@pytest.mark.requirement("TYP-3", "ARG-1", "ARG-2", "IDX-2")
@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_integers_of_every_type(kind: str) -> None:
    top = np.iinfo(kind).max
    small = min(int(top), 2**31 - 3)  # the last index that three queries may start at
    ids = np.array([[top, 1, 2]] * 2, dtype=kind)
    same = np.array([[0, 1, 2]] * 2, dtype=np.int32)
    places = np.array([[small, 1, 0]] * 2, dtype=kind)
    call = plain_call(segment_ids=ids, positions=places)
    plain = {**call, "segment_ids": same, "positions": places.astype(np.int32)}
    assert jnp.array_equal(run(arrays(call)), run(arrays(plain)))
    # other types on the other side, where the largest of one could pass for -1 in the other
    call = plain_call(segment_ids=ids, kv_segment_ids=np.array([[-1, 1, 2]] * 2, dtype=np.int32))
    other = plain_call(segment_ids=same, kv_segment_ids=np.array([[9, 1, 2]] * 2, dtype=np.int32))
    assert jnp.array_equal(run(arrays(call)), run(arrays(other)))
    expected = run(arrays(plain_call(query_offset=small)))
    for offset in (np.array(small, dtype=kind), np.array([small] * 2, dtype=kind)):
        np.testing.assert_allclose(run(arrays(plain_call(query_offset=offset))), expected, rtol=1e-6)


# Hidden keys, empty rows, empty arrays


@pytest.mark.requirement("KEY-2", "KEY-3")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_dropped_keys_may_hold_anything(dtype: str, poison: float, normalisation: str) -> None:
    key_mask = np.array([[True, False, True], [False, False, False]])
    clean = plain_call(config=AttentionConfig(normalisation=normalisation), key_mask=key_mask)
    dirty = {**clean, **{name: np.where(key_mask[..., None, None], clean[name], poison) for name in "kv"}}
    clean, dirty = (arrays(call, dtype) for call in (clean, dirty))
    assert jnp.array_equal(run(dirty), run(clean))
    have, want = gradients(dirty), gradients(clean)
    for name in FLOATS:
        assert jnp.all(jnp.isfinite(have[name])), name
        assert jnp.array_equal(have[name], want[name]), name
    assert jnp.all(have["k"][~key_mask] == 0)


@pytest.mark.requirement("SOFT-2")
@pytest.mark.parametrize(("dtype", "e"), [("float64", 4), ("float32", 4), ("float32", 3), ("float16", 4)])
def test_rows_that_see_nothing(dtype: str, e: int) -> None:
    segments = np.zeros((2, 4), dtype=np.int32)
    segments[0, 1] = 1
    segments[1, :] = 1
    call = plain_call(N=4, M=4, d=4, e=e, P=1, segment_ids=segments)
    call["kv_segment_ids"] = np.zeros_like(segments)
    call = arrays(call, dtype)
    output = run(call)
    assert jnp.all(output[0, 1] == 0)
    assert jnp.all(output[1] == 0)
    assert jnp.all(output[0, 0] != 0)
    grads = gradients(call)
    assert all(jnp.all(jnp.isfinite(grad)) for grad in grads.values())
    assert jnp.all(grads["q"][0, 1] == 0)
    assert all(jnp.all(grads[name][1] == 0) for name in "qkv")


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"M": 0}, {"N": 0, "M": 0}])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_empty_arrays(sizes: dict[str, int], normalisation: str, dtype: str) -> None:
    config = AttentionConfig(normalisation=normalisation, window=2)
    call = arrays(plain_call(config=config, **sizes, query_offset=np.array(1, dtype=np.int32)), dtype)
    output = run(call)
    assert output.shape == (sizes.get("B", 2), sizes.get("N", 3), 2, 3)
    assert jnp.all(output == 0)
    assert all(jnp.all(grad == 0) for grad in gradients(call).values())


@pytest.mark.requirement("KEY-3")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "none"])
def test_nan_is_not_taken_for_seeing_nothing(causal: Any, dtype: str) -> None:
    call = plain_call(d=4, e=4, config=AttentionConfig(causal=causal))
    call["q"][0, 2] = np.nan
    output = run(arrays(call, dtype))
    assert jnp.isnan(output[0, 2]).all()
    assert not jnp.isnan(output[1]).any()


@pytest.mark.requirement("CFG-1")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "token"])
def test_a_scale_that_float32_does_not_hold(causal: Any, dtype: str) -> None:
    tiny, small = (plain_call(config=AttentionConfig(causal=causal, scale=scale)) for scale in (1e-50, 1e-30))
    assert jnp.array_equal(run(arrays(tiny, dtype)), run(arrays(small, dtype)))


# Transformations


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": AttentionConfig(normalisation="none", window=1, rope_pairing="adjacent")},
        {"config": AttentionConfig(causal="token", rope="token"), "query_offset": -1},
        {"key_mask": np.array([[True, False, True], [False, False, False]])},
        {"collapse": np.ones((2, 2)) / 3},
    ],
)
def test_gradients_by_finite_differences(options: Call, dtype: str) -> None:
    call = arrays(plain_call(**options), dtype)
    rest = {name: x for name, x in call.items() if name not in FLOATS}
    function = jax.jit(lambda *floats: iha_jax.attention(*floats, **rest))
    check_grads(function, [call[name] for name in FLOATS], order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64"])
def test_the_kernel_has_the_gradients_of_the_composition(dtype: str) -> None:
    # JAX's function computes in float32, the composition was compared with finite differences above.
    segments = np.array([[0, 0, 1], [0, 1, 1]])
    call = plain_call(segment_ids=segments, kv_segment_ids=np.array([[0, 2, 2], [0, 1, 0]]))
    wide, narrow = gradients(arrays(call, dtype)), gradients(arrays(call, "float32"))
    for name in FLOATS:
        np.testing.assert_allclose(narrow[name], wide[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_vmap_equals_a_loop(normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation)
    call = arrays(plain_call(config=config))
    floats = [jnp.stack([call[name], 2 * call[name]]) for name in FLOATS]
    key_mask = jnp.array([[[True, False, True]] * 2, [[True, True, False]] * 2])
    offset = jnp.array([0, 1])

    def loss(*x: Any) -> Any:
        return jnp.square(iha_jax.attention(*x[:7], config=config, key_mask=x[7], query_offset=x[8])).sum()

    arguments = (*floats, key_mask, offset)
    for function in (loss, jax.grad(loss, argnums=tuple(range(7)))):
        mapped = jax.jit(jax.vmap(function))(*arguments)
        looped = [jax.jit(function)(*(x[i] for x in arguments)) for i in range(2)]
        for have, *want in zip(*map(jax.tree.leaves, (mapped, *looped)), strict=True):
            np.testing.assert_allclose(have, jnp.stack(want), rtol=2e-4, atol=2e-4)


@pytest.mark.requirement("ARG-1")
def test_one_compilation_serves_every_offset() -> None:
    call = arrays(plain_call(M=6, config=AttentionConfig(window=2)))
    traces = []

    @jax.jit
    def attend(offset: Any) -> Any:
        traces.append(offset)
        return iha_jax.attention(**call, query_offset=offset)

    for offset in (-2, 0, 3, 7):
        np.testing.assert_allclose(
            attend(offset), run({**call, "query_offset": offset}), rtol=1e-5, atol=1e-6
        )
    assert len(traces) == 1


def test_configuration_may_be_a_static_argument() -> None:
    call = arrays(plain_call())
    compiled = jax.jit(iha_jax.attention, static_argnames=("config", "precision"))
    assert jnp.array_equal(compiled(**call, precision="highest"), run(call))


def test_without_compilation_the_result_is_as_good() -> None:
    call = plain_call(key_mask=np.array([[True, False, True], [True, True, True]]))
    native = arrays(call)
    rounded = {**call, **{name: as_wide(native[name]) for name in FLOATS}}
    assert_conforms({"output": np.asarray(iha_jax.attention(**native))}, rounded, "float32")


def test_arguments_may_lie_on_several_devices() -> None:
    """In a process that is told to have four devices: the batch is spread over them, then the heads."""
    script = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from backend_cases import FLOATS, plain_call
import iha_jax
mesh = Mesh(np.array(jax.devices()), ("x",))
call = plain_call(B=4, H=4, G=4, d=8, e=8, key_mask=np.arange(12).reshape(4, 3) % 5 > 0)
call = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
call["query_offset"] = jnp.arange(4) - 1
want = iha_jax.attention(**call)
batch = {"query_offset": P("x"), "key_mask": P("x"), "q": P("x"), "k": P("x"), "v": P("x")}
heads = {name: P(None, None, "x") for name in "qkv"} | {name: P("x") for name in FLOATS[3:]}
for specs in (batch, heads):
    spread = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) if isinstance(x, jax.Array) else x
        for name, x in call.items()
    }
    config = spread.pop("config")
    attend = lambda arrays: iha_jax.attention(**arrays, config=config)
    for function in (attend, jax.jit(attend)):
        have = function(spread)
        assert len(have.sharding.device_set) == 4, have.sharding
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
print("done", len(jax.devices()))
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **flags, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done 4\n", done.stderr


def test_arguments_are_left_alone() -> None:
    call = arrays(random_call(3))
    copies = {name: np.array(x) for name, x in call.items() if isinstance(x, jax.Array)}
    run(call)
    assert all(np.array_equal(call[name], copy) for name, copy in copies.items())


# Errors


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", BAD_INPUTS)
@pytest.mark.parametrize("dtype", ["float64"])
def test_errors_are_those_of_the_core(name: str, dtype: str) -> None:
    call = BAD_INPUTS[name](plain_call())
    with pytest.raises(IHAError) as expected:
        iha_core.attention(**call)
    with pytest.raises(type(expected.value)) as found:
        iha_jax.attention(**convert(call, jnp.asarray))
    assert str(found.value) == str(expected.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", [*FLOATS, "key_mask", "segment_ids", "positions", "query_offset"])
def test_foreign_arrays_are_refused_by_name(name: str) -> None:
    ids = np.zeros((2, 3), dtype=np.int32)
    options = {"segment_ids": ids, "positions": ids, "query_offset": ids[:, 0], "key_mask": ids == 0}
    call = convert(plain_call(**options), lambda x: x.astype(np.float32) if x.dtype == np.float64 else x)
    native = convert(call, jnp.asarray)
    with pytest.raises(iha_core.ArgumentTypeError, match=f"^`{name}`: expected a jax.Array, got ndarray$"):
        iha_jax.attention(**{**native, name: call[name]})


@pytest.mark.requirement("CFG-1", "SOFT-1")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_any_scale_that_the_logits_allow(scale: float, normalisation: str) -> None:
    call = call_of_scale(scale, normalisation=normalisation)
    assert_conforms({"output": np.asarray(run(arrays(call)))}, call, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"normalisation": "none", "rope": "token", "window": 2}])
def test_works_where_promotion_is_forbidden(dtype: str, options: Any) -> None:
    key_mask = np.array([[True, False, True], [True, True, True]])
    call = arrays(plain_call(config=AttentionConfig(**options), key_mask=key_mask), dtype)
    expected = run(call)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jnp.array_equal(run(call), expected)
