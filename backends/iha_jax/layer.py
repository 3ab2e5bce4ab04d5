"""The layer: projections and norms around the operation, pure functions of a dict of arrays. SPEC.md 10, 11.

The parameters are a flat pytree, a dict whose keys are the names of [CKPT-1]. Shapes use SPEC.md's dimension
legend: B batch, N tokens, D model width, H heads, G key/value heads, d query and key width, e value width.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from iha_core.checkpoint import check_tensors
from iha_core.config import describe
from iha_core.errors import ArgumentTypeError, DTypeError
from iha_core.initialisers import Initialiser, fixed_mixing, starts
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.validation import FLOAT_DTYPES, dtype_name, parameter_dtypes
from iha_jax.attention import attention
from iha_jax.mixing import compute_dtype, precision_word

Params = dict[str, Array]
"""Parameters of a layer by their names in a checkpoint ([CKPT-1])."""


def init(
    key: Array,
    config: LayerConfig,
    *,
    initialiser: Initialiser = "noisy-average",
    dtype: DTypeLike = jnp.float32,
    mixing_dtype: DTypeLike | None = None,
) -> Params:
    """Parameters at their start.

    A parameter depends on the key, its own name and its own start alone: a layer with biases has the weights
    of one without.

    Args:
        key: a key of `jax.random`.
        config: the layer.
        initialiser: how the mixing tensors and the collapse start; of no effect with kind "mha".
        dtype: of all parameters; float64 (where JAX has it enabled), float32, float16 or bfloat16.
        mixing_dtype: of alpha_q, alpha_k, alpha_v and collapse, float32 while `dtype` is narrower; None means
            `dtype`.

    Returns:
        Arrays by the names of [CKPT-1].

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md [INIT-1] to [INIT-5].
    """
    check_config(config)
    _check_key(key)
    dtypes = _dtypes(dtype, mixing_dtype)
    params = {}
    for name, start in starts(config, initialiser).items():
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        wanted = dtypes[name in MIXING]
        params[name] = _draw(own, start.mean, start.deviation, wanted)
    return params


def apply(
    params: Mapping[str, Array],
    x: Array,
    *,
    config: LayerConfig,
    key_mask: Array | None = None,
    segment_ids: Array | None = None,
    positions: Array | None = None,
    precision: PrecisionLike = "highest",
) -> Array:
    """A layer of interleaved heads, or of plain ones.

    Args:
        params: the parameters of [CKPT-1] that the configuration has, by name. All are of one dtype, but
            those of the operation may be float32 while the others are float16 or bfloat16.
        x: (B, N, D) input, dtype of the projections.
        config: sizes and choices of the layer.
        key_mask: (B, N) bool, True where a token may be attended; None for all.
        segment_ids: (B, N) int; attention stays within equal ids.
        positions: (B, N) int token positions for RoPE; None means index order.
        precision: of all products ([NUM-8]), in JAX's words; see `attention`.

    Under `jax.jit`, config and precision are static.

    Returns:
        (B, N, D), dtype and devices of x.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md [LAY-2] to [LAY-7].
    """
    check_params(params, config)
    _check_input(x, params, config)
    precision = precision_word(precision)
    q, k, v = _heads(params, x, config, precision)
    mixing = params
    if config.kind == "mha":  # [LAY-6]
        mixing = {name: jnp.asarray(fixed, x.dtype) for name, fixed in fixed_mixing(config).items()}
    output = attention(
        q,
        k,
        v,
        *(mixing[name] for name in MIXING),
        config=config.attention,
        key_mask=key_mask,
        segment_ids=segment_ids,
        positions=positions,
        precision=precision,
    )  # (B, N, H, e)
    B, N, H, e = output.shape
    return _project(output.reshape(B, N, H * e), params, "o_proj", precision)  # [LAY-3]


@dataclasses.dataclass(frozen=True)
class InterleavedHeadAttention:
    """A layer whose configuration is bound: `init` and `apply` of this module. Holds no arrays, and hashes.

    Args:
        config: sizes and choices of the layer.

    Raises:
        ArgumentTypeError: no LayerConfig.
    """

    config: LayerConfig

    def __post_init__(self) -> None:
        check_config(self.config)

    def init(
        self,
        key: Array,
        *,
        initialiser: Initialiser = "noisy-average",
        dtype: DTypeLike = jnp.float32,
        mixing_dtype: DTypeLike | None = None,
    ) -> Params:
        """Parameters at their start: see `init`."""
        return init(key, self.config, initialiser=initialiser, dtype=dtype, mixing_dtype=mixing_dtype)

    def apply(
        self,
        params: Mapping[str, Array],
        x: Array,
        *,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        positions: Array | None = None,
        precision: PrecisionLike = "highest",
    ) -> Array:
        """The layer of x, (B, N, D) -> (B, N, D): see `apply`."""
        return apply(
            params,
            x,
            config=self.config,
            key_mask=key_mask,
            segment_ids=segment_ids,
            positions=positions,
            precision=precision,
        )


def check_config(config: object) -> None:
    """Refuse what is no LayerConfig."""
    if not isinstance(config, LayerConfig):
        raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)


def check_params(params: object, config: LayerConfig) -> None:
    """Hold parameters to the configuration: arrays of JAX, names, shapes, dtypes ([CKPT-1], [CKPT-2]).

    Raises:
        ArgumentTypeError: no LayerConfig, no mapping, or a parameter that is no array of JAX.
        IHAError: parameters of another layer.
    """
    check_config(config)
    if not isinstance(params, Mapping):
        expected = "a mapping of arrays by name"
        raise ArgumentTypeError("params", "", expected=expected, found=type(params).__name__)
    for name, value in params.items():
        _check_array(str(name), value)
    check_tensors(params, config)


def has_float64() -> bool:
    """Whether JAX keeps float64, or narrows it silently."""
    return bool(jax.dtypes.canonicalize_dtype(jnp.float64) == jnp.float64)


def _check_array(argument: str, value: object) -> None:
    if not isinstance(value, Array):
        raise ArgumentTypeError(argument, "", expected="a jax.Array", found=type(value).__name__)


def _check_input(x: Array, params: Mapping[str, Array], config: LayerConfig) -> None:
    _check_array("x", x)
    config.check_input(x, dtype_name(params["q_proj.weight"]))


def _check_key(key: Array) -> None:
    """Refuse by the argument's name what `jax.random` would: batches of keys, seeds, other arrays."""
    expected = "one key of jax.random, as jax.random.key(0) is"
    if not isinstance(key, Array):
        raise ArgumentTypeError("key", "", expected=expected, found=describe(key))
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw_key = key.dtype == jnp.uint32 and key.ndim == 1
    if not (is_raw_key or (is_key and key.ndim == 0)):
        raise ArgumentTypeError("key", "", expected=expected, found=f"{key.dtype} {key.shape}")


