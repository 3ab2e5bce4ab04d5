"""Interleaved Head Attention for JAX: `attention`, a pure function for jit, vmap and grad."""

from iha_core.config import AttentionConfig
from iha_jax.attention import attention, attention_stages

__all__ = ["AttentionConfig", "attention", "attention_stages"]
