"""Standard deviation of a conforming result on random data, per element and of means and gains.

Every rounding is modelled as an independent error, uniform within its bound (variance bound**2 / 3),
and carried to the output to first order: through the softmax Jacobian, and coherently where one
rounding reaches an output by several ways (a key that all queries of a token share, a table entry
that all heads share). SPEC.md [NUM-6].
"""

from __future__ import annotations

import numpy as np

from iha_core.bounds.chain import Chain, Side
from iha_core.bounds.formats import Array, tolerances
from iha_core.bounds.worst import Quantity
from iha_core.config import RopePairing
from iha_core.reference import lane_pairs


def _own_variance(stage: Quantity) -> Array:
    """Variance of the rounding to storage and of the sum's n roundings, each uniform."""
    n = np.maximum(stage.terms, 1.0)
    return (stage.stored**2 + stage.summed**2 / n) / 3


def _side_variance(chain: Chain, side: Side) -> tuple[Array, Array]:
    """Variances of the mixed stage and of what rotation and scaling add, but for the table: (B, T, H, d)."""
    mixed = _own_variance(side.mixed)
    if side.angles is None:
        added = np.zeros_like(mixed)
    else:
        constants = tolerances()["operations"]
        cosine, sine = np.cos(side.angles), np.sin(side.angles)
        first, second = lane_pairs(side.mixed.value.shape[-1], chain.config.rope_pairing)
        u, eta = chain.arithmetic.u, chain.arithmetic.storage.eta
        x = side.mixed.value
        mixing = side.mixed.magnitude[..., first] + side.mixed.magnitude[..., second]
        work = constants["rotation"] * (chain.arithmetic.A * mixing) ** 2
        # One of the storage roundings is the table's, which `_table_errors` has, the other the products'.
        added = np.empty_like(mixed)
        for lane, partner in ((first, second), (second, first)):
            along, across = np.abs(x[..., lane] * cosine), np.abs(x[..., partner] * sine)
            added[..., lane] = ((u * along + eta) ** 2 + (u * across + eta) ** 2 + work) / 3
        added += side.rotated.stored**2 / 3
        added = np.where(side.rotated.error == side.mixed.error, 0.0, added)
    return mixed, added + (side.operand.error - side.rotated.error) ** 2 / 3


def _weight_variance(chain: Chain) -> Array:
    return chain.weights.own**2 / 3


