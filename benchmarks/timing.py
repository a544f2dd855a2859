"""Times the steps of a training loop, and the memory they needed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from training import metrics


@dataclass
class Timing:
    """What was measured of one loop at one setting, over all its rounds.

    Attributes:
        step_s: seconds of each timed step on this rank.
        peak_gib: highest allocated memory of any round; None on a CPU.
        num_alloc_retries: times the allocator had to give memory back and start again.
        last_loss: of the last step.
    """

    step_s: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    num_alloc_retries: int | None = None
    last_loss: float = math.nan

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.step_s + other.step_s,
            _largest(self.peak_gib, other.peak_gib),
            _total(self.num_alloc_retries, other.num_alloc_retries),
            other.last_loss,
        )

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the steps' times, as a share of their median."""
        return spread(self.step_s)


def spread(values: Sequence[float]) -> float:
    """Interquartile range as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / statistics.median(values)


def measure(step: Callable[[], float], device: torch.device, num_warmup: int, num_steps: int) -> Timing:
    """Runs warm-up steps, then timed ones.

    On a GPU the time of a step is that between the ends of two steps on the device, so that what the host
    queues ahead is counted where it runs.
    """
    for _ in range(num_warmup):
        step()
    metrics.reset_peak_memory(device)
    retries_before = metrics.memory(device)["num_alloc_retries"]
    clock = _DeviceClock() if device.type == "cuda" else _HostClock()
    clock.tick()
    loss = math.nan
    for _ in range(num_steps):
        loss = step()
        clock.tick()
    memory = metrics.memory(device)
    retries = memory["num_alloc_retries"]
    return Timing(
        clock.intervals_s(),
        memory["peak_allocated_gib"],
        None if retries is None else retries - retries_before,
        loss,
    )


class _HostClock:
    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        self._times.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self._times, self._times[1:], strict=False)]


class _DeviceClock:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals_s(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]


def _largest(one: float | None, other: float | None) -> float | None:
    values = [value for value in (one, other) if value is not None]
    return max(values) if values else None


def _total(one: int | None, other: int | None) -> int | None:
    values = [value for value in (one, other) if value is not None]
    return sum(values) if values else None
