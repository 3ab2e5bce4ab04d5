"""The MLX backend against the reference, and what holds for it alone: kernels, gradients, compilation."""

from __future__ import annotations

import functools
import math
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

mx = pytest.importorskip("mlx.core")
import iha_mlx  # noqa: E402

DTYPES = (mx.float64, mx.float32, mx.float16, mx.bfloat16)
NARROW = (mx.float16, mx.bfloat16)
NATIVE = "scaled_dot_product_attention"

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_normalisation = pytest.mark.parametrize("normalisation", ["softmax", "none"])


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    """Where float64 is, whatever the default device."""
    with mx.stream(mx.cpu):
        yield


def arrays(call: Call, dtype: Any = mx.float64, parameters: Any = None) -> Call:
    """The call in arrays of MLX, floats in `dtype` (the mixing and collapse in `parameters`, where given)."""

    def array(x: np.ndarray[Any, Any]) -> Any:
        return mx.array(x, dtype=mx.float64) if x.dtype == np.float64 else mx.array(x)  # else float32

    call = convert(call, array)
    for name in FLOATS:
        call[name] = call[name].astype(parameters if parameters and name in FLOATS[3:] else dtype)
    return call


def values(x: Any) -> np.ndarray[Any, Any]:
    """Any array in float64."""
    return np.array(x.astype(mx.float64))


def run(call: Call) -> Any:
    return iha_mlx.attention(**call)


def of_floats(call: Call) -> tuple[Any, list[Any]]:
    """The operation as a function of its float arguments, and those."""
    rest = {name: x for name, x in call.items() if name not in FLOATS}
    return functools.partial(_attention, rest), [call[name] for name in FLOATS]


def _attention(rest: Call, *floats: Any) -> Any:
    return iha_mlx.attention(*floats, **rest)


