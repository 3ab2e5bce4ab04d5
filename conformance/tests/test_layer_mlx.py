"""The layer of the MLX backend: values, gradients, compilation, training, parameters, files."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import (
    CONFIGS,
    DIFFERENCES,
    SAME_FUNCTION,
    SAME_GRADIENT,
    assert_same,
    assert_within_limits,
    example,
    sharp_example,
)

import iha_core
from iha_core import AttentionConfig, IHAError, LayerConfig
from iha_core.initialisers import fixed_mixing, starts
from iha_core.layer_config import MIXING

mx = pytest.importorskip("mlx.core")
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402

import iha_mlx  # noqa: E402
from iha_mlx import InterleavedHeadAttention  # noqa: E402

DTYPES = ("float64", "float32", "float16", "bfloat16")
NARROW = ("float16", "bfloat16")

each_config = pytest.mark.parametrize("name", CONFIGS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    """Where float64 is, whatever the default device."""
    with mx.stream(mx.cpu):
        yield


def array(x: np.ndarray[Any, Any]) -> Any:
    """An array of NumPy as one of MLX, in its dtype."""
    if x.dtype.name == "bfloat16":
        return mx.array(x.astype(np.float32)).astype(mx.bfloat16)
    return mx.array(x, dtype=mx.float64) if x.dtype == np.float64 else mx.array(x)


def values(x: Any) -> np.ndarray[Any, Any]:
    """Any array in float64."""
    return np.array(x.astype(mx.float64))


def native(x: Any) -> np.ndarray[Any, Any]:
    """An array in its own dtype, by which `assert_within_limits` judges too."""
    return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16) if x.dtype == mx.bfloat16 else np.array(x)


def parameters(layer: Any) -> dict[str, Any]:
    return tree_flatten(layer.parameters(), destination={})


def layer_of(tensors: Mapping[str, np.ndarray[Any, Any]], config: LayerConfig) -> Any:
    """A layer with the parameters given."""
    layer = InterleavedHeadAttention(config, initialiser="random")
    layer.load_weights([(name, array(tensor)) for name, tensor in tensors.items()])
    return layer


def drawn(name: str = "grouped", dtype: str = "float64", **sizes: Any) -> tuple[Any, Any]:
    """A layer of random parameters, and an input."""
    tensors, x = example(CONFIGS[name], dtype, **sizes)
    return layer_of(tensors, CONFIGS[name]), array(x)


OPTIONS: Mapping[str, dict[str, np.ndarray[Any, Any]]] = {
    "none": {},
    "key_mask": {"key_mask": np.array([[True] * 5 + [False] * 2, [False, True] * 3 + [False]])},
    "segment_ids": {"segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1], [3, 3, 2, 2, 2, 1, 1]])},
    "positions": {"positions": np.array([[0, 1, 2, 0, 1, 2, 3], [-5, 7, 70, 71, 72, 1000, 4]])},
    "no key at all": {"key_mask": np.zeros((2, 7), dtype=np.bool_)},
}


# Values


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "LAY-5", "LAY-6", "LAY-7")
@each_dtype
@each_config
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [example, sharp_example])
def test_outputs_are_within_their_limits(kind: Any, option: str, name: str, dtype: str) -> None:
    config, options = CONFIGS[name], OPTIONS[option]
    tensors, x = kind(config, dtype)
    output = layer_of(tensors, config)(array(x), **{key: array(value) for key, value in options.items()})
    assert_within_limits(native(output), tensors, x, config=config, storage=dtype, **options)


@pytest.mark.requirement("LAY-7")
@each_config
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kind", [example, sharp_example])
def test_mixing_in_float32_in_a_narrower_layer(kind: Any, name: str, dtype: str) -> None:
    config = CONFIGS[name]
    tensors, x = kind(config, dtype, parameter_dtype="float32")
    output = layer_of(tensors, config)(array(x))
    assert_within_limits(native(output), tensors, x, config=config, storage=dtype)


@pytest.mark.requirement("LAY-7")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_projections_sum_in_float32(bias: bool, tokens: int, dtype: str) -> None:
    """A running sum of ones in 16 bits stops at 256 or 2048."""
    D = 4096
    config = LayerConfig(
        kind="mha", model_width=D, num_heads=1, head_width=2, value_width=D, bias=bias, attention=BARE
    )
    layer = InterleavedHeadAttention(config, dtype=getattr(mx, dtype))
    layer.apply(mx.ones_like)
    layer.o_proj.weight = mx.ones_like(layer.o_proj.weight) / D
    x = mx.ones((1, tokens, D), dtype=getattr(mx, dtype))
    for projection in (layer.q_proj, layer.v_proj):
        assert mx.all(projection(x) == D)  # D + 1 with a bias, which is rounded to D
    assert mx.all(layer(x) == D)


BARE = AttentionConfig(causal="none", rope="none")


@pytest.mark.requirement("LAY-4", "LAY-7")
@each_dtype
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
def test_the_norm_is_rounded_once(size: float, dtype: str) -> None:
    config = LayerConfig(model_width=64, num_heads=1, qk_norm=True)
    layer = InterleavedHeadAttention(config, dtype=getattr(mx, dtype))
    rng = np.random.default_rng(7)
    x = mx.array(size * rng.standard_normal((2, 50, 4, 64)), dtype=mx.float64).astype(getattr(mx, dtype))
    layer.q_norm.weight = (1 + mx.random.uniform(shape=(64,))).astype(getattr(mx, dtype))
    wide = values(x)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * values(layer.q_norm.weight)
    found = layer.q_norm(x)
    assert found.dtype == x.dtype
    # half a unit of the one rounding, and of the 64 + 6 roundings of the accumulator
    half = float(mx.finfo(getattr(mx, dtype)).eps) / 2
    accumulator = 2.0**-53 if dtype == "float64" else 2.0**-24
    assert np.all(np.abs(values(found) - exact) <= (half + 70 * accumulator) * np.abs(exact) + 2.0**-25)
    if dtype in NARROW:
        rounded = mx.array(exact, dtype=mx.float64).astype(getattr(mx, dtype))
        assert mx.mean(found != rounded) < 0.01


@pytest.mark.requirement("LAY-4")
@each_dtype
def test_the_norm_of_zeros_is_zero_whatever_epsilon(dtype: str) -> None:
    config = LayerConfig(model_width=4, num_heads=2, qk_norm=True, qk_norm_epsilon=2.0**-126, attention=BARE)
    layer = InterleavedHeadAttention(config, dtype=getattr(mx, dtype))
    zeros = mx.zeros((1, 3, 2, 2), dtype=getattr(mx, dtype))
    assert mx.all(layer.q_norm(zeros) == 0)
    assert mx.all(layer(mx.zeros((1, 3, 4), dtype=getattr(mx, dtype))) == 0)


@pytest.mark.requirement("LAY-4")
def test_epsilon_is_that_of_the_configuration() -> None:
    tensors, x = example(CONFIGS["grouped"], "float64")
    config = LayerConfig.from_dict({**CONFIGS["grouped"].to_dict(), "qk_norm_epsilon": 0.5})
    found = native(layer_of(tensors, config)(array(x)))
    assert_within_limits(found, tensors, x, config=config, storage="float64")


@pytest.mark.requirement("LAY-5")
@each_dtype
@each_config
@pytest.mark.parametrize(("B", "N"), [(0, 7), (2, 0), (0, 0)])
def test_empty_inputs(B: int, N: int, name: str, dtype: str) -> None:
    layer, x = drawn(name, dtype, B=B, N=N)
    output = layer(x, key_mask=mx.ones((B, N), dtype=mx.bool_))
    assert output.shape == x.shape
    assert output.dtype == x.dtype
    grads = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)[1]
    assert all(mx.all(grad == 0) for _, grad in tree_flatten(grads))


@pytest.mark.requirement("LAY-3", "LAY-5")
def test_tokens_that_see_nothing_give_the_bias() -> None:
    layer, x = drawn("grouped", "float32")
    output = layer(x, key_mask=mx.zeros((2, 7), dtype=mx.bool_))
    assert mx.array_equal(output, mx.broadcast_to(layer.o_proj.bias, output.shape))


@pytest.mark.requirement("LAY-6")
def test_fixed_mixing_is_no_parameter() -> None:
    layer, x = drawn("mha", "float32")
    assert not set(MIXING) & set(parameters(layer))
    for name, tensor in fixed_mixing(CONFIGS["mha"]).items():
        assert np.array_equal(values(layer[f"_{name}"]), tensor)
    layer.set_dtype(mx.bfloat16)
    assert layer(x.astype(mx.bfloat16)).dtype == mx.bfloat16
    layer.freeze()
    layer.unfreeze()
    assert set(tree_flatten(layer.trainable_parameters(), destination={})) == set(parameters(layer))


# Parameters


@pytest.mark.requirement("CKPT-1")
@each_config
@each_dtype
def test_parameters_have_the_names_and_shapes_of_the_specification(dtype: str, name: str) -> None:
    layer = InterleavedHeadAttention(CONFIGS[name], initialiser="random", dtype=getattr(mx, dtype))
    found = parameters(layer)
    assert {key: tensor.shape for key, tensor in found.items()} == CONFIGS[name].parameter_shapes()
    assert {tensor.dtype for tensor in found.values()} == {getattr(mx, dtype)}


@pytest.mark.requirement("LAY-7")
@pytest.mark.parametrize("dtype", NARROW)
def test_mixing_dtype_is_of_the_operation_alone(dtype: str) -> None:
    layer = InterleavedHeadAttention(CONFIGS["grouped"], dtype=getattr(mx, dtype), mixing_dtype=mx.float32)
    for name, tensor in parameters(layer).items():
        assert tensor.dtype == (mx.float32 if name in MIXING else getattr(mx, dtype)), name


@pytest.mark.requirement("INIT-1", "INIT-2", "INIT-3", "INIT-4", "INIT-5")
@pytest.mark.parametrize("initialiser", iha_core.initialisers.INITIALISERS)
@pytest.mark.parametrize("collapse", ["global", "per_head"])
def test_parameters_start_as_the_specification_says(collapse: Any, initialiser: Any) -> None:
    config = LayerConfig(
        model_width=96,
        num_heads=12,
        num_kv_heads=6,
        num_pseudo_heads=16,
        qk_norm=True,
        bias=True,
        collapse=collapse,
    )
    mx.random.seed(0)
    found = parameters(InterleavedHeadAttention(config, initialiser=initialiser, dtype=mx.float64))
    for name, start in starts(config, initialiser).items():
        noise = values(found[name]) - start.mean
        if not start.deviation:
            assert np.all(noise == 0), name
            continue
        sizes = noise.ravel() / start.deviation
        # six deviations of the mean, of the variance and of the part within one deviation
        assert abs(sizes.mean()) <= 6 / math.sqrt(sizes.size), name
        assert abs(sizes.var() - 1) <= 6 * math.sqrt(2 / sizes.size), name
        within = math.erf(math.sqrt(0.5))
        assert abs(np.mean(np.abs(sizes) < 1) - within) <= 6 * math.sqrt(within * (1 - within) / sizes.size)
        assert np.unique(sizes).size > 0.95 * sizes.size, name


@pytest.mark.requirement("INIT-1")
def test_the_seed_decides_the_parameters() -> None:
    def of_seed(seed: int) -> dict[str, Any]:
        mx.random.seed(seed)
        return parameters(InterleavedHeadAttention(CONFIGS["grouped"]))

    first, again, other = of_seed(1), of_seed(1), of_seed(2)
    for name, tensor in first.items():
        assert mx.array_equal(tensor, again[name])
        if not name.endswith((".bias", "_norm.weight")):
            assert not mx.any(tensor == other[name])


@pytest.mark.requirement("INIT-2")
def test_a_replicated_start_is_multi_head_attention() -> None:
    preserving = AttentionConfig(causal="token", rope="token", window=3, window_unit="token")
    sizes = {"model_width": 12, "num_heads": 4, "num_kv_heads": 2, "head_width": 4, "attention": preserving}
    iha = InterleavedHeadAttention(LayerConfig(**sizes), initialiser="replicated-average", dtype=mx.float64)
    mha = InterleavedHeadAttention(LayerConfig(kind="mha", **sizes), dtype=mx.float64)
    mha.update({name: iha[name].parameters() for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    x = mx.random.normal((2, 9, 12)).astype(mx.float64)
    exact = []
    for layer in (iha, mha):
        tensors = {name: values(tensor) for name, tensor in parameters(layer).items()}
        assert_within_limits(native(layer(x)), tensors, values(x), config=layer.config, storage="float64")
        exact.append(iha_core.layer(tensors, values(x), config=layer.config))
    assert_same(*exact, SAME_FUNCTION)


def test_set_dtype_is_a_layer_of_that_dtype() -> None:
    layer, x = drawn("grouped", "float32")
    layer.set_dtype(mx.bfloat16)
    found = parameters(layer)
    assert {tensor.dtype for tensor in found.values()} == {mx.bfloat16}
    tensors = {name: values(tensor) for name, tensor in found.items()}
    x = x.astype(mx.bfloat16)
    assert_within_limits(native(layer(x)), tensors, values(x), config=CONFIGS["grouped"], storage="bfloat16")


@each_dtype
@each_config
def test_weights_are_saved_and_loaded_by_mlx(name: str, dtype: str, tmp_path: Path) -> None:
    layer, x = drawn(name, dtype)
    file = str(tmp_path / ("weights.npz" if dtype != "bfloat16" else "weights.safetensors"))
    layer.save_weights(file)
    other = InterleavedHeadAttention(CONFIGS[name], initialiser="random", dtype=getattr(mx, dtype))
    other.load_weights(file)
    assert mx.array_equal(other(x), layer(x))


def test_a_copy_is_a_layer_of_its_own() -> None:
    layer, x = drawn("grouped", "float32")
    other = copy.deepcopy(layer)
    other.alpha_q = other.alpha_q + 1
    assert other.config == layer.config
    assert not mx.allclose(other(x), layer(x))
    other.alpha_q = layer.alpha_q
    assert mx.array_equal(other(x), layer(x))


@pytest.mark.requirement("LAY-2")
def test_projections_may_be_replaced_by_quantised_ones() -> None:
    config = LayerConfig(model_width=64, num_heads=2, head_width=32, num_pseudo_heads=2)
    layer = InterleavedHeadAttention(config)
    x = mx.random.normal((1, 5, 64))
    expected = layer(x)
    nn.quantize(layer, group_size=32, bits=8)
    assert isinstance(layer.q_proj, nn.QuantizedLinear)
    assert mx.abs(layer(x) - expected).max() < 0.05 * mx.abs(expected).max()


# Differentiation and transformation


@pytest.mark.requirement("GRAD-1", "GRAD-6", "GRAD-7")
@each_config
def test_gradients_by_finite_differences(name: str) -> None:
    layer, x = drawn(name, N=4)
    mask = mx.array([[True, True, False, True], [True] * 4])
    cotangent = mx.array(np.cos(np.arange(x.size)).reshape(x.shape), dtype=mx.float64)

    def loss(tensors: Any, x: Any) -> Any:
        layer.update(tensors)
        return (layer(x, key_mask=mask) * cotangent).sum()

    tensors = layer.parameters()
    grads, x_grad = mx.grad(loss, argnums=(0, 1))(tensors, x)
    flat = {**dict(tree_flatten(grads)), "x": x_grad}
    assert set(flat) == {*CONFIGS[name].parameter_shapes(), "x"}
    step = 2.0**-17
    for key, grad in flat.items():
        along = mx.array(np.sin(1.0 + np.arange(grad.size)).reshape(grad.shape), dtype=mx.float64)

        def moved(to: float, key: str = key, along: Any = along) -> float:
            there = dict(tree_flatten(tensors))
            move = mx.array(to, dtype=mx.float64) * along
            if key == "x":
                return float(loss(tensors, x + move).item())
            there[key] = there[key] + move
            layer.load_weights(list(there.items()))
            found = (layer(x, key_mask=mask) * cotangent).sum()
            return float(found.item())

        # central differences of two steps, the error of order step^2 removed
        wide, close = ((moved(width) - moved(-width)) / (2 * width) for width in (2 * step, step))
        found = float((grad * along).sum().item())
        assert found == pytest.approx((4 * close - wide) / 3, rel=DIFFERENCES / 10, abs=DIFFERENCES / 100), (
            key
        )


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_have_the_dtypes_of_their_parameters(dtype: str) -> None:
    narrow = dtype in NARROW
    tensors, x = example(CONFIGS["grouped"], dtype, parameter_dtype="float32" if narrow else None)
    layer = layer_of(tensors, CONFIGS["grouped"])
    wide = layer_of({name: t.astype(np.float64) for name, t in tensors.items()}, CONFIGS["grouped"])
    x = array(x)

    def gradients(layer: Any, x: Any) -> dict[str, Any]:
        def loss(x: Any) -> Any:
            return layer(x).astype(mx.float32 if x.dtype != mx.float64 else mx.float64).square().sum()

        return dict(tree_flatten(nn.value_and_grad(layer, loss)(x)[1]))

    have, want = gradients(layer, x), gradients(wide, x.astype(mx.float64))
    eps = float(mx.finfo(getattr(mx, dtype)).eps)
    for name, tensor in parameters(layer).items():
        assert have[name].dtype == tensor.dtype, name
        error = np.linalg.norm(values(have[name]) - values(want[name]))
        assert error <= 16 * eps * np.linalg.norm(values(want[name])), name


@each_config
@each_dtype
def test_vmap_equals_a_loop(dtype: str, name: str) -> None:
    config = CONFIGS[name]
    tensors, x = example(config, dtype, B=6)
    layer = layer_of(tensors, config)
    mask = np.arange(42).reshape(6, 7) % 5 != 1
    ids = np.arange(42).reshape(6, 7) // 4
    options = {"key_mask": mask, "segment_ids": ids, "positions": ids}

    def mapped(x: Any, *options: Any) -> Any:
        return layer(x, key_mask=options[0], segment_ids=options[1], positions=options[1])

    stacked = [array(each).reshape(3, 2, *each.shape[1:]) for each in (x, mask, ids)]
    output = mx.vmap(mapped)(*stacked).reshape(x.shape)
    assert_within_limits(native(output), tensors, x, config=config, storage=dtype, **options)


@each_config
def test_vmap_of_gradients_equals_a_loop(name: str) -> None:
    layer, x = drawn(name)
    stacked = mx.stack([x, x[::-1], x - 1])
    grad = mx.grad(lambda x: layer(x).square().sum())
    found, expected = mx.vmap(grad)(stacked), mx.stack([grad(each) for each in stacked])
    assert_same(values(found), values(expected), SAME_GRADIENT)


@each_config
@each_dtype
def test_compiles_once_for_each_shape(dtype: str, name: str) -> None:
    config = CONFIGS[name]
    traces = []
    layer, _ = drawn(name, dtype)

    def forward(x: Any, key_mask: Any) -> Any:
        traces.append(x.shape)
        return layer(x, key_mask=key_mask)

    compiled = mx.compile(forward, inputs=layer.state)
    for N in (5, 7):
        for seed in (0, 1, 2):
            tensors, x = example(config, dtype, seed=seed, N=N)
            layer.load_weights([(key, array(tensor)) for key, tensor in tensors.items()])
            mask = np.arange(N)[None] != np.array([[seed], [N]])
            found = native(compiled(array(x), array(mask)))
            assert_within_limits(found, tensors, x, config=config, storage=dtype, key_mask=mask)
    assert traces == [(2, 5, config.model_width), (2, 7, config.model_width)]


# Training


def regression(D: int, dtype: Any = None) -> tuple[Any, Any]:
    """An input and a target that depends on earlier tokens: their running mean."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 8, D)).astype(np.float32)
    target = np.cumsum(x, axis=1) / np.arange(1, 9)[:, None]
    return mx.array(x).astype(dtype or mx.float32), mx.array(target.astype(np.float32))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mixing"), [("float32", None), ("bfloat16", "float32"), ("bfloat16", None)]
)
@each_config
def test_training_reduces_the_loss(name: str, dtype: str, mixing: str | None, compiled: bool) -> None:
    config = CONFIGS[name]
    start: Any = "random" if config.num_heads % config.num_kv_heads else "noisy-average"
    mx.random.seed(4)
    layer = InterleavedHeadAttention(
        config, initialiser=start, dtype=getattr(mx, dtype), mixing_dtype=mixing and getattr(mx, mixing)
    )
    x, target = regression(config.model_width, getattr(mx, dtype))
    optimizer = optimizers.Adam(learning_rate=1e-2)
    optimizer.init(layer.trainable_parameters())
    before = tree_map(lambda tensor: tensor, layer.parameters())
    traces = []

    def loss(x: Any, target: Any) -> Any:
        return (layer(x).astype(mx.float32) - target).square().mean()

    def step(x: Any, target: Any) -> Any:
        traces.append(x.shape)
        value, grads = nn.value_and_grad(layer, loss)(x, target)
        optimizer.update(layer, grads)
        return value

    state = [layer.state, optimizer.state]
    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    losses = []
    for _ in range(60):
        losses.append(run(x, target).item())
        mx.eval(state)
    assert losses[-1] < 0.6 * losses[0]
    if compiled:
        assert len(traces) == 1
    for (key, old), (_, new) in zip(tree_flatten(before), tree_flatten(layer.parameters()), strict=True):
        assert new.dtype == old.dtype, key
        if not key.endswith("k_proj.bias"):  # which softmax without rotation does not see
            assert not mx.array_equal(old, new), key


