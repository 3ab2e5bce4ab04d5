"""The layer of the PyTorch backend: against the golden layer, and as a module among PyTorch's own."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import (
    CONFIGS,
    DIFFERENCES,
    SAME_GRADIENT,
    assert_same,
    assert_within_limits,
    example,
    sharp_example,
)

import iha_core
from iha_core import AttentionConfig, IHAError, LayerConfig
from iha_core.checkpoint import load_checkpoint as load_arrays
from iha_core.checkpoint import save_checkpoint as save_arrays
from iha_core.initialisers import INITIALISERS, starts
from iha_core.layer_config import MIXING

torch = pytest.importorskip("torch")
from iha_torch import InterleavedHeadAttention, load_checkpoint, save_checkpoint  # noqa: E402
from iha_torch.layer import HeadNorm  # noqa: E402

DTYPES = {
    "float64": ("float64", None),
    "float32": ("float32", None),
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", None),
    "bfloat16, float32 mixing": ("bfloat16", "float32"),
}

each_config = pytest.mark.parametrize("name", CONFIGS)
each_dtype = pytest.mark.parametrize("dtypes", DTYPES)


def tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def array(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x.detach().double())


def native(x: Any) -> np.ndarray[Any, Any]:
    """A tensor in its own dtype, by which `assert_within_limits` judges too."""
    x = x.detach()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def assert_layer(output: Any, layer: Any, x: Any, **options: Any) -> None:
    """Hold an output, however it was computed, to the limits of a layer with its parameters of now."""
    parameters = {key: array(p) for key, p in layer.state_dict().items()}
    storage = str(x.dtype).removeprefix("torch.")
    options = {key: value.numpy() for key, value in options.items()}
    assert_within_limits(
        native(output), parameters, array(x), config=layer.config, storage=storage, **options
    )


def assert_same_gradients(found: Any, wanted: Any) -> None:
    for have, want in zip(found, wanted, strict=True):
        assert_same(have.detach(), want.detach(), SAME_GRADIENT)


def dtype_of(name: str | None) -> Any:
    return None if name is None else getattr(torch, name)


def layer_with(config: LayerConfig, parameters: dict[str, np.ndarray[Any, Any]]) -> Any:
    """A layer with given parameters, loaded as users do."""
    dtype = tensor(parameters["q_proj.weight"]).dtype
    mixing = tensor(parameters[MIXING[0]]).dtype if config.kind == "iha" else dtype
    layer = InterleavedHeadAttention(config, initialiser="random", dtype=dtype, mixing_dtype=mixing)
    layer.load_state_dict({name: tensor(x) for name, x in parameters.items()})
    return layer


def layer_and_input(name: str, dtypes: str = "float64", **sizes: Any) -> tuple[Any, Any, dict[str, Any], Any]:
    """A layer and its input, in tensors and as arrays."""
    storage, mixing = DTYPES[dtypes]
    parameters, x = example(CONFIGS[name], storage, parameter_dtype=mixing, **sizes)
    return layer_with(CONFIGS[name], parameters), tensor(x), parameters, x


def options_of(B: int, N: int) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "key_mask": rng.random((B, N)) < 0.7,
        "segment_ids": np.sort(rng.integers(0, 2, (B, N)), axis=1),
        "positions": rng.integers(-50, 50, (B, N)),
    }


# The function


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "LAY-5", "LAY-6", "LAY-7")
@each_dtype
@each_config
@pytest.mark.parametrize("kind", [example, sharp_example])
@pytest.mark.parametrize("given", [(), ("key_mask",), ("key_mask", "segment_ids", "positions")])
def test_outputs_are_within_the_limits(kind: Any, name: str, dtypes: str, given: tuple[str, ...]) -> None:
    storage, mixing = DTYPES[dtypes]
    config = CONFIGS[name]
    parameters, x = kind(config, storage, parameter_dtype=mixing)
    options = {key: value for key, value in options_of(*x.shape[:2]).items() if key in given}
    output = layer_with(config, parameters)(
        tensor(x), **{key: tensor(value) for key, value in options.items()}
    )
    assert_within_limits(native(output), parameters, x, config=config, storage=storage, **options)


@pytest.mark.requirement("LAY-4", "LAY-7")
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_norms_are_rounded_once(weights: str) -> None:
    """Half an ulp of bfloat16, and what a sum of d squares and five operations of float32 may be off."""
    d = 13
    torch.manual_seed(0)
    norm = HeadNorm(d, 1e-6, dtype=dtype_of(weights))
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(50, 7, 3, d).bfloat16()
    wide = x.double()
    exact = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = norm(x)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= (2.0**-9 + (d + 5) * 2.0**-24) * exact_ulp(exact)).all()


def exact_ulp(x: Any) -> Any:
    """The power of two above each number: 2^-8 of it is the distance of bfloat16 numbers there."""
    return torch.exp2(x.abs().log2().floor() + 1)


@pytest.mark.requirement("LAY-5")
@each_config
def test_nothing_is_done_that_depends_on_the_mode(name: str) -> None:
    layer, x, _, _ = layer_and_input(name)
    assert layer.training
    assert torch.equal(layer.eval()(x), layer.train()(x))


@pytest.mark.requirement("DIM-2", "SOFT-2")
@pytest.mark.parametrize(("B", "N"), [(0, 3), (2, 0), (0, 0), (1, 1)])
@each_config
def test_empty_inputs(name: str, B: int, N: int) -> None:
    layer, x, _, _ = layer_and_input(name, B=B, N=N)
    output = layer(x.requires_grad_())
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad.shape == x.shape
    if not B * N:
        assert all(
            not p.grad.any() for key, p in layer.named_parameters() if not key.startswith("o_proj.bias")
        )


@pytest.mark.requirement("SOFT-2")
@each_config
def test_rows_that_see_nothing_give_the_bias(name: str) -> None:
    layer, x, _, _ = layer_and_input(name)
    key_mask = torch.ones(x.shape[:2], dtype=torch.bool)
    key_mask[1] = False
    output = layer(x, key_mask=key_mask)
    bias = torch.zeros(x.shape[-1]) if layer.o_proj.bias is None else layer.o_proj.bias
    assert torch.equal(output[1], bias.to(x.dtype).expand_as(output[1]))
    output[1].square().sum().backward()
    touched = {key for key, p in layer.named_parameters() if p.grad.any()}
    assert touched <= {"o_proj.bias"}


# Tokens that key_mask drops


@pytest.mark.requirement("KEY-2", "KEY-3")
@each_dtype
@each_config
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_dropped_tokens_reach_no_other_row(name: str, dtypes: str, poison: float) -> None:
    layer, x, _, _ = layer_and_input(name, dtypes)
    key_mask = torch.tensor([True, True, False, True, False, True, True]).expand(2, -1)
    clean = layer(x, key_mask=key_mask)
    dirty = layer(x.masked_fill(~key_mask[..., None], poison), key_mask=key_mask)
    assert torch.equal(dirty[key_mask], clean[key_mask])
    assert torch.isnan(dirty[~key_mask]).all()


@pytest.mark.requirement("GRAD-8")
@each_config
def test_gradients_where_dropped_tokens_are_set_to_0(name: str) -> None:
    """What docs/pytorch.md advises: a NaN in a row that no loss looks at reaches the gradients otherwise."""
    layer, x, _, _ = layer_and_input(name)
    key_mask = torch.tensor([True, True, False, True, False, True, True]).expand(2, -1)

    def gradients(x: Any) -> Any:
        x = x.clone().requires_grad_()
        loss = layer(x, key_mask=key_mask)[key_mask].square().sum()
        return torch.autograd.grad(loss, [x, *layer.parameters()])

    dirty = x.masked_fill(~key_mask[..., None], math.nan)
    mended = torch.where(key_mask[..., None], dirty, 0)
    other = x.masked_fill(~key_mask[..., None], 3.0)
    assert not all(gradient.isfinite().all() for gradient in gradients(dirty))
    assert all(gradient.isfinite().all() for gradient in gradients(mended))
    assert_same_gradients(gradients(mended), gradients(other))
    assert not gradients(mended)[0][~key_mask].any()


# State


@pytest.mark.requirement("CKPT-1")
@each_config
def test_the_state_has_the_names_and_shapes_of_a_checkpoint(name: str) -> None:
    layer = InterleavedHeadAttention(CONFIGS[name], initialiser="random")
    shapes = {key: tuple(x.shape) for key, x in layer.state_dict().items()}
    assert shapes == CONFIGS[name].parameter_shapes()
    assert {key for key, _ in layer.named_parameters()} == set(shapes)


@pytest.mark.requirement("LAY-6")
def test_the_mixing_of_plain_heads_is_constant_and_moves_along() -> None:
    layer = InterleavedHeadAttention(CONFIGS["mha"])
    assert {key for key, _ in layer.named_buffers()} == set(MIXING)
    assert not any(key in layer.state_dict() for key in MIXING)
    assert {x.dtype for x in layer.double().buffers()} == {torch.float64}
    meta = InterleavedHeadAttention(CONFIGS["mha"], device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert all(torch.equal(meta.get_buffer(key), layer.get_buffer(key).float()) for key in MIXING)


@pytest.mark.requirement("INIT-1", "INIT-2", "INIT-3", "INIT-4", "INIT-5")
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16, float32 mixing"])
@pytest.mark.parametrize("initialiser", INITIALISERS)
def test_parameters_start_as_the_specification_says(initialiser: Any, dtypes: str) -> None:
    config = LayerConfig(
        model_width=32, num_heads=8, num_pseudo_heads=3, num_kv_heads=4, bias=True, qk_norm=True
    )
    storage, mixing = map(dtype_of, DTYPES[dtypes])
    torch.manual_seed(5)
    layer = InterleavedHeadAttention(config, initialiser=initialiser, dtype=storage, mixing_dtype=mixing)
    for name, start in starts(config, initialiser).items():
        parameter = layer.get_parameter(name).detach()
        mean = torch.from_numpy(start.mean)
        assert parameter.dtype == (mixing or storage if name in MIXING else storage)
        if not start.deviation:
            assert torch.equal(parameter, mean.to(parameter.dtype)), name
            continue
        draws = (parameter.double() - mean) / start.deviation
        # seven standard deviations of mean and variance of so many normal numbers, and one rounding of each
        count, slack = draws.numel(), torch.finfo(parameter.dtype).eps / start.deviation
        assert abs(draws.mean()) <= 7 / math.sqrt(count) + slack, name
        assert abs(draws.var() - 1) <= 7 * math.sqrt(2 / count) + 4 * slack, name


def test_draws_are_those_of_the_generator() -> None:
    def draw(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return list(InterleavedHeadAttention(CONFIGS["paper"]).parameters())

    assert all(torch.equal(a, b) for a, b in zip(draw(1), draw(1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draw(1), draw(2), strict=True))


def test_layers_are_made_without_data_and_filled_later() -> None:
    layer = InterleavedHeadAttention(CONFIGS["per head"], device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    assert layer(torch.empty(2, 5, 12, device="meta", dtype=torch.bfloat16)).shape == (2, 5, 12)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    direct = InterleavedHeadAttention(CONFIGS["per head"], dtype=torch.bfloat16)
    for name, parameter in direct.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter), name
    with torch.device("meta"):
        assert all(p.is_meta for p in InterleavedHeadAttention(CONFIGS["mha"]).parameters())


@each_dtype
@each_config
def test_copies_compute_the_same(name: str, dtypes: str) -> None:
    layer, x, _, _ = layer_and_input(name, dtypes)
    output = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False))
    for other in copies:
        assert torch.equal(other(x), output)
        assert other.config == layer.config
        assert all(a is not b for a, b in zip(other.parameters(), layer.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@each_config
def test_layers_change_their_dtype_as_a_whole(name: str, dtype: str) -> None:
    _, _, parameters, x = layer_and_input(name, "bfloat16, float32 mixing")
    layer = layer_with(CONFIGS[name], parameters).to(dtype_of(dtype))
    if dtype == "float16":
        layer = layer_with(CONFIGS[name], parameters).half()
    rounded = {key: array(p) for key, p in layer.state_dict().items()}
    x = array(tensor(x).to(dtype_of(dtype)))
    output = layer(torch.from_numpy(x).to(dtype_of(dtype)))
    assert_within_limits(native(output), rounded, x, config=CONFIGS[name], storage=dtype)


def test_the_text_of_a_layer_has_its_sizes() -> None:
    text = repr(InterleavedHeadAttention(CONFIGS["grouped"]))
    assert "iha, D=10, H=4, G=2, P=3, d=6, e=5, collapse='global', AttentionConfig(" in text
    assert "(q_norm): HeadNorm(6, epsilon=1e-06)" in text


# Training


def finite_differences(layer: Any, x: Any, **options: Any) -> bool:
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,), options)

    leaves = [p.detach().clone().requires_grad_() for p in (x, *layer.parameters())]
    return bool(
        torch.autograd.gradcheck(
            function, leaves, eps=1e-5, atol=DIFFERENCES, rtol=DIFFERENCES, fast_mode=True
        )
    )


@pytest.mark.requirement("LAY-2", "LAY-3", "LAY-4", "GRAD-1", "GRAD-6", "GRAD-7")
@each_config
def test_gradients_by_finite_differences(name: str) -> None:
    layer, x, _, _ = layer_and_input(name, B=1, N=3)
    assert finite_differences(layer, x)
    assert finite_differences(layer, x, key_mask=torch.tensor([[True, False, True]]))


@each_config
def test_every_parameter_has_a_gradient(name: str) -> None:
    layer, x, _, _ = layer_and_input(name)
    layer(x).square().sum().backward()
    # a bias that all keys of a row have would change nothing, but RoPE turns it
    assert all(p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16, float32 mixing"])
@each_config
def test_training_reduces_a_loss(name: str, dtypes: str) -> None:
    torch.manual_seed(0)
    storage, mixing = map(dtype_of, DTYPES[dtypes])
    layer = InterleavedHeadAttention(CONFIGS[name], initialiser="random", dtype=storage, mixing_dtype=mixing)
    x = torch.randn(4, 8, CONFIGS[name].model_width, dtype=storage)
    target = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


# Transformations


def assert_runs_alike(run: Any, layer: Any, x: Any) -> None:
    """Both outputs conform, and in float64 the gradients are the same; those of `layer` are left."""
    gradients = []
    for function in (run, layer):
        layer.zero_grad()
        output = function(x)
        assert_layer(output, layer, x)
        output.square().sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    if x.dtype == torch.float64:
        assert_same_gradients(*gradients)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["grouped", "window", "mha"])
def test_compiles_in_one_graph_and_once_for_all_values(name: str, dtype: str) -> None:
    torch.compiler.reset()
    layer, x, _, _ = layer_and_input(name, dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step(x: Any) -> None:
        assert_runs_alike(compiled, layer, x)
        optimizer.step()

    step(x)
    longer = [torch.randn(2, N, x.shape[-1], dtype=x.dtype) for N in (11, 13, 17)]
    step(longer[0])
    with torch.compiler.set_stance("fail_on_recompile"):  # further lengths, and new values of all
        for values in (*longer, longer[0] + 1):
            step(values)


@pytest.mark.parametrize("name", ["grouped", "mha"])
def test_compiled_layers_take_their_options(name: str) -> None:
    torch.compiler.reset()
    layer, x, _, _ = layer_and_input(name, "float32")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    options = {key: tensor(value) for key, value in options_of(*x.shape[:2]).items()}
    assert_layer(compiled(x, **options), layer, x, **options)
    changed = options | {"key_mask": ~options["key_mask"], "positions": options["positions"] + 1}
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_layer(compiled(x, **changed), layer, x, **changed)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # its own use
def test_compiles_to_native_code() -> None:
    torch.compiler.reset()
    layer, x, _, _ = layer_and_input("grouped")
    compiled = torch.compile(layer, fullgraph=True)
    assert_runs_alike(compiled, layer, x)
    assert_runs_alike(compiled, layer, torch.cat([x, -x[:, :4]], dim=1))


@each_config
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_number_of_tokens(name: str, strict: bool) -> None:
    torch.compiler.reset()
    layer, x, _, _ = layer_and_input(name, "float32")
    with torch.no_grad():
        program = torch.export.export(
            layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim.AUTO}}, strict=strict
        ).module()
        for N in (5, 12, 20, 40):  # kernels of the CPU differ below N*P = 64
            other = torch.randn(2, N, x.shape[-1])
            assert_layer(program(other), layer, other)


@pytest.mark.requirement("TYP-2", "LAY-7")
@pytest.mark.parametrize("kind", [example, sharp_example])
@each_config
def test_autocast_narrows_projections_and_leaves_the_mixing_wide(name: str, kind: Any) -> None:
    config = CONFIGS[name]
    parameters, x = kind(config, "bfloat16", parameter_dtype="float32")
    layer = layer_with(config, parameters).float()  # values that bfloat16 holds, as autocast rounds them
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(tensor(x).float())
    assert_within_limits(native(output), parameters, x, config=config, storage="bfloat16")
    output.float().square().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_autocast_does_not_round_the_mixing() -> None:
    # values are 2048 and 2048: 2048 (1 + 2^-12) - 2048 = 1/2, and 0 where 1 + 2^-12 is rounded to bfloat16
    config = LayerConfig(
        model_width=2,
        num_heads=1,
        head_width=1,
        num_pseudo_heads=1,
        num_kv_heads=2,
        attention=AttentionConfig(causal="none", rope="none"),
    )
    layer = InterleavedHeadAttention(config, initialiser="random")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(layer, name).weight.zero_()
        layer.v_proj.weight.fill_(2048.0)
        layer.o_proj.weight.fill_(1.0)
        layer.alpha_v.copy_(torch.tensor([1 + 2.0**-12, -1.0]).view(2, 1, 1))
        layer.collapse.fill_(1.0)
    x = torch.tensor([[[1.0, 0.0]]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x).float(), torch.full((1, 1, 2), 0.5))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@each_config
def test_vmap_and_grad_over_parameters_equal_a_loop(name: str) -> None:
    layer, x, _, _ = layer_and_input(name)
    states = [dict(layer.named_parameters()), {key: 0.5 * p for key, p in layer.named_parameters()}]
    stacked = {key: torch.stack([state[key] for state in states]) for key in states[0]}

    def loss(state: Any, x: Any) -> Any:
        return torch.func.functional_call(layer, state, (x,)).square().sum()

    inputs = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(torch.func.grad(loss))(stacked, inputs)
    for index, state in enumerate(states):
        wanted = torch.func.grad(loss)(state, inputs[index])
        assert_same_gradients((mapped[key][index] for key in wanted), wanted.values())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_each_example() -> None:
    """Over x alone, as for gradients that are clipped one by one."""
    layer, x, _, _ = layer_and_input("mha")
    parameters = dict(layer.named_parameters())

    def loss(parameters: Any, row: Any) -> Any:
        return torch.func.functional_call(layer, parameters, (row[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    layer(x).square().sum().backward()
    assert_same_gradients((each[key].sum(0) for key in parameters), (p.grad for p in layer.parameters()))


# Errors


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 3, 12)), "`x`: expected a torch.Tensor, got ndarray"),
        (torch.zeros(3, 12), "`x` shape: expected (B, N, D=12), got (3, 12)"),
        (torch.zeros(2, 3, 11), "`x` shape: expected (B, N, D=12), got (2, 3, 11)"),
        (
            torch.zeros(2, 3, 12).double(),
            "`x` dtype: expected float32, the dtype of `q_proj.weight`, got float64",
        ),
        (torch.zeros(2, 3, 12).int(), "`x` dtype: expected float32, the dtype of `q_proj.weight`, got int32"),
        (torch.zeros(2, 3, 12, device="meta"), "`x` device: expected cpu, the device of the layer, got meta"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_wrong_input_is_named(x: Any, message: str, autocast: bool) -> None:
    layer = InterleavedHeadAttention(CONFIGS["paper"])
    with torch.autocast("cpu", enabled=autocast), pytest.raises(IHAError) as error:
        layer(x)
    assert str(error.value) == message


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key_mask", torch.ones(2, 4, dtype=torch.bool)),
        ("key_mask", torch.ones(2, 3)),
        ("segment_ids", torch.zeros(2, 3)),
        ("positions", torch.zeros(1, 3, dtype=torch.int64)),
    ],
)
def test_errors_of_options_are_those_of_the_operation(name: str, value: Any) -> None:
    layer = InterleavedHeadAttention(CONFIGS["paper"])
    with pytest.raises(IHAError, match=f"^`{name}` "):
        layer(torch.zeros(2, 3, 12), **{name: value})


@pytest.mark.requirement("ERR-1", "TYP-1", "TYP-2")
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_width": 4}, {}, "`config`: expected a LayerConfig, got dict"),
        (CONFIGS["paper"], {"dtype": torch.int32}, "`dtype`: expected one of float64, "),
        (CONFIGS["paper"], {"dtype": torch.float64, "mixing_dtype": torch.float32}, "`mixing_dtype`: expect"),
        (CONFIGS["paper"], {"mixing_dtype": torch.bfloat16}, "`mixing_dtype`: expected float32 with dtype"),
        (CONFIGS["paper"], {"initialiser": "zeros"}, "`initialiser`: expected one of "),
        (CONFIGS["window"], {}, "`num_kv_heads`: expected a divisor of num_heads=2"),
    ],
)
def test_what_no_layer_can_be_is_named(config: Any, options: Any, message: str) -> None:
    with pytest.raises(IHAError) as error:
        InterleavedHeadAttention(config, **options)
    assert str(error.value).startswith(message)


# Checkpoints


def bits(x: Any) -> bytes:
    return bytes(x.detach().contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.requirement("CKPT-1", "CKPT-2", "CKPT-3", "CKPT-4")
@each_dtype
@each_config
def test_checkpoints_return_every_bit(name: str, dtypes: str, tmp_path: Path) -> None:
    layer, x, parameters, _ = layer_and_input(name, dtypes)
    with torch.no_grad():  # numbers that a detour by another dtype would change
        layer.o_proj.weight.view(-1)[:3] = torch.tensor([math.nan, -0.0, torch.finfo(x.dtype).tiny])
    path = tmp_path / "layer.safetensors"
    save_checkpoint(path, layer)
    state = torch.get_rng_state()
    loaded = load_checkpoint(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.config == layer.config
    assert list(loaded.state_dict()) == list(layer.state_dict())
    for key, value in layer.state_dict().items():
        assert loaded.state_dict()[key].dtype == value.dtype
        assert bits(loaded.state_dict()[key]) == bits(value), key
    assert all(p.requires_grad for p in loaded.parameters())
    config, arrays = load_arrays(path)
    assert config == layer.config
    assert all(arrays[key].tobytes() == bits(value) for key, value in layer.state_dict().items())
    save_arrays(path, parameters, layer.config)
    assert torch.equal(load_checkpoint(str(path))(x), layer_with(layer.config, parameters)(x))


@pytest.mark.requirement("CKPT-2")
def test_tied_and_transposed_parameters_are_saved_as_they_are(tmp_path: Path) -> None:
    layer, _, _, _ = layer_and_input("paper")
    layer.alpha_v = layer.alpha_k
    layer.q_proj.weight = torch.nn.Parameter(layer.k_proj.weight.detach().T.contiguous().T)
    save_checkpoint(tmp_path / "layer", layer)
    loaded = load_checkpoint(tmp_path / "layer", device="cpu")
    assert torch.equal(loaded.alpha_v, layer.alpha_k)
    assert torch.equal(loaded.q_proj.weight, layer.q_proj.weight)
    assert loaded.alpha_v is not loaded.alpha_k


def test_other_modules_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(iha_core.ArgumentTypeError, match=r"^`layer`: expected an InterleavedHeadAttention"):
        save_checkpoint(tmp_path / "layer", torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    layer = InterleavedHeadAttention(CONFIGS["paper"])
    layer.k_proj.half()
    with pytest.raises(iha_core.DTypeError, match=r"^`k_proj.weight` dtype: "):
        save_checkpoint(tmp_path / "layer", layer)
    assert not (tmp_path / "layer").exists()
    with pytest.raises(OSError, match=r"[Nn]o such file"):
        save_checkpoint(tmp_path / "no" / "layer", InterleavedHeadAttention(CONFIGS["paper"]))


def rewritten(path: Path, change: Any) -> None:
    """A checkpoint with changed tensors and metadata."""
    from safetensors.torch import safe_open, save_file

    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        entry = json.loads(file.metadata()["iha"])
    metadata = {"iha": entry}
    change(tensors, metadata)
    save_file(tensors, path, {key: json.dumps(value) for key, value in metadata.items()})


FAULTS: dict[str, tuple[Any, str]] = {
    "missing": (lambda t, m: t.pop("k_proj.weight"), "`k_proj.weight`: expected a tensor"),
    "extra": (lambda t, m: t.update(bias=torch.zeros(3)), "`bias`: expected no tensor beside "),
    "misshapen": (lambda t, m: t.update(collapse=torch.zeros(3, 2)), "`collapse` shape: expected (3, 3, 2)"),
    "integers": (lambda t, m: t.update(alpha_q=t["alpha_q"].int()), "`alpha_q` dtype: expected float32"),
    "mixed": (lambda t, m: t.update(alpha_k=t["alpha_k"].half()), "`alpha_k` dtype: expected float32"),
    "newer": (lambda t, m: m["iha"].update(spec_version="1.99"), "`spec_version`: expected 1.0 to "),
    "unknown field": (lambda t, m: m["iha"]["config"].update(depth=2), "`depth` field of config: "),
    "wrong size": (lambda t, m: m["iha"]["config"].update(model_width=13), "`q_proj.weight` shape: "),
    "no metadata": (lambda t, m: m.pop("iha"), "`checkpoint`: expected metadata with the key 'iha'"),
}


@pytest.mark.requirement("CKPT-4", "ERR-1")
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    path = tmp_path / "layer"
    save_checkpoint(path, InterleavedHeadAttention(CONFIGS["paper"]))
    rewritten(path, lambda tensors, metadata: None)
    load_checkpoint(path)
    rewritten(path, change)
    with pytest.raises(IHAError) as error:
        load_checkpoint(path)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.requirement("CKPT-4")
def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    save_checkpoint(path, InterleavedHeadAttention(CONFIGS["paper"]))
    whole = path.read_bytes()
    for part in (whole[:-1], whole[:100], b"", b"PK\x03\x04 a zip file" * 10):
        path.write_bytes(part)
        with pytest.raises(IHAError, match=r"^`checkpoint`: expected a safetensors file, got "):
            load_checkpoint(path)
    with pytest.raises(OSError, match=r"[Nn]o such file"):
        load_checkpoint(tmp_path / "none")
