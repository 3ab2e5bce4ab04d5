"""The layer of JAX against the golden one, and what holds for it alone: transformations, Flax, files."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from iha_core import AttentionConfig, IHAError, LayerConfig, checkpoint
from iha_core.initialisers import INITIALISERS, starts
from iha_core.layer_config import MIXING

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import iha_jax  # noqa: E402
from iha_jax import InterleavedHeadAttention, layer, load_checkpoint, save_checkpoint  # noqa: E402

DTYPES = ("float64", "float32", "float16", "bfloat16")
MIXED = (*((dtype, dtype) for dtype in DTYPES), ("bfloat16", "float32"), ("float16", "float32"))
GROUPED = CONFIGS["grouped"]

each_layer = pytest.mark.parametrize("name", CONFIGS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_mixture = pytest.mark.parametrize(("dtype", "mixing_dtype"), MIXED)


@pytest.fixture(autouse=True)
def _float64_where_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Float64 is enabled for tests of that dtype alone: most programs run without it."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    with jax.enable_x64(parameters.get("dtype") == "float64"):
        yield


def arrays(config: LayerConfig, dtype: str = "float32", **options: Any) -> tuple[dict[str, Any], Any]:
    """Parameters and input of JAX, with random values in all."""
    parameters, x = example(config, dtype, **options)
    return {name: jnp.asarray(value) for name, value in parameters.items()}, jnp.asarray(x)


def compiled(config: LayerConfig, **options: Any) -> Callable[..., Any]:
    return jax.jit(lambda params, x: layer.apply(params, x, config=config, **options))


def assert_layer(found: Any, params: Any, x: Any, config: LayerConfig, **options: Any) -> None:
    """Hold an output, however it was computed, to the limits of a layer of JAX's arrays."""
    parameters = {name: np.asarray(value) for name, value in params.items()}
    options = {name: np.asarray(value) for name, value in options.items()}
    storage = x.dtype.name
    assert_within_limits(
        np.asarray(found), parameters, np.asarray(x), config=config, storage=storage, **options
    )


def assert_same_gradients(found: Any, wanted: Any) -> None:
    assert set(found) == set(wanted)
    for name, want in wanted.items():
        assert_same(found[name], want, SAME_GRADIENT)


@functools.cache
def direct_gradients() -> dict[str, np.ndarray[Any, Any]]:
    """Of the layer by itself in float64, to which other ways to run it are compared."""
    params, x = arrays(GROUPED, "float64")
    loss = lambda p: jnp.square(layer.apply(p, x, config=GROUPED)).sum()  # noqa: E731
    return {name: np.asarray(grad) for name, grad in jax.jit(jax.grad(loss))(params).items()}


def neutral_masks(B: int, N: int) -> dict[str, Any]:
    """What changes nothing, so that one program shows which of them do."""
    return {
        "key_mask": jnp.ones((B, N), dtype=bool),
        "segment_ids": jnp.zeros((B, N), dtype=jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (B, N)),
    }


def assert_takes_every_mask(function: Callable[..., Any], x: Any) -> None:
    """`function(x, **masks)`, compiled: each mask changes what it gives."""
    neutral = neutral_masks(*x.shape[:2])
    plain = function(x, **neutral)
    for key, value in masks(*x.shape[:2]).items():
        assert not jnp.array_equal(function(x, **{**neutral, key: jnp.asarray(value)}), plain), key


def masks(B: int, N: int) -> dict[str, Any]:
    """A row without keys, segments of their own lengths, positions out of order; as NumPy arrays."""
    rng = np.random.default_rng(5)
    key_mask = rng.random((B, N)) < 0.6
    key_mask[0] = False
    segment_ids = np.sort(rng.integers(0, 3, (B, N)), axis=1).astype(np.int32)
    return {
        "key_mask": key_mask,
        "segment_ids": segment_ids,
        "positions": rng.integers(-9, 99, (B, N)).astype(np.int32),
    }


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# Against the golden layer


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "LAY-5", "LAY-6", "LAY-7", "TYP-2")
@each_layer
@pytest.mark.parametrize(
    ("dtype", "mixing_dtype", "masked"),
    [*((*dtypes, True) for dtypes in MIXED), *((dtype, dtype, False) for dtype in ("float32", "bfloat16"))],
)
def test_every_layer_keeps_to_its_limits(name: str, dtype: str, mixing_dtype: str, masked: bool) -> None:
    config = CONFIGS[name]
    options = {key: jnp.asarray(value) for key, value in masks(2, 7).items()} if masked else {}
    function = compiled(config, **options)
    for kind in (example, sharp_example):
        parameters, x = kind(config, dtype, parameter_dtype=mixing_dtype)
        params, x = {key: jnp.asarray(value) for key, value in parameters.items()}, jnp.asarray(x)
        assert_layer(function(params, x), params, x, config, **options)


