"""The layer: projections and norms around the operation, as a module of MLX. SPEC.md 10.1."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module  # mlx.nn does not export them to type checkers
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten

from iha_core.checkpoint import check_tensors
from iha_core.config import describe
from iha_core.errors import ArgumentTypeError, DTypeError
from iha_core.initialisers import Initialiser, Start, fixed_mixing, starts
from iha_core.layer_config import MIXING, LayerConfig
from iha_core.validation import FLOAT_DTYPES, dtype_name
from iha_mlx.attention import attention
from iha_mlx.mixing import compute_dtype

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NARROW = (mx.float16, mx.bfloat16)


class HeadNorm(Module):
    """Root mean square norm of every head, in float32 or float64, rounded once ([LAY-4], [LAY-7]).

    Not `mlx.nn.RMSNorm`, which rounds 16-bit heads once more before the weight, and computes in
    float32 for float64, too.

    Args:
        width: d, of the heads and of `weight`.
        epsilon: what is added to the mean square.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.ones((width,))
        self.epsilon = epsilon

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., d), weight (d,) -> alike, in x's dtype."""
        compute = compute_dtype(x)
        wide = x.astype(compute)
        # As an array, since MLX 0.32.0 rounds to float32 a number that meets an array of float64.
        epsilon = mx.array(self.epsilon, dtype=compute)
        root = mx.sqrt(wide.square().mean(axis=-1, keepdims=True) + epsilon)
        return (wide / root * self.weight.astype(compute)).astype(x.dtype)


