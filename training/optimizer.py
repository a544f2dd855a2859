"""AdamW over fp32 master weights, its learning rate over the steps, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.parallel import SHARD

BETAS = (0.9, 0.95)
"""Usual for language models (GPT-3, arXiv:2005.14165 appendix B): a shorter memory of squared gradients."""

FINAL_SHARE = 0.1
"""Where the cosine ends, as a share of the peak learning rate."""

_SMALLEST_NORM = 1e-6  # against division by zero, as in torch.nn.utils.clip_grad_norm_


def build(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that does not pull norms and biases towards zero.

    Args:
        model: with its final (sharded, fp32) parameters; shared ones are taken once.
        learning_rate: of the first step.
        weight_decay: for parameters of two or more dimensions; all others have none.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for the whole update on CUDA; on the CPU the default loops are as fast and better tested.
    fused = any(parameter.is_cuda for parameter in parameters)
    return _ShardwiseAdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=BETAS, fused=fused
    )


class _ShardwiseAdamW(torch.optim.AdamW):
    """AdamW whose arithmetic sees plain shards; its state keeps DTensors, as checkpoints need them.

    An update works on each element alone, so DTensor has nothing to decide, but takes the CPU 10 ms a step
    for a model of 1.5 B parameters to find that out.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments, steps: what step() hands to the kernel
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate_at(step: int, *, peak: float, num_steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine from the peak to `FINAL_SHARE` of it at the last step.

    Args:
        step: 1 ... num_steps.
        peak: learning rate at the end of the warm-up.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps until the peak; 0 starts at the peak. A run that is no longer than its warm-up
            never decays.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    first, last = max(warmup_steps, 1), num_steps
    progress = (step - first) / (last - first) if last > first else 0.0
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales gradients so that their norm over all ranks is at most `max_norm`.

    Works on the shards themselves: the same arithmetic through DTensor costs the CPU 10 ms a step for a model
    of 1.5 B parameters, which small batches cannot hide.

    Args:
        parameters: all sharded over one mesh by `training.parallel.parallelize`, or none of them; every rank
            calls this with its shards of the same parameters.
        max_norm: 0 leaves the gradients as they are.

    Returns:
        The norm of all gradients before clipping, [] on the device, equal on every rank. Nothing waits for
        it.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [local(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(shards, foreach=True)
    if isinstance(gradients[0], DTensor):
        squared = norm.square()
        # Replicas hold the same gradients: the sum is over one copy of the model.
        dist.all_reduce(squared, group=gradients[0].device_mesh.get_group(SHARD))
        norm = squared.sqrt()
    if max_norm:
        torch._foreach_mul_(shards, (max_norm / (norm + _SMALLEST_NORM)).clamp(max=1.0))
    return norm
