"""`python -m training.run`: arguments -> Ray Train, and what a run leaves behind.

Exit codes: 0 the job succeeded, 1 it failed, 2 the arguments cannot work, 130 it was interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from training import preflight
from training.config import TrainingConfig, UsageError, from_argv
from training.data import PYTHON_PREFIX
from training.errors import JobError, TransportError
from training.progress import Progress
from training.records import SUMMARY_MARK, RunFolder, Status
from training.storage import STORAGE_ERRORS, absolute, one_line
from training.time_limit import TimeLimit


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: as in summary.json.
        exit_code: of the process.
        problems: what is said on stderr, one message each.
        result: what the loop returned.
    """

    status: Status
    exit_code: int
    problems: Sequence[str] = ()
    result: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one job.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    _interrupt_on_sigterm()
    try:
        config = _resolved(from_argv(sys.argv[1:] if argv is None else argv))
        _check(config)
        return _run(config)
    except UsageError as error:
        _complain(error.problems)
        return 2
    except KeyboardInterrupt:  # before there was anything to record
        return 130


def _resolved(config: TrainingConfig) -> TrainingConfig:
    """Fills in the run name and makes local paths absolute."""
    changes = {"storage_path": absolute(config.storage_path)}
    if not config.run_name:
        changes["run_name"] = time.strftime("run-%Y%m%d-%H%M%S")
    if config.data and not config.data.startswith(PYTHON_PREFIX):
        changes["data"] = absolute(config.data)
    if os.path.isdir(config.model_id):
        changes["model_id"] = absolute(config.model_id)
    return dataclasses.replace(config, **changes)


def _check(config: TrainingConfig) -> None:
    problems = preflight.check_model(config) + preflight.check_data(config, config.num_workers or 1)
    if problems:
        raise UsageError(problems)


def _run(config: TrainingConfig) -> int:
    try:
        folder = RunFolder(config.storage_path, config.run_name)
        folder.start(dataclasses.asdict(config))
    except STORAGE_ERRORS as error:
        remedy = f"cannot be written: {one_line(error)}"
        raise UsageError([f"--storage-path {config.storage_path}: {remedy}"]) from None
    with ExitStack() as cluster:
        outcome = _attempt(config, folder, cluster)
        # Before Ray is shut down: who sent SIGTERM may not wait that long.
        return _finish(folder, outcome)


def _attempt(config: TrainingConfig, folder: RunFolder, cluster: ExitStack) -> Outcome:
    progress = Progress(config.steps)
    limit = TimeLimit(config.max_run_s)

    def on_record(record: dict[str, Any]) -> None:
        folder.add(record)
        progress.show(record)

    try:
        # Here and not above, so that --help and wrong arguments answer at once.
        from training import ray_cluster, ray_trainer

        cluster.enter_context(ray_cluster.connected(config))
        _interrupt_on_sigterm()  # ray.init has put a handler of its own there
        with limit:
            num_workers = ray_cluster.num_workers_with_room(config)
            config = _with_workers(config, num_workers)
            return Outcome("succeeded", 0, result=ray_trainer.train(config, num_workers, on_record))
    except KeyboardInterrupt:
        if limit.is_over:
            return Outcome("failed", 1, [limit.message])
        return Outcome("interrupted", 130, ["interrupted; stopping the workers"])
    except UsageError as error:
        return Outcome("failed", 2, error.problems)
    except TransportError as error:
        return Outcome("failed", 1, [str(error)], {"transport": error.evidence})
    except JobError as error:
        return Outcome("failed", 1, [str(error)])
    except Exception as error:  # a fault of this program: its traceback is what helps
        return Outcome("failed", 1, [f"{type(error).__name__}: {error}\n{traceback.format_exc()}"])
    finally:
        progress.close()


def _with_workers(config: TrainingConfig, num_workers: int) -> TrainingConfig:
    """The configuration once the number of workers is known; checks what depends on it.

    Raises:
        UsageError: the batch does not divide, or the text is too short.
    """
    config.num_micro_batches(num_workers)
    if not config.num_workers and (problems := preflight.check_data(config, num_workers)):
        raise UsageError(problems)
    return config


def _finish(folder: RunFolder, outcome: Outcome) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave the clean-up half done
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _complain(outcome.problems)
    try:
        summary = folder.finish(outcome.status, outcome.result, "\n".join(outcome.problems))
    except STORAGE_ERRORS as error:
        _complain([f"the summary cannot be stored: {one_line(error)}"])
        return outcome.exit_code or 1
    print(SUMMARY_MARK + json.dumps(summary), flush=True)
    return outcome.exit_code


def _interrupt_on_sigterm() -> None:
    """SIGTERM, which Ray's job server and Kubernetes send, ends a run as Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _complain(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
