"""Interleaved Head Attention for MLX: `attention`, differentiable, on Apple silicon and on CPUs.

`InterleavedHeadAttention` is the layer around it; `save_checkpoint` and `load_checkpoint` exchange layers
with the other backends.
"""

from iha_core.config import AttentionConfig
from iha_core.layer_config import LayerConfig
from iha_mlx.attention import attention, attention_stages
from iha_mlx.checkpoint import load_checkpoint, save_checkpoint
from iha_mlx.layer import InterleavedHeadAttention

__all__ = [
    "AttentionConfig",
    "InterleavedHeadAttention",
    "LayerConfig",
    "attention",
    "attention_stages",
    "load_checkpoint",
    "save_checkpoint",
]
