"""Deviations in words: what a port does, what SPEC.md requires, what it means for weights, how to mend it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from iha_conformance.diagnose.dialect import HEAD_WIDTH, Dialect, Scale, Value

OF_CONFIG = ("causal", "window_unit", "rope", "rope_pairing", "rope_theta", "scale", "normalisation")
"""Axes that are fields of the configuration: what a port does there is canonical under another one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mending:
    """One axis on which a port deviates, in words.

    Attributes:
        axis: its name.
        does, required: what the port does, and what SPEC.md requires.
        weights: whether the port's weights are canonical ones.
        mend: how to mend the port.
    """

    axis: str
    does: str
    required: str
    weights: str
    mend: str


def describe_scale(scale: Scale) -> str:
    """A factor of the head width d as an expression: "0.125", "d**-0.5", "2.0 * d**-0.5"."""
    power = f"d**{scale.power:g}"
    if scale.power == 0:
        return repr(float(scale.factor))
    return power if scale.factor == 1 else f"{float(scale.factor)!r} * {power}"


def lacking(found: Dialect, asked: Dialect) -> Scale:
    """What the port's factor of the logits has to be multiplied by."""
    return Scale(asked.scale.factor / found.scale.factor, asked.scale.power - found.scale.power)


CHOICES: Mapping[tuple[str, Value], str] = {
    ("collapse_kind", "global"): "R[out, source, pseudo] mixes the pseudo outputs of all heads",
    ("collapse_kind", "per_head"): "each head adds up its own pseudo outputs alone, by r[head, pseudo]",
    ("collapse_kind", "mean"): "the pseudo outputs of a head are averaged, and no collapse is read",
    ("collapse_kind", "first"): "the first pseudo output of a head is taken, and no collapse is read",
    ("collapse_kind", "last"): "the last pseudo output of a head is taken, and no collapse is read",
    ("collapse_kind", "sum"): "the pseudo outputs of a head are added up, and no collapse is read",
    ("order", "token_major"): "virtual token n*P + p: the P virtual tokens of a token follow each other",
    ("order", "pseudo_major"): "virtual token p*N + n: all tokens of pseudo 0 come before those of pseudo 1",
    ("order", "reshaped"): "(N, H, P) is read as (N*P, H), so heads and pseudo-heads are exchanged",
    ("order", "extra_heads"): "pseudo-heads are separate heads: each attends to keys of its own p alone",
    ("causal", "virtual"): "a virtual query sees virtual keys up to its own, s <= t",
    ("causal", "token"): "a virtual query sees all P virtual keys of tokens up to its own, m <= n",
    ("causal", "none"): "there is no causal mask",
    ("window_unit", "virtual"): "the window counts virtual tokens, W*P of them",
    ("window_unit", "token"): "the window counts tokens, W of them",
    ("window_bound", "exclusive"): "only distances below the window are seen",
    ("window_bound", "inclusive"): "a distance equal to the window is seen too, one step too far",
    ("rope", "virtual"): "virtual token p of token n is rotated at position n*P + p",
    ("rope", "token"): "all P virtual tokens of token n are rotated at position n",
    ("rope", "none"): "nothing is rotated",
    ("rope_pairing", "half"): "lanes i and i + d/2 rotate together",
    ("rope_pairing", "adjacent"): "lanes 2i and 2i + 1 rotate together",
    ("rope_sign", 1): "(x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin)",
    ("rope_sign", -1): "the rotation has the opposite sign, (x1 cos + x2 sin, x2 cos - x1 sin)",
    ("rope_when", "after"): "pseudo-heads are rotated after mixing, each at its own position",
    ("rope_when", "before"): "heads are rotated before mixing, so all P pseudo-heads at position n*P",
    ("normalisation", "softmax"): "weights are the softmax of the logits",
    ("normalisation", "none"): "weights are the logits themselves",
    ("qk_norm", "none"): "queries and keys are used as they are",
    ("qk_norm", "before_mix"): "queries and keys are normalised before they are mixed",
    ("qk_norm", "after_mix"): "queries and keys are normalised after they are mixed",
    ("alignment", "last"): "without query_offset the queries are the last N tokens of the keys",
    ("alignment", "first"): "without query_offset the queries are the first N tokens of the keys",
    ("key_mask", "keep"): "key_mask is True where a key may be attended",
    ("key_mask", "drop"): "key_mask is taken to be True where a key is dropped",
    ("key_mask", "ignored"): "key_mask has no effect",
    ("values", "mixed"): "values are mixed by alpha_v, a tensor of their own",
    ("values", "unmixed"): "values are not mixed: every pseudo-head has those of its own head",
}
"""What each value of an axis of choices is, in words; the axes of tensors and numbers are made below."""


