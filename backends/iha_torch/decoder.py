"""Decoders of Hugging Face's transformers with interleaved heads in place of their attention.

That library is never imported here: a model of it has done so.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from iha_core.config import Causal, CollapseKind, Rope, WindowUnit
from iha_core.errors import ArgumentTypeError, ArgumentValueError, ConfigError
from iha_core.initialisers import Initialiser
from iha_torch.convert import from_mha
from iha_torch.layer import InterleavedHeadAttention
from iha_torch.sources import PROJECTIONS, is_decoder_attention

IMPLEMENTATION = "iha"
"""Name of the attention implementation by which padding masks of transformers reach a converted layer."""


def replace_attention(
    model: nn.Module,
    *,
    num_pseudo_heads: int,
    profile: str = "mha-preserving",
    causal: Causal | None = None,
    rope: Rope | None = None,
    window: int | None = None,
    window_unit: WindowUnit | None = None,
    initialiser: Initialiser | None = None,
    collapse: CollapseKind | None = None,
) -> nn.Module:
    """Replace, in place, every self-attention of a decoder of transformers by a converted one.

    The model then computes the same as before, until it is trained, but keeps no cache: `use_cache` is set to
    False, and `generate` computes every step anew. 2-D padding masks and packed sequences work as before;
    4-D masks are refused. Nothing is changed where one layer cannot be converted.

    Args:
        model: a model of transformers, 5 or later.
        num_pseudo_heads, profile, causal, rope, window, window_unit, initialiser, collapse: as for
            `from_mha`.

    Returns:
        The model.

    Raises:
        ArgumentTypeError: `model` is no model of transformers.
        ArgumentValueError: it has no attention that is recognised.
        ConfigError: one of its layers cannot be converted (see `from_mha`), or is called without positions.
    """
    interfaces = _interfaces(model)
    found = {name: module for name, module in model.named_modules() if is_decoder_attention(module)}
    converted = any(isinstance(module, DecoderAttention) for module in model.modules())
    if converted or not found:
        expected = "a model with attention modules of " + ", ".join(PROJECTIONS)
        kind = type(model).__name__
        state = f"a {kind} that is already converted" if converted else f"{kind} without any"
        raise ArgumentValueError("model", "", expected=expected, found=state)
    replacements = {
        name: DecoderAttention(
            from_mha(
                module,
                num_pseudo_heads=num_pseudo_heads,
                profile=profile,
                causal=causal,
                rope=rope,
                window=window,
                window_unit=window_unit,
                initialiser=initialiser,
                collapse=collapse,
            )
        )
        for name, module in found.items()
    }
    if any(r.attention.config.attention.rope != "none" for r in replacements.values()):
        _check_call(model, list(found.values()))
    for name, replacement in replacements.items():
        replacement.train(model.get_submodule(name).training)
        model.set_submodule(name, replacement)
    masks, functions = interfaces
    masks.register(IMPLEMENTATION, padding_mask)
    functions.register(IMPLEMENTATION, _no_attention)
    changed: Any = model
    changed.set_attn_implementation(IMPLEMENTATION)
    for settings in (changed.config, getattr(changed, "generation_config", None)):
        if settings is not None:
            settings.use_cache = False
    return model


class DecoderAttention(nn.Module):
    """A converted layer behind the signature of attention modules of transformers.

    Args:
        attention: the layer.
    """

    def __init__(self, attention: InterleavedHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: object = None,
        attention_mask: Tensor | None = None,
        cache: object = None,
        *,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        """The layer; its weights are never formed, so the second output is None.

        Args:
            hidden_states: (B, N, D).
            position_embeddings: not used: the layer rotates by its own tables, at `position_ids`.
            attention_mask: (B, N) bool as `padding_mask` gives it, False for padding; None for no padding.
            cache, past_key_values: None.
            position_ids: (B or 1, N) int. In a causal layer without an attention_mask, a position that is not
                that of the token before and 1 begins another sequence, which sees nothing of those before, as
                in transformers.

        Returns:
            (B, N, D) and None.

        Raises:
            ArgumentValueError: a cache, a mask of another form, or no positions for a layer that rotates.
        """
        for name, given in (("cache", cache), ("past_key_values", past_key_values)):
            if given is not None:
                expected = "None, as interleaved heads do not decode with a cache: use_cache=False"
                raise ArgumentValueError(name, "", expected=expected, found=type(given).__name__)
        if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.dtype != torch.bool):
            expected = f"(B, N) bool, as attention implementation {IMPLEMENTATION!r} makes it"
            found = f"{tuple(attention_mask.shape)} {attention_mask.dtype}"
            raise ArgumentValueError("attention_mask", "", expected=expected, found=found)
        segments = None
        if position_ids is not None:
            position_ids = position_ids.expand(hidden_states.shape[0], -1)
            # transformers looks for packed sequences where it forms a causal mask, and nowhere else.
            if attention_mask is None and self.attention.config.attention.causal != "none":
                segments = packed_segments(position_ids)
        elif self.attention.config.attention.rope != "none":
            expected = "a tensor (B, N), as the layer rotates by its own tables"
            raise ArgumentValueError("position_ids", "", expected=expected, found="None")
        output = self.attention(
            hidden_states, key_mask=attention_mask, segment_ids=segments, positions=position_ids
        )
        return output, None


def packed_segments(position_ids: Tensor) -> Tensor | None:
    """Segments of packed sequences: (B, N) int -> the same, or None where each row is one sequence."""
    if position_ids.shape[-1] == 0:
        return None
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    segments = (steps != 1).cumsum(-1)
    # A compiler does not know the values; nor does the model then, which forms its mask alike.
    if not torch.compiler.is_compiling() and not bool(segments.any()):
        return None
    return segments


def padding_mask(
    *args: object,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **unused: object,
) -> Tensor | None:
    """What transformers calls to make a mask, for attention implementation "iha": hands padding through.

    Takes the keyword arguments of `transformers.masking_utils.flash_attention_mask`. Causality and window are
    the layer's own, and packed sequences follow from the positions.

    Raises:
        ArgumentValueError: the model asks for a further condition, which would be lost.
    """
    # Skipping is not allowed where there is another condition, or for packed sequences: without a mask only.
    # Masks that are not causal never allow the one kind of skipping, and allow the other by the same rule.
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    if use_vmap or (attention_mask is not None and not skips):
        expected = "a mask of causality, window and padding alone"
        raise ArgumentValueError("attention_mask", "", expected=expected, found="a further mask function")
    return attention_mask


class _ReachedError(Exception):
    """An attention was called; ends a trial call of a model."""


def _check_call(model: nn.Module, modules: list[nn.Module]) -> None:
    """Refuse a model that hands its attention no positions, before it is changed.

    The model is called on two tokens, up to its first attention. Where that cannot be done, as on meta, such
    a model still fails at its first call, and says why (see `DecoderAttention.forward`).
    """
    device = next(model.parameters()).device
    if device.type == "meta":
        return
    given: dict[str, object] = {}

    def stop(module: nn.Module, positional: tuple[object, ...], named: dict[str, object]) -> None:
        given.update(named)
        raise _ReachedError

    hooks = [module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True) for module in modules]
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    try:
        # A model in training may draw numbers before its attention, which are not the caller's.
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            model(input_ids=ids, use_cache=False)
        return
    except _ReachedError:
        pass
    except Exception:  # whatever else the model asks for
        return
    finally:
        for hook in hooks:
            hook.remove()
    for name in ("position_embeddings", "position_ids"):
        if given.get(name) is None:
            expected = "given to attention by its model, as the layer rotates by it"
            raise ConfigError(name, "of the source", expected=expected, found="None")


def _no_attention(module: nn.Module, *args: object, **unused: object) -> tuple[Tensor, None]:
    """The attention function of implementation "iha": of modules that were not converted, so an error."""
    expected = f"an attention that was converted, with implementation {IMPLEMENTATION!r}"
    raise ArgumentTypeError("module", "", expected=expected, found=type(module).__name__)


def _interfaces(model: nn.Module) -> tuple[Any, Any]:
    """Where transformers, which a model of it has imported, registers mask and attention functions."""
    masking = sys.modules.get("transformers.masking_utils")
    modelling = sys.modules.get("transformers.modeling_utils")
    if masking is None or modelling is None or not isinstance(model, modelling.PreTrainedModel):
        expected = "a model of transformers, 5 or later"
        raise ArgumentTypeError("model", "", expected=expected, found=type(model).__name__)
    return masking.AttentionMaskInterface, modelling.AttentionInterface