@pytest.mark.requirement("INIT-3")
@pytest.mark.parametrize(
    ("initialiser", "stay_equal"), [("replicated-average", True), ("noisy-average", False)]
)
def test_copies_of_a_head_stay_copies_without_noise(initialiser: Any, stay_equal: bool) -> None:
    attention = AttentionConfig(causal="token", rope="token")
    config = LayerConfig(model_width=8, num_heads=2, num_pseudo_heads=4, attention=attention)
    layer = InterleavedHeadAttention(config, initialiser=initialiser, dtype=mx.float64)
    x, target = regression(8, mx.float64)
    optimizer = optimizers.SGD(learning_rate=0.1)
    for _ in range(5):
        grads = nn.value_and_grad(layer, lambda: (layer(x) - target).square().mean())()[1]
        optimizer.update(layer, grads)
    for name in MIXING:
        spread = mx.abs(layer[name] - layer[name][..., :1]).max().item()
        assert (spread <= 1e-14) is stay_equal, name
        assert mx.abs(layer[name] - starts(config, initialiser)[name].mean).max() > 1e-4, name


def test_training_and_evaluation_are_alike() -> None:
    layer, x = drawn("grouped", "float32")
    assert layer.training
    trained = layer(x)
    layer.eval()
    assert not layer.training
    assert mx.array_equal(layer(x), trained)
    layer.train()
    assert mx.array_equal(layer(x), trained)


