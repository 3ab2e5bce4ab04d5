"""The backward pass (SPEC.md chapter 9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iha_conformance.corpus.streams import cast
from iha_conformance.power.backward import BackwardPort, Tensors
from iha_conformance.power.mutants.logits import WIDE, narrow
from iha_conformance.power.mutants.registry import add, mutant
from iha_conformance.power.mutants.sums import added
from iha_conformance.power.port import Booleans, Side
from iha_conformance.power.steps import Array
from iha_core import GRADIENTS, reference
from iha_core.layer_config import MIXING
from iha_core.validation import NARROW_DTYPES

Port = BackwardPort

# The cotangent and the collapse


@mutant("gradient: cotangent taken for ones", "GRAD-2", step="change_cotangent")
def cotangent_of_ones(port: Port, cotangent: Array) -> Array:
    """The gradient of the sum of all outputs, whatever the loss."""
    return np.ones_like(cotangent)


@mutant("gradient: cotangent of the first head for all", "GRAD-2", step="change_cotangent")
def cotangent_of_first_head(port: Port, cotangent: Array) -> Array:
    return np.broadcast_to(cotangent[:, :, :1], cotangent.shape)


@mutant("gradient of the collapse of the first batch element", "GRAD-1", step="collapse_bar")
def collapse_of_first_batch(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    return port.collapse_bar(cotangent[:1], virtual_out[:1], R)


@mutant("gradient of the collapse of the last token", "GRAD-1", step="collapse_bar")
def collapse_of_last_token(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    return port.collapse_bar(cotangent[:, -1:], virtual_out[:, -port.dims.P :], R)


@mutant("gradient of the collapse averaged over the batch", "GRAD-1", step="collapse_bar")
def collapse_averaged(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    return port.collapse_bar(cotangent, virtual_out, R) / max(1, port.dims.B)


@mutant("gradient of the collapse with out and source exchanged", "GRAD-1", step="collapse_bar")
def collapse_exchanged(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    bar = port.collapse_bar(cotangent, virtual_out, R)
    return bar if bar.ndim == 2 else np.swapaxes(bar, 0, 1)


@mutant("gradient of the collapse from pseudo-head 0", "GRAD-1", step="collapse_bar")
def collapse_of_pseudo_head_zero(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    return port.collapse_bar(cotangent, np.repeat(virtual_out[:, :: port.dims.P], port.dims.P, axis=1), R)


@mutant("gradient of a per-head collapse summed over all heads", "GRAD-1", step="collapse_bar")
def per_head_of_all_heads(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    if R.ndim == 3:
        return port.collapse_bar(cotangent, virtual_out, R)
    return port.contract("bnie,bnphe->hp", cotangent, port.by_token(virtual_out))


@mutant("gradient through the collapse without its transpose", "GRAD-2", step="virtual_out_bar")
def collapse_not_transposed(port: Port, cotangent: Array, R: Array) -> Array:
    return port.virtual_out_bar(cotangent, R if R.ndim == 2 else np.swapaxes(R, 0, 1))


@mutant("gradient through the collapse to the own head alone", "GRAD-2", step="virtual_out_bar")
def own_head_alone(port: Port, cotangent: Array, R: Array) -> Array:
    own = R if R.ndim == 2 else R * np.eye(len(R))[:, :, None]
    return port.virtual_out_bar(cotangent, own)


@mutant("gradient through the collapse to the first pseudo-head", "GRAD-2", step="virtual_out_bar")
def first_pseudo_head_alone(port: Port, cotangent: Array, R: Array) -> Array:
    return port.virtual_out_bar(cotangent, R * (np.arange(R.shape[-1]) == 0))


# Values, weights, logits


@mutant("gradient of the values with weights of the keys' row", "GRAD-2", step="values_bar")
def weights_not_transposed(port: Port, weights: Array, virtual_out_bar: Array) -> Array:
    """The weights without their transpose, where the shape allows it."""
    T, S = weights.shape[-2:]
    return port.values_bar(np.swapaxes(weights, 2, 3) if T == S else weights, virtual_out_bar)


@mutant("gradient of the values from the last pseudo-query", "GRAD-2", step="values_bar")
def values_from_last_pseudo_query(port: Port, weights: Array, virtual_out_bar: Array) -> Array:
    P = port.dims.P
    last = np.arange(weights.shape[2]) % P == P - 1
    return port.values_bar(weights * last[:, None], virtual_out_bar)


@mutant("gradient of the values without weights", "GRAD-2", step="values_bar")
def values_without_weights(port: Port, weights: Array, virtual_out_bar: Array) -> Array:
    return port.values_bar((weights != 0).astype(np.float64), virtual_out_bar)


@mutant("gradient: weights formed again with the lse of the row before", "GRAD-3", step="weights")
def weights_of_other_row(port: Port, logits: Array, lse: Array | None) -> Array:
    """An index that is off by one in what flash kernels keep of each row."""
    if lse is None:
        return logits
    kept = np.roll(lse, 1, axis=-1)[..., None]
    return np.exp(logits - np.where(np.isneginf(kept), 0.0, kept))


@mutant("gradient of the weights from the values of the first head", "GRAD-3", step="weights_bar")
def weights_from_first_head(port: Port, virtual_out_bar: Array, mixed_v: Array) -> Array:
    return port.weights_bar(virtual_out_bar, np.broadcast_to(mixed_v[:, :, :1], mixed_v.shape))


@mutant("gradient of the weights from the virtual outputs", "GRAD-3", step="weights_bar")
def weights_from_outputs(port: Port, virtual_out_bar: Array, mixed_v: Array) -> Array:
    """The outputs of the forward pass in place of what they receive."""
    return port.weights_bar(port.forward["virtual_out"], mixed_v)


@mutant("gradient: row term dropped", "GRAD-3", step="row_term")
def no_row_term(port: Port, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
    return np.zeros((*weights.shape[:-1], 1))


@mutant("gradient: row term without weights", "GRAD-3", step="row_term")
def plain_mean_for_row_term(port: Port, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
    """The mean over all keys, hidden ones too, in place of the weighted one."""
    right = port.row_term(weights, weights_bar, virtual_out_bar)
    if port.config.normalisation == "none" or weights.shape[-1] == 0:
        return right
    return np.asarray(weights_bar.mean(axis=-1, keepdims=True))


@mutant("gradient: one row term for the pseudo-queries of a token", "GRAD-3", step="row_term")
def row_term_of_token(port: Port, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
    right = port.row_term(weights, weights_bar, virtual_out_bar)
    B, H, T, _ = right.shape
    of_token = right.reshape(B, H, T // port.dims.P, port.dims.P).mean(axis=-1, keepdims=True)
    return np.broadcast_to(of_token, (*of_token.shape[:-1], port.dims.P)).reshape(right.shape)


@mutant("gradient: row term of the first head for all", "GRAD-3", step="row_term")
def row_term_of_first_head(port: Port, weights: Array, weights_bar: Array, virtual_out_bar: Array) -> Array:
    right = port.row_term(weights, weights_bar, virtual_out_bar)
    return right if port.config.normalisation == "none" else np.broadcast_to(right[:, :1], right.shape)


@mutant("gradient: logits without their weights", "GRAD-3", step="logits_bar")
def logits_without_weights(
    port: Port, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans
) -> Array:
    return np.where(seen, weights_bar - row_term, 0.0)


@mutant("gradient: linear attention with the row term of softmax", "GRAD-3", step="logits_bar")
def linear_as_softmax(
    port: Port, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans
) -> Array:
    if port.config.normalisation == "none":
        row_term = np.sum(np.where(seen, weights_bar, 0.0), axis=-1, keepdims=True)
    return port.logits_bar(weights, weights_bar, row_term, seen)


@mutant("gradient: hidden keys receive", "GRAD-8", step="logits_bar")
def mask_ignored(port: Port, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans) -> Array:
    """What comes of softmax over logits that were masked in the forward pass alone."""
    everyone = np.ones_like(seen)
    largest = np.max(np.where(seen, weights, 0.0), axis=-1, keepdims=True, initial=0.0)
    return port.logits_bar(np.where(seen, weights, largest), weights_bar, row_term, everyone)


@mutant("gradient: rows that see nothing give as if they saw all", "GRAD-8", step="logits_bar")
def empty_rows_give(port: Port, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans) -> Array:
    """The gradient of the mean that a large negative number in place of -inf gives."""
    right = port.logits_bar(weights, weights_bar, row_term, seen)
    if port.config.normalisation == "none" or weights.shape[-1] == 0:
        return right
    empty = ~np.any(seen, axis=-1, keepdims=True)
    mean = (weights_bar - weights_bar.mean(axis=-1, keepdims=True)) / weights.shape[-1]
    return np.where(empty, mean, right)


@mutant("gradient of the values from rows that see nothing", "GRAD-8", step="values_bar")
def empty_rows_give_to_values(port: Port, weights: Array, virtual_out_bar: Array) -> Array:
    empty = ~np.any(port.visible[:, None], axis=-1, keepdims=True)
    uniform = 1.0 / max(1, weights.shape[-1])
    softmax = port.config.normalisation == "softmax"
    return port.values_bar(np.where(empty & softmax, uniform, weights), virtual_out_bar)


@mutant("gradient: dropped keys are multiplied by 0", "GRAD-8", step="leave_out")
def dropped_multiplied(port: Port, tensors: Tensors, visible: Booleans) -> Tensors:
    """NaN of a dropped key, times a gradient of 0, in the gradients of the mixing tensors."""
    return tensors


# Queries and keys


@mutant("gradient of the queries without the scale", "GRAD-4", step="queries_bar")
def queries_without_scale(port: Port, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
    return port.queries_bar(logits_bar, rotated_k, 1.0)


@mutant("gradient of the keys without the scale", "GRAD-4", step="keys_bar")
def keys_without_scale(port: Port, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
    return port.keys_bar(logits_bar, rotated_q, 1.0)


@mutant("gradient of the keys with the scale twice", "GRAD-4", step="keys_bar")
def keys_scaled_twice(port: Port, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
    return port.keys_bar(logits_bar, rotated_q, scale**2)


@mutant("gradient of the queries with the default scale", "GRAD-4", step="queries_bar")
def queries_with_default_scale(port: Port, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
    return port.queries_bar(logits_bar, rotated_k, 1.0 / np.sqrt(port.dims.d))


@mutant("gradient of the keys without the transpose", "GRAD-4", step="keys_bar")
def keys_not_transposed(port: Port, logits_bar: Array, rotated_q: Array, scale: float) -> Array:
    T, S = logits_bar.shape[-2:]
    return port.keys_bar(np.swapaxes(logits_bar, 2, 3) if T == S else logits_bar, rotated_q, scale)


@mutant("gradient of the queries from unrotated keys", "GRAD-4", step="queries_bar")
def queries_from_unrotated(port: Port, logits_bar: Array, rotated_k: Array, scale: float) -> Array:
    return port.queries_bar(logits_bar, port.forward["mixed_k"], scale)


@mutant("gradient: rotation not undone", "GRAD-5", step="rotate_back")
def not_undone(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    return rotated_bar


@mutant("gradient: rotation of the keys not undone", "GRAD-5", step="rotate_back")
def keys_not_undone(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    return rotated_bar if side == "k" else port.rotate_back(side, rotated_bar, angles)


@mutant("gradient: rotated once more", "GRAD-5", step="rotate_back")
def rotated_once_more(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    return reference.rotate(rotated_bar, angles, port.config)


@mutant("gradient: rotation undone at the token's position", "GRAD-5", step="rotate_back")
def undone_at_the_token(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    """The angle of pseudo-head 0 for all."""
    of_first = None if angles is None else np.repeat(angles[:, :: port.dims.P], port.dims.P, axis=1)
    return port.rotate_back(side, rotated_bar, of_first)


@mutant("gradient: rotation undone in index order", "GRAD-5", step="rotate_back")
def undone_in_index_order(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    """At 0, 1, 2 ... whatever the positions."""
    if angles is None:
        return rotated_bar
    tokens = port.positions["qk".index(side)].shape[1]
    order = reference.rope_angles(np.arange(tokens)[None], port.dims, port.config)
    return port.rotate_back(side, rotated_bar, order)


@mutant("gradient: rotation undone in the other pairing", "GRAD-5", step="rotate_back")
def undone_in_other_pairing(port: Port, side: Side, rotated_bar: Array, angles: Array | None) -> Array:
    if angles is None:
        return rotated_bar
    other = "adjacent" if port.config.rope_pairing == "half" else "half"
    first, second = reference.lane_pairs(rotated_bar.shape[-1], other)  # type: ignore[arg-type]
    x1, x2 = rotated_bar[..., first], rotated_bar[..., second]
    turned = np.empty_like(rotated_bar)
    turned[..., first] = x1 * np.cos(angles) + x2 * np.sin(angles)
    turned[..., second] = x2 * np.cos(angles) - x1 * np.sin(angles)
    return turned


# Mixing


@mutant("gradient through the first pseudo-head alone", "GRAD-6", step="unmix")
def unmixed_from_first(port: Port, side: Side, mixed_bar: Array, alpha: Array) -> Array:
    return port.unmix(side, mixed_bar, alpha * (np.arange(alpha.shape[-1]) == 0))


@mutant("gradient through the last target head alone", "GRAD-6", step="unmix")
def unmixed_from_last_head(port: Port, side: Side, mixed_bar: Array, alpha: Array) -> Array:
    H = alpha.shape[1]
    return port.unmix(side, mixed_bar, alpha * (np.arange(H) == H - 1)[:, None])


@mutant("gradient through the mixing with source and target exchanged", "GRAD-6", step="unmix")
def unmixed_exchanged(port: Port, side: Side, mixed_bar: Array, alpha: Array) -> Array:
    square = alpha.shape[0] == alpha.shape[1]
    return port.unmix(side, mixed_bar, np.swapaxes(alpha, 0, 1) if square else alpha)


@mutant("gradient of the values through the mixing of the keys", "GRAD-6", step="unmix")
def values_through_keys(port: Port, side: Side, mixed_bar: Array, alpha: Array) -> Array:
    return port.unmix(side, mixed_bar, port.tensors["alpha_k"] if side == "v" else alpha)


@mutant("gradient through the mixing averaged over pseudo-heads", "GRAD-6", step="unmix")
def unmixed_averaged(port: Port, side: Side, mixed_bar: Array, alpha: Array) -> Array:
    return np.asarray(port.unmix(side, mixed_bar, alpha) / alpha.shape[-1])


@mutant("gradient of the mixing tensors of the first batch element", "GRAD-7", step="alpha_bar")
def alpha_of_first_batch(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    return port.alpha_bar(side, x[:1], mixed_bar[:1])


@mutant("gradient of the mixing tensors of the first token", "GRAD-7", step="alpha_bar")
def alpha_of_first_token(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    return port.alpha_bar(side, x[:, :1], mixed_bar[:, : port.dims.P])


@mutant("gradient of the mixing tensors averaged over tokens", "GRAD-7", step="alpha_bar")
def alpha_averaged(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    return np.asarray(port.alpha_bar(side, x, mixed_bar) / max(1, x.shape[1]))


@mutant("gradient of the mixing tensors of the last target head", "GRAD-7", step="alpha_bar")
def alpha_of_last_head(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    bar = port.alpha_bar(side, x, mixed_bar)
    return np.asarray(bar * (np.arange(bar.shape[1]) == bar.shape[1] - 1)[:, None])


@mutant("gradient of the mixing tensors of lane 0", "GRAD-7", step="alpha_bar")
def alpha_of_first_lane(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    return port.alpha_bar(side, x[..., :1], mixed_bar[..., :1])


@mutant("gradient of the mixing tensors with source and target exchanged", "GRAD-7", step="alpha_bar")
def alpha_exchanged(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    bar = port.alpha_bar(side, x, mixed_bar)
    return np.swapaxes(bar, 0, 1) if bar.shape[0] == bar.shape[1] else bar


@mutant("gradient of the mixing tensors with pseudo-heads in reverse", "GRAD-7", step="alpha_bar")
def alpha_reversed(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    return port.alpha_bar(side, x, mixed_bar)[:, :, ::-1]


def _dropped(argument: str) -> Callable[[Port, Tensors], Tensors]:
    return lambda port, gradients: gradients | {argument: 0.0 * gradients[argument]}


for _argument in GRADIENTS:
    _requirement = {"q": "GRAD-6", "k": "GRAD-6", "v": "GRAD-6", "collapse": "GRAD-1"}.get(
        _argument, "GRAD-7"
    )
    add(
        f"gradient of {_argument} dropped",
        _requirement,
        step="change_gradients",
        function=_dropped(_argument),
    )


@mutant("gradient of alpha_k added to that of alpha_v", "GRAD-7", step="change_gradients")
def shared_mixing(port: Port, gradients: Tensors) -> Tensors:
    """What one tensor for keys and values would receive."""
    both = gradients["alpha_k"] + gradients["alpha_v"]
    return gradients | {"alpha_k": both, "alpha_v": both}


# Formats

_MIXED = "float32 parameters beside narrower data exist in 16 bits alone"


@mutant(
    "gradients of float32 parameters stored in 16 bits",
    "GRAD-9",
    "NUM-9",
    step="change_gradients",
    dtypes=NARROW_DTYPES,
    because=_MIXED,
)
def narrow_parameter_gradients(port: Port, gradients: Tensors) -> Tensors:
    return gradients | {name: cast(gradients[name], port.dtype).astype(np.float64) for name in MIXING}


@mutant("gradient of the mixing tensors summed in 16 bits", "NUM-9", "GRAD-7", step="alpha_bar")
def narrow_alpha(port: Port, side: Side, x: Array, mixed_bar: Array) -> Array:
    """Rounded after every token's term."""
    B, N, P = x.shape[0], x.shape[1], port.dims.P
    of_token = mixed_bar.reshape(B, N, P, *mixed_bar.shape[2:])
    terms = np.einsum("bnsw,bnphw->shpbn", x, of_token)
    return added(port, terms.reshape(*terms.shape[:3], B * N))


@mutant("gradient of the collapse summed in 16 bits", "NUM-9", "GRAD-1", step="collapse_bar")
def narrow_collapse(port: Port, cotangent: Array, virtual_out: Array, R: Array) -> Array:
    of_token = port.by_token(virtual_out)
    equation = "bnhe,bnphe->hpbn" if R.ndim == 2 else "bnie,bnphe->ihpbn"
    terms = np.einsum(equation, cotangent, of_token)
    return added(port, terms.reshape(*terms.shape[:-2], -1))


@mutant("gradient of the values summed in 16 bits", "NUM-9", "GRAD-2", step="values_bar")
def narrow_values(port: Port, weights: Array, virtual_out_bar: Array) -> Array:
    return added(port, np.einsum("bhts,bthe->bshet", weights, virtual_out_bar))


@mutant(
    "gradients of the logits stored in 16 bits",
    "NUM-9",
    step="logits_bar",
    dtypes=WIDE,
    because="in 16-bit storage it is what [NUM-9] allows",
)
def narrow_logits(port: Port, weights: Array, weights_bar: Array, row_term: Array, seen: Booleans) -> Array:
    bar = port.logits_bar(weights, weights_bar, row_term, seen)
    return cast(bar, narrow(port.dtype)).astype(np.float64)
