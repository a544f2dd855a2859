"""Says which collective hangs, and who did not come to it, from a thread beside the work.

On CUDA nobody raises when a collective hangs: the CPU queues work, or sleeps until the device is done, and
PyTorch's NCCL watchdog ends the process some seconds after the timeout. In these seconds a thread of this
module reads PyTorch's flight recorder, asks the job's store which ranks wait too, and says so.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

from training.config import TrainingConfig
from training.diagnosis import Stage, did_not_finish
from training.worker import Worker

# Together well below the time for which the watchdog waits (diagnosis.WORKER_ENVIRONMENT).
_POLL_S = 2.0
_GRACE_S = 3.0  # the other ranks look every _POLL_S


@dataclass(frozen=True)
class Collective:
    """One that has been queued and has not ended.

    Attributes:
        name: such as "nccl:all_reduce".
        group: description of its process group, such as "mesh_shard".
        sizes: of its inputs.
    """

    name: str
    group: str
    sizes: list[list[int]]

    def __str__(self) -> str:
        return f"{self.name} of {self.sizes} in group {self.group}"


@contextmanager
def watched(worker: Worker, config: TrainingConfig, stage: Stage) -> Iterator[None]:
    """Watches this rank's collectives on CUDA; says through `worker.say_last` which one hangs.

    Over gloo the waiting call raises, and `diagnosis.explained` says the same.

    Args:
        worker: this rank.
        config: whose timeout the message names.
        stage: what the rank is doing, kept up to date by the caller.
    """
    if worker.device.type != "cuda" or _recorder() is None:
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(worker, config, stage, ended), daemon=True, name="hanging")
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(worker: Worker, config: TrainingConfig, stage: Stage, ended: threading.Event) -> None:
    while not ended.wait(_POLL_S):
        if (collective := overdue()) is not None:
            worker.say_last(did_not_finish(worker, config, stage, str(collective), _GRACE_S))
            return


def overdue() -> Collective | None:
    """The oldest collective of this process that has been running for longer than its timeout, if any."""
    recorder = _recorder()
    if recorder is None:
        return None
    # Collectives, without the stacks they were called from, and only those that may still be running.
    entries = pickle.loads(recorder(True, False, True)).get("entries", [])
    late = [entry for entry in entries if _is_late(entry)]
    if not late:
        return None
    oldest = min(late, key=lambda entry: entry["time_created_ns"])
    name, description = oldest["process_group"]
    return Collective(oldest["profiling_name"], description or name, oldest["input_sizes"])


def _is_late(entry: dict[str, Any]) -> bool:
    age_ms = (time.time_ns() - entry["time_created_ns"]) / 1e6
    return not entry["retired"] and age_ms > entry["timeout_ms"]


def _recorder() -> Callable[[bool, bool, bool], bytes] | None:
    """PyTorch's function that returns the last collectives, pickled: one for NCCL, another for gloo.

    Neither is documented for Python; where both are gone, only the watchdog's own lines are left.
    """
    recorder = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return recorder or getattr(_distributed_c10d, "_dump_fr_trace", None)