def element_variance(chain: Chain) -> Array:
    """Variance of every element of the output, (B, N, H, e)."""
    weights, v, R = chain.weights.value, chain.v.value, chain.R
    H, _, P = R.shape
    B, T, _, e = chain.virtual_out.value.shape
    N, S = T // P, v.shape[1]
    o = chain.virtual_out.value
    d = chain.q.rotated.value.shape[-1]
    softmax = chain.config.normalisation == "softmax"
    centre = np.moveaxis(o, 2, 1) if softmax else np.zeros((B, H, T, e))  # (B, H, T, e)
    values = np.moveaxis(v, 2, 1)  # (B, H, S, e)
    keys = np.moveaxis(chain.k.rotated.value, 2, 1)  # (B, H, S, d)
    queries = np.moveaxis(chain.q.rotated.value, 2, 1)  # (B, H, T, d)
    through_logits = weights if softmax else (weights != 0).astype(np.float64)

    # Errors of one virtual query: each reaches that query's virtual output alone.
    products = (values[..., :, None] * keys[..., None, :]).reshape(B, H, S, e * d)
    value_key = (through_logits @ products).reshape(B, H, T, e, d)
    key_mean = through_logits @ keys  # (B, H, T, d)
    jacobian = chain.scale * (value_key - centre[..., None] * key_mean[..., None, :])  # (B, H, T, e, d)
    per_virtual = np.zeros((B, H, T, e))
    by_row = np.moveaxis(jacobian, 1, 2)  # (B, T, H, e, d)
    mixed, added = _side_variance(chain, chain.q)
    unrotated = _rotate_back(by_row, chain.q.angles, chain.config.rope_pairing)
    of_query = np.einsum("bthed,bthd->bhte", unrotated**2, mixed)
    per_virtual += of_query + np.einsum("bthed,bthd->bhte", by_row**2, added)
    logit_variance = _own_variance(chain.logits)
    a2l = through_logits**2 * np.where(weights != 0, logit_variance, 0.0)
    per_virtual += a2l @ values**2 - 2 * centre * (a2l @ values) + centre**2 * a2l.sum(-1, keepdims=True)
    per_virtual += _weight_variance(chain) @ values**2
    per_virtual += np.moveaxis(_own_variance(chain.virtual_out), 2, 1)
    by_token = per_virtual.reshape(B, H, N, P, e)
    total = np.einsum("bhnpe,ihp->bnie", by_token, R**2) + _own_variance(chain.output)
    for adjoint, variance in _table_errors(chain, chain.q, by_row):  # (B, T, H, e, d/2)
        reaching = np.einsum("bnphej,ihp->bnpiej", adjoint.reshape(B, N, P, H, e, -1), R)
        reaching = reaching.reshape(B, T, H, e, -1)
        reaching, variance = _per_entry(chain, reaching, variance)
        squares = (reaching**2).reshape(B, N, -1, H, e, reaching.shape[-1])
        variance = np.broadcast_to(variance, (B, *variance.shape[1:])).reshape(B, N, -1, variance.shape[-1])
        total += np.einsum("bnpiej,bnpj->bnie", squares, variance)

    # Errors of one virtual key or value: they reach all P pseudo outputs of a token together.
    a = weights.reshape(B, H, N, P, S)
    reach = np.einsum("bhnps,ihp->bnihs", a, R)
    total += np.einsum("bnihs,bshe->bnie", reach**2, _own_variance(chain.v))
    mixed, added = _side_variance(chain, chain.k)  # (B, S, H, d)
    t = through_logits.reshape(B, H, N, P, S)
    queries, centre = queries.reshape(B, H, N, P, d), centre.reshape(B, H, N, P, e)
    for i in range(H):
        tables: list[tuple[Array, Array]] = []
        for h in np.flatnonzero(np.any(R[i] != 0, axis=1)):
            aq = np.einsum("bnps,bnpd,p->bnsd", t[:, h], queries[:, h], R[i, h])  # (B, N, S, d)
            aqo = np.einsum(
                "bnps,bnpd,bnpe,p->bnsde", t[:, h], queries[:, h], centre[:, h], R[i, h], optimize=True
            )
            moved = chain.scale * (aq[..., None] * values[:, None, h, :, None, :] - aqo)  # (B, N, S, d, e)
            gradient = np.einsum("bnsde->bsned", moved)[:, :, None]  # (B, S, 1, N, e, d)
            unrotated = _rotate_back(gradient, chain.k.angles, chain.config.rope_pairing)
            total[:, :, i] += np.einsum("bsned,bsd->bne", unrotated[:, :, 0] ** 2, mixed[:, :, h])
            total[:, :, i] += np.einsum("bsned,bsd->bne", gradient[:, :, 0] ** 2, added[:, :, h])
            of_head = _table_errors(chain, chain.k, gradient, head=int(h))
            tables = (
                [(sofar + new, v) for (sofar, v), (new, _) in zip(tables, of_head, strict=True)]
                if tables
                else of_head
            )
        for adjoint, variance in tables:
            adjoint, variance = _per_entry(chain, adjoint[:, :, 0], variance)  # (B, S or M, N, e, d/2)
            variance = np.broadcast_to(variance, (B, *variance.shape[1:]))
            total[:, :, i] += np.einsum("bsnej,bsj->bne", adjoint**2, variance)
    return np.asarray(total)


def functional_variance(chain: Chain, w: Array, *, per_batch: bool) -> Array:
    """Variance of sum(w * error) over the output: its adjoint at every rounding.

    Args:
        w: (B, N, H, e) weights of the functional.
        per_batch: one functional for each batch element, or one for all together.

    Returns:
        (B,) or ().
    """
    weights, v, R = chain.weights.value, chain.v.value, chain.R
    B, T, H, e = chain.virtual_out.value.shape
    softmax = chain.config.normalisation == "softmax"

    def gather(contribution: Array) -> Array:
        summed = contribution.reshape(B, -1).sum(axis=1)
        return np.asarray(summed if per_batch else summed.sum(axis=0))

    total = gather(w**2 * _own_variance(chain.output))
    to_virtual = np.einsum("bnie,ihp->bnphe", w, R).reshape(B, T, H, e)
    total = total + gather(to_virtual**2 * _own_variance(chain.virtual_out))
    to_v = np.einsum("bhts,bthe->bshe", weights, to_virtual)
    total = total + gather(to_v**2 * _own_variance(chain.v))
    to_weight = np.einsum("bthe,bshe->bhts", to_virtual, v)
    total = total + gather(to_weight**2 * _weight_variance(chain))
    if softmax:
        to_logit = weights * (to_weight - np.sum(weights * to_weight, axis=-1, keepdims=True))
    else:
        to_logit = np.where(weights != 0, to_weight, 0.0)
    total = total + gather(to_logit**2 * np.where(weights != 0, _own_variance(chain.logits), 0.0))
    to_q = chain.scale * np.einsum("bhts,bshd->bthd", to_logit, chain.k.rotated.value)
    to_k = chain.scale * np.einsum("bhts,bthd->bshd", to_logit, chain.q.rotated.value)
    for side, gradient in ((chain.q, to_q), (chain.k, to_k)):
        mixed, added = _side_variance(chain, side)
        unrotated = _rotate_back(gradient, side.angles, chain.config.rope_pairing)
        total = total + gather(unrotated**2 * mixed) + gather(gradient**2 * added)
        total = total + _table_variance(chain, side, gradient, per_batch=per_batch)
    return np.asarray(total)


