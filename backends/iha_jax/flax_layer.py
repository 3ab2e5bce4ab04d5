"""The layer as a module of Flax NNX. It is imported by name alone: `iha_jax` does without Flax."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from iha_core.errors import ArgumentTypeError
from iha_core.initialisers import Initialiser
from iha_core.layer_config import LayerConfig
from iha_jax import layer

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("iha_jax.flax_layer needs Flax 0.12 or later: pip install flax") from error


class InterleavedHeadAttention(nnx.Module):
    """A layer of interleaved heads, or of plain ones, that holds its parameters.

    Each is an `nnx.Param` in the place that its name in a checkpoint says: `q_proj.weight`, `alpha_q`.

    Args:
        config: sizes and choices of the layer, kept as the attribute `config`.
        rngs: whose stream `params` the parameters are drawn from.
        initialiser: how the mixing tensors and the collapse start; of no effect with kind "mha".
        dtype: of all parameters; see `iha_jax.layer.init`.
        mixing_dtype: of alpha_q, alpha_k, alpha_v and collapse; None means `dtype`.

    Raises:
        IHAError: bad input; also a ValueError or a TypeError (see `iha_core.errors`).

    Source: SPEC.md chapters 10 and 11.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        rngs: nnx.Rngs,
        initialiser: Initialiser = "noisy-average",
        dtype: DTypeLike = jnp.float32,
        mixing_dtype: DTypeLike | None = None,
    ) -> None:
        if not isinstance(rngs, nnx.Rngs):
            raise ArgumentTypeError("rngs", "", expected="an nnx.Rngs", found=type(rngs).__name__)
        layer.check_config(config)
        self.config = config
        key = rngs.params()
        drawn = layer.init(key, config, initialiser=initialiser, dtype=dtype, mixing_dtype=mixing_dtype)
        for name, value in drawn.items():
            group, _, leaf = name.rpartition(".")
            if group and not hasattr(self, group):
                setattr(self, group, nnx.Module())
            setattr(getattr(self, group) if group else self, leaf, nnx.Param(value))

    @classmethod
    def from_params(cls, config: LayerConfig, params: Mapping[str, Array]) -> Self:
        """A layer that holds the given parameters, arrays by the names of [CKPT-1].

        Raises:
            IHAError: parameters of another layer.
        """
        layer.check_params(params, config)
        # Its structure alone, of the one initialiser that every configuration allows.
        module: Self = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), initialiser="random"))
        for name, value in params.items():
            module._variable(name).set_value(value)
        return module

    def params(self) -> layer.Params:
        """The parameters as they are now, arrays by the names of [CKPT-1]: what `iha_jax.layer` works on."""
        return {name: self._variable(name).get_value() for name in self.config.parameter_shapes()}

    def __call__(
        self,
        x: Array,
        *,
        key_mask: Array | None = None,
        segment_ids: Array | None = None,
        positions: Array | None = None,
        precision: PrecisionLike = "highest",
    ) -> Array:
        """The layer of x, (B, N, D) -> (B, N, D): see `iha_jax.layer.apply`."""
        return layer.apply(
            self.params(),
            x,
            config=self.config,
            key_mask=key_mask,
            segment_ids=segment_ids,
            positions=positions,
            precision=precision,
        )

    def _variable(self, name: str) -> nnx.Variable[Any]:
        found: nnx.Variable[Any] = operator.attrgetter(name)(self)
        return found
