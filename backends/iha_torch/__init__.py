"""Interleaved Head Attention for PyTorch: `attention`, differentiable, on any device PyTorch runs on."""

from iha_core.config import AttentionConfig
from iha_torch.attention import attention, attention_stages

__all__ = ["AttentionConfig", "attention", "attention_stages"]