def _table_variance(chain: Chain, side: Side, gradient: Array, *, per_batch: bool) -> Array:
    """Share of the rounded cosines and sines, each one number for all heads and batch elements."""
    total = np.zeros(len(gradient) if per_batch else ())
    for adjoint, variance in _table_errors(chain, side, gradient):
        shared, variance = _per_entry(chain, np.sum(adjoint, axis=2), variance)  # (B, T or N, d/2)
        if not per_batch and np.all(side.angles == side.angles[:1]):  # type: ignore[index]
            shared, variance = np.sum(shared, axis=0, keepdims=True), variance[:1]
        part = shared**2 * variance
        total = total + (part.reshape(len(gradient), -1).sum(axis=1) if per_batch else part.sum())
    return total


def _table_errors(
    chain: Chain, side: Side, gradient: Array, *, head: int | None = None
) -> list[tuple[Array, Array]]:
    """Adjoints at the rounded cosines and at the rounded sines, and the variances of these.

    Args:
        gradient: (B, T, H, ..., d), the derivative by the rotated side; H is 1 where `head` is given.

    Returns:
        For cosines and sines (B, T, H, ..., d/2) and (B or 1, T, d/2); nothing without rotation.
    """
    if side.angles is None:
        return []
    first, second = lane_pairs(gradient.shape[-1], chain.config.rope_pairing)
    x = side.mixed.value if head is None else side.mixed.value[:, :, head : head + 1]
    x = x.reshape(*x.shape[:3], *[1] * (gradient.ndim - 4), x.shape[-1])
    g1, g2, x1, x2 = gradient[..., first], gradient[..., second], x[..., first], x[..., second]
    angles = side.angles[:, :, 0]
    u, eta = chain.arithmetic.u, chain.arithmetic.storage.eta
    cosine, sine = (
        np.where(angles == 0, 0.0, (u * np.abs(entry) + eta) ** 2 / 3)
        for entry in (np.cos(angles), np.sin(angles))
    )
    return [(g1 * x1 + g2 * x2, cosine), (g2 * x1 - g1 * x2, sine)]


def _per_entry(chain: Chain, adjoint: Array, variance: Array) -> tuple[Array, Array]:
    """Per table entry: under token positions the P pseudo-heads of a token share theirs.

    adjoint (B, T, ...) and variance (B or 1, T, d/2) -> the same with T, or with T/P.
    """
    if chain.config.rope != "token":
        return adjoint, variance
    P = chain.R.shape[-1]
    B, T = adjoint.shape[:2]
    return adjoint.reshape(B, T // P, P, *adjoint.shape[2:]).sum(axis=2), variance[:, ::P]


def _rotate_back(gradient: Array, angles: Array | None, pairing: RopePairing) -> Array:
    """Adjoint of the rotation: by the opposite angle. gradient is (B, T, H, ..., d)."""
    if angles is None:
        return gradient
    angles = angles.reshape(*angles.shape[:3], *[1] * (gradient.ndim - 4), angles.shape[-1])
    first, second = lane_pairs(gradient.shape[-1], pairing)
    cosine, sine = np.cos(angles), np.sin(angles)
    back = np.empty_like(gradient)
    back[..., first] = gradient[..., first] * cosine + gradient[..., second] * sine
    back[..., second] = gradient[..., second] * cosine - gradient[..., first] * sine
    return back
