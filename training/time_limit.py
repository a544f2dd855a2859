"""How long a run may take: past `--max-run-s` it ends as after Ctrl-C, but as a failure that says why.

KubeRay marks a RayJob as failed at its deadline, and leaves the process on a selected cluster running: the
GPUs would go on working for a job that nobody waits for.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any


class TimeLimit:
    """Raises KeyboardInterrupt in the main thread once the time is over; used as a context manager.

    Attributes:
        is_over: whether it did. Interrupts of other origin leave it false.
    """

    def __init__(self, max_run_s: int) -> None:
        """
        Args:
            max_run_s: from entering the context; 0 for no limit.
        """
        self._max_run_s = max_run_s
        self.is_over = False

    @property
    def message(self) -> str:
        """What is said of a run that it ended."""
        return (
            f"the run was ended after --max-run-s {self._max_run_s}. Allow it more time (the setting "
            "job_deadline_s of the CDK app), or lower --steps"
        )

    def __enter__(self) -> TimeLimit:
        if self._max_run_s:
            signal.signal(signal.SIGALRM, self._end)
            signal.alarm(self._max_run_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._max_run_s:
            signal.alarm(0)

    def _end(self, *_: Any) -> None:
        self.is_over = True
        raise KeyboardInterrupt(self.message)
