"""Multi-head attention that is converted: the same function, or a refusal that says why."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import SAME_FUNCTION, assert_same, assert_within_limits
from test_layer_torch import array, native, tensor

import iha_core
from iha_core import AttentionConfig, ConfigError, IHAError, LayerConfig
from iha_core.config import Causal, WindowUnit
from iha_core.initialisers import INITIALISERS, difference_from_mha
from iha_core.layer_config import MIXING

torch = pytest.importorskip("torch")
from iha_torch import InterleavedHeadAttention, from_mha, replace_attention  # noqa: E402
from iha_torch.decoder import packed_segments  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

VOCABULARY, D, H, G, d = 19, 24, 4, 2, 6


def parameters_of(layer: Any) -> dict[str, Any]:
    return {name: array(x) for name, x in layer.state_dict().items()}


def close(found: Any, wanted: Any) -> None:
    """Equal up to the roundoff of float64, relative to the largest number."""
    assert_same(found.detach(), wanted.detach(), SAME_FUNCTION)


# torch.nn.MultiheadAttention


def multihead(dtype: Any = torch.float64, **options: Any) -> Any:
    torch.manual_seed(1)
    source = torch.nn.MultiheadAttention(D, H, batch_first=True, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(std=1 / math.sqrt(D) if parameter.ndim > 1 else 0.5)
    return source


def hidden(N: int, causal: Causal, window: int | None) -> Any:
    """The mask of `torch.nn.MultiheadAttention`: True where a key may not be attended."""
    n, m = torch.arange(N)[:, None], torch.arange(N)[None]
    mask = torch.zeros(N, N, dtype=torch.bool)
    if causal != "none":
        mask |= m > n
    if window is not None:
        mask |= n - m >= window
        mask |= m - n >= window
    return mask


def example_input(dtype: Any, B: int = 2, N: int = 7) -> Any:
    torch.manual_seed(2)
    return torch.randn(B, N, D, dtype=torch.float64).to(dtype)


@pytest.mark.requirement("PROF-2", "INIT-6")
@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collapse": "per_head"},
        {"causal": "none"},
        {"window": 3},
        {"causal": "virtual"},
        {"causal": "virtual", "window": 2, "window_unit": "virtual", "collapse": "per_head"},
        {"initialiser": "replicated-last", "window": 2, "window_unit": "virtual"},
        {"initialiser": "replicated-first"},
        {"causal": "virtual", "initialiser": "replicated-average", "num_pseudo_heads": 1},
        {"profile": "theory"},
    ],
)
def test_torch_modules_and_their_layers_are_within_the_limits(
    options: dict[str, Any], bias: bool, dtype: Any
) -> None:
    source = multihead(dtype, bias=bias)
    layer = from_mha(source, **{"num_pseudo_heads": 4} | options)  # 1/4 is a number of every dtype
    x, attention = example_input(dtype), layer.config.attention
    storage = str(dtype).removeprefix("torch.")
    mask = hidden(7, attention.causal, attention.window)
    expected, _ = source(x, x, x, attn_mask=mask, need_weights=False)
    mha = LayerConfig(
        kind="mha",
        model_width=D,
        num_heads=H,
        bias=bias,
        attention=AttentionConfig(
            causal="none" if attention.causal == "none" else "token",
            window=attention.window,
            window_unit="token",
            rope="none",
        ),
    )
    plain = {name: x for name, x in parameters_of(layer).items() if name not in MIXING}
    assert_within_limits(native(expected), plain, array(x), config=mha, storage=storage)
    output = layer(x)
    assert output.dtype == dtype
    assert_within_limits(native(output), parameters_of(layer), array(x), config=layer.config, storage=storage)
    close(
        torch.from_numpy(iha_core.layer(parameters_of(layer), array(x), config=layer.config)),
        torch.from_numpy(iha_core.layer(plain, array(x), config=mha)),
    )


def test_masks_and_layouts_of_torch_modules() -> None:
    source = multihead()
    x = example_input(torch.float64)
    dropped = torch.zeros(2, 7, dtype=torch.bool)
    dropped[1, 5:] = True
    mask = hidden(7, "token", None)
    expected, _ = source(x, x, x, attn_mask=mask, key_padding_mask=dropped)
    layer = from_mha(source, num_pseudo_heads=2)
    close(layer(x, key_mask=~dropped), expected)
    source.batch_first = False
    close(from_mha(source, num_pseudo_heads=2)(x, key_mask=~dropped), expected)


def test_the_layer_owns_copies() -> None:
    source = multihead(torch.bfloat16).eval()
    source.in_proj_weight.requires_grad_(False)
    layer = from_mha(source, num_pseudo_heads=2)
    assert not layer.training
    assert from_mha(source.train(), num_pseudo_heads=2).training
    assert all(p.dtype == torch.bfloat16 and p.is_leaf for p in layer.parameters())
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {f"{side}_proj.weight" for side in "qkv"}, "what the source has frozen, and no more"
    before = parameters_of(layer)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    for name, x in parameters_of(layer).items():
        np.testing.assert_array_equal(x, before[name])
    state = torch.get_rng_state()
    from_mha(source, num_pseudo_heads=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.is_meta for p in from_mha(source.to("meta"), num_pseudo_heads=2).parameters())
    layer.reset_parameters()
    assert layer.initialiser == "replicated-average"


@pytest.mark.requirement("INIT-6")
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("initialiser", INITIALISERS)
@pytest.mark.parametrize("unit", ["token", "virtual"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", ["virtual", "token", "none"])
def test_what_converts_computes_the_same_and_the_rest_is_refused(
    causal: Causal, window: int | None, unit: WindowUnit, initialiser: Any, P: int
) -> None:
    source, x = multihead(), example_input(torch.float64)
    options: dict[str, Any] = {"causal": causal, "window": window, "window_unit": unit}
    attention = AttentionConfig(rope="none", **options)
    reason = difference_from_mha(attention, initialiser, num_pseudo_heads=P)

    def convert() -> Any:
        return from_mha(source, num_pseudo_heads=P, initialiser=initialiser, **options)

    if reason is None:
        expected, _ = source(x, x, x, attn_mask=hidden(7, causal, window), need_weights=False)
        close(convert()(x), expected)
    else:
        with pytest.raises(ConfigError) as error:
            convert()
        assert reason.reason in str(error.value)
        assert error.value.argument == reason.field
        assert error.value.argument in ("causal", "window_unit", "initialiser")
        if error.value.argument in options:
            assert str(error.value).endswith(f"got {options[error.value.argument]!r}")


@pytest.mark.requirement("ERR-1", "INIT-6")
@pytest.mark.parametrize(
    ("field", "of_source", "options", "words"),
    [
        ("rope", {}, {"profile": "paper"}, "turned to different positions"),
        ("rope", {}, {"profile": "algorithm1", "num_pseudo_heads": 4}, "turned to different positions"),
        ("rope", {}, {"rope": "token"}, "expected 'none', as the source has it, got 'token'"),
        (
            "causal",
            {},
            {"profile": "paper", "rope": "none", "initialiser": "replicated-first"},
            "are hidden from",
        ),
        ("window_unit", {}, {"causal": "none", "window": 2, "window_unit": "virtual"}, "ends within a token"),
        ("window_unit", {}, {"window": 2, "window_unit": "virtual"}, "one token more"),
        ("initialiser", {}, {"initialiser": "noisy-average"}, "does not copy heads"),
        ("initialiser", {}, {"initialiser": "copy"}, "expected one of"),
        ("profile", {}, {"profile": "mha"}, "expected one of 'paper', "),
        ("causal", {}, {"causal": "full"}, "expected one of"),
        ("window", {}, {"window": 0}, "expected None or a whole number of tokens >= 1"),
        ("collapse", {}, {"collapse": "mean"}, "expected one of 'global', 'per_head'"),
        ("num_pseudo_heads", {}, {"num_pseudo_heads": 0}, "expected a whole number >= 1"),
        ("dropout", {"dropout": 0.1}, {}, "expected 0, as a layer drops no weights, got 0.1"),
        ("add_bias_kv", {"add_bias_kv": True}, {}, "expected False"),
        ("add_zero_attn", {"add_zero_attn": True}, {}, "expected False"),
        ("kdim", {"kdim": 10}, {}, "expected embed_dim=24, for self-attention, got 10"),
        ("vdim", {"vdim": 10}, {}, "expected embed_dim=24"),
    ],
)
def test_refusals_name_the_field_and_the_reason(
    field: str, of_source: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    source = torch.nn.MultiheadAttention(D, H, **of_source)
    with pytest.raises(IHAError) as error:
        from_mha(source, **{"num_pseudo_heads": 2} | options)
    assert error.value.argument == field
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize("source", [torch.nn.Linear(2, 2), torch.nn.TransformerEncoderLayer(4, 2), None])
def test_other_modules_are_refused(source: Any) -> None:
    with pytest.raises(
        iha_core.ArgumentTypeError, match=r"^`source`: expected a torch.nn.MultiheadAttention"
    ):
        from_mha(source, num_pseudo_heads=2)
    with pytest.raises(iha_core.ArgumentTypeError, match=r"^`model`: expected a model of transformers, 5"):
        replace_attention(source, num_pseudo_heads=2)


@pytest.mark.requirement("INIT-6")
def test_the_table_of_the_guide_is_that_of_the_core() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "conversion.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\w+) \| ([\w, ]+) \| ([\w, ]+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE
    )
    seen = set()
    for causal, ropes, windows, *answers in rows[1:]:
        for rope in ropes.split(", "):
            for window, unit in WINDOWS[windows]:
                seen.add((causal, rope, window, unit))
                attention = AttentionConfig(causal=causal, rope=rope, window=window, window_unit=unit)
                for name, answer in zip(("average", "first", "last"), answers, strict=True):
                    reason = difference_from_mha(attention, f"replicated-{name}", num_pseudo_heads=2)
                    assert answer == ("**yes**" if reason is None else "no"), (attention, name)
    assert len(seen) == 3 * 3 * 4


WINDOWS: dict[str, list[tuple[int | None, WindowUnit]]] = {
    "any": [(None, "token"), (None, "virtual"), (3, "token"), (3, "virtual")],
    "none, or of either unit": [(None, "token"), (None, "virtual"), (3, "token"), (3, "virtual")],
    "none, or of unit token": [(None, "token"), (None, "virtual"), (3, "token")],
    "of unit virtual": [(3, "virtual")],
}


@pytest.mark.parametrize("P", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_average_is_off_by_the_rounding_of_1_over_p(dtype: Any, P: int) -> None:
    collapse = from_mha(multihead(dtype), num_pseudo_heads=P, collapse="per_head").collapse
    off = (collapse.double().sum(-1) - 1).abs().max()
    assert off <= torch.finfo(dtype).eps / 2
    assert (off == 0) == (P in (2, 4, 8))


def test_importing_the_backend_does_not_import_transformers() -> None:
    script = "import sys, iha_torch; print('transformers' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


# transformers


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "rope_theta": 30.0},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8, "rms_norm_eps": 1e-3},
    "Mistral": {"sliding_window": 4},
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def model_of(library: Any, family: str, dtype: Any = torch.float64, **further: Any) -> Any:
    """A small decoder with random values in all parameters."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": D,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    given = {**options, **FAMILIES.get(family, {}), **further}
    theta = given.pop("rope_theta", None)
    if theta is not None:
        given.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    torch.manual_seed(4)
    config = getattr(library, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(library, f"{family}ForCausalLM")(config(**given))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return model.to(dtype).eval()


class Rotary(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """Tables of float64, where those of transformers are of float32 for any model."""

    def __init__(self, base: float, width: int) -> None:
        super().__init__()
        self.frequencies = torch.tensor(
            [base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64
        )

    def forward(self, x: Any, position_ids: Any) -> Any:
        angles = position_ids[..., None].double() * self.frequencies
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def in_float64_throughout(model: Any) -> Any:
    """The model with norms and rotation in float64, which transformers computes in float32."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
            norm.load_state_dict(module.state_dict())
            model.set_submodule(name, norm)
    attention = model.model.layers[0].self_attn
    model.model.rotary_emb = Rotary(model.config.rope_parameters["rope_theta"], attention.head_dim)
    return model


def tokens(B: int = 2, N: int = 9) -> Any:
    return torch.randint(1, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(6))


def calls_of_attention(model: Any, ids: Any, **options: Any) -> list[dict[str, Any]]:
    """What every attention of a model is called with."""
    calls: list[dict[str, Any]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, __, given: calls.append(given), with_kwargs=True)
        for layer in model.model.layers
    ]
    model(ids, use_cache=False, **options)
    for hook in hooks:
        hook.remove()
    return calls


def plain_config(family: str, layer: int) -> LayerConfig:
    """The attention of a family, written down by hand."""
    window = {"Qwen2": (None, 3)[layer], "Mistral": 4}.get(family)
    theta = 30.0 if family == "Llama" else 10000.0
    attention = AttentionConfig(
        causal="token", window=window, window_unit="token", rope="token", rope_theta=theta
    )
    return LayerConfig(
        kind="mha",
        model_width=D,
        num_heads=H,
        head_width=8 if family == "Qwen3" else d,
        num_kv_heads=G,
        bias=family in ("Llama", "Qwen2"),
        qk_norm=family == "Qwen3",
        qk_norm_epsilon=1e-3 if family == "Qwen3" else 1e-6,
        attention=attention,
    )


CONVERSIONS: tuple[dict[str, Any], ...] = (
    {},
    {"collapse": "per_head", "initialiser": "replicated-first"},
    {"causal": "virtual"},
    {"initialiser": "replicated-last", "window_unit": "virtual"},
)


@pytest.mark.requirement("PROF-2", "INIT-6")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CONVERSIONS)
@each_family
def test_attention_of_decoders_is_within_the_limits(
    library: Any, family: str, options: dict[str, Any], dtype: Any
) -> None:
    model = model_of(library, family, dtype)
    storage = str(dtype).removeprefix("torch.")
    for index, call in enumerate(calls_of_attention(model, tokens())):
        source, x = model.model.layers[index].self_attn, array(call["hidden_states"])
        mha = plain_config(family, index)
        plain = parameters_of(source)
        if family == "Qwen2":
            plain["o_proj.bias"] = np.zeros(D)
        expected, _ = source(**call)
        assert_within_limits(native(expected), plain, x, config=mha, storage=storage)
        layer = from_mha(source, num_pseudo_heads=4, **options)
        output = layer(call["hidden_states"])
        assert_within_limits(native(output), parameters_of(layer), x, config=layer.config, storage=storage)
        exact = iha_core.layer(parameters_of(layer), x, config=layer.config)
        close(torch.from_numpy(exact), torch.from_numpy(iha_core.layer(plain, x, config=mha)))


@pytest.mark.requirement("INIT-6")
@pytest.mark.parametrize("options", CONVERSIONS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@each_family
def test_logits_of_converted_models_are_the_same(
    library: Any, family: str, padding: str, options: dict[str, Any]
) -> None:
    model = in_float64_throughout(model_of(library, family))
    converted = replace_attention(copy.deepcopy(model), num_pseudo_heads=3, **options)
    ids = tokens()
    mask = torch.ones_like(ids)
    given: dict[str, Any] = {}
    if padding != "none":
        mask[1, slice(None, 3) if padding == "left" else slice(-3, None)] = 0
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    kept = mask.bool()
    close(converted(ids, **given).logits[kept], model(ids, **given).logits[kept])
    if given:  # without positions, too, which transformers then counts from the first column
        given.pop("position_ids")
        close(converted(ids, **given).logits[kept], model(ids, **given).logits[kept])
        changed = torch.where(kept, ids, 7)
        assert not torch.equal(changed, ids)
        close(converted(changed, **given).logits[kept], converted(ids, **given).logits[kept])


@each_family
def test_packed_sequences_do_not_see_each_other(library: Any, family: str) -> None:
    model = in_float64_throughout(model_of(library, family))
    converted = replace_attention(copy.deepcopy(model), num_pseudo_heads=2)
    ids, positions = tokens(), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = converted(ids, position_ids=positions).logits
    close(packed, model(ids, position_ids=positions, use_cache=False).logits)
    close(packed[:, 4:], converted(ids[:, 4:]).logits)


@each_family
def test_positions_turn_and_do_not_separate_where_there_is_a_mask(library: Any, family: str) -> None:
    """As transformers has it: without a mask alone, positions that start anew begin another sequence."""
    model = in_float64_throughout(model_of(library, family))
    converted = replace_attention(copy.deepcopy(model), num_pseudo_heads=2)
    ids = tokens()
    given = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.tensor([[0, 1, 5, 6, 0, 1, 2, 3, 4]]),
    }
    close(converted(ids, **given).logits, model(ids, **given).logits)


def test_segments_follow_from_positions() -> None:
    assert packed_segments(torch.tensor([[0, 1, 2], [5, 6, 7]])) is None
    assert packed_segments(torch.zeros(2, 0, dtype=torch.int64)) is None
    segments = packed_segments(torch.tensor([[0, 1, 0, 1], [3, 4, 5, 6], [0, 2, 2, 3]]))
    assert segments.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 2]]


def test_converted_models_generate_without_a_cache(library: Any) -> None:
    model = model_of(library, "Mistral", torch.float32)
    converted = replace_attention(copy.deepcopy(model), num_pseudo_heads=2)
    ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.int64)
    ids[1, :2], mask[1, :2] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(converted.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.requirement("ERR-1")
@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("cache", {"use_cache": True}),
        ("attention_mask", {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}),
    ],
)
def test_calls_of_a_model_that_a_layer_cannot_serve(library: Any, argument: str, given: Any) -> None:
    converted = replace_attention(model_of(library, "Llama"), num_pseudo_heads=2)
    assert converted.config.use_cache is False
    with pytest.raises(iha_core.ArgumentValueError, match=f"^`{argument}`: expected "):
        converted(tokens(), **given)
    converted.set_attn_implementation("sdpa")
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 0] = 0
    with pytest.raises(iha_core.ArgumentValueError, match="as attention implementation 'iha' makes it"):
        converted(tokens(), attention_mask=mask)


@pytest.mark.requirement("ERR-1")
def test_positions_and_caches_of_the_module_itself(library: Any) -> None:
    model = replace_attention(model_of(library, "Llama"), num_pseudo_heads=2)
    module, x = model.model.layers[0].self_attn, example_input(torch.float64)
    with pytest.raises(iha_core.ArgumentValueError, match=r"^`position_ids`: "):
        module(x)
    with pytest.raises(iha_core.ArgumentValueError, match=r"^`past_key_values`: "):
        module(x, position_ids=torch.arange(7)[None], past_key_values=object())
    output, weights = module(x, position_ids=torch.arange(7)[None])
    assert weights is None
    assert torch.equal(output, module.attention(x))


def test_further_mask_functions_are_refused(library: Any) -> None:
    from transformers.masking_utils import create_causal_mask

    model = replace_attention(model_of(library, "Llama"), num_pseudo_heads=2)
    given = {"config": model.config, "inputs_embeds": torch.zeros(2, 9, D), "cache": None}
    mask = torch.ones(2, 9, dtype=torch.int64)
    assert torch.equal(create_causal_mask(**given, attention_mask=mask), mask.bool())

    def everything(*indices: Any) -> Any:
        return indices[2] >= 0

    blocks = torch.zeros(2, 9, dtype=torch.int64)
    for further in ({"or_mask_function": everything}, {"block_sequence_ids": blocks}):
        with pytest.raises(iha_core.ArgumentValueError, match="further mask function"):
            create_causal_mask(**given, attention_mask=mask, **further)


@each_family
@pytest.mark.parametrize("initialiser", ["replicated-average", "replicated-first", "replicated-last"])
def test_converted_models_are_trained(library: Any, family: str, initialiser: Any) -> None:
    """And which gradients of the mixing are 0 at the start, as docs/conversion.md says."""
    model = replace_attention(model_of(library, family), num_pseudo_heads=3, initialiser=initialiser).train()
    layers = [layer.self_attn.attention for layer in model.model.layers]
    before = [{name: getattr(layer, name).detach().clone() for name in MIXING} for layer in layers]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids, losses = tokens(4, 9), []
    for step in range(8):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        for layer in layers:
            gradients = {name: getattr(layer, name).grad for name in MIXING}
            if initialiser == "replicated-average":
                for gradient in gradients.values():
                    close(gradient, gradient[..., :1].expand_as(gradient))
            elif step == 0:
                taken = 0 if initialiser == "replicated-first" else 2
                others = [p for p in range(3) if p != taken]
                assert not gradients["alpha_q"][..., others].any()
                gradients["alpha_q"] = gradients["alpha_q"][..., taken]
            assert all((gradient != 0).all() for gradient in gradients.values())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    for layer, start in zip(layers, before, strict=True):
        for name in MIXING:
            assert (getattr(layer, name) != start[name]).all(), name


def test_models_compile_after_conversion(library: Any) -> None:
    torch.compiler.reset()
    model = replace_attention(model_of(library, "Llama", torch.float64), num_pseudo_heads=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = 0
    for given in ({}, {"attention_mask": mask}):
        close(compiled(tokens(), **given).logits, model(tokens(), **given).logits)


def attention_of(library: Any, family: str, **options: Any) -> Any:
    return model_of(library, family, torch.float32, **options).model.layers[0].self_attn


def with_part(name: str, part: Any) -> Callable[[Any], Any]:
    def change(library: Any) -> Any:
        source = attention_of(library, "Qwen3")
        delattr(source, name) if hasattr(source, name) else None
        setattr(source, name, part)
        return source

    return change


def of(family: str, **options: Any) -> Callable[[Any], Any]:
    return lambda library: attention_of(library, family, **options)


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "virtual rotation": (of("Llama"), {"profile": "paper"}, "rope"),
    "no rotation": (of("Llama"), {"rope": "none"}, "rope"),
    "profile without rotation": (of("Llama"), {"profile": "theory"}, "rope"),
    "not causal": (of("Llama"), {"causal": "none"}, "causal"),
    "virtual causality, average": (
        of("Llama"),
        {"causal": "virtual", "initialiser": "replicated-average"},
        "causal",
    ),
    "a window that it has not": (of("Llama"), {"window": 2}, "window"),
    "another window": (of("Mistral"), {"window": 5}, "window"),
    "virtual window": (of("Mistral"), {"window_unit": "virtual"}, "window_unit"),
    "noise": (of("Llama"), {"initialiser": "noisy-average"}, "initialiser"),
    "scaled rotation": (
        of("Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        {},
        "rope_parameters",
    ),
    "partial rotation": (
        of(
            "Llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}
        ),
        {},
        "partial_rotary_factor",
    ),
    "dropout": (of("Llama", attention_dropout=0.1), {}, "attention_dropout"),
    "soft cap (Gemma 2)": (of("Gemma2", head_dim=8), {}, "attn_logit_softcapping"),
    "norm by 1 + weight (Gemma 3)": (of("Gemma3", head_dim=8), {}, "q_norm"),
    "adjacent lanes (Cohere)": (of("Cohere"), {}, "rotate_half"),
    "sinks (gpt-oss)": (of("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1), {}, "sinks"),
    "norm of all heads (OLMo 2)": (of("Olmo2"), {}, "q_norm.weight"),
    "a projection that is no Linear": (with_part("q_proj", torch.nn.Identity()), {}, "q_proj"),
    "a further part": (with_part("gate", torch.nn.Linear(2, 2)), {}, "gate"),
    "a norm with a mean": (with_part("k_norm", torch.nn.LayerNorm(8, eps=1e-3, bias=False)), {}, "k_norm"),
    "another epsilon": (with_part("k_norm", torch.nn.RMSNorm(8, eps=1e-2)), {}, "k_norm"),
    "heads of another width": (with_part("k_proj", torch.nn.Linear(D, 17, bias=False)), {}, "k_proj.weight"),
    "another dtype": (with_part("v_proj", torch.nn.Linear(D, 16, bias=False).half()), {}, "v_proj.weight"),
}


@pytest.mark.requirement("ERR-1", "INIT-6")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_function_is_refused_by_name(library: Any, name: str) -> None:
    make, options, field = REFUSED[name]
    source = make(library)
    with pytest.raises(IHAError) as error:
        from_mha(source, num_pseudo_heads=2, **options)
    assert error.value.argument == field
    assert "\n" not in str(error.value)


def test_a_model_that_cannot_be_converted_stays_as_it_was(library: Any) -> None:
    model = model_of(library, "Llama")
    model.model.layers[1].self_attn.attention_dropout = 0.5
    modules = dict(model.named_modules())
    with pytest.raises(ConfigError, match=r"^`attention_dropout` of the source: "):
        replace_attention(model, num_pseudo_heads=2)
    assert dict(model.named_modules()) == modules
    assert (model.config._attn_implementation, model.config.use_cache) == ("sdpa", True)
    with pytest.raises(
        iha_core.ArgumentValueError, match=r"^`model`: expected a model with attention modules"
    ):
        replace_attention(
            replace_attention(model_of(library, "Llama"), num_pseudo_heads=2), num_pseudo_heads=2
        )


def test_scales_of_a_source_are_kept(library: Any) -> None:
    source = attention_of(library, "Llama")
    assert from_mha(source, num_pseudo_heads=2).config.attention.scale is None
    source.scaling = 0.25
    assert from_mha(source, num_pseudo_heads=2).config.attention.scale == 0.25


def test_a_source_that_is_not_causal_stays_so(library: Any) -> None:
    source = attention_of(library, "Llama")
    source.is_causal = False
    assert from_mha(source, num_pseudo_heads=2).config.attention.causal == "none"
    with pytest.raises(ConfigError, match=r"^`causal`: expected 'none', as the source has it, got 'token'$"):
        from_mha(source, num_pseudo_heads=2, causal="token")


def test_configurations_of_transformers_4(library: Any) -> None:
    """rope_theta and rope_scaling stood for themselves."""

    class Old:
        num_attention_heads, num_key_value_heads, rope_theta, rope_scaling = H, G, 77.0, None

    source = attention_of(library, "Llama")
    source.config = Old()
    assert from_mha(source, num_pseudo_heads=2).config.attention.rope_theta == 77.0
    source.config.rope_scaling = {"type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match=r"^`rope_parameters` of the source: "):
        from_mha(source, num_pseudo_heads=2)
    source.config.rope_scaling, source.config.rope_theta = None, None
    with pytest.raises(ConfigError, match=r"^`rope_theta` of the source: "):
        from_mha(source, num_pseudo_heads=2)


def test_converted_models_are_stored_by_their_state(library: Any, tmp_path: Path) -> None:
    model = replace_attention(model_of(library, "Qwen2"), num_pseudo_heads=2)
    with torch.no_grad():
        model.model.layers[0].self_attn.attention.alpha_q.normal_()
    torch.save(model.state_dict(), tmp_path / "state")
    other = replace_attention(model_of(library, "Qwen2"), num_pseudo_heads=2)
    assert not torch.equal(other(tokens()).logits, model(tokens()).logits)
    other.load_state_dict(torch.load(tmp_path / "state"))
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)
    model.save_pretrained(tmp_path / "folder")
    assert {path.name for path in (tmp_path / "folder").iterdir()} >= {"model.safetensors", "config.json"}


def test_layers_of_a_model_are_layers_like_others(library: Any) -> None:
    model = replace_attention(model_of(library, "Qwen3"), num_pseudo_heads=2, collapse="per_head")
    layer = model.model.layers[1].self_attn.attention
    assert isinstance(layer, InterleavedHeadAttention)
    x = tensor(np.ones((1, 3, D)))
    wanted = iha_core.layer(parameters_of(layer), np.ones((1, 3, D)), config=layer.config)
    close(layer(x), torch.from_numpy(wanted))