@pytest.mark.requirement("LAY-7")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_projections_are_wide_and_rounded_once(dtype: str) -> None:
    """257 times 1 and as many of 2^-9 are 257.5: lost in 16 bits term by term, and by a bias added later."""
    D = 514
    config = LayerConfig(
        kind="mha",
        model_width=D,
        num_heads=1,
        head_width=2,
        bias=True,
        attention=AttentionConfig(rope="none"),
    )
    params = {name: jnp.zeros(shape, dtype) for name, shape in config.parameter_shapes().items()}
    params["v_proj.weight"] = jnp.concatenate([jnp.ones((2, 257)), jnp.full((2, 257), 2.0**-9)], 1).astype(
        dtype
    )
    params["v_proj.bias"] = jnp.full(2, -257.0, dtype)  # in bfloat16 that is -256, and 1 more is left
    params["o_proj.weight"] = jnp.ones((D, 2), dtype)
    out = compiled(config)(params, jnp.ones((1, 1, D), dtype))
    left = 257 + 257 * 2.0**-9 + float(params["v_proj.bias"][0])
    rounded = float(np.asarray(left).astype(jnp.dtype(dtype)))
    assert jnp.all(out == jnp.asarray(2 * rounded, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_compilation_the_result_is_as_good(dtype: str) -> None:
    parameters, x = example(GROUPED, dtype)
    params = {name: jnp.asarray(value) for name, value in parameters.items()}
    found = layer.apply(params, jnp.asarray(x), config=GROUPED)
    assert_within_limits(np.asarray(found), parameters, x, config=GROUPED, storage=dtype)


@pytest.mark.requirement("LAY-4")
@pytest.mark.parametrize(
    ("dtype", "epsilon"), [("float64", 2.0**-126), ("float32", 2.0**-126), ("float32", 1e30)]
)
def test_heads_of_zeros_stay_zero_whatever_the_epsilon(dtype: str, epsilon: float) -> None:
    config = dataclasses.replace(GROUPED, bias=False, qk_norm_epsilon=epsilon)
    params, x = arrays(config, dtype)
    loss = lambda p, x: jnp.square(layer.apply(p, x, config=config)).sum()  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss))(params, x.at[:, 1].set(0))
    assert jnp.isfinite(value)
    assert all(jnp.all(jnp.isfinite(grad)) for grad in grads.values())


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"B": 0, "N": 0}])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@each_layer
def test_empty_inputs(name: str, dtype: str, sizes: dict[str, int]) -> None:
    config = CONFIGS[name]
    params, x = arrays(config, dtype, **sizes)

    def loss(p: Any) -> Any:
        output = layer.apply(p, x, config=config)
        return jnp.square(output).sum(), output

    grads, output = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert output.shape == x.shape
    assert all(jnp.all(grad == 0) for grad in grads.values())


@pytest.mark.requirement("SOFT-2", "KEY-3")
def test_rows_that_see_nothing_give_the_bias_whatever_the_dropped_tokens_hold() -> None:
    params, x = arrays(GROUPED)
    function = jax.jit(lambda x, key_mask: layer.apply(params, x, config=GROUPED, key_mask=key_mask))
    out = function(x, jnp.array([[False] * 7, [True] * 7]))
    assert jnp.array_equal(out[0], jnp.broadcast_to(params["o_proj.bias"], x.shape[1:]))
    key_mask = jnp.ones((2, 7), dtype=bool).at[:, 3].set(False)
    others = jnp.arange(7) != 3
    clean = function(x, key_mask)[:, others]
    for poison in (math.nan, math.inf):
        assert jnp.array_equal(function(x.at[:, 3].set(poison), key_mask)[:, others], clean)


@pytest.mark.requirement("PROF-2", "INIT-6")
def test_a_replicated_layer_is_the_plain_one() -> None:
    plain = CONFIGS["mha"]
    params, x = arrays(plain)
    config = dataclasses.replace(plain, kind="iha", num_pseudo_heads=4)  # 1/4 is a number of float32
    drawn = layer.init(jax.random.key(0), config, initialiser="replicated-average")
    replicated = {**params, **{name: drawn[name] for name in MIXING}}
    exact = []
    for each, given in ((plain, params), (config, replicated)):
        assert_layer(compiled(each)(given, x), given, x, each)
        exact.append(iha_core.layer(given, x, config=each))
    assert_same(*exact, SAME_FUNCTION)


# Starts


@pytest.mark.requirement("INIT-1", "INIT-2", "INIT-3", "INIT-4", "INIT-5")
@pytest.mark.parametrize("initialiser", INITIALISERS)
@each_mixture
def test_starts_are_those_of_the_specification(initialiser: Any, dtype: str, mixing_dtype: str) -> None:
    """Means and deviations, by samples of which no one in 10^9 is as far off."""
    config = LayerConfig(
        model_width=60, num_heads=6, num_pseudo_heads=5, num_kv_heads=3, bias=True, qk_norm=True
    )
    params = layer.init(
        jax.random.key(7), config, initialiser=initialiser, dtype=dtype, mixing_dtype=mixing_dtype
    )
    assert list(params) == list(config.parameter_shapes())
    for name, start in starts(config, initialiser).items():
        value = np.asarray(params[name])
        assert value.dtype == np.dtype(mixing_dtype if name in MIXING else dtype), name
        assert value.shape == start.mean.shape
        if not start.deviation:
            assert same_bits(value, start.mean.astype(value.dtype)), name
            continue
        scores = (value.astype(np.float64) - start.mean) / start.deviation
        rounding = float(ml_dtypes.finfo(value.dtype).eps) / start.deviation
        n = scores.size
        assert abs(scores.mean()) <= 6.2 / math.sqrt(n) + rounding, name
        assert abs(np.mean(scores**2) - 1) <= 6.2 * math.sqrt(2 / n) + 20 / n + 2 * rounding, name
        assert len(np.unique(scores)) > n / 4, name


