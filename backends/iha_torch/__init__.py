"""Interleaved Head Attention for PyTorch: `attention` and its layer, differentiable, on any device."""

from iha_core.config import AttentionConfig
from iha_core.layer_config import LayerConfig
from iha_torch.attention import attention, attention_stages
from iha_torch.checkpoint import load_checkpoint, save_checkpoint
from iha_torch.convert import from_mha
from iha_torch.decoder import replace_attention
from iha_torch.layer import InterleavedHeadAttention

__all__ = [
    "AttentionConfig",
    "InterleavedHeadAttention",
    "LayerConfig",
    "attention",
    "attention_stages",
    "from_mha",
    "load_checkpoint",
    "replace_attention",
    "save_checkpoint",
]