def _dtypes(dtype: DTypeLike, mixing_dtype: DTypeLike | None) -> tuple[str, str]:
    """Names of the dtypes of the projections and of the operation's tensors ([TYP-1], [TYP-2])."""
    storage = _name("dtype", dtype)
    allowed = FLOAT_DTYPES if has_float64() else FLOAT_DTYPES[1:]
    if storage not in allowed:
        more = "" if has_float64() else " (float64 only with jax.enable_x64)"
        raise DTypeError("dtype", "", expected="one of " + ", ".join(allowed) + more, found=storage)
    if mixing_dtype is None:
        return storage, storage
    parameter = _name("mixing_dtype", mixing_dtype)
    if parameter not in parameter_dtypes(storage):
        expected = " or ".join(parameter_dtypes(storage))
        raise DTypeError("mixing_dtype", "", expected=expected, found=parameter)
    return storage, parameter


def _name(argument: str, dtype: DTypeLike | None) -> str:
    try:
        if dtype is None:  # which NumPy takes for float64
            raise TypeError
        return str(jnp.dtype(dtype).name)
    except TypeError:
        raise ArgumentTypeError(argument, "", expected="a dtype", found=describe(dtype)) from None


def _draw(key: Array, mean: np.ndarray, deviation: float, dtype: str) -> Array:
    """Independent normal numbers, formed in float32 or float64 and rounded once."""
    compute = jnp.float64 if dtype == "float64" else jnp.float32
    if not deviation:
        return jnp.asarray(mean, dtype)
    noise = deviation * jax.random.normal(key, mean.shape, compute)
    if mean.any():  # of a large weight, whose mean is 0, no second copy is made
        noise = jnp.asarray(mean, compute) + noise
    return noise.astype(dtype)


def _heads(
    params: Mapping[str, Array], x: Array, config: LayerConfig, precision: PrecisionLike
) -> tuple[Array, Array, Array]:
    """Queries (B, N, H, d), keys (B, N, G, d) and values (B, N, G, e) of the operation ([LAY-2], [LAY-4])."""
    B, N, _ = x.shape
    d, e = config.head_width, config.value_width
    q = _project(x, params, "q_proj", precision).reshape(B, N, config.num_heads, d)
    k = _project(x, params, "k_proj", precision).reshape(B, N, config.num_kv_heads, d)
    v = _project(x, params, "v_proj", precision).reshape(B, N, config.num_kv_heads, e)
    if config.qk_norm:
        q = _rms_norm(q, params["q_norm.weight"], config.qk_norm_epsilon)
        k = _rms_norm(k, params["k_norm.weight"], config.qk_norm_epsilon)
    return q, k, v


def _project(x: Array, params: Mapping[str, Array], name: str, precision: PrecisionLike) -> Array:
    """x Wᵀ + b, with sums in float32 or float64, rounded once ([LAY-2], [LAY-7]).

    x (B, N, in), weight (out, in), bias (out,) -> (B, N, out) in x's dtype.
    """
    compute = compute_dtype(x)
    # Operands of 16 bits stay as they are, for units that multiply those and sum in float32.
    product = jnp.einsum(
        "bni,oi->bno", x, params[f"{name}.weight"], precision=precision, preferred_element_type=compute
    )
    if f"{name}.bias" in params:
        product = product + params[f"{name}.bias"].astype(compute)[None, None]
    return product.astype(x.dtype)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Each head divided by its root mean square, in float32 or float64, rounded once ([LAY-4], [LAY-7]).

    x (B, N, heads, d), weight (d,) -> (B, N, heads, d) in x's dtype.
    """
    compute = compute_dtype(x)
    wide = x.astype(compute)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)  # (B, N, heads, 1)
    root = jnp.sqrt(mean_square + epsilon)
    return (wide / root * weight.astype(compute)[None, None, None]).astype(x.dtype)
