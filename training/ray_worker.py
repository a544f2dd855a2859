"""What Ray Train runs in each worker process: builds the `Worker` and hands over to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.util.queue import Queue

from training import handshake, loop
from training.config import TrainingConfig
from training.worker import Worker


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one rank's whole job.

    Args:
        job: `config`, the fields of a `TrainingConfig`; `records`, the queue that the driver reads.

    Returns:
        The loop's summary; rank 0's is the run's.
    """
    config = TrainingConfig(**job["config"])
    context = ray.train.get_context()
    rank = context.get_world_rank()
    handshake.open_log(config, rank)  # before anything can start NCCL
    device = _device(config)
    nodes = _node_of_each_rank(context.get_world_size())
    report = _Report(job["records"]) if rank == 0 else _ignore
    worker = Worker(
        rank=rank,
        world_size=context.get_world_size(),
        # Ray counts local ranks by IP address, which several Ray nodes on one machine share.
        local_rank=nodes[:rank].count(nodes[rank]),
        node=nodes[rank],
        device=device,
        report=report,
        say_last=partial(_say_last, job["records"]),
    )
    summary = loop.train(config, worker)
    if isinstance(report, _Report):
        report.flush()
    return summary


def _device(config: TrainingConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return device


def _node_of_each_rank(world_size: int) -> list[str]:
    """Ray's node id of every rank, gathered over gloo: NCCL is for the loop to start, with its checks."""
    nodes = [""] * world_size
    group = dist.new_group(backend="gloo")
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id(), group=group)
    dist.destroy_process_group(group)
    return nodes


def _ignore(record: Mapping[str, Any]) -> None:
    """Ranks other than 0: their records equal rank 0's."""


@dataclass(frozen=True)
class LastWords:
    """Travels among the records: why a worker's process is about to be ended from outside."""

    text: str


def _say_last(records: Queue, text: str) -> None:
    records.put(LastWords(text))


class _Report:
    """Sends records to the driver without waiting for it.

    `ray.train.report` would hold every step until Ray's controller has polled the workers, which it does once
    a second or two: its queue has room for one report (Ray 2.58, TrainContext._wait_then_report).
    """

    def __init__(self, records: Queue) -> None:
        self._records = records
        self._last: ray.ObjectRef | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._last = self._records.actor.put_nowait.remote(dict(record))

    def flush(self) -> None:
        """Returns once the driver can see the last record: calls to one actor keep their order."""
        if self._last is not None:
            ray.get(self._last)
