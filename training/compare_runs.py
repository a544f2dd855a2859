"""Runs one training as a process of its own and returns its summary."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from training.records import SUMMARY_MARK

COMMAND = (sys.executable, "-m", "training.run")
# How long an interrupted run may take to stop its workers and store its summary.
_GRACE_S = 60


class RunFailure(Exception):
    """A run failed, or did not use what it should; the message says which and why."""


def run_training(argv: Sequence[str]) -> dict[str, Any]:
    """Trains once.

    Args:
        argv: arguments of `training.run`.

    Returns:
        The run's summary, as in its summary.json.

    Raises:
        RunFailure: the run failed, with its last words.
        KeyboardInterrupt: on SIGINT or SIGTERM; the run has been ended.
    """
    summary: dict[str, Any] | None = None
    with _interruptible_by_sigterm(), _started(argv) as process:
        for line in process.stdout:
            if line.startswith(SUMMARY_MARK):
                summary = json.loads(line.removeprefix(SUMMARY_MARK))
            else:
                print(line, end="", file=sys.stderr, flush=True)
        code = process.wait()
    if code == 0 and summary is not None and summary.get("status") == "succeeded":
        return summary
    reason = (summary or {}).get("error") or "see its output above"
    raise RunFailure(f"the run `{' '.join(argv)}` ended with exit code {code}: {reason}")


@contextlib.contextmanager
def _started(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, so that an interruption reaches it once, and from here."""
    process = subprocess.Popen(
        [*COMMAND, *argv], stdout=subprocess.PIPE, text=True, start_new_session=True, encoding="utf-8"
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Asks the run to stop, then makes it."""
    for how in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()


@contextlib.contextmanager
def _interruptible_by_sigterm() -> Iterator[None]:
    """SIGTERM, which Ray's job server and Kubernetes send, counts as Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