class InterleavedHeadAttention(Module):
    """A layer of interleaved heads, or of plain ones with kind "mha".

    Its parameters have the names and shapes of SPEC.md [CKPT-1]: `q_proj.weight`, ..., `alpha_q`, `collapse`.
    They are drawn by `mx.random`, so that `mx.random.seed` decides them. There is no dropout: `train` and
    `eval` change nothing.

    Args:
        config: sizes and choices of the layer.
        initialiser: how the mixing tensors start ([INIT-2] to [INIT-5]); of no effect with kind "mha".
        dtype: of the parameters and the input: float64, float32, float16 or bfloat16.
        mixing_dtype: of alpha_q, alpha_k, alpha_v and collapse: None means `dtype`; it may be float32
            while that is float16 or bfloat16.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md [LAY-1] to [LAY-7], chapter 11.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        initialiser: Initialiser = "noisy-average",
        dtype: mx.Dtype = mx.float32,
        mixing_dtype: mx.Dtype | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not isinstance(config, LayerConfig):
            raise ArgumentTypeError("config", "", expected="a LayerConfig", found=type(config).__name__)
        mixing_dtype = _checked_dtypes(dtype, mixing_dtype)
        self.config = config
        D, H, G = config.model_width, config.num_heads, config.num_kv_heads
        d, e = config.head_width, config.value_width
        self.q_proj = Linear(D, H * d, bias=config.bias)
        self.k_proj = Linear(D, G * d, bias=config.bias)
        self.v_proj = Linear(D, G * e, bias=config.bias)
        self.o_proj = Linear(H * e, D, bias=config.bias)
        if config.qk_norm:
            self.q_norm = HeadNorm(d, config.qk_norm_epsilon)
            self.k_norm = HeadNorm(d, config.qk_norm_epsilon)
        for name, start in starts(config, initialiser).items():
            module, _, leaf = name.rpartition(".")
            drawn = _drawn(start, mixing_dtype if name in MIXING else dtype)
            setattr(self[module] if module else self, leaf, drawn)
        if config.kind == "mha":  # [LAY-6]; arrays whose names start with _ are no parameters to MLX
            for name, value in fixed_mixing(config).items():
                setattr(self, f"_{name}", mx.array(value, dtype=mx.float32))

    def __call__(
        self,
        x: mx.array,
        *,
        key_mask: mx.array | None = None,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """The layer's output.

        Args:
            x: (B, N, D) input, in the dtype of the parameters.
            key_mask: (B, N) bool, True where a token may be attended; None for all.
            segment_ids: (B, N) int; attention stays within equal ids.
            positions: (B, N) int token positions for RoPE; None means index order.

        Returns:
            (B, N, D), dtype of x, not yet evaluated.

        Raises:
            IHAError: bad input, or parameters that do not fit the configuration.
            NotImplementedError: float64 while the default device is a GPU, which has none.

        Source: SPEC.md [LAY-2] to [LAY-7].
        """
        self._check(x)
        config = self.config
        q = self.q_proj(x).reshape(*x.shape[:2], config.num_heads, config.head_width)
        k = self.k_proj(x).reshape(*x.shape[:2], config.num_kv_heads, config.head_width)
        v = self.v_proj(x).reshape(*x.shape[:2], config.num_kv_heads, config.value_width)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        output = attention(
            q,
            k,
            v,
            *self._mixing(q.dtype),
            config=config.attention,
            key_mask=key_mask,
            segment_ids=segment_ids,
            positions=positions,
        )  # (B, N, H, e)
        projected: mx.array = self.o_proj(output.flatten(-2))  # (B, N, H*e) -> (B, N, D)
        return projected

    def _mixing(self, storage: mx.Dtype) -> list[mx.array]:
        """alpha_q, alpha_k, alpha_v and collapse: parameters, or the fixed ones, of 0 and 1 alone."""
        if self.config.kind == "iha":
            return [self[name] for name in MIXING]
        return [self[f"_{name}"].astype(storage) for name in MIXING]

    def _check(self, x: Any) -> None:
        """Hold the input and the parameters to the configuration.

        A layer whose projections were replaced, by quantised ones for example, is held to its heads alone.
        """
        if not isinstance(x, mx.array):
            raise ArgumentTypeError("x", "", expected="an mlx.core.array", found=type(x).__name__)
        self.config.check_input(x)
        if any(type(self[name]) is not Linear for name in PROJECTIONS):
            if dtype_name(x) not in FLOAT_DTYPES:
                raise DTypeError("x", "dtype", expected="a float dtype", found=dtype_name(x))
            return
        check_tensors(named_parameters(self), self.config)
        self.config.check_input(x, dtype_name(self.q_proj.weight))


def named_parameters(layer: Module) -> dict[str, mx.array]:
    """The parameters of a layer, frozen ones included, by their names in a checkpoint."""
    named: dict[str, mx.array] = {}
    tree_flatten(layer.parameters(), destination=named)  # type: ignore[no-untyped-call]
    return named


def _checked_dtypes(dtype: mx.Dtype, mixing_dtype: mx.Dtype | None) -> mx.Dtype:
    """The dtype of the mixing tensors, both allowed together ([TYP-1], [TYP-2])."""
    if not isinstance(dtype, mx.Dtype) or dtype not in (mx.float64, mx.float32, *NARROW):
        expected = "mlx.core.float64, float32, float16 or bfloat16"
        raise DTypeError("dtype", "", expected=expected, found=describe(dtype))
    allowed = (dtype, mx.float32) if dtype in NARROW else (dtype,)
    if mixing_dtype is None:
        return dtype
    if not isinstance(mixing_dtype, mx.Dtype) or mixing_dtype not in allowed:
        expected = "None or " + " or ".join(map(str, allowed))
        raise DTypeError("mixing_dtype", "", expected=expected, found=describe(mixing_dtype))
    return mixing_dtype


def _drawn(start: Start, dtype: mx.Dtype) -> mx.array:
    """Normal numbers, drawn in float32 and rounded once."""
    wide = mx.float64 if dtype == mx.float64 else mx.float32
    value = mx.array(start.mean, dtype=wide)
    if start.deviation:
        value = value + (start.deviation * mx.random.normal(value.shape)).astype(wide)
    return value.astype(dtype)