def gradients(call: Call) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients of the sum of squares of the output with respect to all float arguments."""
    function, floats = of_floats(call)
    grads = mx.grad(lambda *x: function(*x).square().sum(), argnums=tuple(range(7)))(*floats)
    assert [grad.dtype for grad in grads] == [x.dtype for x in floats]
    return dict(zip(FLOATS, map(values, grads), strict=True))


@pytest.mark.parametrize("seed", range(160))
def test_stages_agree_with_the_reference(seed: int) -> None:
    call = random_call(seed)
    stages, kernel = iha_mlx.attention_stages(**arrays(call))
    assert kernel == "composed"
    assert list(stages) == list(iha_core.attention_stages(**call))
    assert_conforms({name: np.array(stage) for name, stage in stages.items()}, call)


@pytest.mark.parametrize("seed", range(160))
def test_stages_of_the_kernel_agree_with_the_reference(seed: int) -> None:
    call = random_call(seed)
    rounded = {**call, **{name: call[name].astype(np.float32).astype(np.float64) for name in FLOATS}}
    expected = iha_core.attention_stages(**rounded)
    stages, kernel = iha_mlx.attention_stages(**arrays(rounded, mx.float32))
    softmax = call["config"].normalisation == "softmax"
    native = softmax and call["q"].size and call["k"].size  # the scales drawn are at most 1
    assert kernel == (NATIVE if native else "composed")
    assert list(stages) == [name for name in expected if not native or name not in ("logits", "lse")]
    assert_conforms({name: np.array(stage) for name, stage in stages.items()}, rounded, "float32")


@each_dtype
@each_normalisation
def test_stages_do_not_change_the_output(dtype: Any, normalisation: str) -> None:
    call = arrays(plain_call(config=AttentionConfig(normalisation=normalisation)), dtype)
    stages, _ = iha_mlx.attention_stages(**call)
    output = run(call)
    assert output.dtype == dtype
    assert all(stage.dtype == dtype for name, stage in stages.items() if name not in ("logits", "lse"))
    assert mx.array_equal(output, stages["output"])


# Kernel and memory layout


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Queries, keys, values and keyword arguments of every call of MLX's kernel."""
    calls: list[tuple[Any, ...]] = []
    kernel = mx.fast.scaled_dot_product_attention

    def record(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q, k, v, options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(mx.fast, NATIVE, record)
    return calls


@each_dtype
@each_normalisation
@pytest.mark.parametrize("scale", [None, 1.0, 1.5])
@pytest.mark.parametrize("sizes", [{}, {"d": 64, "e": 64}, {"N": 1}, {"N": 0}, {"M": 0}])
def test_the_kernel_named_is_the_one_that_runs(
    kernel_calls: list[tuple[Any, ...]],
    sizes: dict[str, int],
    scale: float | None,
    normalisation: str,
    dtype: Any,
) -> None:
    call = plain_call(config=AttentionConfig(normalisation=normalisation, scale=scale), **sizes)
    _, kernel = iha_mlx.attention_stages(**arrays(call, dtype))
    if dtype == mx.float64 or normalisation == "none" or scale == 1.5 or 0 in sizes.values():
        assert kernel == "composed"
        assert not kernel_calls
    else:
        assert kernel == (NATIVE if dtype == mx.float32 else f"{NATIVE} in float32")
        ((*operands, _),) = kernel_calls
        assert all(x.dtype == mx.float32 for x in operands)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, "causal"),
        ({"query_offset": 0}, "causal"),
        ({"M": 5}, "causal"),
        ({"window": 3}, "causal"),
        ({"N": 1, "M": 5}, "causal"),
        ({"query_offset": np.array(0)}, "array"),
        ({"query_offset": 1}, "array"),
        ({"query_offset": 0, "M": 5}, "array"),
        ({"M": 2}, "array"),
        ({"causal": "token"}, "array"),
        ({"window": 2}, "array"),
        ({"causal": "none"}, None),
        ({"causal": "none", "window": 3}, None),
        ({"causal": "none", "window": 3, "M": 4}, "array"),
        ({"causal": "token", "N": 1, "M": 5}, None),
        ({"query_offset": 3}, None),
        ({"key_mask": np.ones((2, 3), dtype=np.bool_)}, "array"),
        ({"segment_ids": np.zeros((2, 3), dtype=np.int64)}, "array"),
    ],
)
def test_mask_or_causal_flag_or_neither(
    kernel_calls: list[tuple[Any, ...]], options: Call, mask: str | None
) -> None:
    fields = {name: options[name] for name in options if name in ("causal", "window", "window_unit")}
    rest = {name: options[name] for name in options if name not in fields}
    call = plain_call(config=AttentionConfig(**fields), **rest)
    call |= {name: call[name].astype(np.float32).astype(np.float64) for name in FLOATS}
    assert_conforms({"output": np.array(run(arrays(call, mx.float32)))}, call, "float32")
    ((_, _, _, given),) = kernel_calls
    assert ("array" if isinstance(given["mask"], mx.array) else given["mask"]) == mask
    assert given["scale"] == 0.5


@pytest.mark.requirement("ARG-5")
@each_dtype
@each_normalisation
def test_any_memory_layout(dtype: Any, normalisation: str) -> None:
    call = arrays(plain_call(N=4, M=4, config=AttentionConfig(normalisation=normalisation)), dtype)
    expected = run(call)
    for name in FLOATS:
        x = call[name]
        spread = mx.full([2 * size for size in x.shape], math.nan, dtype=dtype)
        every_second = (slice(None, None, 2),) * x.ndim
        spread[every_second] = x
        call[name] = spread[every_second].transpose().transpose()
    assert mx.array_equal(run(call), expected)
    call["q"] = mx.broadcast_to(call["q"][:1], call["q"].shape)
    assert mx.array_equal(run(call), run({**call, "q": mx.contiguous(call["q"])}))


# Numerics


@pytest.mark.requirement("SOFT-1", "LOG-2")
@each_dtype
@pytest.mark.parametrize("same_width", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name: str, same_width: bool, dtype: Any) -> None:
    call, expected = EXACT[name]
    d = call["q"].shape[3]
    call, expected = with_value_width(call, expected, d if same_width else d + 1)
    assert np.array_equal(values(run(arrays(call, dtype)))[0, :, 0], expected)


@pytest.mark.requirement("SOFT-1", "NUM-2")
@each_dtype
@pytest.mark.parametrize("width", [1, 2])
def test_logits_that_16_bits_cannot_tell_apart(dtype: Any, width: int) -> None:
    # q (1, 1), k (256, 0) and (256, 1); one final rounding and one of the weights
    call = bare_call([[1, 1]], [[256, 0], [256, 1]], [[0] * width, [1] * width])
    share = 1 / (1 + math.exp(-1))
    assert np.all(np.abs(values(run(arrays(call, dtype))) - share) <= 2 * mx.finfo(dtype).eps * share)


