"""The optimizer steps of a run: queued, read, judged and reported."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from training import metrics, optimizer
from training.agreement import Agreement
from training.config import TrainingConfig
from training.diagnosis import Stage
from training.errors import DataError, NotFiniteError
from training.feed import Feed, StepData
from training.hardware import peak_bf16_flops
from training.metrics import Throughput
from training.model import CausalLM
from training.shape import ModelShape
from training.step import Moment, Outcome, Result, train_step
from training.worker import Worker


@dataclass
class _Progress:
    """What the steps so far came to."""

    first_loss: float | None = None
    last_loss: float | None = None
    num_skipped: int = 0

    def add(self, result: Result) -> None:
        if not result.is_finite:
            self.num_skipped += 1
            return
        self.first_loss = result.loss if self.first_loss is None else self.first_loss
        self.last_loss = result.loss


@dataclass(frozen=True)
class _Unread:
    """A step that is queued, and whose outcome nobody has looked at yet."""

    step: int
    outcome: Outcome
    data: StepData
    learning_rate: float


class Steps:
    """The optimizer steps of a run, and their figures."""

    def __init__(
        self, config: TrainingConfig, worker: Worker, agreement: Agreement, stage: Stage, shape: ModelShape
    ) -> None:
        """
        Args:
            config: how to train.
            worker: this rank; gets the record of each step.
            agreement: among all ranks.
            stage: kept up to date with the number of the step.
            shape: of the model, for its FLOPs.
        """
        self._config, self._worker, self._agreement, self._stage = config, worker, agreement, stage
        self._progress = _Progress()
        self._throughput = _throughput(config, worker, shape)

    def run(self, model: CausalLM, feed: Feed) -> None:
        """Trains for `config.steps` steps and reports each."""
        adamw = optimizer.build(model, self._config.learning_rate, self._config.weight_decay)
        metrics.reset_peak_memory(self._worker.device)
        self._last_moment = Moment(self._worker.device)
        unread: deque[_Unread] = deque()
        for step in range(1, self._config.steps + 1):
            unread.append(self._queue(step, model, adamw, feed.next()))
            # A GPU computes the step while the one before is read and the next is queued: it never waits.
            while len(unread) > (1 if self._worker.device.type == "cuda" else 0):
                self._finish(unread.popleft())
        while unread:
            self._finish(unread.popleft())
        self._require_progress()

    def _queue(
        self, step: int, model: CausalLM, adamw: torch.optim.Optimizer, step_data: StepData
    ) -> _Unread:
        self._stage.name = f"step {step}"
        optimizer.set_learning_rate(adamw, rate := _learning_rate(self._config, step))
        has_failed = step_data.error is not None
        outcome = train_step(model, adamw, step_data.micro_batches, self._config, has_failed)
        return _Unread(step, outcome, step_data, rate)

    def _finish(self, unread: _Unread) -> None:
        result = unread.outcome.read()
        step_s = self._last_moment.seconds_until(unread.outcome.moment)
        self._last_moment = unread.outcome.moment
        self._require_usable(unread.step, result, unread.data)
        self._report(unread.step, result, step_s, unread.data.wait_s, unread.learning_rate)

    def _require_usable(self, step: int, result: Result, step_data: StepData) -> None:
        """Every rank raises, or none: the result is the same on all."""
        if result.failed_ranks:
            rank = result.failed_ranks[0]
            reason = self._agreement.gather(step_data.error)[rank]
            raise DataError(f"rank {rank}: its data failed in step {step}: {reason}")
        if not result.is_finite and self._config.on_nan == "stop":
            raise NotFiniteError(_not_finite(step, result))

    def _require_progress(self) -> None:
        if self._progress.num_skipped == self._config.steps:
            raise NotFiniteError(
                f"all {self._config.steps} steps were skipped, since none had a finite loss and gradient; "
                "lower --learning-rate and check the data and the weights"
            )

    def _report(self, step: int, result: Result, step_s: float, data_wait_s: float, rate: float) -> None:
        self._progress.add(result)
        self._throughput.add(step_s, data_wait_s)
        tokens_per_s = self._throughput.tokens_per_step / step_s
        self._worker.report(
            {
                "step": step,
                "loss": _json_number(result.loss),
                "grad_norm": _json_number(result.grad_norm),
                "skipped": not result.is_finite,
                "learning_rate": rate,
                "tokens_per_s": tokens_per_s,
                "tokens_per_s_per_gpu": tokens_per_s / self._worker.world_size,
                "mfu": self._throughput.mfu(tokens_per_s),
                "step_s": step_s,
                "data_wait_s": data_wait_s,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Losses and throughput."""
        return {
            "num_steps": self._config.steps,
            "num_skipped_steps": self._progress.num_skipped,
            "first_loss": self._progress.first_loss,
            "last_loss": self._progress.last_loss,
            **self._throughput.summary(),
        }


def _learning_rate(config: TrainingConfig, step: int) -> float:
    return optimizer.learning_rate_at(
        step, peak=config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
    )


def _throughput(config: TrainingConfig, worker: Worker, shape: ModelShape) -> Throughput:
    num_sequences = config.batch_size * config.num_micro_batches(worker.world_size) * worker.world_size
    is_gpu = worker.device.type == "cuda"
    return Throughput(
        tokens_per_step=num_sequences * config.seq_len,
        num_gpus=worker.world_size,
        flops_per_token=shape.flops_per_token(config.seq_len),
        peak_flops=peak_bf16_flops(torch.cuda.get_device_name(worker.device)) if is_gpu else None,
        untimed_steps=config.untimed_steps,
    )


def _not_finite(step: int, result: Result) -> str:
    ranks = ", ".join(str(rank) for rank in result.not_finite_ranks)
    what = f"the loss is not finite on rank {ranks}" if ranks else "the norm of the gradients is not finite"
    return (
        f"step {step}: {what} (loss {result.loss}, gradient norm {result.grad_norm}). Lower --learning-rate, "
        "give more --warmup-steps, or check the data; --on-nan skip leaves such steps out and counts them"
    )


def _json_number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
