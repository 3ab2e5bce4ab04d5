"""Multi-head attention as a layer of interleaved heads that starts as the same function: [INIT-6]."""

from __future__ import annotations

import dataclasses
from typing import get_args

import torch
from torch import nn

from iha_core.config import (
    PROFILES,
    AttentionConfig,
    Causal,
    CollapseKind,
    Rope,
    WindowUnit,
    check_choice,
    describe,
    whole_number,
)
from iha_core.errors import ConfigError
from iha_core.initialisers import Initialiser, difference_from_mha, starts
from iha_core.layer_config import MIXING
from iha_torch.layer import InterleavedHeadAttention, layer_of
from iha_torch.sources import Source, read_source


def from_mha(
    source: nn.Module,
    *,
    num_pseudo_heads: int,
    profile: str = "mha-preserving",
    causal: Causal | None = None,
    rope: Rope | None = None,
    window: int | None = None,
    window_unit: WindowUnit | None = None,
    initialiser: Initialiser | None = None,
    collapse: CollapseKind | None = None,
) -> InterleavedHeadAttention:
    """A layer of interleaved heads that computes what a multi-head attention does, until it is trained.

    Two kinds of modules convert. `torch.nn.MultiheadAttention` without dropout, for self-attention: causality
    and window are arguments of its call, so they are chosen here; it does not rotate. And attention as
    Llama, Mistral, Qwen2 and Qwen3 have it in transformers, with q_proj, k_proj, v_proj, o_proj, and possibly
    q_norm and k_norm: causality, window, scale and RoPE are its own. Where only some projections have a
    bias, as in Qwen2, the bias of the others (o_proj) starts as zeros, and is then trained like any. A module
    of transformers is called once, on other weights and a few tokens, and has to compute what was read of it.

    Args:
        source: the module, which is left as it is: the layer owns copies of its weights, of their dtype, on
            their device, and frozen (`requires_grad`) where they are; what it has not, mixing tensors and
            biases of zeros, is trained. Hooks are not taken over.
        num_pseudo_heads: P, a whole number of at least 1.
        profile: configuration whose fields the arguments below replace ([PROF-1]). Where they do not, rope
            "token" becomes "none" for a source that does not rotate, and causal "none" for a decoder that is
            not causal.
        causal, rope, window, window_unit: fields of the configuration; None means source and profile decide.
        initialiser: a replicated one; None means "replicated-last" where causal is "virtual", else
            "replicated-average".
        collapse: "global" or "per_head", whichever the profile allows; None means the first of those.

    Returns:
        The layer, in the source's mode of training. It takes x as (B, N, D), whatever `batch_first` is.

    Raises:
        ArgumentTypeError: `source` is no module that can be converted.
        ConfigError: the named field does not allow the same function, or the source has what a layer has not.

    Source: SPEC.md [INIT-2], [INIT-6]; erratum 2.
    """
    check_choice("profile", profile, tuple(PROFILES))
    num_pseudo_heads = whole_number("num_pseudo_heads", num_pseudo_heads, "a whole number >= 1")
    collapse = _collapse(profile, collapse)
    read = read_source(source)
    attention = _attention_config(
        read, PROFILES[profile].config, causal=causal, rope=rope, window=window, window_unit=window_unit
    )
    if initialiser is None:
        initialiser = "replicated-last" if attention.causal == "virtual" else "replicated-average"
    config = dataclasses.replace(
        read.config,
        kind="iha",
        num_pseudo_heads=num_pseudo_heads,
        collapse=collapse,
        attention=attention,
    )
    difference = difference_from_mha(attention, initialiser, num_pseudo_heads=config.num_pseudo_heads)
    if difference is not None:
        expected = f"a start that computes what the source does ({difference.reason})"
        raise ConfigError(difference.field, "", expected=expected, found=repr(difference.found))
    first = read.tensors["q_proj.weight"]
    mixing = {
        name: torch.as_tensor(start.mean, dtype=first.dtype, device=first.device)
        for name, start in starts(config, initialiser).items()
        if name in MIXING
    }
    layer = layer_of(config, {**read.tensors, **mixing}, device=first.device, initialiser=initialiser)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in read.frozen)
    return layer.train(source.training)


def _collapse(profile: str, collapse: CollapseKind | None) -> CollapseKind:
    """The kind of collapse: the profile's first, or what is asked for, where the profile allows it."""
    allowed = PROFILES[profile].collapse
    if collapse is None:
        return allowed[0]
    check_choice("collapse", collapse, get_args(CollapseKind))
    if collapse not in allowed:
        expected = " or ".join(map(repr, allowed)) + f", as profile {profile!r} has it"
        raise ConfigError("collapse", "", expected=expected, found=repr(collapse))
    return collapse


def _attention_config(
    read: Source,
    base: AttentionConfig,
    *,
    causal: Causal | None,
    rope: Rope | None,
    window: int | None,
    window_unit: WindowUnit | None,
) -> AttentionConfig:
    """The configuration of the new layer; refuses what is not the source's own."""
    own = read.config.attention
    if rope is None:
        rope = own.rope if base.rope == "token" else base.rope
    if causal is None:
        causal = "none" if read.fixed and own.causal == "none" else base.causal
    if window is None:
        window = own.window
    attention = dataclasses.replace(
        base,
        causal=causal,
        rope=rope,
        window=window,
        window_unit=base.window_unit if window_unit is None else window_unit,
        rope_theta=own.rope_theta,
        rope_pairing=own.rope_pairing,
        scale=own.scale,
    )
    if attention.rope != "virtual" and attention.rope != own.rope:
        found = repr(attention.rope)
        raise ConfigError("rope", "", expected=f"{own.rope!r}, as the source has it", found=found)
    if read.fixed and (attention.causal == "none") != (own.causal == "none"):
        wanted = "'none'" if own.causal == "none" else "'token' or 'virtual'"
        found = repr(attention.causal)
        raise ConfigError("causal", "", expected=f"{wanted}, as the source has it", found=found)
    if read.fixed and attention.window != own.window:
        expected = f"{own.window}, as the source has it"
        raise ConfigError("window", "", expected=expected, found=describe(attention.window))
    return attention