@pytest.mark.requirement("SOFT-1", "SOFT-3")
@pytest.mark.parametrize("distance", [1.0, 30.0, 300.0, 700.0])
def test_exponentials_of_float64_are_accurate(distance: float) -> None:
    # Two keys whose logits are `distance` apart: the lighter weight is their ratio of exponentials.
    call = bare_call([[1.0]], [[distance], [0.0]], [[0.0], [1.0]])
    stages, _ = iha_mlx.attention_stages(**arrays(call))
    with mpmath.workdps(40):
        weight = 1 / (1 + mpmath.exp(distance))
        assert abs(float(stages["output"].item()) / weight - 1) <= (4 + distance) * 2.0**-53
        lse = distance + mpmath.log1p(mpmath.exp(-distance))
    assert abs(float(stages["lse"].item()) - lse) <= 2.0**-52 * lse


@pytest.mark.requirement("COL-1", "MIX-3")
@each_dtype
def test_long_sums_do_not_stick(dtype: Any) -> None:
    H = P = 64
    call = plain_call(B=1, N=1, M=1, H=H, G=1, P=P, d=2, e=2, config=AttentionConfig(causal="none"))
    ones = {name: np.ones_like(call[name]) for name in ("v", "alpha_v", "collapse")}
    assert np.all(values(run(arrays({**call, **ones}, dtype))) == H * P)


@pytest.mark.requirement("MIX-1")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_mixing_is_rounded_once(dtype: Any) -> None:
    call = plain_call(B=1, N=1, M=1, H=2, G=2, P=1, d=2)
    call["q"] = np.full_like(call["q"], 1.0) * np.array([1.764, 0.4001])[:, None]
    call["alpha_q"] = np.full_like(call["alpha_q"], 1.0) * np.array([1.764, 0.4001])[:, None, None]
    call = arrays(call, dtype)
    exact = values(call["q"])[0, 0, :, 0] @ values(call["alpha_q"])[:, 0, 0]
    mixed = iha_mlx.attention_stages(**call)[0]["mixed_q"]
    assert mx.all(mixed == mx.array(exact, dtype=mx.float64).astype(dtype))


@pytest.mark.requirement("TYP-2")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_parameters_of_float32_are_not_rounded(dtype: Any, per_head: bool) -> None:
    # 4096 (1 + 2^-12) - 4096 = 1; a rounded parameter gives 0
    fine = np.array([1 + 2.0**-12, -1.0])
    call = plain_call(B=1, N=1, M=1, H=1, G=2, P=2, d=2, config=AttentionConfig(causal="none", rope="none"))
    call["k"] = np.full_like(call["k"], 4096)
    call["v"] = np.full_like(call["v"], 2048)
    call["alpha_k"] = np.broadcast_to(fine[:, None, None], (2, 1, 2))
    call["alpha_v"] = np.ones((2, 1, 2))
    call["collapse"] = fine[None, :] if per_head else fine[None, None, :]
    call["alpha_q"] = np.zeros((1, 1, 2))
    stages, _ = iha_mlx.attention_stages(**arrays(call, dtype, mx.float32))
    assert mx.all(stages["mixed_k"] == 1)
    assert mx.all(stages["output"] == 1)
    assert stages["output"].dtype == dtype


