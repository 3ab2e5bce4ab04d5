"""Multi-head attention that can be converted, read as a layer of kind "mha": SPEC.md [LAY-6].

Modules of Hugging Face's transformers are recognised by their attributes; that library is never imported.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from iha_core.checkpoint import check_tensors
from iha_core.config import AttentionConfig
from iha_core.errors import ArgumentTypeError, ConfigError
from iha_core.initialisers import fixed_mixing
from iha_core.layer_config import LayerConfig
from iha_torch.layer import InterleavedHeadAttention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")

PROBED_TOKENS = 5
"""Length of the sequences on which a module of transformers is compared with what was read of it."""

PROBE_LIMIT = 2.0**-6
"""Difference at which a module counts as another function, relative to the largest number it gives.

Both are in float32, so that of the same function is some 1e-6. Devices and modules that multiply in a
narrower format by themselves, at worst bfloat16 with roundoff 2^-9, stay below a few of its roundoffs. The
logits are of order 1 (see `_probe_value`), so that what leaves out or adds a rotation, a norm or a factor is
off by a tenth or more.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A multi-head attention as a layer of kind "mha", and what of it is fixed.

    Attributes:
        config: the layer; its attention has what the source fixes.
        tensors: its parameters, by their names in a checkpoint.
        fixed: whether causality and window are the source's own, rather than arguments of its call.
        frozen: names of the parameters that are not trained in the source.
    """

    config: LayerConfig
    tensors: dict[str, Tensor]
    fixed: bool
    frozen: frozenset[str]


def read_source(source: nn.Module) -> Source:
    if isinstance(source, nn.MultiheadAttention):
        return _read_torch(source)
    if is_decoder_attention(source):
        return _read_decoder(source)
    expected = "a torch.nn.MultiheadAttention, or a module with config, " + ", ".join(PROJECTIONS)
    raise ArgumentTypeError("source", "", expected=expected, found=type(source).__name__)


def _refuse(field: str, expected: str, found: object) -> NoReturn:
    raise ConfigError(field, "of the source", expected=expected, found=str(found))


def _read_torch(source: nn.MultiheadAttention) -> Source:
    """`torch.nn.MultiheadAttention` for self-attention."""
    if "forward" in vars(source) or type(source).forward is not nn.MultiheadAttention.forward:
        expected = "a torch.nn.MultiheadAttention with the forward of that class"
        found = f"{type(source).__module__}.{type(source).__qualname__} with one of its own"
        raise ArgumentTypeError("source", "", expected=expected, found=found)
    D = source.embed_dim
    for field, width in (("kdim", source.kdim), ("vdim", source.vdim)):
        if width != D:
            _refuse(field, f"embed_dim={D}, for self-attention", width)
    if source.bias_k is not None or source.bias_v is not None:
        _refuse("add_bias_kv", "False, as a layer has no keys beside those of its tokens", True)
    if source.add_zero_attn:
        _refuse("add_zero_attn", "False, as a layer has no keys beside those of its tokens", True)
    if source.dropout > 0:
        _refuse("dropout", "0, as a layer drops no weights", source.dropout)
    weights = (*source.in_proj_weight.chunk(3), source.out_proj.weight)
    tensors = {f"{name}.weight": x for name, x in zip(PROJECTIONS, weights, strict=True)}
    if source.in_proj_bias is not None:
        biases = (*source.in_proj_bias.chunk(3), source.out_proj.bias)
        tensors |= {f"{name}.bias": x for name, x in zip(PROJECTIONS, biases, strict=True)}
    config = LayerConfig(
        kind="mha",
        model_width=D,
        num_heads=source.num_heads,
        bias=source.in_proj_bias is not None,
        attention=AttentionConfig(causal="none", rope="none"),
    )
    # Parts of a parameter tell nothing of it where no gradients are recorded.
    trained = {
        "weight": (source.in_proj_weight, source.out_proj.weight),
        "bias": (source.in_proj_bias, source.out_proj.bias),
    }
    frozen = frozenset(
        name for name in tensors if _is_frozen(trained[name.split(".")[1]][name.startswith(PROJECTIONS[-1])])
    )
    return Source(config=config, tensors=_detached(tensors, config), fixed=False, frozen=frozen)


def _is_frozen(tensor: object) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def is_decoder_attention(module: object) -> bool:
    if not isinstance(module, nn.Module) or isinstance(module, InterleavedHeadAttention):
        return False
    return all(hasattr(module, name) for name in ("config", *PROJECTIONS))


def _read_decoder(source: nn.Module) -> Source:
    """Attention of a decoder of transformers, by its attributes."""
    settings: Any = source.config
    children = dict(source.named_children())
    _refuse_further_parts(source, children)
    H = settings.num_attention_heads
    G = getattr(settings, "num_key_value_heads", None) or H
    linear: dict[str, Any] = {name: children[name] for name in PROJECTIONS}
    D = linear["q_proj"].in_features
    d = getattr(source, "head_dim", None) or getattr(settings, "head_dim", None) or D // H
    norms: dict[str, Any] = {name: children[name] for name in NORMS if name in children}
    bias = any(module.bias is not None for module in linear.values())
    tensors = _decoder_tensors(source, bias)
    config = LayerConfig(
        kind="mha",
        model_width=D,
        num_heads=H,
        head_width=d,
        num_kv_heads=G,
        value_width=max(linear["v_proj"].out_features // G, 1),
        bias=bias,
        qk_norm=bool(norms),
        qk_norm_epsilon=_epsilon(norms) if norms else 1e-6,
        attention=_decoder_attention(source, d),
    )
    frozen = frozenset(name for name, tensor in tensors.items() if _is_frozen(tensor))
    read = Source(config=config, tensors=_detached(tensors, config), fixed=True, frozen=frozen)
    for name, module in norms.items():
        _check_norm(name, module, d)
    _check_function(source, config)
    return read


def _decoder_tensors(source: nn.Module, bias: bool) -> dict[str, Tensor]:
    """The parameters of an attention of transformers; with `bias`, zeros where a projection has none."""
    children: dict[str, Any] = dict(source.named_children())
    tensors: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        module = children[name]
        tensors[f"{name}.weight"] = module.weight
        if bias:
            zeros = module.weight.new_zeros(module.out_features)
            tensors[f"{name}.bias"] = zeros if module.bias is None else module.bias
    for name in NORMS:
        if name in children:
            tensors[f"{name}.weight"] = children[name].weight
    return tensors


def _detached(tensors: Mapping[str, Tensor], config: LayerConfig) -> dict[str, Tensor]:
    """The tensors without their history, held to the configuration."""
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    check_tensors(detached, config)
    return detached


def _refuse_further_parts(source: nn.Module, children: Mapping[str, nn.Module]) -> None:
    """Refuse what a layer has no place for, lest it be lost in silence."""
    for name in PROJECTIONS:
        if not isinstance(children.get(name), nn.Linear):
            _refuse(name, "a torch.nn.Linear", type(getattr(source, name)).__name__)
    if len(set(NORMS) & set(children)) == 1:
        _refuse("q_norm", "norms of both queries and keys, or none", "one of them")
    own = [name for name, _ in source.named_parameters(recurse=False)]
    for name in (*children, *own):
        if name not in (*PROJECTIONS, *NORMS):
            _refuse(name, "no parts beside " + ", ".join((*PROJECTIONS, *NORMS)), "one of that name")
    for name in NORMS:
        if name in children and not isinstance(getattr(children[name], "weight", None), Tensor):
            _refuse(name, "a norm with a weight", f"{type(children[name]).__name__} without one")
    for name in ("attention_dropout", "residual_dropout", "resid_pdrop"):
        if getattr(source, name, 0.0):
            _refuse(name, "0, as a layer drops nothing", getattr(source, name))
    for name in ("attn_logit_softcapping", "logits_soft_cap", "softcap", "clip_qkv"):
        for place in (source, source.config):
            if getattr(place, name, None) is not None:
                _refuse(name, "None, as a layer does not cap logits or projections", getattr(place, name))


def _epsilon(norms: Mapping[str, Any]) -> float:
    found: set[float] = set()
    for module in norms.values():
        epsilon: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if epsilon is None:
            _refuse("q_norm", "a norm with variance_epsilon or eps", type(module).__name__)
        found.add(epsilon)
    if len(found) > 1:
        _refuse("k_norm", "the epsilon of q_norm", sorted(found))
    return float(found.pop())


@torch.no_grad()
def _check_norm(name: str, module: nn.Module, d: int) -> None:
    """Refuse norms that are not (34), such as one that multiplies by 1 + weight, or subtracts the mean.

    With weight 0 the result is 0, and that of ones with weight 1 is not. Nothing is found out about a module
    without data.
    """
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.is_meta:
        return
    ones = weight.new_ones(1, 1, 1, d)
    functional = torch.func.functional_call
    cancelled = functional(module, {"weight": torch.zeros_like(weight)}, (ones,))
    kept = functional(module, {"weight": torch.ones_like(weight)}, (ones,))
    if bool(cancelled.any()) or not bool(kept.all()):
        _refuse(name, "a root-mean-square norm that multiplies by its weight", type(module).__name__)


def _decoder_attention(source: nn.Module, d: int) -> AttentionConfig:
    """Causality, window, scale and RoPE of a decoder's attention."""
    settings = source.config
    causal = getattr(source, "is_causal", True) and getattr(settings, "is_causal", True) is not False
    scale = getattr(source, "scaling", None)
    if scale in (d**-0.5, 1 / math.sqrt(d)):
        scale = None
    return AttentionConfig(
        causal="token" if causal else "none",
        window=_window(source, causal),
        window_unit="token",
        rope="token",
        rope_theta=_rope_theta(source),
        rope_pairing="half",
        scale=scale,
    )


