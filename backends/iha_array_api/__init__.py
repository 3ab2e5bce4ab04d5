"""Interleaved Head Attention for any library of the Python array API standard (2024.12)."""

from iha_array_api.attention import attention, attention_stages
from iha_core.config import AttentionConfig

__all__ = ["AttentionConfig", "attention", "attention_stages"]
