"""Splash attention, JAX's Pallas kernel for TPUs, for the sizes that it takes. SPEC.md 3.2 and 3.4.

Elsewhere than on a TPU it is interpreted, which is slow and only good for tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.lax import PrecisionLike
from numpy.typing import NDArray

from iha_core.conditions import binding_conditions, index_conditions
from iha_core.config import AttentionConfig
from iha_core.validation import Dims
from iha_jax.masking import repeat_virtual

TILE = 128
"""The number of virtual queries, and of virtual keys, must be a multiple of it."""

BLOCKS = (512, 256, TILE)
"""Virtual queries or keys that are handled at once: the first of these that divides them all."""


BLOCK_SIZES = (
    "block_q",
    "block_kv",
    "block_kv_compute",
    "block_q_dkv",
    "block_kv_dkv",
    "block_kv_dkv_compute",
    "block_q_dq",
    "block_kv_dq",
)
"""Names of the block sizes, forward and backward; all are one number here."""


class VirtualMask(splash.Mask):
    """The conditions on indices ([MASK-1] to [WIN-3]), worked out block by block on the host.

    A query that sees nothing counts as seeing everything, so that its row stays finite; its output is
    made 0 afterwards ([SOFT-2]).
    """

    def __init__(self, dims: Dims, config: AttentionConfig, offset: int) -> None:
        self._dims, self._config, self._offset = dims, config, offset
        rows, columns = np.arange(dims.T).reshape(-1, TILE), np.arange(dims.S)
        self.sees_something = np.concatenate([self._visible(some, columns).any(axis=1) for some in rows])
        self._key = (dims, config, offset)

    @property
    def shape(self) -> tuple[int, int]:
        return self._dims.T, self._dims.S

    def __getitem__(self, index: tuple[slice, slice]) -> NDArray[np.bool_]:
        T, S = self.shape
        rows, columns = np.arange(T)[index[0]], np.arange(S)[index[1]]
        visible: NDArray[np.bool_] = self._visible(rows, columns) | ~self.sees_something[rows, None]
        return visible

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _visible(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        P = self._dims.P
        causal, window = binding_conditions(self._config, self._dims, self._offset)
        t, s = rows[:, None] + self._offset * P, columns[None, :]
        conditions = index_conditions(self._config, causal, window, P, n=t // P, m=s // P, t=t, s=s)
        visible = np.ones((len(rows), len(columns)), dtype=np.bool_)
        for condition in conditions:
            visible &= condition
        return visible


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    dims: Dims,
    config: AttentionConfig,
    offset: int | Array,
    key_mask: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    *,
    scale: float,
    precision: PrecisionLike,
) -> Array:
    """Softmax attention by the kernel ([LOG-1] to [OUT-1]); queries that see nothing get anything finite.

    q (B, T, H, d), k (B, S, H, d), v (B, S, H, e) -> (B, T, H, e) in q's dtype.

    Raises:
        NotImplementedError: the kernel does not take this call.
    """
    keys = segment_ids if kv_segment_ids is None else kv_segment_ids
    _check_taken(dims, config, offset, q.dtype, key_mask, segment_ids, keys)
    assert isinstance(offset, int)
    block = next(size for size in BLOCKS if dims.T % size == 0 and dims.S % size == 0)
    mask = splash.MultiHeadMask([VirtualMask(dims, config, offset)] * dims.H)
    ids = _hiding_ids(dims, key_mask, segment_ids, keys)
    # The kernel has no scale of its own; [NUM-3] allows the rounding of scaled queries.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    per_head = [x.swapaxes(1, 2) for x in (q, k, v)]  # (B, H, T or S, d or e)

    def attend(*arguments: Any, interpret: bool) -> Any:
        sizes = splash.BlockSizes(**dict.fromkeys(BLOCK_SIZES, block))  # type: ignore[arg-type]
        kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
        return jax.vmap(kernel)(*arguments)

    with jax.default_matmul_precision(precision):
        out: Array = lax.platform_dependent(
            *per_head, ids, tpu=partial(attend, interpret=False), default=partial(attend, interpret=True)
        )
    return out.swapaxes(1, 2)  # (B, T, H, e)


def _check_taken(
    dims: Dims,
    config: AttentionConfig,
    offset: int | Array,
    dtype: Any,
    key_mask: Array | None,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> None:
    refused = None
    if config.normalisation != "softmax":
        refused = f"normalisation 'softmax', got {config.normalisation!r}"
    elif dtype not in (jnp.float32, jnp.bfloat16):
        refused = f"float32 or bfloat16, got {dtype}"
    elif config.resolve_scale(dims.d) > 1:  # scaled queries may overflow where logits do not ([NUM-3])
        refused = f"a scale of at most 1, got {config.scale}"
    elif not isinstance(offset, int):
        refused = "a plain int as query_offset, got an array"
    elif 0 in (dims.B, dims.T, dims.S) or dims.T % TILE or dims.S % TILE:
        refused = f"N*P and M*P to be multiples of {TILE} and B > 0, got {dims.T}, {dims.S} and {dims.B}"
    elif segment_ids is not None and key_mask is not None:
        refused = "segment_ids or key_mask, got both"
    else:
        for ids in (segment_ids, kv_segment_ids):
            if ids is not None and ids.dtype in (jnp.uint32, jnp.int64):
                refused = f"segment ids of a type within int32, got {ids.dtype}"
    if refused is not None:
        raise NotImplementedError(f"splash attention: expected {refused}")


def _hiding_ids(
    dims: Dims, key_mask: Array | None, segment_ids: Array | None, kv_segment_ids: Array | None
) -> splash.SegmentIds | None:
    """What hides keys for each batch element, as ids of virtual queries (B, T) and keys (B, S), int32."""
    if key_mask is not None:  # ids 0 and 1; no query has 1
        segment_ids, kv_segment_ids = jnp.zeros((dims.B, dims.N), jnp.int32), ~key_mask
    if segment_ids is None or kv_segment_ids is None:
        return None
    virtual_ids = (repeat_virtual(ids, dims.P).astype(jnp.int32) for ids in (segment_ids, kv_segment_ids))
    return splash.SegmentIds(*virtual_ids)
