"""Configuration and validation: every choice, every refusal, in one line that names the argument."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import mpmath
import numpy as np
import pytest

import iha_core
from iha_core import PROFILES, AttentionConfig, ConfigError, Dims, IHAError, validate
from iha_core.conditions import binding_conditions, scale_factors
from iha_core.validation import dtype_name


@pytest.mark.requirement("CFG-1")
def test_fields_and_defaults_are_those_of_the_specification() -> None:
    assert AttentionConfig().to_dict() == {
        "causal": "virtual",
        "window": None,
        "window_unit": "virtual",
        "rope": "virtual",
        "rope_theta": 500000.0,
        "rope_pairing": "half",
        "scale": None,
        "normalisation": "softmax",
    }


@pytest.mark.requirement("PROF-1")
def test_profiles_are_those_of_the_specification() -> None:
    assert set(PROFILES) == {"paper", "algorithm1", "theory", "mha-preserving"}
    assert PROFILES["paper"].config == PROFILES["algorithm1"].config == AttentionConfig()
    assert PROFILES["paper"].collapse == ("global",)
    assert PROFILES["algorithm1"].collapse == ("per_head",)
    assert PROFILES["theory"].config == AttentionConfig(causal="none", rope="none")
    preserving = PROFILES["mha-preserving"]
    assert preserving.config == AttentionConfig(causal="token", rope="token", window_unit="token")
    assert preserving.collapse == ("global", "per_head")


@pytest.mark.requirement("CFG-1", "CFG-2", "ERR-1")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("causal", "full", ValueError),
        ("causal", None, TypeError),
        ("causal", True, TypeError),
        ("causal", ["virtual"], TypeError),
        ("window", 0, ValueError),
        ("window", -1, ValueError),
        ("window", 2.0, TypeError),
        ("window", True, TypeError),
        ("window", "3", TypeError),
        ("window", np.zeros((3, 3)), TypeError),
        ("rope", np.zeros((50, 50)), TypeError),
        ("causal", "x" * 100000, ValueError),
        ("window_unit", "pseudo", ValueError),
        ("rope", "VIRTUAL", ValueError),
        ("rope_theta", 0, ValueError),
        ("rope_theta", float("nan"), ValueError),
        ("rope_theta", float("inf"), ValueError),
        ("rope_theta", "5e5", TypeError),
        ("rope_theta", True, TypeError),
        ("rope_pairing", "interleaved", ValueError),
        ("scale", 0.0, ValueError),
        ("scale", 10**400, ValueError),
        ("scale", -1.0, ValueError),
        ("scale", 1j, TypeError),
        ("normalisation", "sigmoid", ValueError),
    ],
)
def test_a_wrong_field_is_refused_in_one_line(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`{field}`: expected .+, got .+") as caught:
        AttentionConfig(**{field: value})
    assert isinstance(caught.value, IHAError)
    assert caught.value.argument == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.requirement("CFG-1", "ERR-1")
def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="`dropout`"):
        AttentionConfig.from_dict({"dropout": 0.1})
    with pytest.raises(TypeError, match="`config`"):
        AttentionConfig.from_dict([("window", 3)])  # type: ignore[arg-type]


def test_a_configuration_is_a_value() -> None:
    config = AttentionConfig(window=np.int32(3), scale=np.float32(0.5), rope_theta=100)  # type: ignore[arg-type]
    same = AttentionConfig(window=3, scale=0.5, rope_theta=100.0)
    assert config == same
    assert hash(config) == hash(same)
    assert type(config.window) is int
    assert type(config.scale) is float
    assert AttentionConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 4  # type: ignore[misc]


@pytest.mark.requirement("LOG-2")
def test_default_scale_is_of_the_head_width() -> None:
    assert AttentionConfig().resolve_scale(16) == 0.25
    assert AttentionConfig().resolve_scale(5) == 5**-0.5
    assert AttentionConfig(scale=0.7).resolve_scale(16) == 0.7


@pytest.mark.requirement("ROPE-4", "ROPE-5")
@pytest.mark.parametrize("theta", [500000.0, 10.0])
@pytest.mark.parametrize("d", [2, 6, 64, 80, 576])
def test_frequencies_leave_room_for_the_angle(theta: float, d: int) -> None:
    """Of the four roundoffs of an angle, the product with the position takes one."""
    with mpmath.workdps(40):
        for i, frequency in enumerate(AttentionConfig(rope_theta=theta).rope_frequencies(d)):
            exact = mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / d)
            assert abs(frequency - exact) <= 3 * 2.0**-53 * exact


@pytest.mark.requirement("TYP-1")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("torch.bfloat16", "bfloat16"), ("mlx.core.bool_", "bool"), (np.dtype("float32"), "float32")],
)
def test_dtype_names_lose_their_framework(dtype: Any, name: str) -> None:
    class Holder:
        pass

    holder = Holder()
    holder.dtype = dtype  # type: ignore[attr-defined]
    assert dtype_name(holder) == name


def _arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    sizes = {
        "q": (2, 5, 4, 6),
        "k": (2, 5, 2, 6),
        "v": (2, 5, 2, 3),
        "alpha_q": (4, 4, 3),
        "alpha_k": (2, 4, 3),
        "alpha_v": (2, 4, 3),
        "collapse": (4, 4, 3),
    }
    return {name: np.zeros(shape, np.float32) for name, shape in (sizes | shapes).items()}


@pytest.mark.requirement("ERR-1")
def test_the_message_of_the_specification() -> None:
    with pytest.raises(ValueError, match="alpha_k") as caught:
        validate(**_arrays(alpha_k=(4, 4, 3)), config=AttentionConfig())
    assert str(caught.value) == "`alpha_k` shape: expected (G=2, H=4, P=3), got (4, 4, 3)"


@pytest.mark.requirement("DIM-1", "DIM-2", "ERR-1")
@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("q", (2, 5, 24)),
        ("q", (2, 5, 0, 6)),
        ("q", (2, 5, 4, 0)),
        ("k", (1, 5, 2, 6)),
        ("k", (2, 5, 0, 6)),
        ("v", (2, 4, 2, 3)),
        ("v", (2, 5, 2, 0)),
        ("alpha_q", (4, 4, 0)),
        ("alpha_q", (4, 3, 3)),
        ("alpha_v", (2, 4, 2)),
        ("collapse", (4, 12)),
        ("collapse", (4, 4, 3, 1)),
    ],
)
def test_a_wrong_shape_is_refused(argument: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"`{argument}` shape: expected .+, got ") as caught:
        validate(**_arrays(**{argument: shape}), config=AttentionConfig())
    assert isinstance(caught.value, IHAError)


@pytest.mark.requirement("TYP-1", "TYP-2")
@pytest.mark.parametrize(
    ("storage", "parameter", "allowed"),
    [
        ("float64", "float64", True),
        ("float64", "float32", False),
        ("float32", "float64", False),
        ("float16", "float32", True),
        ("float16", "float16", True),
        ("float16", "float64", False),
    ],
)
def test_which_dtypes_go_together(storage: str, parameter: str, allowed: bool) -> None:
    arrays = {
        name: x.astype(storage if name in ("q", "k", "v") else parameter) for name, x in _arrays().items()
    }
    if allowed:
        validate(**arrays, config=AttentionConfig())
    else:
        with pytest.raises(TypeError, match="`alpha_q` dtype"):
            validate(**arrays, config=AttentionConfig())


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("argument", ["q", "alpha_k", "collapse", "key_mask", "positions"])
@pytest.mark.parametrize("value", [[1.0], 3, "x", np.ndarray, np])
def test_what_is_no_array_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{argument}`: expected an array"):
        validate(**_arrays() | {argument: value}, config=AttentionConfig())


@pytest.mark.requirement("ERR-1")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("wrap", [np.ma.masked_array, np.matrix])
def test_arrays_with_rules_of_their_own_are_refused(wrap: Any) -> None:
    arrays = _arrays(collapse=(4, 3))
    with pytest.raises(TypeError, match=r"`collapse`: expected a plain array, got (MaskedArray|matrix)"):
        validate(**arrays | {"collapse": wrap(arrays["collapse"])}, config=AttentionConfig())


@pytest.mark.requirement("ERR-1")
def test_the_configuration_is_an_object() -> None:
    with pytest.raises(TypeError, match="`config`: expected an AttentionConfig, got dict"):
        validate(**_arrays(), config={"window": 3})  # type: ignore[arg-type]


@pytest.mark.requirement("ARG-1", "ARG-2", "IDX-2", "TYP-3", "ERR-1")
@pytest.mark.parametrize(
    ("offset", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        (np.float32(1), TypeError),
        (np.bool_(True), TypeError),
        (np.zeros(3, int), ValueError),
        (np.zeros((2, 1), int), ValueError),
        (2**31, ValueError),
        (2**31 - 4, ValueError),
        (np.int64(2**40), ValueError),
        (-(2**31) - 1, ValueError),
        ("0", TypeError),
        (int, TypeError),
    ],
)
def test_a_wrong_offset_is_refused(offset: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`query_offset`"):
        validate(**_arrays(), config=AttentionConfig(), query_offset=offset)


@pytest.mark.requirement("ARG-1", "ARG-2")
@pytest.mark.parametrize(
    "offset", [0, -7, 2**31 - 5, -(2**31), np.int16(3), np.zeros((), np.int32), np.zeros(2, np.uint8)]
)
def test_a_right_offset_is_taken(offset: Any) -> None:
    validate(**_arrays(), config=AttentionConfig(), query_offset=offset)


@pytest.mark.requirement("MASK-1", "MASK-2", "WIN-1", "WIN-2")
def test_conditions_are_dropped_only_where_they_hide_nothing() -> None:
    """Against the reference's mask, on every small combination."""
    for causal in ("virtual", "token", "none"):
        for unit in ("virtual", "token"):
            for window in (None, 1, 2, 3, 5, 2**40):
                config = AttentionConfig(causal=causal, window=window, window_unit=unit)
                for N, M, P, offset in np.ndindex(3, 4, 3, 9):
                    dims = Dims(B=1, N=N + 1, M=M, H=1, G=1, P=P + 1, d=2, e=2, collapse_kind="global")
                    _check_binding(config, dims, offset - 3)


