"""The PyTorch backend against the reference, and what holds for it alone: kernels, gradients, compilation."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
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

torch = pytest.importorskip("torch")
import iha_torch  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)
NATIVE = "scaled_dot_product_attention"

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensors(call: Call, dtype: Any = None, parameters: Any = None, *, grad: bool = False) -> Call:
    """The call in tensors, floats in `dtype` (the mixing and collapse in `parameters`, where given)."""
    call = convert(call, lambda x: torch.from_numpy(np.array(x)))
    for name in FLOATS:
        to = parameters if parameters and name in FLOATS[3:] else dtype
        call[name] = call[name].to(to or call[name].dtype).requires_grad_(grad)
    return call


def run(call: Call) -> Any:
    return iha_torch.attention(**call)


def gradients(call: Call) -> list[Any]:
    """Gradients of the sum of squares of the output with respect to all float arguments."""
    return list(torch.autograd.grad(run(call).square().sum(), [call[name] for name in FLOATS]))


@pytest.mark.parametrize("seed", range(240))
def test_stages_agree_with_the_reference(seed: int) -> None:
    call = random_call(seed)
    expected = iha_core.attention_stages(**call)
    stages, kernel = iha_torch.attention_stages(**tensors(call))
    linear = call["config"].normalisation == "none"
    assert kernel == ("composed" if linear else NATIVE)
    assert list(stages) == [name for name in expected if name != "lse" and (linear or name != "logits")]
    assert_conforms({name: stage.detach().numpy() for name, stage in stages.items()}, call)


@each_dtype
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_stages_do_not_change_the_output(dtype: Any, normalisation: str) -> None:
    call = tensors(plain_call(config=AttentionConfig(normalisation=normalisation)), dtype)
    stages, _ = iha_torch.attention_stages(**call)
    output = run(call)
    assert output.dtype == dtype
    assert all(stage.dtype == dtype for name, stage in stages.items() if name != "logits")
    assert torch.equal(output, stages["output"])


# Kernel and memory layout


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Queries, keys, values and keyword arguments of every call of PyTorch's kernel."""
    calls: list[tuple[Any, ...]] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def record(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q, k, v, options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, NATIVE, record)
    return calls


@pytest.mark.parametrize(
    ("options", "mask", "flag"),
    [
        ({}, False, True),
        ({"query_offset": 0, "M": 5}, False, True),
        ({"query_offset": torch.tensor(0)}, True, False),
        ({"query_offset": 1}, True, False),
        ({"M": 5}, True, False),
        ({"causal": "token"}, True, False),
        ({"window": 2}, True, False),
        ({"window": 3}, False, True),
        ({"window": 3, "window_unit": "token"}, False, True),
        ({"causal": "none"}, False, False),
        ({"causal": "none", "window": 3}, False, False),
        ({"causal": "none", "window": 3, "M": 4}, True, False),
        ({"causal": "none", "window": 3, "M": 4, "query_offset": 0}, True, False),
        ({"causal": "token", "N": 1, "M": 5}, False, False),
        ({"causal": "virtual", "N": 1, "M": 5}, True, False),
        ({"causal": "virtual", "N": 1, "M": 5, "P": 1}, False, False),
        ({"query_offset": 3}, False, False),
        ({"key_mask": torch.ones(2, 3, dtype=torch.bool)}, True, False),
        ({"segment_ids": torch.zeros(2, 3, dtype=torch.int64)}, True, False),
    ],
)
def test_mask_or_causal_flag_or_neither(
    kernel_calls: list[tuple[Any, ...]],
    options: Call,
    mask: bool,
    flag: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iha_torch.kernels, "FEW_KEYS", 0)
    fields = {name: options[name] for name in options if name in ("causal", "window", "window_unit")}
    rest = {name: options[name] for name in options if name not in fields}
    call = plain_call(config=AttentionConfig(**fields), **rest)
    assert_conforms({"output": run(tensors(call)).detach().numpy()}, call)
    ((_, _, _, given),) = kernel_calls
    assert (given["attn_mask"] is not None, given["is_causal"]) == (mask, flag)
    assert given["scale"] == 0.5