def test_frozen_parameters_receive_no_gradient() -> None:
    layer, x = drawn("grouped", "float32")
    full = set(parameters(layer))
    layer.freeze(keys=["alpha_q", "collapse"])
    layer.v_proj.freeze()
    frozen = {"alpha_q", "collapse", "v_proj.weight", "v_proj.bias"}
    grads = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)[1]
    assert set(tree_flatten(grads, destination={})) == full - frozen
    layer.unfreeze()
    grads = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)[1]
    assert set(tree_flatten(grads, destination={})) == full
    assert set(parameters(layer)) == full


# Errors


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (mx.zeros((7, 10)), r"^`x` shape: expected \(B, N, D=10\), got \(7, 10\)$"),
        (mx.zeros((1, 2, 7, 10)), r"^`x` shape: expected \(B, N, D=10\), got \(1, 2, 7, 10\)$"),
        (mx.zeros((2, 7, 9)), r"^`x` shape: expected \(B, N, D=10\), got \(2, 7, 9\)$"),
        (mx.zeros((2, 0, 9)), r"^`x` shape: expected \(B, N, D=10\), got \(2, 0, 9\)$"),
        (
            mx.zeros((2, 7, 10), dtype=mx.bfloat16),
            r"^`x` dtype: expected float32, the dtype of `q_proj.weight`, got bfloat16$",
        ),
        (
            mx.zeros((2, 7, 10), dtype=mx.int32),
            r"^`x` dtype: expected float32, the dtype of `q_proj.weight`, got int32$",
        ),
        (np.zeros((2, 7, 10), dtype=np.float32), r"^`x`: expected an mlx.core.array, got ndarray$"),
        (None, r"^`x`: expected an mlx.core.array, got NoneType$"),
    ],
)
def test_a_wrong_input_is_refused_by_name(x: Any, message: str) -> None:
    with pytest.raises(IHAError, match=message):
        InterleavedHeadAttention(CONFIGS["grouped"])(x)


