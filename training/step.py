"""One optimizer step over all ranks, from micro-batches to updated weights.

Nothing here waits for the device unless `on_nan` is "skip". The caller reads an outcome when the next step is
queued already, so that the device always has work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.config import TrainingConfig
from training.loss import IGNORED_LABEL
from training.model import CausalLM
from training.optimizer import clip_gradients
from training.parallel import accumulate


def train_step(
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    config: TrainingConfig,
    has_failed: bool = False,
) -> Outcome:
    """Runs one optimizer step. Every rank calls it with as many micro-batches.

    The loss is the mean over all labels of the step that count, on all ranks and in all micro-batches, so
    that neither the number of ranks nor that of micro-batches changes a gradient.

    Args:
        model: from `training.parallel.parallelize`.
        optimizer: of the model's parameters.
        micro_batches: pairs (input_ids, labels), int64 [batch_size, seq_len], on the model's device.
        config: `max_grad_norm`, `on_nan` and `reshard_after_forward` are read.
        has_failed: this rank's data is a placeholder; every rank learns so from the outcome.

    Returns:
        What happened, on the device.
    """
    model.loss_scale = _loss_scale(micro_batches)
    loss = _backward(model, micro_batches, keeps_parameters=not config.reshard_after_forward)
    grad_norm = clip_gradients(model.parameters(), config.max_grad_norm)
    outcome = Outcome.gather(loss, grad_norm, has_failed)
    if config.on_nan != "skip" or outcome.read().is_finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return outcome


def _loss_scale(micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What the summed loss of each micro-batch is multiplied with, fp32 [], equal on every rank."""
    counts = [(labels != IGNORED_LABEL).sum() for _, labels in micro_batches]
    num_labels = torch.stack(counts).sum()
    dist.all_reduce(num_labels)
    # FSDP averages gradients over ranks: the factor world_size turns that into a sum.
    return (dist.get_world_size() / num_labels.clamp(min=1)).float()


def _backward(
    model: CausalLM, micro_batches: Sequence[tuple[Tensor, Tensor]], keeps_parameters: bool
) -> Tensor:
    """Leaves the step's gradients on the parameters; returns this rank's share of the loss, []."""
    losses = []
    for index, (input_ids, labels) in enumerate(micro_batches, start=1):
        if len(micro_batches) > 1:  # each call visits all modules; one micro-batch is FSDP's default
            accumulate(model, index == len(micro_batches), keeps_parameters)
        loss = model(input_ids, labels)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@dataclass(frozen=True)
class Result:
    """What a step came to, equal on every rank.

    Attributes:
        loss: mean over the step's labels.
        grad_norm: of all gradients, before clipping.
        not_finite_ranks: ranks whose share of the loss is NaN or infinite.
        failed_ranks: ranks without data for this step.
    """

    loss: float
    grad_norm: float
    not_finite_ranks: list[int]
    failed_ranks: list[int]

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients can be used."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Moment:
    """A point in a device's work: on CUDA it is reached when everything queued before it is done.

    The clock of the CPU would not do: it can be stopped anywhere between queueing and reading.
    """

    def __init__(self, device: torch.device) -> None:
        """Marks the point that the device's queue has now."""
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Returns once the device has come to this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Moment) -> float:
        """Time the device took between two points that it has passed."""
        if self._event is None:
            return later._time_s - self._time_s
        return self._event.elapsed_time(later._event) / 1000


class Outcome:
    """A `Result` that the device may still be computing.

    Attributes:
        moment: the end of the step's backward pass; from one step's to the next's is the time of a step.
    """

    def __init__(self, of_ranks: Tensor) -> None:
        """
        Args:
            of_ranks: fp64 [world_size, 3], on the device: loss, gradient norm, and whether the data failed.
        """
        self._of_ranks = of_ranks
        if of_ranks.is_cuda:
            # Copied now: a copy queued at reading time would wait for everything queued until then.
            self._of_ranks = torch.empty_like(of_ranks, device="cpu", pin_memory=True)
            self._of_ranks.copy_(of_ranks, non_blocking=True)
        self.moment = Moment(of_ranks.device)

    @classmethod
    def gather(cls, loss: Tensor, grad_norm: Tensor, has_failed: bool) -> Outcome:
        """One small all-gather of what each rank came to."""
        failed = torch.full_like(loss, float(has_failed), dtype=torch.float64)
        own = torch.stack([loss.double(), grad_norm.double(), failed])
        of_ranks = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather(list(of_ranks), own)
        return cls(of_ranks)

    def read(self) -> Result:
        """Waits until the device has come to the end of this step's backward pass."""
        self.moment.wait()
        losses, norms, failed = zip(*self._of_ranks.tolist(), strict=True)
        return Result(
            loss=sum(losses) / len(losses),
            grad_norm=norms[0],
            not_finite_ranks=[rank for rank, loss in enumerate(losses) if not math.isfinite(loss)],
            failed_ranks=[rank for rank, flag in enumerate(failed) if flag],
        )
