"""Ranks tell each other how it went, so that all go on or all end with the same error.

A rank that raises alone leaves the others waiting in the next collective until its timeout. Whatever can
fail on one rank only (a download, a file, a batch) is therefore done through an `Agreement`. Its messages
are small and go over a gloo group of their own: they need no GPU, start no NCCL communicator, and cannot mix
with the collectives of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from training import errors
from training.config import UsageError
from training.errors import JobError

T = TypeVar("T")
_POLL_S = 0.5


class Agreement:
    """Messages among all ranks. Every rank constructs it, and calls its methods, in the same order."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Values must be picklable."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank; if it fails on one, raises that rank's error on all.

        Raises:
            JobError: of the class that the failing rank raised; on the other ranks the message names it.
            UsageError: likewise.
        """
        outcome: Future[T] = Future()
        try:
            outcome.set_result(action())
        except Exception as error:
            outcome.set_exception(error)
        self._raise_first_error(outcome)
        return outcome.result()

    def wait_for(self, action: Callable[[], T] | None) -> T | None:
        """Runs a long `action` on the ranks that have one, while all wait for all of them.

        The action runs in a thread and the ranks exchange signs of life, so that it may take longer than the
        group's timeout, and a rank that dies meanwhile is noticed at once.

        Args:
            action: None on ranks that only wait.

        Raises:
            JobError, UsageError: as `together`.
        """
        with ThreadPoolExecutor(max_workers=1) as pool:
            outcome = pool.submit(action or (lambda: None))
            while not all(self.gather(outcome.done())):
                time.sleep(_POLL_S)
        self._raise_first_error(outcome)
        return outcome.result()

    def _raise_first_error(self, outcome: Future) -> None:
        own = outcome.exception()
        described = self.gather(None if own is None else _describe(own))
        if own is not None:
            raise own
        for rank, other in enumerate(described):
            if other is not None:
                raise _rebuild(rank, *other)


def _describe(error: BaseException) -> tuple[str, list[str]]:
    if isinstance(error, UsageError):
        return "UsageError", error.problems
    if isinstance(error, JobError):
        return type(error).__name__, [str(error)]
    return "JobError", [f"{type(error).__name__}: {error}"]


def _rebuild(rank: int, kind: str, messages: list[str]) -> Exception:
    if kind == "UsageError":
        return UsageError(messages)
    text = messages[0] if messages[0].startswith(f"rank {rank}") else f"rank {rank}: {messages[0]}"
    return getattr(errors, kind, JobError)(text)
