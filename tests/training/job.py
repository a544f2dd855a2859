"""The job as a command, as the RayJob starts it, and data sets of a user's own that trouble it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from training.records import SUMMARY_MARK

ROOT = Path(__file__).parents[2]

# Data sets of a user's own, which do to a worker what the tests need done.
OWN_DATA = """
import dataclasses, os, time
from training import data
from training.errors import DataError

def good(config, *arguments):
    return data.batches(dataclasses.replace(config, data=""), *arguments)

def unreadable(config, vocab_size, rank, *rest):
    if rank == 1:
        raise DataError("shard-1.parquet: cannot be read")
    return good(config, vocab_size, rank, *rest)

def deadly(config, vocab_size, rank, *rest):
    yield next(good(config, vocab_size, rank, *rest))
    if rank == 1:
        os._exit(3)
    yield from good(config, vocab_size, rank, *rest)

def slow(config, *arguments):
    for batch in good(config, *arguments):
        yield batch
        time.sleep(0.2)
"""


def environment(**changes: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "HF_TOKEN")}
    return own | {"HF_ENDPOINT": "http://127.0.0.1:1", "RAY_USAGE_STATS_ENABLED": "0"} | changes


def command(*arguments: str) -> list[str]:
    defaults = "--model tiny --device cpu --num-workers 2 --steps 6 --batch-size 2 --seq-len 32"
    return [
        sys.executable,
        "-m",
        "training.run",
        *defaults.split(),
        "--gradient-accumulation",
        "1",
        "--learning-rate",
        "0.01",
        *arguments,
    ]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=150,
    )


def printed_summary(done: subprocess.CompletedProcess[str]) -> dict:
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(SUMMARY_MARK), done.stdout + done.stderr
    return json.loads(last.removeprefix(SUMMARY_MARK))