def _layer_type(source: nn.Module) -> str | None:
    """What the configuration calls the layer; None where all layers are alike."""
    types = getattr(source.config, "layer_types", None)
    index = getattr(source, "layer_idx", None)
    return None if types is None or index is None else str(types[index])


def _window(source: nn.Module, causal: bool) -> int | None:
    """Width of a sliding layer's window in tokens, own token included; None for full attention.

    Where attention is not causal, transformers lets a token see as many as `sliding_window` to either side.
    """
    layer_type = _layer_type(source)
    if layer_type not in (None, "full_attention", "sliding_attention"):
        _refuse("layer_types", "full_attention or sliding_attention", layer_type)
    if layer_type == "full_attention":
        return None
    window: int | None = getattr(source.config, "sliding_window", None)
    return window if window is None or causal else window + 1


def _rope_theta(source: nn.Module) -> float:
    """Base of the default rotation; refuses any other rotation."""
    settings = source.config
    parameters = getattr(settings, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        scaling = getattr(settings, "rope_scaling", None) or {}
        parameters = {"rope_theta": getattr(settings, "rope_theta", None), **scaling}
    layer_type = _layer_type(source)
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    known = {name: value for name, value in parameters.items() if value is not None}
    rope_type = known.pop("rope_type", known.pop("type", "default"))
    if rope_type != "default":
        _refuse("rope_parameters", "rope_type 'default'", f"rope_type {rope_type!r}")
    partial = known.pop("partial_rotary_factor", None) or getattr(settings, "partial_rotary_factor", None)
    if partial not in (None, 1):
        _refuse("partial_rotary_factor", "1: all lanes of a head are rotated", partial)
    theta = known.pop("rope_theta", None)
    if theta is None:
        _refuse("rope_theta", "a number", None)
    if known:
        _refuse("rope_parameters", "rope_theta alone", sorted(known))
    embedding = getattr(settings, "position_embedding_type", "rope")  # GraniteMoeHybrid: None for none
    if embedding != "rope":
        _refuse("position_embedding_type", "'rope'", embedding)
    if not getattr(source, "use_rope", True):
        _refuse("use_rope", "True", False)
    _check_pairing(source)
    return float(theta)


def _check_pairing(source: nn.Module) -> None:
    """Refuse rotations of other lanes than i and i + d/2, which attributes do not tell apart.

    Models of transformers have a function `rotate_half` beside their attention.
    """
    modules: list[Any] = [sys.modules.get(cls.__module__) for cls in type(source).__mro__]
    functions = [module.rotate_half for module in modules if hasattr(module, "rotate_half")]
    if not functions:
        _refuse("source", "an attention with rotate_half in its module", type(source).__name__)
    turned = functions[0](torch.arange(1.0, 5.0, device="cpu")).tolist()
    if turned != [-3.0, -4.0, 1.0, 2.0]:
        _refuse("rotate_half", "a rotation of lanes i and i + d/2", turned)


def _check_function(source: nn.Module, config: LayerConfig) -> None:
    """Refuse a module whose own forward computes something else than the layer that was read of it.

    Attributes do not tell all: some layers of a model do not rotate, others multiply or gate. The forward is
    called with the mask and the rotation that its decoder would make, on weights that depend on nothing but
    their shapes, in float32: so the module's own may be zeros, of any dtype, or on meta.
    """
    weights: Any = source.q_proj
    device = torch.device("cpu") if weights.weight.is_meta else weights.weight.device
    try:
        pair = _Pair(source, config)
        values = {
            name: _probe_value(name, parameter.shape, config, device)
            for name, parameter in pair.named_parameters()
        }
        shape = (2, PROBED_TOKENS, config.model_width)
        x = _numbers(shape).to(device)
        autocasts = torch.amp.is_autocast_available(device.type)
        off = torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext()
        with torch.no_grad(), off:
            found, wanted = torch.func.functional_call(pair, values, (x,))
        difference = float((found - wanted).abs().max() / wanted.abs().max())
    except Exception as error:
        expected = "an attention that can be called as the decoders of transformers do, to be compared"
        raise ArgumentTypeError("source", "", expected=expected, found=_told(source, error)) from error
    if not difference <= PROBE_LIMIT:
        expected = (
            "a module that computes what its attributes say: attention with projections, "
            "possibly norms of heads, RoPE on both queries and keys, and nothing else"
        )
        found = f"{type(source).__name__}, whose forward gives something else (off by {difference:.2g})"
        raise ConfigError("source", "", expected=expected, found=found)


def _told(source: nn.Module, error: Exception) -> str:
    return f"{type(source).__name__}: {type(error).__name__}: {error}"


class _Pair(nn.Module):
    """A module of transformers and the layer that was read of it, on the same weights."""

    def __init__(self, source: nn.Module, config: LayerConfig) -> None:
        super().__init__()
        # A copy that shares the children and owns its settings: the module itself stays as it is.
        bare = copy.copy(source)
        bare.config = copy.deepcopy(source.config)
        settings: Any = bare.config
        settings._attn_implementation = "eager"
        bare.training = False
        self.source = bare
        self.read = [InterleavedHeadAttention(config, device="meta", dtype=torch.float32)]  # no child
        self.config = config

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, D) -> what the module gives, and what the layer does."""
        config, attention = self.config, self.config.attention
        N = x.shape[1]
        index = torch.arange(N, device=x.device)
        angles = index[:, None].double() * torch.tensor(
            attention.rope_frequencies(config.head_width), dtype=torch.float64, device=x.device
        )
        angles = torch.cat((angles, angles), -1)[None]  # (1, N, d)
        distance = index[:, None] - index  # (N, N)
        hidden = torch.zeros(N, N, dtype=torch.bool, device=x.device)
        if attention.causal != "none":
            hidden |= distance < 0
        if attention.window is not None:
            hidden |= distance.abs() >= attention.window
        mask = torch.zeros(1, 1, N, N, device=x.device, dtype=x.dtype)
        # Hooks of the module are not called, so its forward is.
        found, *_ = self.source.forward(
            hidden_states=x,
            position_embeddings=(angles.cos().to(x.dtype), angles.sin().to(x.dtype)),
            attention_mask=mask.masked_fill(hidden, torch.finfo(x.dtype).min),
        )
        tensors = _decoder_tensors(self.source, config.bias)
        fixed = {
            name: torch.as_tensor(value, dtype=x.dtype, device=x.device)
            for name, value in fixed_mixing(config).items()
        }
        wanted: Tensor = torch.func.functional_call(self.read[0], {**tensors, **fixed}, (x,))
        return found, wanted


def _probe_value(name: str, shape: torch.Size, config: LayerConfig, device: torch.device) -> Tensor:
    """A parameter for `_check_function`, such that outputs and logits are of order 1."""
    value = _numbers(tuple(shape)).to(device)
    _, part, *_ = name.split(".")
    if part in NORMS:
        value = 1 + value / 4
    elif value.ndim > 1:
        value /= math.sqrt(shape[-1])
    if part == ("q_norm" if config.qk_norm else "q_proj"):
        value /= config.attention.resolve_scale(config.head_width) * math.sqrt(config.head_width)
    return value


def _numbers(shape: tuple[int, ...]) -> Tensor:
    """Some numbers of mean 0 and variance 1, the same each time, without drawing one for each element."""
    generator = torch.Generator(device="cpu").manual_seed(len(shape))
    size = math.prod(shape)
    period = 8191  # a prime, so that it is no multiple of a width
    some = torch.randn(period, generator=generator, dtype=torch.float32, device="cpu")
    return some.repeat(-(-size // period))[:size].view(shape)