@pytest.mark.requirement("INIT-1")
def test_every_parameter_is_drawn_by_a_key_of_its_own() -> None:
    config = LayerConfig(model_width=8, num_heads=2, num_pseudo_heads=2)
    draw = drawing(config)
    params = draw(jax.random.key(0))
    for a, b in (
        ("q_proj.weight", "k_proj.weight"),
        ("alpha_k", "alpha_v"),
        ("v_proj.weight", "o_proj.weight"),
    ):
        assert not jnp.array_equal(params[a], params[b])
    again, other = draw(jax.random.key(0)), draw(jax.random.key(1))
    assert all(same_bits(params[name], again[name]) for name in params)
    assert not any(jnp.array_equal(params[name], other[name]) for name in params)
    # the same weights whatever else the layer has, traced or not, by a key of either kind
    biased = drawing(dataclasses.replace(config, bias=True, qk_norm=True))(jax.random.key(0))
    raw = draw(jax.random.PRNGKey(0))
    traced = jax.jit(draw)(jax.random.key(0))
    for name in params:
        assert same_bits(params[name], biased[name])
        assert same_bits(params[name], raw[name])
        np.testing.assert_allclose(traced[name], params[name], rtol=1e-6, atol=1e-7)


def drawing(config: LayerConfig) -> Callable[..., Any]:
    return InterleavedHeadAttention(config).init


@each_layer
def test_the_shapes_of_a_start_are_known_without_it(name: str) -> None:
    config = CONFIGS[name]
    module = InterleavedHeadAttention(config)
    shapes = jax.eval_shape(
        lambda key: module.init(key, initialiser="random", dtype=jnp.bfloat16, mixing_dtype=jnp.float32),
        jax.random.key(0),
    )
    assert {key: found.shape for key, found in shapes.items()} == config.parameter_shapes()
    for key, found in shapes.items():
        assert found.dtype == ("float32" if key in MIXING else "bfloat16")


# Transformations


