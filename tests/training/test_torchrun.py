"""The same loop, started by torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import torchrun
from training.errors import DataError, JobError

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model",
    "tiny",
    "--device",
    "cpu",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
    "--gradient-accumulation",
    "1",
]


def _torchrun(*arguments, num_processes=2, **environment):
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_processes), "-m", "training.torchrun", *arguments),
        ],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_run_prints_steps_to_stderr_and_one_json_summary_to_stdout():
    done = _torchrun(*SMALL, "--steps", "3", "--untimed-steps", "1", TRAINING_NODE="first-node")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["num_steps"], summary["world_size"]) == (3, 2)
    assert summary["num_ranks_per_node"] == {"first-node": 2}
    assert [line.split("  ")[0] for line in done.stderr.splitlines() if line.startswith("step ")] == [
        f"step {step}/3" for step in (1, 2, 3)
    ]


@pytest.fixture
def started_by_torchrun(monkeypatch):
    """The environment torchrun gives to rank 0 of 2."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ([*SMALL, "--num-workers", "3"], ["--num-workers 3: torchrun started 2; leave it out"]),
        (
            [*SMALL, "--steps", "0", "--seq-lenn", "4"],
            [
                "--seq-lenn: no such argument; did you mean --seq-len?",
                "--steps 0: must be at least 1",
            ],
        ),
    ],
)
def test_unusable_arguments_are_all_named_with_exit_code_2(started_by_torchrun, capsys, arguments, problems):
    assert torchrun.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(problems)
    assert all(line.startswith(f"error: {problem}") for line, problem in zip(lines, problems, strict=True)), (
        lines
    )


def test_more_processes_than_gpus_are_refused(started_by_torchrun, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "99")
    monkeypatch.setenv("RANK", "0")
    assert torchrun.main(["--device", "cuda"]) == 2
    assert "LOCAL_RANK is 99; start fewer with --nproc-per-node" in capsys.readouterr().err


def test_without_torchrun_the_command_to_use_is_named(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert torchrun.main(SMALL) == 2
    assert "RANK" in (said := capsys.readouterr().err)
    assert "python -m torch.distributed.run --nproc-per-node N -m training.torchrun" in said


def test_only_rank_0_says_what_all_ranks_know(started_by_torchrun, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert torchrun.main([*SMALL, "--steps", "0"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rank", "error", "said"),
    [
        ("0", JobError("disk full"), "error: disk full\n"),
        ("1", JobError("disk full"), "error: disk full\n"),
        ("0", DataError("rank 1: a.txt: empty"), "error: rank 1: a.txt: empty\n"),
        ("1", DataError("rank 1: a.txt: empty"), ""),
    ],
)
def test_a_failed_job_exits_with_1_and_its_message(
    started_by_torchrun, monkeypatch, capsys, rank, error, said
):
    def fail(*_):
        raise error

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(torchrun, "_run", fail)
    assert torchrun.main(SMALL) == 1
    assert capsys.readouterr().err == said
