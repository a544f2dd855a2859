"""Every benchmark explains itself."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import (
    activation_memory,
    boundary_bytes,
    checkpoint_stall,
    cli,
    l4_memory,
    load,
    quality,
    summary,
    throughput,
    two_nodes_of_four,
)
from tests.benchmarks.marks import needs_hosts

PROGRAMS = (
    activation_memory,
    boundary_bytes,
    checkpoint_stall,
    l4_memory,
    load,
    quality,
    throughput,
    two_nodes_of_four,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_benchmark_has_help_that_names_its_command_and_explains_each_argument(program, capsys):
    with pytest.raises(SystemExit) as exit_:
        program.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"python -m {program.__name__}" in text and "--out FILE" in text
    assert "default: None" not in text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_benchmark_is_described_in_the_document(program):
    assert f"`{program.__name__.removeprefix('benchmarks.')}.py`" in summary.README.read_text()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_counts_must_be_whole_and_above_zero(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number above 0"):
        cli.positive(text)


def children(pid):
    """Processes below one, as the kernel knows them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(child)]
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_a_benchmark_and_its_ranks_and_keeps_what_was_measured(tmp_path):
    argv = ["--device", "cpu", "--model", "tiny", "--num-rounds", "1000"]
    assert_interrupted(throughput, argv, tmp_path / "out.json", signal.SIGINT)


@needs_hosts
def test_sigterm_does_the_same_and_leaves_no_hosts_behind(tmp_path):
    argv = ["--ranks-per-node", "1", "--num-steps", "1", "--accumulation", "1", *map(str, range(50, 90))]
    pid = assert_interrupted(boundary_bytes, argv, tmp_path / "out.json", signal.SIGTERM)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"bb{pid}h" not in listed and f"bb{pid}sw" not in listed


def assert_interrupted(program, arguments, out, signal_number):
    """Starts a benchmark and sends it a signal once it has a row; returns the number of its process."""
    argv = [sys.executable, "-m", program.__name__, "--out", str(out), *arguments]
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 100
        while not (out.exists() and json.loads(out.read_text())["rows"]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        ranks = children(process.pid)
        os.kill(process.pid, signal_number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal_number
    assert said.strip().splitlines()[-1] == f"interrupted; what was measured is in {out}"
    assert "Traceback" not in said
    content = json.loads(out.read_text())
    assert content["rows"] and content["stopped"] == "interrupted" and not content["complete"]
    assert len(ranks) >= 2
    # Python's own helper among them, which tracks shared resources, ends a moment after the program.
    ended_by = time.monotonic() + 10
    while running := list(filter(is_running, ranks)):
        assert time.monotonic() < ended_by, f"still running: {running}"
        time.sleep(0.05)
    return process.pid
