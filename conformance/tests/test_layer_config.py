"""`LayerConfig`: every field, every refusal, and the shapes of the parameters that follow."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

import iha_core
from iha_core import ArgumentTypeError, AttentionConfig, ConfigError, IHAError, LayerConfig
from iha_core.layer_config import MIXING

GROUPED: dict[str, Any] = {
    "kind": "iha",
    "model_width": 10,
    "num_heads": 4,
    "head_width": 6,
    "num_pseudo_heads": 3,
    "num_kv_heads": 2,
    "value_width": 5,
    "bias": True,
    "qk_norm": True,
    "qk_norm_epsilon": 1e-5,
    "collapse": "per_head",
    "attention": {
        "causal": "token",
        "window": 3,
        "window_unit": "token",
        "rope": "token",
        "rope_theta": 10000.0,
        "rope_pairing": "adjacent",
        "scale": 0.5,
        "normalisation": "none",
    },
}
"""Every field of another value than its default."""


@pytest.mark.requirement("LAY-1")
def test_fields_and_defaults_are_those_of_the_specification() -> None:
    assert LayerConfig(model_width=12, num_heads=3).to_dict() == {
        "kind": "iha",
        "model_width": 12,
        "num_heads": 3,
        "head_width": 4,
        "num_pseudo_heads": 3,
        "num_kv_heads": 3,
        "value_width": 4,
        "bias": False,
        "qk_norm": False,
        "qk_norm_epsilon": 1e-6,
        "collapse": "global",
        "attention": AttentionConfig().to_dict(),
    }


@pytest.mark.requirement("LAY-1", "LAY-6")
def test_defaults_follow_from_other_fields() -> None:
    plain = LayerConfig(kind="mha", model_width=12, num_heads=3)
    assert (plain.num_pseudo_heads, plain.num_kv_heads) == (1, 3)
    assert LayerConfig(model_width=7, num_heads=3, head_width=4).value_width == 4
    assert LayerConfig(model_width=12, num_heads=3, value_width=5).head_width == 4
    assert LayerConfig(model_width=12, num_heads=3, num_kv_heads=2).num_pseudo_heads == 3


@pytest.mark.requirement("LAY-1")
def test_every_field_is_kept() -> None:
    config = LayerConfig.from_dict(GROUPED)
    assert config.to_dict() == GROUPED
    default = LayerConfig(model_width=1, num_heads=1, attention=AttentionConfig(rope="none")).to_dict()
    assert all(GROUPED[name] != value for name, value in default.items() if name != "kind")


@pytest.mark.requirement("CKPT-3")
@pytest.mark.parametrize("kind", ["iha", "mha"])
def test_a_configuration_is_json(kind: Any) -> None:
    """Written and read again it is the same; so are its fields without those that have their defaults."""
    config = LayerConfig(kind=kind, model_width=12, num_heads=3, qk_norm=True)
    assert LayerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert LayerConfig.from_dict({"kind": kind, "model_width": 12, "num_heads": 3, "qk_norm": True}) == config
    assert LayerConfig.from_dict({**config.to_dict(), "attention": config.attention}) == config


def test_a_configuration_is_a_value() -> None:
    config = LayerConfig(
        model_width=np.int64(12),  # type: ignore[arg-type]
        num_heads=np.int32(3),  # type: ignore[arg-type]
        qk_norm_epsilon=np.float32(0.5),  # type: ignore[arg-type]
    )
    same = LayerConfig(model_width=12, num_heads=3, head_width=4, num_pseudo_heads=3, qk_norm_epsilon=0.5)
    assert config == same
    assert hash(config) == hash(same)
    assert {type(config.model_width), type(config.num_heads)} == {int}
    assert type(config.qk_norm_epsilon) is float
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bias = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        LayerConfig("iha", 12, 3)  # type: ignore[misc]


@pytest.mark.parametrize("name", GROUPED)
def test_every_field_tells_configurations_apart(name: str) -> None:
    other: dict[str, Any] = {
        "collapse": "global",
        "bias": False,
        "qk_norm": False,
        "attention": {},
        "qk_norm_epsilon": 0.25,
    }
    changed = {**GROUPED, name: other.get(name, 8)}
    if name == "kind":
        changed |= {"kind": "mha", "num_pseudo_heads": 1}
    assert LayerConfig.from_dict(changed) != LayerConfig.from_dict(GROUPED)


@pytest.mark.requirement("LAY-1", "ERR-1")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("kind", "gqa", ConfigError),
        ("kind", None, ArgumentTypeError),
        ("model_width", 0, ConfigError),
        ("model_width", None, ArgumentTypeError),
        ("model_width", 12.0, ArgumentTypeError),
        ("model_width", "12", ArgumentTypeError),
        ("model_width", True, ArgumentTypeError),
        ("num_heads", 0, ConfigError),
        ("num_heads", -3, ConfigError),
        ("num_heads", None, ArgumentTypeError),
        ("head_width", 0, ConfigError),
        ("head_width", 5, ConfigError),  # odd, with a rotation
        ("head_width", 4.0, ArgumentTypeError),
        ("num_pseudo_heads", 0, ConfigError),
        ("num_pseudo_heads", [2], ArgumentTypeError),
        ("num_kv_heads", 0, ConfigError),
        ("num_kv_heads", np.ones(3), ArgumentTypeError),
        ("value_width", 0, ConfigError),
        ("value_width", False, ArgumentTypeError),
        ("bias", 1, ArgumentTypeError),
        ("bias", None, ArgumentTypeError),
        ("qk_norm", "yes", ArgumentTypeError),
        ("qk_norm", np.True_, ArgumentTypeError),
        ("qk_norm_epsilon", 0.0, ConfigError),
        ("qk_norm_epsilon", 1e-38, ConfigError),
        ("qk_norm_epsilon", 1e39, ConfigError),
        ("qk_norm_epsilon", -1e-6, ConfigError),
        ("qk_norm_epsilon", float("nan"), ConfigError),
        ("qk_norm_epsilon", float("inf"), ConfigError),
        ("qk_norm_epsilon", 10**400, ConfigError),
        ("qk_norm_epsilon", "1e-6", ArgumentTypeError),
        ("qk_norm_epsilon", True, ArgumentTypeError),
        ("collapse", "mean", ConfigError),
        ("collapse", None, ArgumentTypeError),
        ("attention", {}, ArgumentTypeError),
        ("attention", None, ArgumentTypeError),
        ("attention", "x" * 100000, ArgumentTypeError),
    ],
)
def test_a_wrong_field_is_refused_in_one_line(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^`{field}`: expected .+, got .+") as caught:
        LayerConfig(**{"model_width": 12, "num_heads": 3, field: value})
    assert isinstance(caught.value, IHAError)
    assert caught.value.argument == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.requirement("LAY-1", "LAY-6", "ROPE-6", "ERR-1")
@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        ({"model_width": 13}, "head_width", "a width, as num_heads=3 does not divide model_width=13"),
        ({"model_width": 15}, "head_width", "an even width with rope='virtual'"),
        (
            {"model_width": 15, "attention": AttentionConfig(rope="token")},
            "head_width",
            "an even width with rope='token'",
        ),
        ({"kind": "mha", "num_pseudo_heads": 2}, "num_pseudo_heads", "1 with kind='mha'"),
        ({"kind": "mha", "num_kv_heads": 2}, "num_kv_heads", "a divisor of num_heads=3 with kind='mha'"),
        ({"kind": "mha", "num_kv_heads": 6}, "num_kv_heads", "a divisor of num_heads=3 with kind='mha'"),
    ],
)
def test_fields_that_disagree_are_refused(fields: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LayerConfig(**{"model_width": 12, "num_heads": 3, **fields})
    assert str(caught.value).startswith(f"`{field}`: expected {expected}, got ")


@pytest.mark.requirement("LAY-1")
def test_what_only_one_kind_or_rotation_needs_is_free_otherwise() -> None:
    assert LayerConfig(model_width=12, num_heads=3, num_kv_heads=2).num_kv_heads == 2
    assert LayerConfig(model_width=12, num_heads=3, num_kv_heads=5).num_kv_heads == 5
    unrotated = AttentionConfig(rope="none")
    assert LayerConfig(model_width=15, num_heads=3, attention=unrotated).head_width == 5
    assert LayerConfig(model_width=13, num_heads=3, head_width=2).head_width == 2
    assert LayerConfig(kind="mha", model_width=12, num_heads=3, num_pseudo_heads=1).num_pseudo_heads == 1


@pytest.mark.requirement("LAY-1", "CKPT-4", "ERR-1")
@pytest.mark.parametrize(
    ("fields", "argument", "error"),
    [
        ({"model_width": 12}, "num_heads", ConfigError),
        ({"num_heads": 3}, "model_width", ConfigError),
        ({}, "model_width", ConfigError),
        ({"model_width": 12, "num_heads": 3, "dropout": 0.1}, "dropout", ConfigError),
        ({"model_width": 12, "num_heads": 3, "attention": {"dropout": 0.1}}, "dropout", ConfigError),
        ({"model_width": 12, "num_heads": 3, "attention": {"window": 0}}, "window", ConfigError),
        ({"model_width": 12, "num_heads": 3, "attention": [1]}, "config", ArgumentTypeError),
        ({"model_width": 12, "num_heads": 3, "attention": None}, "config", ArgumentTypeError),
        ([("model_width", 12)], "config", ArgumentTypeError),
        (None, "config", ArgumentTypeError),
        ("{}", "config", ArgumentTypeError),
        ({"model_width": 12, "num_heads": 3, 5: 1}, "5", ConfigError),
    ],
)
def test_wrong_mappings_are_refused(fields: Any, argument: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LayerConfig.from_dict(fields)
    assert isinstance(caught.value, IHAError)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_a_mapping_is_left_alone() -> None:
    fields = {"model_width": 12, "num_heads": 3, "attention": {"window": 2}}
    LayerConfig.from_dict(fields)
    assert fields == {"model_width": 12, "num_heads": 3, "attention": {"window": 2}}


# Parameters


@pytest.mark.requirement("CKPT-1", "LAY-2", "LAY-3")
def test_all_parameters_have_their_shapes() -> None:
    D, H, G, P, d, e = 10, 4, 2, 3, 6, 5
    assert LayerConfig.from_dict({**GROUPED, "collapse": "global"}).parameter_shapes() == {
        "q_proj.weight": (H * d, D),
        "q_proj.bias": (H * d,),
        "k_proj.weight": (G * d, D),
        "k_proj.bias": (G * d,),
        "v_proj.weight": (G * e, D),
        "v_proj.bias": (G * e,),
        "o_proj.weight": (D, H * e),
        "o_proj.bias": (D,),
        "q_norm.weight": (d,),
        "k_norm.weight": (d,),
        "alpha_q": (H, H, P),
        "alpha_k": (G, H, P),
        "alpha_v": (G, H, P),
        "collapse": (H, H, P),
    }


@pytest.mark.requirement("CKPT-1", "LAY-6")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", ["iha", "mha"])
@pytest.mark.parametrize("collapse", ["global", "per_head"])
def test_parameters_are_there_where_they_are_used(
    collapse: Any, kind: Any, qk_norm: bool, bias: bool
) -> None:
    config = LayerConfig(
        kind=kind, model_width=12, num_heads=3, bias=bias, qk_norm=qk_norm, collapse=collapse
    )
    projections = [f"{letter}_proj.weight" for letter in "qkvo"]
    if bias:
        projections += [f"{letter}_proj.bias" for letter in "qkvo"]
    norms = ["q_norm.weight", "k_norm.weight"] if qk_norm else []
    shapes = config.parameter_shapes()
    assert set(shapes) == {*projections, *norms, *(MIXING if kind == "iha" else ())}
    assert shapes.get("collapse") == {"mha": None, "iha": (3, 3, 3) if collapse == "global" else (3, 3)}[kind]


@pytest.mark.requirement("CKPT-4", "ERR-1")
@pytest.mark.parametrize("name", LayerConfig.from_dict(GROUPED).parameter_shapes())
def test_parameters_are_held_to_the_configuration(name: str) -> None:
    config = LayerConfig.from_dict(GROUPED)
    shapes = config.parameter_shapes()
    config.check_parameters(shapes)
    config.check_parameters({key: list(shape) for key, shape in shapes.items()})  # type: ignore[misc]
    with pytest.raises(iha_core.ArgumentValueError, match=f"^`{name}`: expected a tensor .+, got none of"):
        config.check_parameters({key: shape for key, shape in shapes.items() if key != name})
    for wrong in ((*shapes[name], 1), shapes[name][:-1], (*shapes[name][:-1], shapes[name][-1] + 1)):
        with pytest.raises(iha_core.ShapeError) as caught:
            config.check_parameters({**shapes, name: wrong})
        assert str(caught.value) == f"`{name}` shape: expected {shapes[name]}, got {wrong}"


@pytest.mark.requirement("CKPT-4", "ERR-1")
def test_a_parameter_too_many_is_refused() -> None:
    config = LayerConfig(model_width=12, num_heads=3)
    with pytest.raises(iha_core.ArgumentValueError) as caught:
        config.check_parameters({**config.parameter_shapes(), "q_proj.bias": (12,)})
    assert str(caught.value) == (
        "`q_proj.bias`: expected no tensor beside q_proj.weight, k_proj.weight, v_proj.weight,"
        " o_proj.weight, alpha_q, alpha_k, alpha_v, collapse, got one of that name"
    )


@pytest.mark.requirement("LAY-1", "ERR-1")
def test_the_layer_takes_the_right_types() -> None:
    config = LayerConfig(model_width=12, num_heads=3)
    parameters = {name: np.zeros(shape) for name, shape in config.parameter_shapes().items()}
    with pytest.raises(IHAError, match=r"^`config`: expected a LayerConfig, got dict$"):
        iha_core.layer(parameters, np.zeros((1, 2, 12)), config=config.to_dict())  # type: ignore[arg-type]
    with pytest.raises(IHAError, match=r"^`x` shape: expected \(B, N, D=12\), got \(2, 12\)$"):
        iha_core.layer(parameters, np.zeros((2, 12)), config=config)
    with pytest.raises(IHAError, match=r"^`x` shape: expected \(B, N, D=12\), got \(1, 2, 11\)$"):
        iha_core.layer(parameters, np.zeros((1, 2, 11)), config=config)
    with pytest.raises(IHAError, match=r"^`alpha_q`: expected a tensor"):
        iha_core.layer(
            {k: t for k, t in parameters.items() if k != "alpha_q"}, np.zeros((1, 2, 12)), config=config
        )