@pytest.mark.requirement("ROPE-4", "ROPE-5", "POS-1", "IDX-2")
@pytest.mark.parametrize("position", [1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("d", [6, 16, 80])
@pytest.mark.parametrize("dtype", [mx.float64, mx.float32], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_angles_of_large_positions(position: int, d: int, dtype: Any, compiled: bool) -> None:
    P = 3
    call = plain_call(B=1, N=1, M=1, H=1, G=1, P=P, d=d)
    call["q"] = np.concatenate([np.ones(d // 2), np.zeros(d // 2)])[None, None, None]
    call["alpha_q"] = np.ones_like(call["alpha_q"])
    call = arrays(call, dtype)

    def rotated(positions: Any) -> Any:
        return iha_mlx.attention_stages(**call, positions=positions)[0]["rotated_q"][0, :, 0]

    found = values((mx.compile(rotated) if compiled else rotated)(mx.array([[position]])))
    with mpmath.workdps(40):
        for p in range(P):
            for i in range(d // 2):
                angle = (position * P + p) * mpmath.mpf(500000) ** (-mpmath.mpf(2 * i) / d)
                limit = 4 * 2.0**-53 * abs(float(angle)) + mx.finfo(dtype).eps
                assert abs(float(found[p, i]) - mpmath.cos(angle)) <= limit
                assert abs(float(found[p, i + d // 2]) - mpmath.sin(angle)) <= limit


@pytest.mark.requirement("ROPE-5")
def test_sines_are_accurate_all_around_the_circle() -> None:
    turns = np.concatenate([np.linspace(-1, 1, 257), np.arange(-8, 9) / 8 + 2.0**-40])
    cos, sin = (np.array(x) for x in iha_mlx.rope._cos_sin(mx.array(turns, dtype=mx.float64)))
    with mpmath.workdps(30):
        for turn, c, s in zip(turns, cos, sin, strict=True):
            angle = 2 * mpmath.pi * mpmath.mpf(float(turn))
            assert abs(float(c) - mpmath.cos(angle)) <= 2.0**-52
            assert abs(float(s) - mpmath.sin(angle)) <= 2.0**-52
    quarters = turns[::64][:5]
    assert np.array_equal(cos[:257:64], np.cos(np.pi * quarters * 2).round())
    assert np.array_equal(sin[:257:64], np.sin(np.pi * quarters * 2).round())


@pytest.mark.requirement("IDX-2", "WIN-1", "WIN-2")
@pytest.mark.parametrize("unit", ["virtual", "token"])
@pytest.mark.parametrize("traced", [False, True])
def test_masks_beyond_31_bits(unit: Any, traced: bool) -> None:
    start = 2**31 - 4
    config = AttentionConfig(causal="none", window=start, window_unit=unit)
    call = plain_call(P=3, config=config, query_offset=np.array([start] * 2) if traced else start)
    stages, _ = iha_mlx.attention_stages(**arrays(call))
    assert 0 < mx.isinf(stages["logits"]).sum().item() < stages["logits"].size
    assert_conforms({name: np.array(stage) for name, stage in stages.items()}, call)


@pytest.mark.requirement("TYP-3", "ARG-1", "ARG-2", "IDX-2")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_integers_of_every_type(dtype: str) -> None:
    top = np.iinfo(dtype).max
    ends = np.array([[top, 1, top - 1]] * 2, dtype=dtype)
    small = min(int(top), 2**31 - 3)  # the last index that three queries may start at
    places = np.array([[small, 1, 0]] * 2, dtype=dtype)
    call = plain_call(segment_ids=ends, kv_segment_ids=ends.astype(np.int64), positions=places)
    # equal arguments but for their type, so the bits agree
    wide = {**call, "segment_ids": ends.astype(np.int64), "positions": places.astype(np.int64)}
    assert mx.array_equal(run(arrays(call)), run(arrays(wide)))
    plain = run(arrays(plain_call(query_offset=small)))
    for offset in (np.array(small, dtype=dtype), np.array([small, small], dtype=dtype)):
        assert mx.allclose(run(arrays(plain_call(query_offset=offset))), plain, rtol=1e-13, atol=1e-13)
    assert mx.array_equal(run({**arrays(plain_call()), "query_offset": np.int64(small)}), plain)


@pytest.mark.requirement("SEG-1", "TYP-3")
def test_ids_are_compared_in_64_bits() -> None:
    wide = np.array([[2**32 - 1, 2**40, -(2**31)]] * 2)  # -1, 0 and itself in 32 bits
    narrow = np.array([[-1, 0, -(2**31)]] * 2)
    call = plain_call(segment_ids=wide, kv_segment_ids=narrow)
    assert_conforms({"output": np.array(run(arrays(call)))}, call)
    call["segment_ids"] = wide.astype(np.uint32)
    assert_conforms({"output": np.array(run(arrays(call)))}, call)


@pytest.mark.requirement("CFG-1")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "token"])
def test_a_scale_that_float32_does_not_hold(causal: Any, dtype: Any) -> None:
    call = plain_call(config=AttentionConfig(causal=causal, scale=1e-50))
    tiny = run(arrays(call, dtype))
    small = run(arrays({**call, "config": AttentionConfig(causal=causal, scale=1e-30)}, dtype))
    assert np.isfinite(values(tiny)).all()
    assert mx.array_equal(tiny, small)


@pytest.mark.requirement("SOFT-1")
@pytest.mark.parametrize("dtype", [mx.float64, mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q", "k", "scale"), [(1e30, 1e-30, 1e10), (2e-19, 1e-19, 2e38), (2e-19, 1e-19, 5e38), (1e38, 2.0, 0.5)]
)
@each_normalisation
def test_factors_that_overflow_before_their_product(
    q: float, k: float, scale: float, dtype: Any, normalisation: Any
) -> None:
    config = {"scale": scale, "normalisation": normalisation}
    output = values(run(arrays(bare_call([[q]], [[k], [0.0]], [[1.0], [-1.0]], **config), dtype)))
    logit = scale * (k * q)
    expected = math.tanh(logit / 2) if normalisation == "softmax" else logit
    assert output.item() == pytest.approx(expected, rel=0.05)  # bfloat16 holds neither q nor k


# Hidden keys, empty rows, empty arrays


@pytest.mark.requirement("KEY-2", "KEY-3")
@each_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@each_normalisation
def test_dropped_keys_may_hold_anything(dtype: Any, poison: float, normalisation: str) -> None:
    key_mask = np.array([[True, False, True], [False, False, False]])
    clean = plain_call(config=AttentionConfig(normalisation=normalisation), key_mask=key_mask)
    dirty = {**clean, **{name: np.where(key_mask[..., None, None], clean[name], poison) for name in "kv"}}
    clean, dirty = (arrays(call, dtype) for call in (clean, dirty))
    assert mx.array_equal(run(dirty), run(clean))
    have, want = gradients(dirty), gradients(clean)
    for name in FLOATS:
        assert np.all(np.isfinite(have[name])), name
        assert np.array_equal(have[name], want[name]), name
    assert np.all(have["k"][~key_mask] == 0)


@pytest.mark.requirement("KEY-3")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "none"])
@pytest.mark.parametrize("N", [1, 4])
def test_nan_is_not_taken_for_seeing_nothing(N: int, causal: Any, dtype: Any) -> None:
    call = plain_call(N=N, M=N, key_mask=np.ones((2, N), dtype=np.bool_))
    call["config"] = AttentionConfig(causal=causal)
    call["q"][0, N - 1] = np.nan
    output = values(run(arrays(call, dtype)))
    assert np.isnan(output[0, N - 1]).all()
    assert not np.isnan(output[1]).any()


@pytest.mark.requirement("SOFT-2")
@each_dtype
@pytest.mark.parametrize("widths", [(4, 4), (4, 3)])
def test_rows_that_see_nothing(dtype: Any, widths: tuple[int, int]) -> None:
    d, e = widths
    segments = np.zeros((2, 4), dtype=np.int64)
    segments[0, 1] = 1
    segments[1, :] = 1
    call = plain_call(N=4, M=4, d=d, e=e, P=1, segment_ids=segments)
    call["kv_segment_ids"] = np.zeros_like(segments)
    call = arrays(call, dtype)
    output = values(run(call))
    assert np.all(output[0, 1] == 0)
    assert np.all(output[1] == 0)
    assert np.all(output[0, 0] != 0)
    grads = gradients(call)
    assert all(np.all(np.isfinite(grad)) for grad in grads.values())
    assert np.all(grads["q"][0, 1] == 0)
    assert all(np.all(grads[name][1] == 0) for name in "qkv")


@pytest.mark.requirement("SOFT-2")
@each_dtype
@pytest.mark.parametrize("options", [{"N": 5, "M": 2}, {"query_offset": -2}])
def test_queries_before_all_keys_see_nothing(dtype: Any, options: Call) -> None:
    output = values(run(arrays(plain_call(**options), dtype)))
    seen = options.get("N", 3) + options.get("query_offset", options.get("M", 3) - options.get("N", 3))
    unseen = output.shape[1] - seen
    assert np.all(output[:, :unseen] == 0)
    assert np.all(output[:, unseen:] != 0)


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize("dtype", [mx.float64, mx.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"M": 0}, {"N": 0, "M": 0}])
@each_normalisation
def test_empty_arrays(dtype: Any, sizes: dict[str, int], normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation, window=2)
    key_mask = np.ones((sizes.get("B", 2), sizes.get("M", 3)), dtype=np.bool_)
    for options in ({}, {"query_offset": np.array(1)}, {"key_mask": key_mask}):
        call = arrays(plain_call(config=config, **sizes, **options), dtype)
        output = run(call)
        assert output.shape == (sizes.get("B", 2), sizes.get("N", 3), 2, 3)
        assert np.all(values(output) == 0)
        for name, grad in gradients(call).items():
            assert grad.shape == call[name].shape
            assert np.all(grad == 0)


# Differentiation and transformation


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": AttentionConfig(normalisation="none", window=1, rope_pairing="adjacent")},
        {"config": AttentionConfig(causal="token", rope="token"), "query_offset": -1},
        {"key_mask": np.array([[True, False, True], [False, False, False]])},
        {"collapse": np.ones((2, 2)) / 3},
        {"e": 4},
    ],
)
def test_gradients_by_finite_differences(options: Call) -> None:
    call = plain_call(**options)
    function, floats = of_floats(arrays(call))
    cotangent = mx.array(np.cos(np.arange(function(*floats).size)), dtype=mx.float64)

    def loss(*x: Any) -> Any:
        return (function(*x).flatten() * cotangent).sum()

    grads = mx.grad(loss, argnums=tuple(range(7)))(*floats)
    step = 2.0**-17
    for position, name in enumerate(FLOATS):
        along = np.sin(1.0 + np.arange(call[name].size)).reshape(call[name].shape)

        def moved(to: float, at: int = position, along: Any = along) -> float:
            floats_there = [*floats]
            floats_there[at] = floats[at] + mx.array(to * along, dtype=mx.float64)
            return float(loss(*floats_there).item())

        # central differences of two steps, the error of order step^2 removed
        wide, close = ((moved(width) - moved(-width)) / (2 * width) for width in (2 * step, step))
        assert float((grads[position] * mx.array(along, dtype=mx.float64)).sum().item()) == pytest.approx(
            (4 * close - wide) / 3, rel=1e-8, abs=1e-9
        ), name


@pytest.mark.parametrize("dtype", [mx.float32, *NARROW], ids=str)
@pytest.mark.parametrize("key_mask", [None, np.array([[True, False, True], [False, False, False]])])
def test_gradients_of_the_kernel_are_those_of_float64(dtype: Any, key_mask: Any) -> None:
    call = arrays(plain_call(key_mask=key_mask), dtype)
    wide = {**call, **{name: call[name].astype(mx.float64) for name in FLOATS}}
    have, want = gradients(call), gradients(wide)
    for name in FLOATS:
        error = np.linalg.norm(have[name] - want[name])
        assert error <= 8 * float(mx.finfo(dtype).eps) * np.linalg.norm(want[name]), name


@pytest.mark.requirement("NUM-2")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gradients_tell_apart_logits_that_16_bits_cannot(dtype: Any) -> None:
    # The gradient of v is the weights, times twice the output.
    call = arrays(bare_call([[1, 1]], [[256, 0], [256, 1]], [[1, 1], [1, 1]]), dtype)
    share = 1 / (1 + math.exp(-1))
    grad = gradients(call)["v"][0, :, 0, 0]
    assert np.all(np.abs(grad / 2 - [1 - share, share]) <= 2 * float(mx.finfo(dtype).eps))


def test_arguments_are_left_alone() -> None:
    call = arrays(random_call(3))
    copies = {name: np.array(x) for name, x in call.items() if isinstance(x, mx.array)}
    mx.eval(run(call))
    assert all(np.array_equal(np.array(call[name]), copy) for name, copy in copies.items())


@pytest.mark.parametrize("dtype", [mx.float64, mx.float32], ids=str)
@each_normalisation
def test_vmap_equals_a_loop(dtype: Any, normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation)
    call = arrays(plain_call(config=config), dtype)
    floats = [mx.stack([call[name], 2 * call[name]]) for name in FLOATS]
    key_mask = mx.array([[[True, False, True]] * 2, [[True, True, False]] * 2])
    arguments = (*floats, key_mask, mx.array([0, 1]))

    def loss(*x: Any) -> Any:
        return iha_mlx.attention(*x[:7], config=config, key_mask=x[7], query_offset=x[8]).square().sum()

    def both(*x: Any) -> Any:
        return [loss(*x), *mx.grad(loss, argnums=tuple(range(7)))(*x)]

    mapped = mx.vmap(both)(*arguments)
    looped = [both(*(x[i] for x in arguments)) for i in range(2)]
    for have, *want in zip(mapped, *looped, strict=True):
        assert mx.allclose(have, mx.stack(want), rtol=1e-4 if dtype == mx.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_normalisation
def test_compiles_for_every_length(dtype: Any, normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation, window=2)

    def loss(*x: Any) -> Any:
        options = {"key_mask": x[7], "positions": x[8], "query_offset": x[9], "segment_ids": x[10]}
        return iha_mlx.attention(*x[:7], config=config, **options).square().sum()

    function = mx.value_and_grad(loss, argnums=tuple(range(7)))
    compiled = mx.compile(function)
    for N in (5, 7):
        call = arrays(plain_call(N=N, M=N), dtype)
        index = mx.broadcast_to(mx.arange(N), (2, N))
        for offset in ([0, 1], [2, -1]):  # the second of a length runs what was compiled for the first
            options = (index != 1, 1000 * index, mx.array(offset), index // 4)
            floats = [call[name] for name in FLOATS]
            have, have_grads = compiled(*floats, *options)
            want, want_grads = function(*floats, *options)
            for a, b in zip([have, *have_grads], [want, *want_grads], strict=True):
                error = np.abs(values(a) - values(b)).max()
                assert error <= 32 * float(mx.finfo(dtype).eps) * np.abs(values(b)).max()


def test_whole_call_compiles_with_arguments_by_name() -> None:
    call = arrays(plain_call(query_offset=np.array([0, 1])), mx.bfloat16)
    config = call.pop("config")
    compiled = mx.compile(functools.partial(iha_mlx.attention, config=config))
    assert mx.array_equal(compiled(**call), iha_mlx.attention(**call, config=config))


# Errors


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_errors_are_those_of_the_core(name: str) -> None:
    call = BAD_INPUTS[name](plain_call())
    with pytest.raises(IHAError) as expected:
        iha_core.attention(**call)
    with pytest.raises(type(expected.value)) as found:
        run(convert(call, lambda x: mx.array(x, dtype=getattr(mx, x.dtype.name.replace("bool", "bool_")))))
    assert str(found.value) == str(expected.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", [*FLOATS, "key_mask", "segment_ids", "positions", "query_offset"])
def test_foreign_arrays_are_refused_by_name(name: str) -> None:
    ids = np.zeros((2, 3), dtype=np.int64)
    options = {"segment_ids": ids, "positions": ids, "query_offset": ids[:, 0], "key_mask": ids == 0}
    call = plain_call(**options)
    with pytest.raises(
        iha_core.ArgumentTypeError, match=f"^`{name}`: expected an mlx.core.array, got ndarray$"
    ):
        run({**arrays(call), name: call[name]})


@pytest.mark.requirement("ERR-2")
def test_float64_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = arrays(plain_call())
    narrow = arrays(plain_call(), mx.float32)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    with pytest.raises(NotImplementedError, match=r"^float64 runs on the CPU only"):
        run(call)
    assert run(narrow).dtype == mx.float32


@pytest.mark.requirement("CFG-1", "SOFT-1")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_any_scale_that_the_logits_allow(scale: float, normalisation: str) -> None:
    call = call_of_scale(scale, normalisation=normalisation)
    assert_conforms({"output": np.array(run(arrays(call, mx.float32)))}, call, "float32")


@pytest.mark.requirement("KEY-1", "SEG-1")
@pytest.mark.parametrize("name", ["key_mask", "segment_ids", "query_offset"])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_vmap_over_one_argument_alone(name: str, normalisation: str) -> None:
    call = arrays(plain_call(config=AttentionConfig(normalisation=normalisation, window=2)), mx.float32)
    mapped = {
        "key_mask": mx.array([[[True, False, True]] * 2, [[False, True, False]] * 2]),
        "segment_ids": mx.array([[[0, 0, 1]] * 2, [[0, 1, 1]] * 2]),
        "query_offset": mx.array([0, 1]),
    }[name]
    have = mx.vmap(lambda x: iha_mlx.attention(**call, **{name: x}))(mapped)
    want = mx.stack([iha_mlx.attention(**call, **{name: mapped[i]}) for i in range(2)])
    assert mx.allclose(have, want, rtol=1e-5, atol=1e-6)