def test_the_layer_is_a_value() -> None:
    module, twin = InterleavedHeadAttention(GROUPED), InterleavedHeadAttention(dataclasses.replace(GROUPED))
    assert module == twin
    assert hash(module) == hash(twin)
    assert module != InterleavedHeadAttention(CONFIGS["paper"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.config = CONFIGS["paper"]  # type: ignore[misc]
    params, x = arrays(GROUPED)
    options = {key: jnp.asarray(value) for key, value in masks(2, 7).items()}
    found = jax.jit(lambda params, x: module.apply(params, x, **options, precision="high"))(params, x)
    assert same_bits(found, compiled(GROUPED, **options, precision="high")(params, x))
    assert_takes_every_mask(jax.jit(functools.partial(module.apply, params)), x)


def test_configuration_and_layer_may_be_static_arguments() -> None:
    params, x = arrays(GROUPED)
    want = compiled(GROUPED)(params, x)
    static = jax.jit(layer.apply, static_argnames=("config", "precision"))
    assert jnp.array_equal(static(params, x, config=GROUPED, precision="highest"), want)
    bound = jax.jit(InterleavedHeadAttention.apply, static_argnums=0)
    assert jnp.array_equal(bound(InterleavedHeadAttention(GROUPED), params, x), want)


@pytest.mark.parametrize("dtype", ["float32"])
def test_shapes_are_compiled_once_each(dtype: str) -> None:
    function = compiled(GROUPED)
    for seed in range(2):
        for B, N in ((2, 7), (3, 4)):
            parameters, x = example(GROUPED, dtype, seed=seed, B=B, N=N)
            params = {name: jnp.asarray(value) for name, value in parameters.items()}
            found = function(params, jnp.asarray(x))
            assert_within_limits(np.asarray(found), parameters, x, config=GROUPED, storage=dtype)
    assert function._cache_size() == 2


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("name", ["grouped", "mha"])
def test_vmap_equals_a_loop_over_layers_and_inputs(name: str, dtype: str) -> None:
    """An ensemble: stacked parameters, each with an input and a mask of its own."""
    config = CONFIGS[name]
    members = [arrays(config, dtype, seed=seed) for seed in range(3)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for params, _ in members))
    x = jnp.stack([x for _, x in members])
    key_mask = jnp.arange(3 * 2 * 7).reshape(3, 2, 7) % 5 > 0

    def loss(params: Any, x: Any, key_mask: Any) -> Any:
        output = layer.apply(params, x, config=config, key_mask=key_mask)
        return jnp.square(output).sum(), output

    function = jax.grad(loss, argnums=(0, 1), has_aux=True)
    mapped, outputs = jax.jit(jax.vmap(function))(params, x, key_mask)
    one = jax.jit(function)
    for i in range(3):
        gradients, output = one(*members[i], key_mask[i])
        for found in (outputs[i], output):
            assert_layer(found, *members[i], config, key_mask=key_mask[i])
        for have, want in zip(*map(jax.tree.leaves, (mapped, gradients)), strict=True):
            assert_same(have[i], want, SAME_GRADIENT)


def test_vmap_over_inputs_alone_and_over_keys() -> None:
    config = CONFIGS["per head"]
    module = InterleavedHeadAttention(config)
    params, x = arrays(config)
    xs = jnp.stack([x, 2 * x])
    mapped = jax.jit(jax.vmap(module.apply, in_axes=(None, 0)))(params, xs)
    for found, x in zip(mapped, xs, strict=True):
        assert_layer(found, params, x, config)
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = jax.jit(jax.vmap(module.init))(keys)
    for name, shape in config.parameter_shapes().items():
        assert drawn[name].shape == (3, *shape)
        np.testing.assert_allclose(drawn[name][1], module.init(keys[1])[name], rtol=1e-6, atol=1e-7)
    assert jax.eval_shape(jax.vmap(module.apply, in_axes=(0, None)), drawn, x).shape == (3, *x.shape)


@pytest.mark.requirement("GRAD-9")
@pytest.mark.parametrize("dtype", ["float64"])
@each_layer
def test_gradients_by_finite_differences(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    params, x = arrays(config, dtype, N=4)
    options = {key: jnp.asarray(value) for key, value in masks(2, 4).items()}
    function = jax.jit(lambda params, x: layer.apply(params, x, config=config, **options))
    modes = ["fwd", "rev"] if name == "grouped" else ["rev"]
    check_grads(function, (params, x), order=1, modes=modes, atol=DIFFERENCES, rtol=DIFFERENCES, eps=1e-5)
    grads = jax.grad(lambda params: jnp.sin(function(params, x)).sum())(params)
    for key, grad in grads.items():
        assert jnp.any(grad != 0), key


@each_mixture
def test_gradients_have_the_dtypes_of_their_parameters(dtype: str, mixing_dtype: str) -> None:
    params, x = arrays(GROUPED, dtype, parameter_dtype=mixing_dtype)
    loss = lambda p, x: jnp.square(layer.apply(p, x, config=GROUPED).astype(jnp.float32)).sum()  # noqa: E731
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    # the dtypes are those of the program; one is run here, others in training and against differences
    run = (dtype, mixing_dtype) == ("float16", "float32")
    grads, grad_x = gradients(params, x) if run else jax.eval_shape(gradients, params, x)
    assert grad_x.dtype == dtype
    for name, grad in grads.items():
        assert grad.dtype == (mixing_dtype if name in MIXING else dtype), name
        if run:
            assert jnp.all(jnp.isfinite(grad)), name
            assert jnp.any(grad != 0), name


@pytest.mark.parametrize("dtype", ["float64"])
def test_rematerialised_gradients_are_the_same(dtype: str) -> None:
    params, x = arrays(GROUPED, dtype)
    apply = jax.checkpoint(InterleavedHeadAttention(GROUPED).apply)
    found = jax.jit(jax.grad(lambda p: jnp.square(apply(p, x)).sum()))(params)
    assert_same_gradients(found, direct_gradients())


def train_step(
    module: InterleavedHeadAttention, traces: list[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A start and a step of training, of Adam where optax is installed, else of gradient descent."""
    try:
        import optax
    except ImportError:
        optax = None
    optimiser = optax.adam(1e-2) if optax else None

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        traces.append(1)
        loss = lambda p: jnp.mean(jnp.square((module.apply(p, x) - y).astype(jnp.float32)))  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        if optimiser is None:
            return jax.tree.map(lambda p, g: p - (0.05 * g).astype(p.dtype), params, grads), state, value
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    start = (lambda params: None) if optimiser is None else optimiser.init
    return start, jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.parametrize(("dtype", "mixing_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_jitted_step_of_training_consumes_its_parameters(dtype: str, mixing_dtype: str) -> None:
    module = InterleavedHeadAttention(GROUPED)
    traces: list[int] = []
    start, step = train_step(module, traces)
    params = module.init(jax.random.key(0), dtype=dtype, mixing_dtype=mixing_dtype)
    first = {name: np.array(value) for name, value in params.items()}
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 7, 10), dtype)
    state, losses = start(params), []
    for _ in range(20):
        given = params
        params, state, loss = step(params, state, x, y)
        assert all(value.is_deleted() for value in given.values())
        losses.append(float(loss))
    assert len(traces) == 1
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert losses[-1] < 0.8 * losses[0]
    for name, value in params.items():
        assert value.dtype == first[name].dtype
        assert not same_bits(value, first[name]), name


@pytest.mark.parametrize(("dtype", "mixing_dtype"), [("float32", None), ("bfloat16", "float32")])
@each_layer
def test_works_where_promotion_is_forbidden(name: str, dtype: str, mixing_dtype: str | None) -> None:
    config = CONFIGS[name]
    params, x = arrays(config, dtype, parameter_dtype=mixing_dtype)
    options = {key: jnp.asarray(value) for key, value in masks(2, 7).items()}
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(compiled(config, **options), params, x).dtype == dtype
        drawn = jax.eval_shape(lambda key: layer.init(key, GROUPED, dtype=dtype), jax.random.key(0))
    assert all(value.dtype == dtype for value in drawn.values())


def assert_precision_reaches_every_product(apply: Callable[..., Any], *arguments: Any) -> None:
    """By the text of the program: a CPU multiplies unrounded whatever is asked for."""
    for asked, word in (({}, "HIGHEST"), ({"precision": "high"}, "HIGH")):
        text = str(jax.make_jaxpr(functools.partial(apply, **asked))(*arguments))
        products = text.count("dot_general[")
        assert products >= 10
        assert text.count(f"precision=(Precision.{word}, Precision.{word})") == products


def test_precision_reaches_every_product() -> None:
    assert_precision_reaches_every_product(InterleavedHeadAttention(GROUPED).apply, *arrays(GROUPED))


# Errors


def bad_inputs() -> dict[str, tuple[str, str, Callable[[Any, Any], Any]]]:
    """By name: the argument that is named, the words of the message, and what is done to a good call."""

    def without(params: Any, name: str) -> Any:
        return {key: value for key, value in params.items() if key != name}

    return {
        "missing": ("alpha_k", r"expected a tensor \(2, 4, 3\)", lambda p, x: (without(p, "alpha_k"), x)),
        "further": ("gate", "expected no tensor beside", lambda p, x: ({**p, "gate": x}, x)),
        "misshapen": (
            "collapse",
            r"shape: expected \(4, 4, 3\), got \(4, 3\)",
            lambda p, x: ({**p, "collapse": p["collapse"][0]}, x),
        ),
        "foreign": (
            "alpha_q",
            "a jax.Array, got ndarray",
            lambda p, x: ({**p, "alpha_q": np.ones((4, 4, 3))}, x),
        ),
        "no array": (
            "o_proj.bias",
            "a jax.Array, got NoneType",
            lambda p, x: ({**p, "o_proj.bias": None}, x),
        ),
        "narrow": (
            "k_proj.weight",
            "expected float32, the dtype of `q_proj.weight`, got bfloat16",
            lambda p, x: ({**p, "k_proj.weight": p["k_proj.weight"].astype(jnp.bfloat16)}, x),
        ),
        "mixing": (
            "alpha_q",
            "expected float32, got bfloat16",
            lambda p, x: ({**p, "alpha_q": p["alpha_q"].astype(jnp.bfloat16)}, x),
        ),
        "no mapping": ("params", "a mapping of arrays by name, got list", lambda p, x: (list(p.values()), x)),
        "rank": ("x", r"shape: expected \(B, N, D=10\), got \(7, 10\)", lambda p, x: (p, x[0])),
        "width": ("x", r"shape: expected \(B, N, D=10\), got \(2, 7, 9\)", lambda p, x: (p, x[..., 1:])),
        "dtype": (
            "x",
            "dtype: expected float32, the dtype of `q_proj.weight`, got float16",
            lambda p, x: (p, x.astype(jnp.float16)),
        ),
        "integers": ("x", "dtype: expected float32", lambda p, x: (p, x.astype(jnp.int32))),
        "numpy": ("x", "a jax.Array, got ndarray", lambda p, x: (p, np.asarray(x))),
    }


@pytest.mark.requirement("ERR-1", "CKPT-1")
@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_is_refused_by_name(name: str) -> None:
    argument, words, change = bad_inputs()[name]
    params, x = change(*arrays(GROUPED))
    with pytest.raises(IHAError, match=words) as caught:
        layer.apply(params, x, config=GROUPED)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("key_mask", jnp.ones((2, 6), dtype=bool)),
        ("key_mask", jnp.ones((2, 7), dtype=jnp.int32)),
        ("segment_ids", jnp.ones((1, 7), dtype=jnp.int32)),
        ("positions", jnp.ones((2, 7))),
        ("positions", np.ones((2, 7), dtype=np.int32)),
    ],
)
def test_masks_are_refused_by_name(argument: str, value: Any) -> None:
    params, x = arrays(GROUPED)
    with pytest.raises(IHAError) as caught:
        layer.apply(params, x, config=GROUPED, **{argument: value})
    assert caught.value.argument == argument


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("config", lambda key: layer.init(GROUPED, key)),
        ("config", lambda key: layer.apply({}, jnp.ones((1, 1, 1)), config=AttentionConfig())),
        ("config", lambda key: InterleavedHeadAttention(AttentionConfig())),
        ("key", lambda key: layer.init(0, GROUPED)),
        ("key", lambda key: layer.init(jax.random.split(key), GROUPED)),
        ("key", lambda key: layer.init(jnp.ones(2), GROUPED)),
        ("initialiser", lambda key: layer.init(key, GROUPED, initialiser="xavier")),
        ("num_kv_heads", lambda key: layer.init(key, CONFIGS["window"])),
        ("dtype", lambda key: layer.init(key, GROUPED, dtype=jnp.int32)),
        ("dtype", lambda key: layer.init(key, GROUPED, dtype="half a float")),
        ("dtype", lambda key: layer.init(key, GROUPED, dtype=None)),
        ("dtype", lambda key: layer.init(key, GROUPED, dtype=jnp.float64)),
        ("mixing_dtype", lambda key: layer.init(key, GROUPED, mixing_dtype=jnp.bfloat16)),
        ("mixing_dtype", lambda key: layer.init(key, GROUPED, dtype="bfloat16", mixing_dtype="float16")),
    ],
)
def test_bad_starts_are_refused_by_name(argument: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(IHAError) as caught:
        call(jax.random.key(0))
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_a_start_in_float64_says_how_to_have_it() -> None:
    with pytest.raises(TypeError, match=r"`dtype`: .*jax\.enable_x64"):
        layer.init(jax.random.key(0), GROUPED, dtype=jnp.float64)
    with jax.enable_x64(True):
        params = jax.eval_shape(lambda key: layer.init(key, GROUPED, dtype=jnp.float64), jax.random.key(0))
    assert all(value.dtype == "float64" for value in params.values())


# Checkpoints


@pytest.mark.requirement("CKPT-1", "CKPT-2", "CKPT-3", "CKPT-4")
@each_layer
@each_mixture
def test_files_keep_every_bit(name: str, dtype: str, mixing_dtype: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    parameters, _ = example(config, dtype, parameter_dtype=mixing_dtype)
    for value in parameters.values():  # what arithmetic would not keep
        value.reshape(-1)[:3] = [math.nan, -0.0, float(ml_dtypes.finfo(value.dtype).smallest_subnormal)]
    params = {key: jnp.asarray(value) for key, value in parameters.items()}
    save_checkpoint(tmp_path / "layer.safetensors", params, config)
    found, loaded = load_checkpoint(tmp_path / "layer.safetensors")
    assert found == config
    assert list(loaded) == list(params)
    assert all(isinstance(value, jax.Array) for value in loaded.values())
    assert all(same_bits(loaded[key], value) for key, value in parameters.items())
    # the file is the one that NumPy writes, and reads
    checkpoint.save_checkpoint(tmp_path / "numpy.safetensors", parameters, config)
    assert (tmp_path / "numpy.safetensors").read_bytes() == (tmp_path / "layer.safetensors").read_bytes()


def test_files_outlive_their_parameters(tmp_path: Path) -> None:
    """What is loaded is no view of the file."""
    path = tmp_path / "layer.safetensors"
    params, x = arrays(GROUPED)
    save_checkpoint(str(path), params, GROUPED)
    _, loaded = load_checkpoint(str(path))
    path.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    assert same_bits(layer.apply(loaded, x, config=GROUPED), layer.apply(params, x, config=GROUPED))


def test_transposed_parameters_are_written_as_they_read(tmp_path: Path) -> None:
    params, _ = arrays(GROUPED)
    params["q_proj.weight"] = jnp.asarray(np.asarray(params["q_proj.weight"]).T.copy()).T
    save_checkpoint(tmp_path / "t", params, GROUPED)
    assert same_bits(load_checkpoint(tmp_path / "t")[1]["q_proj.weight"], params["q_proj.weight"])


@pytest.mark.requirement("CKPT-2", "ERR-1")
@pytest.mark.parametrize("name", ["grouped", "mha"])
def test_float64_is_refused_where_it_would_be_narrowed(name: str, tmp_path: Path) -> None:
    parameters, _ = example(CONFIGS[name], "float64")
    checkpoint.save_checkpoint(tmp_path / "wide", parameters, CONFIGS[name])
    with pytest.raises(iha_core.DTypeError, match=r"dtype that JAX keeps .*jax\.enable_x64") as caught:
        load_checkpoint(tmp_path / "wide")
    assert caught.value.argument == "q_proj.weight"
    with jax.enable_x64(True):
        _, params = load_checkpoint(tmp_path / "wide")
        assert all(value.dtype == "float64" for value in params.values())


def write(path: Path, tensors: Any, entry: Any = None, **metadata: str) -> None:
    from safetensors.numpy import save_file

    whole = {"spec_version": iha_core.SPEC_VERSION, "config": GROUPED.to_dict()} | (entry or {})
    save_file(tensors, path, metadata or {"iha": json.dumps(whole)})


def bad_files() -> dict[str, tuple[str, Callable[[Path, Any], None]]]:
    """By name: the argument that is named, and what is written in place of a good file."""
    major, minor = map(int, iha_core.SPEC_VERSION.split("."))
    cut = {key: value for key, value in GROUPED.to_dict().items() if key != "model_width"}
    return {
        "missing": ("alpha_v", lambda path, t: write(path, {k: v for k, v in t.items() if k != "alpha_v"})),
        "further": ("gate", lambda path, t: write(path, t | {"gate": np.ones(3, np.float32)})),
        "misshapen": ("collapse", lambda path, t: write(path, t | {"collapse": t["collapse"][:, :2].copy()})),
        "mistyped": (
            "k_norm.weight",
            lambda path, t: write(path, t | {"k_norm.weight": np.ones(6, np.float16)}),
        ),
        "newer": ("spec_version", lambda path, t: write(path, t, {"spec_version": f"{major}.{minor + 1}"})),
        "config": ("model_width", lambda path, t: write(path, t, {"config": cut})),
        "field": ("gate", lambda path, t: write(path, t, {"config": GROUPED.to_dict() | {"gate": 1}})),
        "no metadata": ("checkpoint", lambda path, t: write(path, t, format="pt")),
        "no json": ("iha", lambda path, t: write(path, t, iha="{")),
        "no safetensors": ("checkpoint", lambda path, t: path.write_text("weights", encoding="utf-8")),
        "truncated": (
            "checkpoint",
            lambda path, t: (write(path, t), path.write_bytes(path.read_bytes()[:-5])),  # type: ignore[func-returns-value]
        ),
        "empty": ("checkpoint", lambda path, t: path.write_bytes(b"")),
    }


@pytest.mark.requirement("CKPT-4", "ERR-1")
@pytest.mark.parametrize("name", bad_files())
def test_bad_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    argument, put = bad_files()[name]
    put(tmp_path / "bad", example(GROUPED, "float32")[0])
    with pytest.raises(IHAError) as caught:
        load_checkpoint(tmp_path / "bad")
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    params, _ = arrays(GROUPED)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(OSError, match=r"No such|directory"):
            load_checkpoint(path)
    with pytest.raises((OSError, SafetensorError), match=r"No such file"):
        save_checkpoint(tmp_path / "nowhere" / "layer", params, GROUPED)


@pytest.mark.requirement("CKPT-4", "ERR-1")
def test_other_parameters_are_not_written(tmp_path: Path) -> None:
    params, _ = arrays(GROUPED)
    for argument, bad in (
        ("gate", {**params, "gate": jnp.ones(2)}),
        ("alpha_q", {**params, "alpha_q": np.asarray(params["alpha_q"])}),
        ("alpha_q", {**params, "alpha_q": params["alpha_q"][:1]}),
        ("params", None),
    ):
        with pytest.raises(IHAError) as caught:
            save_checkpoint(tmp_path / "layer", bad, GROUPED)  # type: ignore[arg-type]
        assert caught.value.argument == argument
    with pytest.raises(IHAError, match="`config`"):
        save_checkpoint(tmp_path / "layer", params, GROUPED.to_dict())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# Flax


def flax_layer() -> Any:
    pytest.importorskip("flax")
    from iha_jax import flax_layer

    return flax_layer.InterleavedHeadAttention


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flax_is_imported_only_for_those_who_ask() -> None:
    found = run_python("import sys, iha_jax; print('flax' in sys.modules, 'safetensors' in sys.modules)")
    assert found == "False False\n"


def test_without_flax_the_error_says_so() -> None:
    script = """
import sys
sys.modules["flax"] = None
import iha_jax
try:
    import iha_jax.flax_layer
except ImportError as error:
    print(error)
"""
    assert run_python(script) == "iha_jax.flax_layer needs Flax 0.12 or later: pip install flax\n"


@pytest.mark.parametrize(
    ("name", "dtype", "mixing_dtype"),
    [*((name, "float32", None) for name in CONFIGS), ("grouped", "bfloat16", "float32")],
)
def test_the_module_computes_what_the_functions_do(name: str, dtype: str, mixing_dtype: str | None) -> None:
    Module = flax_layer()
    config = CONFIGS[name]
    params, x = arrays(config, dtype, parameter_dtype=mixing_dtype)
    options = {key: jnp.asarray(value) for key, value in masks(2, 7).items()}
    module = Module.from_params(config, params)
    assert module.config == config
    have = module.params()
    assert list(have) == list(config.parameter_shapes())
    assert all(same_bits(have[key], value) for key, value in params.items())
    found = jax.jit(lambda: module(x, **options, precision="high"))()
    want = jax.jit(lambda: layer.apply(params, x, config=config, **options, precision="high"))()
    assert same_bits(found, want)


def test_the_module_draws_from_its_stream() -> None:
    Module = flax_layer()
    from flax import nnx

    options: dict[str, Any] = {"initialiser": "random", "dtype": jnp.bfloat16, "mixing_dtype": jnp.float32}
    found = Module(GROUPED, rngs=nnx.Rngs(params=3, dropout=1), **options).params()
    want = layer.init(nnx.Rngs(params=3).params(), GROUPED, **options)
    assert all(same_bits(found[name], want[name]) for name in want)
    rngs = nnx.Rngs(0)
    first, second = Module(GROUPED, rngs=rngs), Module(GROUPED, rngs=rngs)
    assert not jnp.array_equal(first.params()["alpha_q"], second.params()["alpha_q"])


@each_layer
def test_the_module_holds_params_by_their_names(name: str) -> None:
    Module = flax_layer()
    from flax import nnx

    config = CONFIGS[name]
    module = Module(config, rngs=nnx.Rngs(0), initialiser="random")
    _, state, rest = nnx.split(module, nnx.Param, ...)
    assert not rest
    names = {".".join(path): variable for path, variable in nnx.to_flat_state(state)}
    assert {key: variable.shape for key, variable in names.items()} == config.parameter_shapes()
    assert isinstance(module.q_proj.weight, nnx.Param)


@pytest.mark.parametrize("dtype", ["float64"])
def test_the_module_under_the_transformations_of_flax(dtype: str) -> None:
    Module = flax_layer()
    from flax import nnx

    params, x = arrays(GROUPED, dtype)
    module = Module.from_params(GROUPED, params)
    want = compiled(GROUPED)(params, x)
    assert jnp.array_equal(nnx.jit(lambda module, x: module(x))(module, x), want)
    graph, state = nnx.split(module)
    merged = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    assert all(same_bits(value, module.params()[name]) for name, value in merged.params().items())
    assert jnp.array_equal(jax.jit(lambda state: nnx.merge(graph, state)(x))(state), want)
    loss = lambda module: jnp.square(module(x)).sum()  # noqa: E731
    grads = {".".join(path): grad[...] for path, grad in nnx.to_flat_state(nnx.jit(nnx.grad(loss))(module))}
    assert_same_gradients({name: grads.pop(name) for name in params}, direct_gradients())
    assert not grads


def test_the_module_learns_with_an_optimiser_of_flax() -> None:
    Module = flax_layer()
    optax = pytest.importorskip("optax")
    from flax import nnx

    module = Module(GROUPED, rngs=nnx.Rngs(0))
    optimiser = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 7, 10))
    first = module.params()
    traces = []

    @nnx.jit
    def step(module: Any, optimiser: Any) -> Any:
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda module: jnp.mean(jnp.square(module(x) - y)))(module)
        optimiser.update(module, grads)
        return loss

    losses = [float(step(module, optimiser)) for _ in range(20)]
    assert len(traces) == 1
    assert losses[-1] < 0.8 * losses[0]
    assert not any(jnp.array_equal(value, first[name]) for name, value in module.params().items())


def test_the_module_takes_every_mask() -> None:
    Module = flax_layer()
    params, x = arrays(GROUPED)
    assert_takes_every_mask(jax.jit(Module.from_params(GROUPED, params)), x)


def test_precision_reaches_every_product_of_the_module() -> None:
    Module = flax_layer()
    params, x = arrays(GROUPED)
    assert_precision_reaches_every_product(Module.from_params(GROUPED, params), x)


def test_modules_of_one_set_of_parameters_are_apart() -> None:
    Module = flax_layer()
    params, x = arrays(GROUPED)
    one, two = Module.from_params(GROUPED, params), Module.from_params(GROUPED, params)
    one.alpha_q.set_value(0 * params["alpha_q"])
    assert not jnp.array_equal(jax.jit(one)(x), jax.jit(two)(x))
    assert same_bits(two.params()["alpha_q"], params["alpha_q"])


def test_an_ensemble_of_modules() -> None:
    Module = flax_layer()
    from flax import nnx

    @nnx.jit  # one program, not one for each operation
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: Any) -> Any:
        return Module(GROUPED, rngs=rngs)

    _, x = arrays(GROUPED)
    modules = make(nnx.Rngs(0))
    ensemble = nnx.jit(nnx.vmap(lambda module, x: module(x), in_axes=(0, None)))
    assert ensemble(modules, x).shape == (3, *x.shape)
    assert modules.alpha_q.shape == (3, 4, 4, 3)
    assert not jnp.array_equal(modules.alpha_q[0], modules.alpha_q[1])


@pytest.mark.requirement("ERR-1")
def test_the_module_refuses_by_name() -> None:
    Module = flax_layer()
    from flax import nnx

    params, x = arrays(GROUPED)
    for argument, call in (
        ("rngs", lambda: Module(GROUPED, rngs=jax.random.key(0))),
        ("config", lambda: Module(AttentionConfig(), rngs=nnx.Rngs(0))),
        ("dtype", lambda: Module(GROUPED, rngs=nnx.Rngs(0), dtype=jnp.float64)),
        ("alpha_q", lambda: Module.from_params(CONFIGS["grouped"], {**params, "alpha_q": x})),
        ("config", lambda: Module.from_params(None, params)),
        ("x", lambda: Module.from_params(GROUPED, params)(x[..., 1:])),
    ):
        with pytest.raises(IHAError) as caught:
            call()
        assert caught.value.argument == argument


def test_the_package_exports_the_layer() -> None:
    assert {"InterleavedHeadAttention", "LayerConfig", "load_checkpoint", "save_checkpoint"} <= set(
        iha_jax.__all__
    )
    assert all(hasattr(iha_jax, name) for name in iha_jax.__all__)
