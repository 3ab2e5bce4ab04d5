"""The Array API backend against the reference, under several namespaces and on devices that lack types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backend_cases import (
    BAD_INPUTS,
    EXACT,
    FLOATS,
    SCALES,
    Call,
    assert_conforms,
    call_of_scale,
    convert,
    plain_call,
    random_call,
    with_value_width,
)

import iha_core
from iha_core import AttentionConfig, IHAError

array_api_compat = pytest.importorskip("array_api_compat")
strict = pytest.importorskip("array_api_strict")
import iha_array_api  # noqa: E402

NAMESPACES = ("numpy", "array_api_strict", "torch")
NO_FLOAT64 = strict.Device("no_float64")
NO_64_BITS = strict.Device("no_x64")

each_namespace = pytest.mark.parametrize("namespace", NAMESPACES)


@pytest.fixture(autouse=True)
def strict_without_options() -> Iterator[None]:
    """array_api_strict without what the standard makes optional."""
    with strict.ArrayAPIStrictFlags(
        api_version="2024.12", boolean_indexing=False, data_dependent_shapes=False
    ):
        yield


def to_namespace(call: Call, namespace: str, device: Any = None) -> Call:
    if namespace == "numpy":
        return call
    if namespace == "torch":
        return convert(call, lambda x: pytest.importorskip("torch").from_numpy(np.array(x)))
    return convert(call, lambda x: strict.asarray(x, device=device))


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    return np.from_dlpack(x)


def narrowed(call: Call, dtype: Any, integer: Any = None) -> Call:
    """Floats in `dtype`, and int64 in `integer` where that is given."""

    def narrow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if x.dtype == np.float64:
            return x.astype(dtype)
        return x.astype(integer) if integer and x.dtype == np.int64 else x

    return convert(call, narrow)


@each_namespace
@pytest.mark.parametrize("seed", range(160))
def test_stages_agree_with_the_reference(seed: int, namespace: str) -> None:
    call = random_call(seed)
    expected = iha_core.attention_stages(**call)
    arguments = to_namespace(call, namespace)
    stages, kernel = iha_array_api.attention_stages(**arguments)
    assert kernel == "composed"
    assert list(stages) == list(expected)
    for name, stage in stages.items():
        assert type(stage) is type(arguments["q"]), name
    assert_conforms({name: to_numpy(stage) for name, stage in stages.items()}, call)
    assert np.array_equal(to_numpy(iha_array_api.attention(**arguments)), to_numpy(stages["output"]))


@pytest.mark.requirement("IDX-2", "ROPE-5")
@pytest.mark.parametrize("device", [NO_FLOAT64, NO_64_BITS], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_devices_without_64_bits_agree_bit_for_bit(seed: int, device: Any) -> None:
    call = narrowed(random_call(seed), np.float32, np.int32)
    expected, _ = iha_array_api.attention_stages(**to_namespace(call, "array_api_strict"))
    stages, _ = iha_array_api.attention_stages(**to_namespace(call, "array_api_strict", device))
    for name, stage in stages.items():
        assert stage.device == device
        assert np.array_equal(to_numpy(stage), to_numpy(expected[name])), name


def test_other_devices_are_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.zeros((2, 3), dtype=np.int64)
    call = plain_call(segment_ids=ids, positions=ids, query_offset=ids[:, 0], key_mask=ids == 0)
    arguments = to_namespace(call, "array_api_strict", strict.Device("device1"))
    with monkeypatch.context() as patch:
        patch.delattr(np, "from_dlpack")
        output = iha_array_api.attention(**arguments)
    assert_conforms({"output": to_numpy(output)}, call)


@pytest.mark.requirement("IDX-2", "POS-1", "ROPE-5")
@pytest.mark.parametrize("device", [None, NO_FLOAT64, NO_64_BITS], ids=str)
def test_virtual_positions_beyond_31_bits(device: Any) -> None:
    positions = np.array([[2**31 - 1, -(2**31), 2**30]] * 2, dtype=np.int32)
    call = narrowed(plain_call(P=3, positions=positions), np.float32)
    for offset in (None, 2**31 - 8):
        call["query_offset"] = offset
        stages, _ = iha_array_api.attention_stages(**to_namespace(call, "array_api_strict", device))
        assert_conforms({name: to_numpy(stage) for name, stage in stages.items()}, call, "float32")


FLOAT_TYPES = [
    ("numpy", np.float64),
    ("numpy", np.float32),
    ("numpy", np.float16),
    ("numpy", ml_dtypes.bfloat16),
    ("array_api_strict", np.float64),
    ("array_api_strict", np.float32),
    ("torch", "float16"),
    ("torch", "bfloat16"),
]
each_type = pytest.mark.parametrize(("namespace", "dtype"), FLOAT_TYPES, ids=str)


def in_type(call: Call, namespace: str, dtype: Any, parameters: Any = None) -> Call:
    """Floats in one of `FLOAT_TYPES`, the mixing and collapse in `parameters` where given."""
    arguments = to_namespace(call, namespace)
    for name in FLOATS:
        to = parameters if parameters and name in FLOATS[3:] else dtype
        if namespace == "torch":
            arguments[name] = arguments[name].to(getattr(pytest.importorskip("torch"), to))
        else:
            arguments[name] = to_namespace({name: call[name].astype(to)}, namespace)[name]
    return arguments


def values(x: Any) -> np.ndarray[Any, Any]:
    """Any float array in float64."""
    return to_numpy(x.double()) if hasattr(x, "double") else np.asarray(x).astype(np.float64)


@pytest.mark.requirement("SOFT-1", "LOG-2")
@each_type
@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name: str, namespace: str, dtype: Any) -> None:
    call, expected = with_value_width(*EXACT[name], 2)
    arguments = in_type(call, namespace, dtype)
    output = iha_array_api.attention(**arguments)
    assert output.dtype == arguments["q"].dtype
    assert np.array_equal(values(output)[0, :, 0], expected)


@pytest.mark.requirement("TYP-2")
@pytest.mark.parametrize(
    ("namespace", "dtype"), [kind for kind in FLOAT_TYPES if "16" in str(kind[1])], ids=str
)
@pytest.mark.parametrize("per_head", [False, True])
def test_parameters_of_float32_are_not_rounded(namespace: str, dtype: Any, per_head: bool) -> None:
    # 4096 (1 + 2^-12) - 4096 = 1; a rounded parameter gives 0
    fine = np.array([1 + 2.0**-12, -1.0])
    call = plain_call(B=1, N=1, M=1, H=1, G=2, P=2, d=2, config=AttentionConfig(causal="none", rope="none"))
    call["k"] = np.full_like(call["k"], 4096)
    call["v"] = np.full_like(call["v"], 2048)
    call["alpha_k"] = np.broadcast_to(fine[:, None, None], (2, 1, 2))
    call["alpha_v"] = np.ones((2, 1, 2))
    call["collapse"] = fine[None, :] if per_head else fine[None, None, :]
    call["alpha_q"] = np.zeros((1, 1, 2))
    stages, _ = iha_array_api.attention_stages(**in_type(call, namespace, dtype, "float32"))
    assert np.all(values(stages["mixed_k"]) == 1)
    assert np.all(values(stages["output"]) == 1)
    assert stages["output"].dtype == in_type(call, namespace, dtype)["q"].dtype


@pytest.mark.requirement("KEY-2", "KEY-3")
@each_type
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_dropped_keys_may_hold_anything(
    namespace: str, dtype: Any, poison: float, normalisation: str
) -> None:
    key_mask = np.array([[True, False, True], [False, False, False]])
    clean = plain_call(config=AttentionConfig(normalisation=normalisation), key_mask=key_mask)
    dirty = {**clean, **{name: np.where(key_mask[..., None, None], clean[name], poison) for name in "kv"}}
    outputs = [values(iha_array_api.attention(**in_type(call, namespace, dtype))) for call in (clean, dirty)]
    assert np.array_equal(*outputs)
    assert np.all(outputs[0][1] == 0)


@pytest.mark.requirement("DIM-2", "SOFT-2", "SOFT-3")
@each_namespace
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"M": 0}, {"N": 0, "M": 0}])
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_empty_arrays(namespace: str, sizes: dict[str, int], normalisation: str) -> None:
    config = AttentionConfig(normalisation=normalisation, window=2)
    call = plain_call(config=config, **sizes)
    stages, _ = iha_array_api.attention_stages(**to_namespace(call, namespace))
    assert stages["output"].shape == (sizes.get("B", 2), sizes.get("N", 3), 2, 3)
    assert np.all(to_numpy(stages["output"]) == 0)
    if sizes.get("M") == 0 and normalisation == "softmax":
        assert np.all(to_numpy(stages["lse"]) == -np.inf)


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
def test_gradients_where_the_namespace_has_them(options: Call) -> None:
    torch = pytest.importorskip("torch")
    call = plain_call(**options)
    poisoned = "key_mask" in call
    if poisoned:
        call["k"][~call["key_mask"]] = math.nan
    call = to_namespace(call, "torch")
    rest = {name: x for name, x in call.items() if name not in FLOATS}
    floats = [call[name].requires_grad_() for name in FLOATS]

    def function(*floats: Any) -> Any:
        return iha_array_api.attention(*floats, **rest)

    gradients = torch.autograd.grad(function(*floats).square().sum(), floats)
    assert all(torch.all(gradient.isfinite()) for gradient in gradients)
    if poisoned:  # finite differences of what holds NaN are NaN
        assert torch.all(gradients[1][~call["key_mask"]] == 0)
        floats[1] = torch.nan_to_num(floats[1].detach()).requires_grad_()
    assert torch.autograd.gradcheck(function, floats)


def test_gradients_of_no_keys_are_zero() -> None:
    torch = pytest.importorskip("torch")
    call = to_namespace(plain_call(M=0), "torch")
    floats = [call[name].requires_grad_() for name in FLOATS]
    for gradient in torch.autograd.grad(iha_array_api.attention(**call).square().sum(), floats):
        assert torch.all(gradient == 0)


@pytest.mark.requirement("TYP-3", "ARG-2")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
@each_namespace
def test_integers_of_every_type(dtype: str, namespace: str) -> None:
    top = min(int(np.iinfo(dtype).max), 2**31 - 3)  # the last index that three queries may start at
    ids = np.array([[top, 1, top - 1]] * 2, dtype=dtype)
    for offset in (np.array(top, dtype=dtype), ids[:, 0]):
        call = plain_call(
            segment_ids=ids, kv_segment_ids=ids.astype(np.int64), positions=ids, query_offset=offset
        )
        wide = convert(call, lambda x: x if x.dtype.kind == "f" else x.astype(np.int64))
        outputs = [iha_array_api.attention(**to_namespace(each, namespace)) for each in (call, wide)]
        assert np.array_equal(*map(to_numpy, outputs))


# Errors


@pytest.mark.requirement("ERR-1")
@each_namespace
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_errors_are_those_of_the_core(name: str, namespace: str) -> None:
    call = BAD_INPUTS[name](plain_call())
    with pytest.raises(IHAError) as expected:
        iha_core.attention(**call)
    with pytest.raises(type(expected.value)) as found:
        iha_array_api.attention(**to_namespace(call, namespace))
    assert str(found.value) == str(expected.value)


class Impostor:
    """Has a shape and a dtype, and is no array of any library."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.shape, self.dtype = array.shape, array.dtype


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("name", [*FLOATS, "key_mask", "segment_ids", "positions", "query_offset"])
def test_foreign_arrays_and_devices_are_refused_by_name(name: str) -> None:
    ids = np.zeros((2, 3), dtype=np.int64)
    options = {"segment_ids": ids, "positions": ids, "query_offset": ids[:, 0], "key_mask": ids == 0}
    arrays = plain_call(**options)
    call = to_namespace(arrays, "array_api_strict")
    match = f"^`{name}`: expected an array of the array API standard, got Impostor$"
    with pytest.raises(iha_core.ArgumentTypeError, match=match):
        iha_array_api.attention(**{**call, name: Impostor(arrays[name])})
    if name == "q":  # whatever q is, the others are measured by it
        return
    match = f"^`{name}`: expected an array of array_api_strict, the namespace of `q`, got one of .*numpy$"
    with pytest.raises(iha_core.ArgumentTypeError, match=match):
        iha_array_api.attention(**{**call, name: arrays[name]})
    other = strict.asarray(arrays[name], device=strict.Device("device1"))
    with pytest.raises(
        iha_core.ArgumentValueError, match=f"^`{name}` device: expected .*, the device of `q`"
    ):
        iha_array_api.attention(**{**call, name: other})


@pytest.mark.requirement("CFG-1", "SOFT-1")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("normalisation", ["softmax", "none"])
def test_any_scale_that_the_logits_allow(scale: float, normalisation: str) -> None:
    call = call_of_scale(scale, normalisation=normalisation)
    floats = {name: call[name].astype(np.float32) for name in FLOATS}
    assert_conforms({"output": iha_array_api.attention(**{**call, **floats})}, call, "float32")