def describe_value(axis: str, dialect: Dialect, *, per_head: bool) -> str:
    """What a dialect does on an axis, as a main clause.

    Args:
        axis: name of the axis.
        dialect: whose value it is.
        per_head: whether the collapse that is given has the shape (H, P).
    """
    value = getattr(dialect, axis)
    if axis.endswith("_axes"):
        names = value.split(",")
        if axis == "collapse_axes" and per_head:
            names = ["head" if name == "source" else name for name in names if name != "out"]
        return f"{axis.removesuffix('_axes')} is read as [{', '.join(names)}]"
    if axis == "scale":
        expression = describe_scale(dialect.scale)
        at = "" if dialect.scale.power == 0 else f" ({dialect.scale.at(HEAD_WIDTH):g} at d = {HEAD_WIDTH})"
        return f"logits are multiplied by {expression}{at}"
    if axis == "rope_theta":
        return f"the base of the frequencies is {value:g}"
    if axis == "qk_multiplier":
        return "nothing is multiplied" if value == 1 else f"normalised q and k are multiplied by {value:g}"
    return CHOICES[axis, value]


def in_words(axis: str, found: Dialect, asked: Dialect, mendable: bool) -> Mending:
    per_head = asked.collapse_kind == "per_head"
    return Mending(
        axis=axis,
        does=describe_value(axis, found, per_head=per_head),
        required=describe_value(axis, asked, per_head=per_head),
        weights=_meaning(axis, found, asked, mendable),
        mend=_advice(axis, found, asked),
    )


def _meaning(axis: str, found: Dialect, asked: Dialect, mendable: bool) -> str:
    """Whether the port's weights are canonical ones."""
    if axis.endswith("_axes") and mendable:
        return f"the same numbers, stored otherwise: transpose {axis.removesuffix('_axes')}"
    if axis == "order":
        if mendable:
            return "the same numbers, stored otherwise: refill the last two axes of all four tensors"
        return "not interchangeable: no canonical weights compute the same"
    if axis == "rope_sign":
        return (
            "not interchangeable as they are: negate the second lane of every rotated pair, in the rows of"
            " q_proj and k_proj of each head"
        )
    if axis == "window_bound" and found.window_unit == "token" and found.window.kind == "config":
        return "canonical under another configuration, with the window W + 1; not under the one asked for"
    if axis in OF_CONFIG:
        return _other_config(axis, found, asked, mendable)
    return _MEANING.get((axis, getattr(found, axis))) or _by_number(axis, found, mendable)


def _other_config(axis: str, found: Dialect, asked: Dialect, mendable: bool) -> str:
    """A field of the configuration: which one makes the port's weights canonical, and what else does."""
    value = found.scale.at(HEAD_WIDTH) if axis == "scale" else getattr(found, axis)
    shown = f"{value:.6g}" if axis in ("scale", "rope_theta") else f'"{value}"'
    where = f" at head width {HEAD_WIDTH}" if axis == "scale" and found.scale.power else ""
    text = f"canonical under another configuration, {axis} = {shown}{where}; not under the one asked for"
    if axis == "scale" and found.scale == Scale(1.0, -0.5):
        text = "canonical under another configuration, without a scale; not under the one asked for"
    if axis == "scale" and mendable:
        text += f", unless alpha_q is multiplied by {describe_scale(lacking(found, asked))}"
    if axis == "rope_pairing" and mendable:
        text += ", unless the lanes of each head are permuted in the rows of q_proj and k_proj"
    return text


