"""Interleaved Head Attention for JAX: `attention`, a pure function for jit, vmap and grad, and its layer.

The layer as a module of Flax is in `iha_jax.flax_layer`, which is not imported here.
"""

from iha_core.config import AttentionConfig
from iha_core.layer_config import LayerConfig
from iha_jax.attention import attention, attention_stages
from iha_jax.checkpoint import load_checkpoint, save_checkpoint
from iha_jax.layer import InterleavedHeadAttention

__all__ = [
    "AttentionConfig",
    "InterleavedHeadAttention",
    "LayerConfig",
    "attention",
    "attention_stages",
    "load_checkpoint",
    "save_checkpoint",
]
