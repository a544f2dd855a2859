"""Micro-batches for the steps of one rank, checked, and on its device.

A rank whose data fails still has to take part in every collective of the step, or the others would wait for
it until the timeout. It gets a placeholder without labels that count, and the step's outcome tells all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from training.config import TrainingConfig
from training.loss import IGNORED_LABEL


@dataclass(frozen=True)
class StepData:
    """What one step trains on.

    Attributes:
        micro_batches: pairs (input_ids, labels), int64 [batch_size, seq_len], on the device.
        wait_s: time until the data was there.
        error: why the micro-batches are placeholders; None when they are real.
    """

    micro_batches: list[tuple[Tensor, Tensor]]
    wait_s: float
    error: str | None = None


class Feed:
    """Takes as many micro-batches from an iterator as a step needs.

    Args:
        batches: endless; pairs (input_ids, labels) on the CPU.
        config: `batch_size` and `seq_len` are read.
        vocab_size: all ids must be below it.
        num_micro_batches: per step.
        device: where the model is.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        config: TrainingConfig,
        vocab_size: int,
        num_micro_batches: int,
        device: torch.device,
    ) -> None:
        self._batches = batches
        self._shape = (config.batch_size, config.seq_len)
        self._vocab_size = vocab_size
        self._num_micro_batches = num_micro_batches
        self._device = device

    def next(self) -> StepData:
        """The data of the next step. Never raises for what the iterator does: see `StepData.error`."""
        started = time.perf_counter()
        error = None
        try:
            pairs = [self._checked(next(self._batches)) for _ in range(self._num_micro_batches)]
        except StopIteration:
            error = "the data ended; an iterator of batches must be endless"
        except Exception as raised:  # whatever a user's own data set raises belongs into the report
            error = str(raised) or type(raised).__name__
        if error is not None:
            pairs = [self._placeholder()] * self._num_micro_batches
        return StepData(
            [(self._move(ids), self._move(labels)) for ids, labels in pairs],
            time.perf_counter() - started,
            error,
        )

    def _checked(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Finds here what a GPU would only answer with a device-side assertion."""
        for what, ids, lowest in zip(("input", "label"), pair, (0, IGNORED_LABEL), strict=True):
            if tuple(ids.shape) != self._shape or ids.dtype != torch.int64:
                raise ValueError(
                    f"{what} ids are {ids.dtype} {list(ids.shape)}; --batch-size and --seq-len ask for "
                    f"torch.int64 {list(self._shape)}"
                )
            smallest, largest = (int(value) for value in ids.aminmax())
            if smallest < lowest or largest >= self._vocab_size:
                wrong = smallest if smallest < lowest else largest
                raise ValueError(f"{what} id {wrong} is outside of the model's {self._vocab_size} tokens")
        return pair

    def _placeholder(self) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(self._shape, dtype=torch.int64)
        return ids, torch.full_like(ids, IGNORED_LABEL)

    def _move(self, ids: Tensor) -> Tensor:
        if self._device.type == "cuda":
            return ids.pin_memory().to(self._device, non_blocking=True)
        return ids