@pytest.mark.requirement("ARG-5")
@pytest.mark.parametrize("rope", ["none", "virtual"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_kernels_get_interleaved_memory(
    kernel_calls: list[tuple[Any, ...]], rope: str, parameters: Any
) -> None:
    call = tensors(plain_call(config=AttentionConfig(rope=rope)), torch.bfloat16, parameters)
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    run(call)
    ((q, k, v, _),) = kernel_calls
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.requirement("ARG-5")
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_any_memory_layout(normalisation: str) -> None:
    call = tensors(plain_call(N=4, M=4, config=AttentionConfig(normalisation=normalisation)))
    expected = run(call)
    for name in FLOATS:
        x = call[name]
        spread = torch.full([2 * size for size in x.shape], math.nan, dtype=x.dtype)
        spread[(slice(None, None, 2),) * x.ndim] = x
        call[name] = spread[(slice(None, None, 2),) * x.ndim]
    torch.testing.assert_close(run(call), expected, rtol=1e-13, atol=1e-13)
    call["q"] = call["q"][:1].expand(2, -1, -1, -1)
    dense = {**call, "q": call["q"].contiguous()}
    torch.testing.assert_close(run(call), run(dense), rtol=1e-13, atol=1e-13)


# Numerics


@pytest.mark.requirement("SOFT-1", "LOG-2")
@each_dtype
@pytest.mark.parametrize("same_width", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name: str, same_width: bool, dtype: Any) -> None:
    call, expected = EXACT[name]
    d = call["q"].shape[3]
    call, expected = with_value_width(call, expected, d if same_width else d + 1)
    output = run(tensors(call, dtype))[0, :, 0]
    assert torch.equal(output.double(), torch.from_numpy(expected))


@pytest.mark.requirement("SOFT-1")
@each_dtype
@pytest.mark.parametrize("width", [1, 2])
def test_logits_that_16_bits_cannot_tell_apart(dtype: Any, width: int) -> None:
    # q (1, 1), k (256, 0) and (256, 1); one final rounding and one of the weights
    call = bare_call([[1, 1]], [[256, 0], [256, 1]], [[0] * width, [1] * width])
    output = run(tensors(call, dtype)).double()
    share = 1 / (1 + math.exp(-1))
    assert torch.all((output - share).abs() <= 2 * torch.finfo(dtype).eps * share)


@pytest.mark.requirement("COL-1", "MIX-3")
@each_dtype
def test_long_sums_do_not_stick(dtype: Any) -> None:
    H = P = 64
    call = plain_call(B=1, N=1, M=1, H=H, G=1, P=P, d=2, e=2, config=AttentionConfig(causal="none"))
    ones = {name: np.ones_like(call[name]) for name in ("v", "alpha_v", "collapse")}
    assert torch.all(run(tensors({**call, **ones}, dtype)) == H * P)


@pytest.mark.requirement("MIX-1")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_mixing_is_rounded_once(dtype: Any) -> None:
    call = plain_call(B=1, N=1, M=1, H=2, G=2, P=1, d=2)
    call["q"] = np.full_like(call["q"], 1.0) * np.array([1.764, 0.4001])[:, None]
    call["alpha_q"] = np.full_like(call["alpha_q"], 1.0) * np.array([1.764, 0.4001])[:, None, None]
    call = tensors(call, dtype)
    exact = call["q"][0, 0, :, 0].double() @ call["alpha_q"][:, 0, 0].double()
    mixed = iha_torch.attention_stages(**call)[0]["mixed_q"]
    assert torch.all(mixed == exact.to(dtype))


@pytest.mark.requirement("TYP-2")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_parameters_of_float32_are_not_rounded(dtype: Any, autocast: bool, per_head: bool) -> None:
    # 4096 (1 + 2^-12) - 4096 = 1; a rounded parameter gives 0
    fine = np.array([1 + 2.0**-12, -1.0])
    call = plain_call(B=1, N=1, M=1, H=1, G=2, P=2, d=2, config=AttentionConfig(causal="none", rope="none"))
    call["k"] = np.full_like(call["k"], 4096)
    call["v"] = np.full_like(call["v"], 2048)
    call["alpha_k"] = np.broadcast_to(fine[:, None, None], (2, 1, 2))
    call["alpha_v"] = np.ones((2, 1, 2))
    call["collapse"] = fine[None, :] if per_head else fine[None, None, :]
    call["alpha_q"] = np.zeros((1, 1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        stages, _ = iha_torch.attention_stages(**tensors(call, dtype, torch.float32))
    assert torch.all(stages["mixed_k"] == 1)
    assert torch.all(stages["output"] == 1)
    assert stages["output"].dtype == dtype


@pytest.mark.requirement("ROPE-4", "ROPE-5", "POS-1", "IDX-2")
@pytest.mark.parametrize("position", [1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("d", [6, 16, 80])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_angles_of_large_positions(position: int, d: int, dtype: Any) -> None:
    P = 3
    call = plain_call(B=1, N=1, M=1, H=1, G=1, P=P, d=d)
    call["q"] = np.concatenate([np.ones(d // 2), np.zeros(d // 2)])[None, None, None]
    call["alpha_q"] = np.ones_like(call["alpha_q"])
    call["positions"] = np.array([[position]])
    rotated = iha_torch.attention_stages(**tensors(call, dtype))[0]["rotated_q"][0, :, 0]
    with mpmath.workdps(40):
        for p in range(P):
            for i in range(d // 2):
                angle = (position * P + p) * mpmath.mpf(500000) ** (-mpmath.mpf(2 * i) / d)
                limit = 4 * 2.0**-53 * abs(float(angle)) + torch.finfo(dtype).eps
                assert abs(float(rotated[p, i]) - mpmath.cos(angle)) <= limit
                assert abs(float(rotated[p, i + d // 2]) - mpmath.sin(angle)) <= limit


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
    assert torch.equal(run(tensors(call)), run(tensors(wide)))
    for offset in (np.array(small, dtype=dtype), np.array([1, small], dtype=dtype)):
        call = plain_call(query_offset=offset)
        wide = plain_call(query_offset=offset.astype(np.int64))
        assert torch.equal(run(tensors(call)), run(tensors(wide)))
    plain = run(tensors(plain_call(query_offset=small)))
    torch.testing.assert_close(run(tensors(plain_call(query_offset=np.array(small)))), plain)
    assert torch.equal(run({**tensors(plain_call()), "query_offset": np.int64(small)}), plain)


# Hidden keys, empty rows, empty arrays


@pytest.mark.requirement("KEY-2", "KEY-3")
@each_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_dropped_keys_may_hold_anything(dtype: Any, poison: float, normalisation: str) -> None:
    key_mask = np.array([[True, False, True], [False, False, False]])
    clean = plain_call(config=AttentionConfig(normalisation=normalisation), key_mask=key_mask)
    dirty = {**clean, **{name: np.where(key_mask[..., None, None], clean[name], poison) for name in "kv"}}
    clean, dirty = (tensors(call, dtype, grad=True) for call in (clean, dirty))
    assert torch.equal(run(dirty), run(clean))
    for name, have, want in zip(FLOATS, gradients(dirty), gradients(clean), strict=True):
        assert torch.all(have.isfinite()), name
        assert torch.equal(have, want), name
    assert torch.all(gradients(dirty)[1][~torch.from_numpy(key_mask)] == 0)


@pytest.mark.requirement("SOFT-2")
@each_dtype
@pytest.mark.parametrize("widths", [(4, 4), (4, 3)])
@pytest.mark.parametrize("tokens", [4, 700])  # beyond a block of the CPU's kernel
def test_rows_that_see_nothing(dtype: Any, widths: tuple[int, int], tokens: int) -> None:
    d, e = widths
    segments = np.zeros((2, tokens), dtype=np.int64)
    segments[0, 1] = 1
    segments[1, :] = 1
    call = plain_call(N=tokens, M=tokens, d=d, e=e, P=1, segment_ids=segments)
    call["kv_segment_ids"] = np.zeros_like(segments)
    call = tensors(call, dtype, grad=True)
    output = run(call)
    assert torch.all(output[0, 1] == 0)
    assert torch.all(output[1] == 0)
    assert torch.all(output[0, 0] != 0)
    grads = dict(zip(FLOATS, gradients(call), strict=True))
    assert all(torch.all(grad.isfinite()) for grad in grads.values())
    assert torch.all(grads["q"][0, 1] == 0)
    assert all(torch.all(grads[name][1] == 0) for name in "qkv")


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"M": 0}, {"N": 0, "M": 0}])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_empty_arrays(sizes: dict[str, int], normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation, window=2)
    for options in ({}, {"query_offset": torch.tensor(1)}):
        call = tensors(plain_call(config=config, **sizes, **options), grad=True)
        output = run(call)
        assert output.shape == (sizes.get("B", 2), sizes.get("N", 3), 2, 3)
        assert torch.all(output == 0)
        assert all(torch.all(grad == 0) for grad in gradients(call))


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
    if "key_mask" in call:
        call["k"][~call["key_mask"]] = math.nan
    call = tensors(call, grad=True)
    rest = {name: x for name, x in call.items() if name not in FLOATS}

    def function(*floats: Any) -> Any:
        return iha_torch.attention(*floats, **rest)

    floats = [call[name] for name in FLOATS]
    if "key_mask" in call:  # finite differences of what holds NaN are NaN
        grad = torch.autograd.grad(function(*floats).sum(), floats[1])[0]
        assert torch.all(grad[~call["key_mask"]] == 0)
        floats[1] = torch.nan_to_num(floats[1].detach()).requires_grad_()
    assert torch.autograd.gradcheck(function, floats)


def test_arguments_are_left_alone() -> None:
    call = tensors(random_call(3))
    copies = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    run(call)
    assert all(torch.equal(call[name], copy) for name, copy in copies.items())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_vmap_equals_a_loop(normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation)
    call = tensors(plain_call(config=config))
    floats = [torch.stack([call[name], 2 * call[name]]) for name in FLOATS]
    key_mask = torch.tensor([[[True, False, True]] * 2, [[True, True, False]] * 2])
    offset = torch.tensor([0, 1])

    def loss(*x: Any) -> Any:
        return iha_torch.attention(*x[:7], config=config, key_mask=x[7], query_offset=x[8]).square().sum()

    arguments = (*floats, key_mask, offset)
    for function in (loss, torch.func.grad(loss, argnums=tuple(range(7)))):
        mapped = torch.func.vmap(function)(*arguments)
        looped = [function(*(x[i] for x in arguments)) for i in range(2)]
        for have, *want in zip(mapped, *looped, strict=True) if function is not loss else [(mapped, *looped)]:
            torch.testing.assert_close(have, torch.stack(want))


@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_compiles_in_one_graph_for_every_length(normalisation: str) -> None:
    torch.compiler.reset()
    config = AttentionConfig(normalisation=normalisation, window=2)
    compiled = torch.compile(iha_torch.attention, backend="aot_eager", fullgraph=True)
    for N in (5, 7):
        call = tensors(plain_call(N=N, M=N, config=config), grad=True)
        call["key_mask"] = torch.arange(N).expand(2, N) != 1
        call["query_offset"] = torch.tensor([0, 1])
        torch.testing.assert_close(compiled(**call), run(call))
        have = torch.autograd.grad(compiled(**call).sum(), [call[name] for name in FLOATS])
        want = torch.autograd.grad(run(call).sum(), [call[name] for name in FLOATS])
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b)


# Errors


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_errors_are_those_of_the_core(name: str) -> None:
    call = BAD_INPUTS[name](plain_call())
    with pytest.raises(IHAError) as expected:
        iha_core.attention(**call)
    with pytest.raises(type(expected.value)) as found:
        run(convert(call, torch.from_numpy))
    assert str(found.value) == str(expected.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", [*FLOATS, "key_mask", "segment_ids", "positions", "query_offset"])
def test_foreign_arrays_and_devices_are_refused_by_name(name: str) -> None:
    ids = np.zeros((2, 3), dtype=np.int64)
    options = {"segment_ids": ids, "positions": ids, "query_offset": ids[:, 0], "key_mask": ids == 0}
    arrays = plain_call(**options)
    call = tensors(arrays)
    with pytest.raises(iha_core.ArgumentTypeError, match=f"^`{name}`: expected a torch.Tensor, got ndarray$"):
        run({**call, name: arrays[name]})
    if name != "q":
        match = f"^`{name}` device: expected cpu, the device of `q`, got meta$"
        with pytest.raises(iha_core.ArgumentValueError, match=match):
            run({**call, name: call[name].to("meta")})


@pytest.mark.requirement("KEY-3")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "none"])
@pytest.mark.parametrize("N", [1, 2, 4, 7, 16])
def test_nan_is_not_taken_for_seeing_nothing(N: int, causal: Any, dtype: Any) -> None:
    call = plain_call(N=N, M=N, d=4, e=4, config=AttentionConfig(causal=causal))  # e = d: the fused kernel
    call["q"][0, N - 1] = np.nan
    output = run(tensors(call, dtype))
    assert torch.isnan(output[0, N - 1]).all()
    assert not torch.isnan(output[1]).any()


@pytest.mark.requirement("CFG-1")
@each_dtype
@pytest.mark.parametrize("causal", ["virtual", "token"])
def test_a_scale_that_float32_does_not_hold(causal: Any, dtype: Any) -> None:
    # Enough keys for no mask and e = d for the fused kernel: there 0 would meet the logits that are hidden.
    call = plain_call(N=40, M=40, d=4, e=4, config=AttentionConfig(causal=causal, scale=1e-50))
    output = run(tensors(call, dtype))
    assert torch.isfinite(output).all()


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", ["k", "alpha_v"])
def test_sparse_tensors_are_refused(name: str) -> None:
    call = tensors(plain_call())
    with pytest.raises(
        iha_core.ArgumentTypeError, match=f"^`{name}`: expected a dense tensor, got torch.sparse"
    ):
        run({**call, name: call[name].detach().to_sparse()})


def test_runs_without_data() -> None:
    call = convert(tensors(plain_call()), lambda x: x)
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    assert run(meta).shape == run(call).shape


def test_bfloat16_agrees_with_arrays_of_ml_dtypes() -> None:
    call = plain_call(config=AttentionConfig(rope="none"))
    rounded = {name: call[name].astype(ml_dtypes.bfloat16).astype(np.float64) for name in FLOATS}
    output = run(tensors(call, torch.bfloat16)).double().numpy()
    assert_conforms({"output": output}, {**call, **rounded}, "bfloat16")


@pytest.mark.requirement("CFG-1", "SOFT-1")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_any_scale_that_the_logits_allow(scale: float, normalisation: str) -> None:
    call = call_of_scale(scale, normalisation=normalisation)
    assert_conforms({"output": run(tensors(call, torch.float32)).numpy()}, call, "float32")