@pytest.mark.requirement("ERR-1", "LAY-5")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_mask": mx.ones((2, 7))}, "^`key_mask` dtype: expected bool, got float32$"),
        ({"key_mask": mx.ones((2, 6), dtype=mx.bool_)}, "^`key_mask` shape: "),
        ({"segment_ids": mx.ones((7,), dtype=mx.int32)}, "^`segment_ids` shape: "),
        ({"positions": mx.ones((2, 7))}, "^`positions` dtype: "),
        ({"positions": np.ones((2, 7), dtype=np.int32)}, "^`positions`: expected an mlx.core.array"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(IHAError, match=message):
        InterleavedHeadAttention(CONFIGS["grouped"])(mx.zeros((2, 7, 10)), **options)


@pytest.mark.requirement("ERR-1", "CKPT-1")
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("q_proj.weight", (24, 9), "float32"),
        ("k_proj.bias", (24,), "float32"),
        ("q_norm.weight", (5,), "float32"),
        ("alpha_k", (4, 4, 3), "float32"),
        ("collapse", (4, 3), "float32"),
        ("collapse", (4, 4, 3), "float16"),
        ("o_proj.weight", (10, 20), "float16"),
        ("k_norm.weight", (6,), "bfloat16"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_by_name(name: str, shape: Any, dtype: str) -> None:
    layer = InterleavedHeadAttention(CONFIGS["grouped"])
    layer.load_weights([(name, mx.zeros(shape, dtype=getattr(mx, dtype)))], strict=False)
    with pytest.raises(IHAError, match=f"^`{name}` (shape|dtype): expected .+, got .+") as caught:
        layer(mx.zeros((2, 7, 10)))
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("ERR-1", "TYP-1", "TYP-2")
@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dtype": mx.int32}, "dtype"),
        ({"dtype": "float32"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"mixing_dtype": "bfloat16"}, "mixing_dtype"),
        ({"mixing_dtype": mx.bfloat16}, "mixing_dtype"),
        ({"dtype": mx.float64, "mixing_dtype": mx.float32}, "mixing_dtype"),
        ({"dtype": mx.bfloat16, "mixing_dtype": mx.float16}, "mixing_dtype"),
        ({"dtype": mx.bfloat16, "mixing_dtype": mx.float64}, "mixing_dtype"),
        ({"initialiser": "orthogonal"}, "initialiser"),
        ({"initialiser": None}, "initialiser"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(IHAError, match=f"^`{argument}`: expected .+, got .+") as caught:
        InterleavedHeadAttention(CONFIGS["grouped"], **options)
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("ERR-1", "INIT-2")
def test_a_wrong_configuration_is_refused_by_name() -> None:
    with pytest.raises(IHAError, match=r"^`config`: expected a LayerConfig, got dict$"):
        InterleavedHeadAttention(CONFIGS["grouped"].to_dict())
    with pytest.raises(IHAError, match=r"^`num_kv_heads`: expected a divisor of num_heads=2"):
        InterleavedHeadAttention(CONFIGS["window"])


@pytest.mark.requirement("ERR-2")
def test_float64_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = drawn()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    with pytest.raises(NotImplementedError, match=r"^float64 runs on the CPU only"):
        layer(x)


@pytest.mark.requirement("ERR-1")
def test_only_its_own_layers_are_saved(tmp_path: Path) -> None:
    with pytest.raises(
        IHAError, match=r"^`layer`: expected an InterleavedHeadAttention of iha_mlx, got Linear$"
    ):
        iha_mlx.save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
    layer = InterleavedHeadAttention(CONFIGS["paper"])
    layer.alpha_q = layer.alpha_q[:1]
    with pytest.raises(IHAError, match=r"^`alpha_q` shape: expected \(3, 3, 2\), got \(1, 3, 2\)$"):
        iha_mlx.save_checkpoint(tmp_path / "a", layer)
    assert not list(tmp_path.iterdir())


# Checkpoints: what MLX alone does with files


@pytest.mark.requirement("CKPT-2", "CKPT-4")
@each_dtype
@each_config
def test_a_layer_is_read_as_it_was_written(name: str, dtype: str, tmp_path: Path) -> None:
    for mixing in (None, "float32") if dtype in NARROW else (None,):
        tensors, x = example(CONFIGS[name], dtype, parameter_dtype=mixing)
        layer, x = layer_of(tensors, CONFIGS[name]), array(x)
        path = tmp_path / "layer.checkpoint"  # no suffix that MLX knows
        iha_mlx.save_checkpoint(path, layer)
        assert list(tmp_path.iterdir()) == [path]
        found = iha_mlx.load_checkpoint(path)
        assert found.config == CONFIGS[name]
        for key, tensor in parameters(layer).items():
            assert parameters(found)[key].dtype == tensor.dtype, key
            assert mx.array_equal(parameters(found)[key], tensor), key
        assert mx.array_equal(found(x), layer(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_special_are_read_as_they_were_written(dtype: str, tmp_path: Path) -> None:
    layer = InterleavedHeadAttention(CONFIGS["paper"], dtype=getattr(mx, dtype))
    info = mx.finfo(getattr(mx, dtype))
    odd = [-0.0, math.inf, -math.inf, float(info.max), float(info.smallest_normal), float(info.eps)]
    width = layer.alpha_q.size
    layer.alpha_q = mx.array((odd * width)[:width], dtype=mx.float64).astype(info.dtype).reshape(3, 3, 2)
    iha_mlx.save_checkpoint(tmp_path / "a", layer)
    found = iha_mlx.load_checkpoint(tmp_path / "a").alpha_q
    assert np.array_equal(np.signbit(values(found)), np.signbit(values(layer.alpha_q)))
    assert np.array_equal(values(found), values(layer.alpha_q))


def test_a_file_may_be_replaced_while_its_layer_is_in_use(tmp_path: Path) -> None:
    """MLX reads tensors when they are needed: they have to be there before."""
    layer, x = drawn("grouped", "float32")
    expected = layer(x)
    path = tmp_path / "layer.safetensors"
    iha_mlx.save_checkpoint(path, layer)
    found = iha_mlx.load_checkpoint(path)
    path.write_bytes(b"")
    assert mx.array_equal(found(x), expected)
    iha_mlx.save_checkpoint(path, found)
    lazy = InterleavedHeadAttention(CONFIGS["grouped"])
    lazy.load_weights(str(path))
    iha_mlx.save_checkpoint(path, lazy)  # over the file that its tensors come from
    assert mx.array_equal(iha_mlx.load_checkpoint(path)(x), expected)


def test_views_are_written_as_they_read(tmp_path: Path) -> None:
    layer, x = drawn("paper", "float32")
    layer.alpha_q = layer.alpha_q.swapaxes(0, 1)
    layer.q_proj.weight = layer.q_proj.weight[:, ::-1]
    iha_mlx.save_checkpoint(tmp_path / "a", layer)
    assert mx.array_equal(iha_mlx.load_checkpoint(tmp_path / "a")(x), layer(x))
