"""Interleaved Head Attention for MLX: `attention`, differentiable, on Apple silicon and on CPUs."""

from iha_core.config import AttentionConfig
from iha_mlx.attention import attention, attention_stages

__all__ = ["AttentionConfig", "attention", "attention_stages"]
