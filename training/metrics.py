"""What a run achieved: throughput, utilization, time of steps, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

GIB = 1024**3


@dataclass
class Throughput:
    """Collects the time of each step and turns it into figures that mean something.

    The first steps compile kernels and fill allocators; they are left out. MFU, model FLOPs utilization, is
    `tokens/s/GPU x model FLOPs per token / peak FLOP/s of the GPU`, where the FLOPs per token are those of
    `training.shape.ModelShape.flops_per_token` (no recomputation) and the peak is dense bf16.

    Attributes:
        tokens_per_step: over all ranks, ignored labels included.
        num_gpus: ranks, on whatever device.
        flops_per_token: forward and backward.
        peak_flops: of one GPU; None where it is not known, which leaves MFU out.
        untimed_steps: first steps left out.
    """

    tokens_per_step: int
    num_gpus: int
    flops_per_token: float
    peak_flops: float | None
    untimed_steps: int
    _step_s: list[float] = field(default_factory=list)
    _data_wait_s: list[float] = field(default_factory=list)

    def add(self, step_s: float, data_wait_s: float) -> None:
        """Notes one step: its duration, and how long this rank's data took of it or beside it."""
        self._step_s.append(step_s)
        self._data_wait_s.append(data_wait_s)

    def mfu(self, tokens_per_s: float) -> float | None:
        """Share of the GPUs' arithmetic that the model used, 0 ... 1."""
        if self.peak_flops is None:
            return None
        return tokens_per_s / self.num_gpus * self.flops_per_token / self.peak_flops

    def summary(self) -> dict[str, Any]:
        """Figures over the timed steps, JSON-ready; each None when there were no timed steps."""
        timed = self._step_s[self.untimed_steps :]
        waits = self._data_wait_s[self.untimed_steps :]
        rate = self.tokens_per_step * len(timed) / sum(timed) if timed else None
        return {
            "num_timed_steps": len(timed),
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / self.num_gpus if rate else None,
            "steps_per_s": len(timed) / sum(timed) if timed else None,
            "mfu": self.mfu(rate) if rate else None,
            "step_s_p50": _percentile(timed, 50),
            "step_s_p95": _percentile(timed, 95),
            "data_wait_s_mean": float(np.mean(waits)) if timed else None,
        }


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def reset_peak_memory(device: torch.device) -> None:
    """Starts the peak of `memory` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory(device: torch.device) -> dict[str, float | int | None]:
    """Peak memory of one rank's device, and how often its allocator had to free its cache and try again.

    Each retry stops the device: a run that has some is too close to the device's limit. None on a CPU.
    """
    if device.type != "cuda":
        return {"peak_allocated_gib": None, "peak_reserved_gib": None, "num_alloc_retries": None}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "num_alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def highest(of_ranks: Sequence[dict[str, float | int | None]]) -> dict[str, float | int | None]:
    """The highest value over ranks of each entry of `memory`: the rank that limits the job."""
    found = {}
    for name in of_ranks[0]:
        values = [rank[name] for rank in of_ranks if rank[name] is not None]
        found[name] = max(values) if values else None
    return found