_MEANING: Mapping[tuple[str, Value], str] = {
    ("collapse_kind", "global"): "not interchangeable: it needs a collapse of shape (H, H, P)",
    ("collapse_kind", "per_head"): (
        "interchangeable only where R has no terms of other heads; its own are canonical with"
        " R[i, h, p] = r[h, p] where i = h and 0 elsewhere"
    ),
    ("collapse_kind", "mean"): "it has no collapse; its weights are canonical with r[h, p] = 1/P",
    ("collapse_kind", "first"): "it has no collapse; its weights are canonical with r[h, 0] = 1, else 0",
    ("collapse_kind", "last"): "it has no collapse; its weights are canonical with r[h, P-1] = 1, else 0",
    ("collapse_kind", "sum"): "it has no collapse; its weights are canonical with r[h, p] = 1",
    ("window_bound", "inclusive"): "not interchangeable: every query sees more keys than in training",
    ("rope_when", "before"): (
        'under rope "virtual" canonical with rope = "token" and positions that are P times the token'
        " indices; not under the configuration asked for"
    ),
    ("qk_norm", "before_mix"): (
        "not interchangeable: a norm depends on the data and cannot be put into weights; a canonical layer"
        " with this norm between projection and operation computes the same"
    ),
    ("qk_norm", "after_mix"): "not interchangeable: a norm depends on the data, and no weights have it",
    ("alignment", "first"): "interchangeable where N = M, and where query_offset is given",
    ("key_mask", "drop"): "interchangeable: weights are unaffected, only the argument means the opposite",
    ("key_mask", "ignored"): "interchangeable where no key is dropped",
    ("values", "unmixed"): (
        "it has no alpha_v; its weights are canonical with alpha_v[g, h, p] = 1 where g = h, else 0"
    ),
}


def _by_number(axis: str, found: Dialect, mendable: bool) -> str:
    if axis == "qk_multiplier" and mendable:
        return (
            f"interchangeable, were it not for the norm, with alpha_q and alpha_k {found.qk_multiplier:g} x"
        )
    return "not interchangeable: no canonical weights compute the same"


_ADVICE: Mapping[str, str] = {
    "rope_theta": "Take rope_theta from the configuration.",
    "normalisation": "Follow the configuration: softmax over the visible virtual keys, or none.",
    "window_bound": "Compare with <, not <=: W itself is out of reach.",
    "rope_sign": "Change the sign of sin, on queries and keys alike.",
    "rope_when": "Rotate after mixing, each pseudo-head at its own position n*P + p.",
    "qk_norm": "Take the norm out of the operation; a layer may have one between projections and operation.",
    "qk_multiplier": "Take the multiplier out of the operation; scale is the only factor of the logits.",
    "alignment": "Let query token 0 have index M - N unless query_offset says otherwise.",
    "key_mask": "Let True mean that a key may be attended.",
    "values": "Mix values by alpha_v, as keys by alpha_k.",
}


def _advice(axis: str, found: Dialect, asked: Dialect) -> str:
    """How to mend the port."""
    if axis.startswith("alpha_"):
        name, x = axis.removesuffix("_axes"), axis[6]
        return (
            f"Sum the first axis of {name} against the heads of {x}; the second is the head that results, the"
            f" third the pseudo index: einsum('bnsw,shp->bnphw', {x}, {name})."
        )
    if axis == "collapse_axes":
        if asked.collapse_kind == "per_head":
            return "Let rows be heads and columns pseudo-heads: einsum('bnphe,hp->bnhe', pseudo, collapse)."
        return (
            "Let the first axis of collapse be the head that results:"
            " einsum('bnphe,ihp->bnie', pseudo, collapse)."
        )
    if axis == "collapse_kind":
        if asked.collapse_kind == "per_head":
            return "Take a collapse of two axes as r[head, pseudo]."
        return "Take a collapse of three axes as R[out, source, pseudo]; sum over all heads and pseudo-heads."
    if axis == "order":
        if found.order == "reshaped":
            return "Transpose (N, H, P) to (N, P, H) before it is reshaped to (N*P, H), and back afterwards."
        if found.order == "extra_heads":
            return (
                "Make P virtual tokens of every token, and let each attend to all virtual keys of its head."
            )
        return "Interleave: mixed (N, P, H) reshaped to (N*P, H), which gives virtual token n*P + p."
    if axis == "causal":
        return f'Follow causal = "{asked.causal}": {CHOICES["causal", asked.causal]}.'
    if axis == "window_unit":
        return f'Follow window_unit = "{asked.window_unit}": {CHOICES["window_unit", asked.window_unit]}.'
    if axis == "rope":
        return f'Follow rope = "{asked.rope}": {CHOICES["rope", asked.rope]}.'
    if axis == "rope_pairing":
        return f'Follow rope_pairing = "{asked.rope_pairing}": {CHOICES["rope_pairing", asked.rope_pairing]}.'
    if axis == "scale":
        return (
            f"Multiply the logits by {describe_scale(asked.scale)}, d the head width of q, and nothing else."
        )
    return _ADVICE[axis]
