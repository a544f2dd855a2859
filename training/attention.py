"""Which kernel PyTorch's scaled dot-product attention takes on this device."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from training.shape import ModelShape


def attention_backend(shape: ModelShape, seq_len: int, device: torch.device) -> str:
    """The backend that causal attention of this model's shape is dispatched to.

    Asks PyTorch's own dispatcher, for bf16 on CUDA and on the CPU alike.

    Args:
        shape: of the model.
        seq_len: tokens per sequence.
        device: where the model runs.

    Returns:
        "flash_attention", "efficient_attention", "cudnn_attention" or "math".
    """
    query, key = (
        torch.empty(
            (1, num_heads, seq_len, shape.head_dim), dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for num_heads in (shape.num_heads, shape.num_kv_heads)
    )
    # Without a mask Transformers leaves fewer key and value heads to the kernel (use_gqa_in_sdpa).
    is_grouped = shape.num_kv_heads != shape.num_heads
    chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=is_grouped)
    return SDPBackend(chosen).name.lower()
