"""Turns what goes wrong on a device or between ranks into one message that says what to change.

**Collectives that hang.** Over gloo the waiting call raises, and `explained` names rank, stage, collective,
and the ranks that did not report the same. On CUDA nothing raises: PyTorch's NCCL watchdog ends the process
some time after the timeout, and `training.hanging` says the same as `explained` before that.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.config import TrainingConfig
from training.errors import JobError
from training.worker import Worker

WORKER_ENVIRONMENT = {
    # Segments that grow: between those of fixed sizes, gaps are left that the next allocation cannot use.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Compare ranks when a collective times out, and name those that lag behind.
    "TORCH_NCCL_DESYNC_DEBUG": "1",
    # Keep the last collectives of each rank, and write them to TORCH_FR_DUMP_TEMP_FILE on a timeout.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # The watchdog ends the process four times this after the timeout; by default that is a whole minute more.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
}
"""What PyTorch on a worker has to find in its environment when it starts.

Sources: docs.pytorch.org, "CUDA semantics" and "PYTORCH ProcessGroupNCCL Environment Variables".
"""

_GRACE_S = 2.0  # ranks reach their timeouts within this of each other


@dataclass
class Stage:
    """What this rank is doing, for messages: "loading the model", "step 7"."""

    name: str = "starting"


@contextmanager
def explained(worker: Worker, config: TrainingConfig, stage: Stage) -> Iterator[None]:
    """Replaces errors of device memory and of timed-out collectives by a JobError with the remedy.

    Args:
        worker: this rank.
        config: whose settings the remedies name.
        stage: kept up to date by the caller.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise JobError(_out_of_memory(worker, config, stage, error)) from error
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        raise JobError(_timed_out(worker, config, stage, error)) from error


def _out_of_memory(worker: Worker, config: TrainingConfig, stage: Stage, error: Exception) -> str:
    advice = [
        f"--batch-size {config.batch_size} lower (--gradient-accumulation keeps the step's size)"
        if config.batch_size > 1
        else f"--seq-len {config.seq_len} lower",
    ]
    if config.activation_memory == "none":
        advice.insert(0, f"--activation-memory {TrainingConfig.activation_memory}, or full")
    elif config.activation_memory != "full":
        advice.insert(0, f"--activation-memory {config.activation_memory} lower, or full")
    if not config.reshard_after_forward:
        advice.append("--reshard-after-forward, which keeps less of the weights and is slower")
    if config.sharding == "hybrid":
        advice.append("--sharding full, which spreads weights over all nodes")
    reason = str(error).partition("\n")[0]
    return (
        f"rank {worker.rank} on {worker.node}: out of device memory in {stage.name}. Change, the first of "
        f"these that helps: {'; '.join(advice)}. PyTorch says: {reason}"
    )


def _is_timeout(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _timed_out(worker: Worker, config: TrainingConfig, stage: Stage, error: RuntimeError) -> str:
    reason = str(error).partition("\n")[0]
    said = did_not_finish(worker, config, stage, _collective(error), _GRACE_S)
    return f"{said} The process group says: {reason}"


def did_not_finish(
    worker: Worker, config: TrainingConfig, stage: Stage, collective: str, grace_s: float
) -> str:
    """What a rank says of a collective that exceeded its timeout: where it waited, and for whom.

    Args:
        worker: this rank.
        config: whose timeout is named.
        stage: where it waited.
        collective: what it waited in.
        grace_s: how long other ranks may take to find the same.
    """
    return (
        f"rank {worker.rank} on {worker.node}: {collective} in {stage.name} did not finish within "
        f"--collective-timeout-s {config.collective_timeout_s}. {_who_is_missing(worker, stage, grace_s)}"
    )


def _collective(error: RuntimeError) -> str:
    """Name of the collective that raised, from the traceback; errors of a backward pass keep theirs too."""
    calls = [
        frame.name
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.endswith("distributed_c10d.py") and frame.name in dist.distributed_c10d.__all__
    ]
    return calls[-1] if calls else "a collective"


def _who_is_missing(worker: Worker, stage: Stage, grace_s: float) -> str:
    """Ranks tell each other through the job's store where they waited; one that hangs says nothing."""
    try:
        store = dist.PrefixStore("timed-out/", dist.distributed_c10d._get_default_store())
        store.set(str(worker.rank), stage.name)
        time.sleep(grace_s)
        waited = {
            rank: store.get(str(rank)).decode()
            for rank in range(worker.world_size)
            if store.check([str(rank)])
        }
    except (RuntimeError, ValueError):  # the store is on rank 0, which may be the one that has gone
        return "The job's store does not answer: look at rank 0 first."
    missing = [str(rank) for rank in range(worker.world_size) if rank not in waited]
    if missing:
        return f"Still somewhere else, and the ones to look at: rank {', '.join(missing)}."
    places = ", ".join(f"rank {rank} in {place}" for rank, place in waited.items())
    return f"All ranks timed out: {places}."
