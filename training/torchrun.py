"""The training loop without Ray, for measuring and debugging.

    python -m torch.distributed.run --nproc-per-node 2 -m training.torchrun --model tiny --device cpu

The arguments are those of `training.run`; workers are as many as torchrun starts. Rank 0 writes a line for
each step to stderr and one JSON object, the summary, to stdout. Exit codes of each process: 0 success, 1 the
job failed, 2 the arguments cannot work (torchrun itself then ends with 1).

`TRAINING_NODE` in the environment names the node instead of the host name. With it, two torchruns on one host
count as two nodes, each with the GPUs of its CUDA_VISIBLE_DEVICES; NCCL needs NCCL_HOSTID, different on each,
to see it the same way.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from training.config import TrainingConfig, UsageError, from_argv
from training.errors import DataError, JobError, NotFiniteError, TransportError
from training.progress import Progress
from training.worker import Worker

PROG = "python -m torch.distributed.run --nproc-per-node N -m training.torchrun"
NODE_VARIABLE = "TRAINING_NODE"
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# What every rank raises with the same message: one of them is enough to say it.
_SHARED_ERRORS = (TransportError, DataError, NotFiniteError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this process's rank.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        config = _configuration(sys.argv[1:] if argv is None else argv)
        summary = _run(config, rank)
    except UsageError as error:
        if rank == 0:
            print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except JobError as error:
        if rank == 0 or not isinstance(error, _SHARED_ERRORS):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    if rank == 0:
        print(json.dumps(summary), flush=True)
    return 0


def _configuration(argv: Sequence[str]) -> TrainingConfig:
    if missing := [name for name in _TORCHRUN_VARIABLES if name not in os.environ]:
        raise UsageError([f"{', '.join(missing)} not in the environment: start this with {PROG}"])
    world_size = int(os.environ["WORLD_SIZE"])
    config = from_argv(["--num-workers", str(world_size), *argv], PROG)
    if config.num_workers not in (0, world_size):
        raise UsageError([f"--num-workers {config.num_workers}: torchrun started {world_size}; leave it out"])
    if config.device == "cuda" and torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        raise UsageError(
            [
                f"--device cuda: this node has {torch.cuda.device_count()} GPUs, but LOCAL_RANK is "
                f"{os.environ['LOCAL_RANK']}; start fewer with --nproc-per-node, or use --device cpu"
            ]
        )
    return config


def _run(config: TrainingConfig, rank: int) -> dict[str, Any]:
    # Here and not above: they import Transformers, and wrong arguments should be answered at once.
    from training import handshake, loop
    from training.diagnosis import WORKER_ENVIRONMENT

    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s: %(message)s")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if config.device == "cuda" else torch.device("cpu")
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    handshake.open_log(config, rank)  # before NCCL starts: it reads its environment once
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=config.collective_timeout_s)
    )
    progress = Progress(config.steps, sys.stderr)
    try:
        return loop.train(config, _worker(rank, local_rank, device, _reporter(rank, progress)))
    finally:
        progress.close()
        dist.destroy_process_group()


def _worker(
    rank: int, local_rank: int, device: torch.device, report: Callable[[Mapping[str, Any]], None]
) -> Worker:
    node = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    return Worker(rank, dist.get_world_size(), local_rank, node, device, report, _say_last)


def _say_last(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _reporter(rank: int, progress: Progress) -> Callable[[Mapping[str, Any]], None]:
    return progress.show if rank == 0 else lambda record: None


if __name__ == "__main__":
    sys.exit(main())
