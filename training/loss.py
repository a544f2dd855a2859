"""Cross-entropy of a language model's output head, a chunk of tokens at a time.

The logits of a batch, [tokens, vocabulary], are the largest tensor of a training step: 4 x 2048 tokens of
Qwen2.5 are 2.5 GB in bf16, and autograd would keep them, an fp32 copy and the gradient. Here the logits of
one chunk exist at a time, and their gradient is formed while they do, so that neither forward nor backward
ever holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""A label without loss, as in `torch.nn.functional.cross_entropy`."""

CHUNK_TOKENS = 2048
"""Large enough that a chunk's matrix products fill a GPU; 2048 x 151,936 logits are 1.2 GB in fp32."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    compiled: bool = False,
) -> Tensor:
    """`scale` times the summed cross-entropy of `hidden @ weight.T` against `labels`.

    A head that shares its weight with the embedding works like any other: autograd adds both gradients.

    Args:
        hidden: outputs of the last layer [..., hidden_size], bf16 or fp32.
        weight: the output head [vocab_size, hidden_size], same type as `hidden`.
        labels: int64 [...], one for each row of `hidden`; `IGNORED_LABEL` rows count for nothing.
        scale: fp32 [], for example 1 / (number of labels that count).
        chunk_tokens: tokens whose logits exist at the same time.
        compiled: fuse the arithmetic on a chunk's logits with torch.compile.

    Returns:
        The loss, fp32 [] (fp64 for fp64 inputs). Gradients reach `hidden` and `weight`; that of `weight` is
        summed over chunks in fp32.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _ChunkedCrossEntropy.apply(
        rows, weight, labels.reshape(-1), scale, chunk_tokens, compiled, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor,
        chunk_tokens: int,
        compiled: bool,
        with_gradients: bool,
    ) -> Tensor:
        loss_and_gradient = _compiled_loss_and_gradient() if compiled else _loss_and_gradient
        precise = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), device=hidden.device, dtype=precise)
        if with_gradients:
            hidden_grad = torch.empty_like(hidden)
            weight_sum = torch.zeros(weight.shape, device=weight.device, dtype=precise)
        for first in range(0, len(hidden), chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits = _product(hidden[chunk], weight.t(), precise)
            chunk_loss, logits_grad = loss_and_gradient(logits, labels[chunk], hidden.dtype)
            del logits  # gone before the next chunk's come: together they would be the step's peak of memory
            loss += chunk_loss
            if with_gradients:
                torch.mul(_product(logits_grad, weight, precise), scale, out=hidden_grad[chunk])
                _add_product(weight_sum, logits_grad.t(), hidden[chunk])
            del logits_grad
        if with_gradients:
            ctx.save_for_backward(hidden_grad, torch.mul(weight_sum, scale, out=torch.empty_like(weight)))
        return loss * scale

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        factor = grad_output.to(hidden_grad.dtype)
        return hidden_grad * factor, weight_grad * factor, None, None, None, None, None


def _loss_and_gradient(logits: Tensor, labels: Tensor, gradient_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Summed loss [] and gradient [tokens, vocab_size] of one chunk's logits, both without the scale.

    Most of a gradient is one entry a token, probability - 1 of the label. Close to -1 it loses little when it
    is rounded to bf16; scaled, it would lose as much as any number.
    """
    counts = (labels != IGNORED_LABEL)[:, None]
    target = torch.where(counts, labels[:, None], 0)
    log_sum = torch.logsumexp(logits, dim=-1, keepdim=True)
    loss = torch.where(counts, log_sum - logits.gather(1, target), 0.0).sum()
    columns = torch.arange(logits.shape[1], device=logits.device)[None, :]
    gradient = (logits - log_sum).exp() - (columns == target).to(logits.dtype)
    return loss, torch.where(counts, gradient, 0.0).to(gradient_dtype)


@cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_loss_and_gradient, dynamic=False, fullgraph=True)


# cuBLAS multiplies bf16 matrices into an fp32 one without rounding in between. Logits rounded to bf16 would
# cost more accuracy than everything else here; a CPU has no such product, so the factors are converted.


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in a type at least as precise as the factors'."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may be more precise than the factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
