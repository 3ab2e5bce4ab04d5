"""The golden layer: against loops that share no code with it, at sizes of 0, and on bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layers import CONFIGS, example

import iha_core
from iha_core import AttentionConfig, IHAError, LayerConfig, attention
from iha_core.bounds import arithmetic, derive_layer_limits
from iha_core.initialisers import difference_from_mha, starts
from iha_core.layer_config import MIXING

Array = np.ndarray[Any, Any]


def by_loops(parameters: dict[str, Array], x: Array, config: LayerConfig, **options: Any) -> Array:
    """Equations (32) to (34), a number at a time, around the operation."""
    B, N, D = x.shape
    H, G, d, e = config.num_heads, config.num_kv_heads, config.head_width, config.value_width

    def heads(side: str, count: int, width: int) -> Array:
        out = np.zeros((B, N, count, width))
        for b, n, h, j in np.ndindex(*out.shape):
            row = h * width + j
            total = math.fsum(parameters[f"{side}_proj.weight"][row, c] * x[b, n, c] for c in range(D))
            out[b, n, h, j] = total + (parameters[f"{side}_proj.bias"][row] if config.bias else 0.0)
        if side != "v" and config.qk_norm:
            for b, n, h in np.ndindex(B, N, count):
                mean = math.fsum(number**2 for number in out[b, n, h]) / width
                for j in range(width):
                    weight = parameters[f"{side}_norm.weight"][j]
                    out[b, n, h, j] *= weight / math.sqrt(mean + config.qk_norm_epsilon)
        return out

    if config.kind == "iha":
        mixing = [parameters[name] for name in MIXING]
    else:
        alpha_q, grouped, collapse = np.zeros((H, H, 1)), np.zeros((G, H, 1)), np.zeros((H, H, 1))
        for h in range(H):
            alpha_q[h, h] = collapse[h, h] = grouped[h * G // H, h] = 1.0
        mixing = [alpha_q, grouped, grouped, collapse]
    q, k, v = heads("q", H, d), heads("k", G, d), heads("v", G, e)
    out = attention(q, k, v, *mixing, config=config.attention, **options)
    y = np.zeros((B, N, D))
    for b, n, c in np.ndindex(B, N, D):
        row = parameters["o_proj.weight"][c]
        y[b, n, c] = math.fsum(row[h * e + j] * out[b, n, h, j] for h in range(H) for j in range(e))
        y[b, n, c] += parameters["o_proj.bias"][c] if config.bias else 0.0
    return y


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "LAY-5", "LAY-6")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_is_what_loops_give(name: str) -> None:
    config = CONFIGS[name]
    parameters, x = example(config, "float64", N=5)
    options = {
        "key_mask": np.array([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]], bool),
        "segment_ids": np.array([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]),
        "positions": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]),
    }
    found = iha_core.layer(parameters, x, config=config, **options)
    exact, limit = derive_layer_limits(parameters, x, config=config, storage="float64", **options)
    np.testing.assert_array_equal(found, exact)
    assert np.all(np.abs(by_loops(parameters, x, config, **options) - found) <= limit / 2)


@pytest.mark.requirement("DIM-2")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"B": 0, "N": 0}])
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_of_0(name: str, sizes: dict[str, int]) -> None:
    parameters, x = example(CONFIGS[name], "float32", **sizes)
    assert iha_core.layer(parameters, x, config=CONFIGS[name]).shape == x.shape
    exact, limit = derive_layer_limits(parameters, x, config=CONFIGS[name], storage="float32")
    assert exact.shape == limit.shape == x.shape


PARAMETERS, X = example(CONFIGS["paper"], "float32")


@pytest.mark.requirement("ERR-1", "CKPT-4")
@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"parameters": None}, "parameters"),
        ({"parameters": {**PARAMETERS, "alpha_k": [[[1.0]]]}}, "alpha_k"),
        ({"parameters": {**PARAMETERS, "alpha_k": PARAMETERS["alpha_k"].astype(np.float64)}}, "alpha_k"),
        ({"parameters": {**PARAMETERS, "alpha_k": PARAMETERS["alpha_k"][:1]}}, "alpha_k"),
        ({"parameters": {**PARAMETERS, "gate": PARAMETERS["alpha_k"]}}, "gate"),
        ({"parameters": {n: a for n, a in PARAMETERS.items() if n != "collapse"}}, "collapse"),
        ({"x": X.tolist()}, "x"),
        ({"x": X + 1j}, "x"),
        ({"x": X > 0}, "x"),
        ({"x": X.astype(str)}, "x"),
        ({"x": np.ma.array(X)}, "x"),
        ({"x": X[0]}, "x"),
        ({"x": X[..., :-1]}, "x"),
        ({"config": None}, "config"),
        ({"config": AttentionConfig()}, "config"),
        ({"key_mask": np.ones((2, 7))}, "key_mask"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: dict[str, Any], argument: str) -> None:
    given: dict[str, Any] = {"parameters": PARAMETERS, "x": X, "config": CONFIGS["paper"], **arguments}
    with pytest.raises(IHAError) as error:
        iha_core.layer(given.pop("parameters"), given.pop("x"), **given)
    assert error.value.argument == argument
    assert "\n" not in str(error.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("P", [0, -1, None, "2", 1.0, True])
def test_what_is_no_number_of_pseudo_heads_is_no_question(P: Any) -> None:
    with pytest.raises(IHAError, match="`num_pseudo_heads`"):
        difference_from_mha(AttentionConfig(), "replicated-last", num_pseudo_heads=P)


@pytest.mark.requirement("ERR-1")
def test_other_things_than_configurations_and_dtypes_are_refused() -> None:
    with pytest.raises(IHAError, match="`attention`"):
        difference_from_mha(CONFIGS["paper"], "replicated-last", num_pseudo_heads=2)  # type: ignore[arg-type]
    with pytest.raises(IHAError, match="`config`"):
        starts(None)  # type: ignore[arg-type]
    for storage in ("int8", None, []):
        with pytest.raises(IHAError, match="`storage`"):
            arithmetic(storage)  # type: ignore[arg-type]
    with pytest.raises(IHAError, match="`precision`"):
        arithmetic("float32", [])  # type: ignore[arg-type]
