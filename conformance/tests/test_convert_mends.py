"""Faults that an attacker found in the layer of PyTorch and its conversion, each with what mends it."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
from test_convert_torch import DTYPES, D, H, close, in_float64_throughout, model_of, multihead, tokens

import iha_core
from iha_core import ArgumentTypeError, AttentionConfig, ConfigError, IHAError, LayerConfig
from iha_core.config import PROFILES
from iha_core.layer_config import MIXING

torch = pytest.importorskip("torch")
from iha_torch import InterleavedHeadAttention, from_mha, replace_attention  # noqa: E402
from iha_torch.sources import PROBE_LIMIT  # noqa: E402


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def refusal(source: Any, **options: Any) -> IHAError:
    with pytest.raises(IHAError) as error:
        from_mha(source, **{"num_pseudo_heads": 2} | options)
    assert "\n" not in str(error.value)
    return error.value


# What the forward of a module computes


@pytest.mark.requirement("ERR-1", "INIT-6")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_without_rotation_are_refused(library: Any, dtype: Any) -> None:
    """Exaone 4 rotates in sliding layers alone, which only its forward says."""
    sliding, full = model_of(library, "Exaone4", dtype, **HYBRID).model.layers
    assert from_mha(sliding.self_attn, num_pseudo_heads=2).config.attention.window == 4
    error = refusal(full.self_attn)
    assert isinstance(error, ConfigError)
    assert error.argument == "source"
    assert "Exaone4Attention, whose forward gives something else" in str(error)


@pytest.mark.parametrize("change", ["gate", "scale", "cap", "values", "raises", "rotation"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_of_another_function_is_refused(library: Any, change: str, device: str) -> None:
    base = type(model_of(library, "Llama").model.layers[0].self_attn)

    class Changed(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, position_embeddings: Any, **further: Any) -> Any:
            cos, sin = position_embeddings
            if change == "raises":
                raise KeyError("lost\ngate")
            if change == "rotation":
                sin = -sin
                cos = torch.ones_like(cos)
            if change == "cap":
                hidden_states = hidden_states.clamp(-1, 1)
            if change == "scale":
                self = copy.copy(self)
                self.scaling = self.scaling * 2
            y, weights = base.forward(self, hidden_states, (cos, sin), **further)
            if change == "gate":
                y = y * hidden_states.sigmoid()
            return (y + hidden_states if change == "values" else y), weights

    source = model_of(library, "Llama", torch.bfloat16).model.layers[0].self_attn.to(device)
    from_mha(source, num_pseudo_heads=2)
    source.__class__ = Changed
    error = refusal(source)
    assert error.argument == "source"
    assert isinstance(error, ArgumentTypeError) == (change == "raises")


def test_a_probe_needs_no_weights_and_changes_nothing(library: Any) -> None:
    """A rotation does not show on weights that are zeros, nor on none at all."""
    model = model_of(library, "Exaone4", torch.float32, **HYBRID).train()
    full = model.model.layers[1].self_attn
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.zero_()
    assert refusal(full).argument == "source"
    assert refusal(copy.deepcopy(full).to("meta")).argument == "source"
    source = model.model.layers[0].self_attn
    calls: list[Any] = []
    source.register_forward_hook(lambda *given: calls.append(given))
    before = {name: x.clone() for name, x in source.state_dict().items()}
    settings, state = source.config.to_dict(), torch.get_rng_state()
    parameters = dict(source.named_parameters())
    with torch.autocast("cpu", torch.bfloat16):
        from_mha(source, num_pseudo_heads=2)
    assert not calls
    assert source.training
    assert source.config.to_dict() == settings
    assert source.config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameters[name] is parameter for name, parameter in source.named_parameters())
    assert all(torch.equal(x, before[name]) for name, x in source.state_dict().items())


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Granite"])
def test_a_scale_hides_nothing_from_the_probe(library: Any, family: str) -> None:
    """Where logits are small all keys weigh the same, and no rotation shows."""
    source = model_of(library, family, torch.float32).model.layers[0].self_attn
    source.scaling = 1e-5
    assert from_mha(source, num_pseudo_heads=2).config.attention.scale == 1e-5
    base = type(source)

    class Still(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, position_embeddings: Any, **further: Any) -> Any:
            cos, sin = position_embeddings
            turned = torch.ones_like(cos), torch.zeros_like(sin)
            return base.forward(self, hidden_states, turned, **further)

    source.__class__ = Still
    error = refusal(source)
    assert float(str(error).split("off by ")[1].rstrip(")")) > 4 * PROBE_LIMIT


@pytest.mark.parametrize("name", ["residual_dropout", "attention_dropout"])
def test_dropout_is_refused(library: Any, name: str) -> None:
    model = model_of(library, "Starcoder2", **{"residual_dropout": 0.0, "attention_dropout": 0.0, name: 0.2})
    error = refusal(model.model.layers[0].self_attn)
    assert error.argument == name
    assert str(error).endswith("got 0.2")


def test_norms_without_a_weight_are_refused(library: Any) -> None:
    source = model_of(library, "Qwen3", head_dim=6).model.layers[0].self_attn
    source.k_norm = torch.nn.RMSNorm(6, eps=1e-3, elementwise_affine=False)
    assert refusal(source).argument == "k_norm"

    class Bare(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        eps = 1e-3

    source.q_norm, source.k_norm = Bare(), Bare()
    error = refusal(source)
    assert isinstance(error, ConfigError)
    assert str(error) == "`q_norm` of the source: expected a norm with a weight, got Bare without one"
    nano = model_of(library, "NanoChat", torch.float32).model.layers[0].self_attn
    assert refusal(nano).argument == "q_norm"


# Models


GRANITE = {
    "layer_types": ["attention", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
}


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("rotation", "argument"), [(None, "position_embedding_type"), ("rope", "position_ids")]
)
def test_models_that_give_attention_no_positions_stay_as_they_were(
    library: Any, rotation: str | None, argument: str
) -> None:
    model = model_of(library, "GraniteMoeHybrid", torch.float32, position_embedding_type=rotation, **GRANITE)
    modules, state = dict(model.named_modules()), torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"^`{argument}` of the source: ") as error:
        replace_attention(model, num_pseudo_heads=2)
    assert "\n" not in str(error.value)
    assert dict(model.named_modules()) == modules
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in modules.values())
    model(tokens())


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("positions", [None, [0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 2, 4, 6, 8, 10, 12, 14, 16]])
def test_decoders_that_are_not_causal(
    library: Any, family: str, padding: bool, positions: list[int] | None
) -> None:
    """transformers looks for packed sequences in causal masks alone, and its window has another edge."""
    model = in_float64_throughout(model_of(library, family))
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    converted = replace_attention(copy.deepcopy(model), num_pseudo_heads=2)
    ids = tokens()
    given: dict[str, Any] = {}
    if positions is not None:
        given["position_ids"] = torch.tensor([positions])
    if padding:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, :3] = 0
    kept = given.get("attention_mask", torch.ones_like(ids)).bool()
    close(converted(ids, **given).logits[kept], model(ids, use_cache=False, **given).logits[kept])


def test_further_masks_of_decoders_that_are_not_causal_are_refused(library: Any) -> None:
    from transformers.masking_utils import create_bidirectional_mask

    model = replace_attention(model_of(library, "Llama"), num_pseudo_heads=2)
    mask = torch.ones(2, 9, dtype=torch.int64)
    given = {"config": model.config, "inputs_embeds": torch.zeros(2, 9, D), "attention_mask": mask}
    assert torch.equal(create_bidirectional_mask(**given), mask.bool())
    with pytest.raises(iha_core.ArgumentValueError, match="further mask function"):
        create_bidirectional_mask(**given, and_mask_function=lambda *indices: indices[2] >= 0)


def test_a_second_conversion_says_that_there_was_one(library: Any) -> None:
    model = replace_attention(model_of(library, "Llama"), num_pseudo_heads=2)
    with pytest.raises(
        iha_core.ArgumentValueError, match=r"got a LlamaForCausalLM that is already converted$"
    ):
        replace_attention(model, num_pseudo_heads=2)
    with pytest.raises(iha_core.ArgumentValueError, match=r"use_cache=False"):
        model(tokens(), use_cache=True)


def test_frozen_decoders_stay_frozen(library: Any) -> None:
    source = model_of(library, "Qwen2").model.layers[0].self_attn
    source.requires_grad_(False)
    source.k_proj.bias.requires_grad_(True)
    layer = from_mha(source, num_pseudo_heads=2)
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    assert trained == {*MIXING, "k_proj.bias", "o_proj.bias"}


# torch.nn.MultiheadAttention


@pytest.mark.parametrize("recorded", [True, False])
def test_frozen_weights_stay_frozen(recorded: bool) -> None:
    source = multihead()
    source.in_proj_weight.requires_grad_(False)
    source.out_proj.bias.requires_grad_(False)
    with torch.set_grad_enabled(recorded):
        layer = from_mha(source, num_pseudo_heads=2)
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.bias"}


def test_classes_with_a_forward_of_their_own_are_refused() -> None:
    class Named(torch.nn.MultiheadAttention):  # type: ignore[misc, name-defined, unused-ignore]
        pass

    class Doubled(torch.nn.MultiheadAttention):  # type: ignore[misc, name-defined, unused-ignore]
        def forward(self, *given: Any, **named: Any) -> Any:
            output, weights = super().forward(*given, **named)
            return 2 * output, weights

    from_mha(Named(D, H), num_pseudo_heads=2)
    patched = torch.nn.MultiheadAttention(D, H)
    patched.forward = lambda *given: given
    for source in (Doubled(D, H), torch.ao.nn.quantizable.MultiheadAttention(D, H), patched):
        error = refusal(source)
        assert isinstance(error, ArgumentTypeError)
        assert error.argument == "source"
        assert str(error).endswith("MultiheadAttention with one of its own") or "Doubled" in str(error)


# Arguments


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_decides_the_collapse(profile: str) -> None:
    own = PROFILES[profile].collapse
    options = {"profile": profile, "rope": "none"}
    if profile == "algorithm1":
        options["initialiser"] = "replicated-last"
    layer = from_mha(multihead(), num_pseudo_heads=2, **options)
    assert layer.config.collapse == own[0]
    for kind in ("global", "per_head"):
        if kind in own:
            assert from_mha(multihead(), num_pseudo_heads=2, collapse=kind, **options).collapse.ndim == (
                3 if kind == "global" else 2
            )
        else:
            error = refusal(multihead(), collapse=kind, **options)
            assert isinstance(error, ConfigError)
            assert error.argument == "collapse"
            assert f"as profile '{profile}' has it" in str(error)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_pseudo_heads", None),
        ("num_pseudo_heads", True),
        ("window_unit", ""),
        ("window_unit", 0),
        ("window_unit", False),
        ("collapse", ""),
        ("collapse", 0),
    ],
)
def test_arguments_that_are_no_choice_are_refused(argument: str, value: Any) -> None:
    assert refusal(multihead(), **{argument: value}).argument == argument


# The layer


def plain_layer(**options: Any) -> Any:
    config = LayerConfig(kind="mha", model_width=D, num_heads=H, attention=AttentionConfig(rope="none"))
    torch.manual_seed(3)
    return InterleavedHeadAttention(config, **options)


@pytest.mark.requirement("LAY-6")
@pytest.mark.parametrize("assign", [False, True])
def test_constants_are_set_by_loading(assign: bool) -> None:
    wanted = plain_layer()
    layer = pickle.loads(pickle.dumps(copy.deepcopy(plain_layer(device="meta"))))
    if not assign:
        layer.to_empty(device="cpu")
        for name in MIXING:
            getattr(layer, name).fill_(float("nan"))
    model = torch.nn.Sequential(layer)
    model.load_state_dict({f"0.{name}": x for name, x in wanted.state_dict().items()}, assign=assign)
    x = torch.ones(2, 3, D)
    assert torch.equal(model(x), wanted(x))
    assert set(layer.state_dict()) == set(wanted.state_dict())
    assert {name for name, _ in layer.named_buffers()} == set(MIXING)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("argument", ["dtype", "mixing_dtype"])
@pytest.mark.parametrize("found", ["float32", float, 1])
def test_dtypes_are_those_of_the_framework(argument: str, found: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^`{argument}`: expected a torch.dtype or None, got "):
        plain_layer(**{argument: found})


@pytest.mark.requirement("ERR-1")
def test_inputs_are_dense() -> None:
    layer, x = plain_layer(), torch.ones(2, 3, D)
    given = [
        x.to_sparse(),
        torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged),
    ]
    with warnings.catch_warnings(action="ignore"):  # of a prototype
        given.append(torch.nested.nested_tensor([x[0], x[1]], layout=torch.strided))
    if torch.backends.mkldnn.is_available():
        given.append(x.to_mkldnn())
    for tensor in given:
        with pytest.raises(ArgumentTypeError, match=r"^`x`: expected a dense tensor, got "):
            layer(tensor)