def _check_binding(config: AttentionConfig, dims: Dims, offset: int) -> None:
    causal, window = binding_conditions(config, dims, offset)
    query_index, key_index = iha_core.reference.token_indices(dims, offset)
    visible = iha_core.reference.visibility(query_index, key_index, dims, config)
    if window is None and config.window is not None:
        open_window = dataclasses.replace(config, window=None)
        np.testing.assert_array_equal(
            visible, iha_core.reference.visibility(query_index, key_index, dims, open_window)
        )
    if causal == "none":
        causal_alone = dataclasses.replace(config, window=None)
        assert iha_core.reference.visibility(query_index, key_index, dims, causal_alone).all()


@pytest.mark.requirement("CFG-1", "ERR-1")
def test_frequencies_beyond_float64_are_refused_by_name() -> None:
    assert AttentionConfig(rope_theta=5e-324).rope_frequencies(2) == (1.0,)
    expected = r"^`rope_theta`: expected frequencies within float64 for a head width d=64, got 5e-324$"
    with pytest.raises(ConfigError, match=expected):
        AttentionConfig(rope_theta=5e-324).rope_frequencies(64)


@pytest.mark.requirement("CFG-1", "SOFT-1")
@pytest.mark.parametrize("scale", [5e-324, 1e-50, 1e-39, 2.0**-126, 0.3, 1.0, 3e38, 1e39, 1e308])
def test_scales_come_in_factors_that_float32_holds(scale: float) -> None:
    assert scale_factors(scale, "float64") == (scale, 1.0)
    for storage in ("float32", "float16", "bfloat16"):
        factor, power = scale_factors(scale, storage)
        assert factor * power == min(max(scale, 2.0**-250), 2.0**250)
        assert all(2.0**-126 <= part < 2.0**128 for part in (factor, power))
        assert (power == 1.0) == (2.0**-126 <= scale < 2.0**128)
