"""A run that is ended from outside says so, keeps what it has, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.training.job import ROOT, command, environment


def _stopped(how: signal.Signals, folder: Path, variables: dict[str, str], *arguments: str) -> Any:
    """Sends a signal to a run that has done its first step.

    Returns:
        Exit code, what it said from then on, and its summary.
    """
    slow = ["--data", "python:own_data:slow", "--steps", "1000"]
    process = subprocess.Popen(
        command(*slow, "--storage-path", str(folder), "--run-name", "cut", *arguments),
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert any(line.startswith("step ") for line in iter(process.stdout.readline, ""))
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 3
    assert os.getpgid(process.pid) == os.getpgrp(), "Ctrl-C in a terminal would not reach it"
    process.send_signal(how)
    said = process.stdout.read()
    code = process.wait(timeout=60)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert len((folder / "cut/steps.jsonl").read_text().splitlines()) >= 1
    return code, said, json.loads((folder / "cut/summary.json").read_text())


def test_an_interrupted_run_is_recorded_as_interrupted(own_data: dict[str, str], tmp_path: Path) -> None:
    code, said, summary = _stopped(signal.SIGINT, tmp_path, own_data)
    assert code == 130, said
    assert summary["status"] == "interrupted"


def test_a_run_that_takes_too_long_is_recorded_as_failed(own_data: dict[str, str], tmp_path: Path) -> None:
    # The signal that the process gets once the time is over.
    code, said, summary = _stopped(signal.SIGALRM, tmp_path, own_data, "--max-run-s", "600")
    assert code == 1, said
    assert "error: the run was ended after --max-run-s 600. Allow it more time" in said
    assert summary["status"] == "failed" and summary["error"].startswith("the run was ended after")
