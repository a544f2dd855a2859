"""Starts the workers with Ray Train, follows their records, and turns its failures into one message."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

# Ray Train passes these on to its controller and workers. The interval bounds how late the end of a run,
# or a failed worker, is noticed (Ray's default: 2 s). The watcher would announce preemptions, after which
# nothing resumes yet, and logs an error of its own at every start.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from ray.util.queue import Empty, Queue

from training import handshake, ray_worker
from training.config import TrainingConfig, UsageError
from training.diagnosis import WORKER_ENVIRONMENT
from training.errors import JobError
from training.ray_cluster import resources_per_worker

_POLL_S = 0.5


def train(
    config: TrainingConfig, num_workers: int, on_record: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Runs the job on a connected Ray cluster that has room for it.

    Args:
        config: the run's configuration; its paths are absolute, since workers have their own working folders.
        num_workers: number of ranks.
        on_record: called in this thread with the record of each step, while the job runs.

    Returns:
        Rank 0's summary.

    Raises:
        JobError: the job failed; the message is all that there is to say.
        UsageError: the workers found that the configuration cannot work.
    """
    records = Queue(actor_options={"num_cpus": 0})
    trainer = _trainer(config, num_workers, records)
    # In a thread: on the main one Ray installs a handler for SIGINT that ends the process with status 0.
    result = _in_background(trainer.fit)
    last_words = _follow(records, result, on_record)
    try:
        return result.result().return_value
    except WorkerGroupError as error:
        raise worker_failure(error, last_words) from None
    except ControllerError as error:
        raise _controller_failure(error, num_workers) from None


def _trainer(config: TrainingConfig, num_workers: int, records: Queue) -> TorchTrainer:
    return TorchTrainer(
        ray_worker.run,
        train_loop_config={"config": dataclasses.asdict(config), "records": records},
        torch_config=TorchConfig(
            backend="nccl" if config.device == "cuda" else "gloo", timeout_s=config.collective_timeout_s
        ),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=config.device == "cuda",
            resources_per_worker=resources_per_worker(config),
        ),
        run_config=RunConfig(
            name=config.run_name,
            storage_path=config.storage_path,
            failure_config=FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
            worker_runtime_env={"env_vars": {**WORKER_ENVIRONMENT, **handshake.environment(config)}},
            # What Ray Train logs as an error, it also raises here.
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """Starts `call` in a daemon thread, which does not keep an interrupted process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="ray-train-fit").start()
    return future


def _follow(records: Queue, result: Future[Any], on_record: Callable[[Mapping[str, Any]], None]) -> list[str]:
    """Passes records on until the job has ended and none is left; returns the last words of workers."""
    last_words: list[str] = []
    while True:
        ended = result.done()
        try:
            record = records.get(timeout=_POLL_S)
        except Empty:
            if ended:
                return last_words
            continue
        if isinstance(record, ray_worker.LastWords):
            last_words.append(record.text)
        else:
            on_record(record)


def worker_failure(error: WorkerGroupError, last_words: Sequence[str] = ()) -> JobError | UsageError:
    """The one error to show: what the job itself said, else how the ranks broke.

    When one rank stops, the others often fail for that alone; a `JobError` is never such an echo.

    Args:
        error: Ray Train's, with the failure of each rank.
        last_words: of workers whose processes were then ended from outside.
    """
    failures = [error.worker_failures[rank] for rank in sorted(error.worker_failures)]
    for failure in failures:
        if isinstance(failure, UsageError):
            return failure
    reasons = {str(failure): failure for failure in failures if isinstance(failure, JobError)}
    if len(reasons) == 1:
        return next(iter(reasons.values()))  # with what its class carries
    if reasons:
        return JobError("\n".join(reasons))
    if last_words:
        return JobError("\n".join(sorted(last_words)))
    dead = [
        _death(rank, failure.health_check_failure)
        for rank, failure in sorted(error.worker_failures.items())
        if isinstance(failure, WorkerHealthCheckFailedError)
    ]
    return JobError("\n".join(dead) or str(error))


def _death(rank: int, failure: Exception) -> str:
    """Ray's message on a dead process names its actor in six lines; the last one says what happened."""
    reason = str(failure).strip().rpartition("\n")[2]
    return f"rank {rank}: its process ended without an error of its own. {reason}"


def _controller_failure(error: ControllerError, num_workers: int) -> JobError:
    cause = error.controller_failure
    if not isinstance(cause, WorkerGroupStartupTimeoutError):
        return JobError(f"Ray Train could not run the workers: {cause}")
    free = {name: round(ray.available_resources().get(name, 0)) for name in ("CPU", "GPU")}
    return JobError(
        f"the Ray cluster is large enough for {num_workers} workers, but had no room for them: another job "
        f"holds its resources (free now: {free['CPU']} CPUs, {free['GPU']} GPUs); stop it or wait for its end"
    )
