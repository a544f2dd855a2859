"""The job's entrypoint as a command: what it says, how it exits, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.train.v2.api.exceptions import WorkerGroupError

from tests.training.job import OWN_DATA, ROOT, command, environment, printed_summary, run
from training.config import UsageError
from training.errors import DataError
from training.ray_trainer import worker_failure
from training.run import main

TEXT = "The quick brown fox jumps over the lazy dog. " * 400


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray cluster: a head without CPUs, and two nodes with two each."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("own-data")
    (folder / "own_data.py").write_text(OWN_DATA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
        cluster = Cluster()
        for num_cpus in (0, 2, 2):
            cluster.add_node(
                num_cpus=num_cpus,
                node_ip_address="127.0.0.1",
                include_dashboard=False,
                dashboard_agent_listen_port=0,
            )
        yield cluster.address
        cluster.shutdown()


# --- a job on two nodes -------------------------------------------------------------------------------------


def test_a_job_on_two_nodes_trains_and_leaves_its_records(two_nodes: str, text: str, tmp_path: Path) -> None:
    done = run(
        *("--num-workers", "4", "--data", text, "--storage-path", str(tmp_path), "--run-name", "first"),
        RAY_ADDRESS=two_nodes,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "first/summary.json").read_text())
    assert summary == printed_summary(done)
    assert summary["status"] == "succeeded"
    assert summary["world_size"] == 4
    assert sorted(summary["num_ranks_per_node"].values()) == [2, 2]
    assert summary["mesh"] == {"replicate": 2, "shard": 2}
    assert summary["transport"]["verdict"] == "not applicable"
    assert summary["last_loss"] < summary["first_loss"]
    records = [json.loads(line) for line in (tmp_path / "first/steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] == summary["last_loss"]
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert shown == ["1/6", "2/6", "3/6", "4/6", "5/6", "6/6"]


def test_a_failure_on_one_rank_is_one_message_and_exit_code_1(two_nodes: str, tmp_path: Path) -> None:
    done = run(
        *("--data", "python:own_data:unreadable", "--storage-path", str(tmp_path), "--run-name", "bad"),
        RAY_ADDRESS=two_nodes,
        PYTHONPATH=str(_folder_with_own_data(tmp_path)),
    )
    assert done.returncode == 1
    assert "error: rank 1: shard-1.parquet: cannot be read\n" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    summary = json.loads((tmp_path / "bad/summary.json").read_text())
    assert summary == printed_summary(done)
    assert (summary["status"], summary["error"]) == ("failed", "rank 1: shard-1.parquet: cannot be read")


def test_a_worker_that_dies_is_named_and_the_job_ends(two_nodes: str, tmp_path: Path) -> None:
    done = run(
        *("--data", "python:own_data:deadly", "--storage-path", str(tmp_path)),
        RAY_ADDRESS=two_nodes,
        PYTHONPATH=str(_folder_with_own_data(tmp_path)),
    )
    assert done.returncode == 1
    assert "error: rank 1: its process ended without an error of its own." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def _folder_with_own_data(folder: Path) -> Path:
    (folder / "own_data.py").write_text(OWN_DATA)
    return folder


def test_a_cluster_that_is_too_small_is_said_with_both_numbers(two_nodes: str, tmp_path: Path) -> None:
    script = (
        "import sys; from training import ray_cluster, run; ray_cluster.GRACE_S = 0.5; sys.exit(run.main())"
    )
    arguments = command("--num-workers", "5", "--storage-path", str(tmp_path), "--run-name", "large")
    done = subprocess.run(
        [arguments[0], "-c", script, *arguments[3:]],
        cwd=ROOT,
        env=environment(RAY_ADDRESS=two_nodes),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "the job needs 5 workers with one CPU each" in done.stderr
    assert "after 0.5 s only 4 CPUs on 3 nodes; lower --num-workers or add nodes" in done.stderr
    assert json.loads((tmp_path / "large/summary.json").read_text())["status"] == "failed"


def test_a_cluster_that_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    done = run("--storage-path", str(tmp_path), RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 1
    assert "error: the Ray cluster at RAY_ADDRESS=127.0.0.1:1 does not answer: " in done.stderr
    assert "Traceback" not in done.stderr


# --- arguments that cannot work -----------------------------------------------------------------------------


def model_folder(folder: Path, **changes: object) -> str:
    folder.mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": 64} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def without(folder: str, name: str) -> str:
    (Path(folder) / name).unlink()
    return folder


def damaged(folder: str) -> str:
    (Path(folder) / "config.json").write_text("{")
    return folder


def sharded(folder: str) -> str:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    (Path(folder) / "model-1.safetensors").write_bytes(b"")
    return folder


def file(folder: Path, content: bytes) -> str:
    (folder / "data.txt").write_bytes(content)
    return str(folder / "data.txt")


CASES = {
    "an argument that does not exist": (lambda _: ["--colour", "red"], ["--colour: no such argument"]),
    "several at once": (
        lambda _: ["--steps", "none", "--seq-len", "0"],
        ["--steps none: not a whole number", "--seq-len 0: must be at least 1"],
    ),
    "a batch that does not divide": (
        lambda _: ["--global-batch-size", "6"],
        ["--global-batch-size 6: does not divide into 2 workers x --batch-size 2"],
    ),
    "sequences beyond a named architecture": (
        lambda _: ["--seq-len", "5000"],
        ["--seq-len 5000: tiny was built for at most 4096 tokens"],
    ),
    "sequences beyond a model": (
        lambda folder: ["--seq-len", "65", "--model", model_folder(folder / "model")],
        ["--seq-len 65: ", "was built for at most 64 tokens"],
    ),
    "a folder that is not there": (
        lambda _: ["--model", "./nothing"],
        ["--model-id ./nothing: no such folder"],
    ),
    "a folder without config.json": (
        lambda folder: ["--model", without(model_folder(folder / "model"), "config.json")],
        ["the folder has no config.json"],
    ),
    "a config.json that is not JSON": (
        lambda folder: ["--model", damaged(model_folder(folder / "model"))],
        ["config.json cannot be read: "],
    ),
    "a folder without weights": (
        lambda folder: ["--model", without(model_folder(folder / "model"), "model.safetensors")],
        ["the folder has no weights"],
    ),
    "a folder that lacks a shard": (
        lambda folder: ["--model", sharded(model_folder(folder / "model"))],
        ["model.safetensors.index.json names model-2.safetensors, which the folder lacks"],
    ),
    "data that is not there": (
        lambda _: ["--data", "nothing.txt"],
        ["--data ", "nothing.txt: cannot be read: No such file or directory"],
    ),
    "data that is a folder": (lambda folder: ["--data", str(folder)], ["cannot be read: "]),
    "empty data": (lambda folder: ["--data", file(folder, b"")], ["data.txt: the file is empty"]),
    "data that is not UTF-8": (
        lambda folder: ["--data", file(folder, b"\xff")],
        ["data.txt: not UTF-8 at byte 0"],
    ),
    "data that is too short": (
        lambda folder: ["--data", file(folder, b"x" * 128)],
        ["has 128 tokens, but one batch on each of 2 workers takes 129"],
    ),
    "a data function that is not there": (
        lambda _: ["--data", "python:nothing:f"],
        ["use python:<module>:<function>"],
    ),
    "a model without a tokenizer": (
        lambda folder: ["--data", file(folder, b"x" * 999), "--model", model_folder(folder / "model")],
        ["data.txt: the tokenizer of ", "cannot be loaded (it has none)"],
    ),
    "a storage path that is a file": (
        lambda folder: ["--storage-path", file(folder, b"")],
        ["--storage-path ", "cannot be written: "],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_that_cannot_work_are_one_line_each_and_exit_code_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    arguments, says = CASES[case]
    given = ["--storage-path", str(tmp_path / "results"), *arguments(tmp_path)]
    assert main(command(*given)[3:]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert all(line.startswith("error: --") for line in told.err.splitlines()), told.err
    for text in says:
        assert text in told.err
    assert not (tmp_path / "results").exists(), "nothing was started"


@pytest.fixture
def handlers() -> Iterator[None]:
    """The command sets handlers of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hub_that_cannot_be_reached_is_one_line_without_waiting_for_retries(tmp_path: Path) -> None:
    done = run("--model", "Nobody/Nothing", "--storage-path", str(tmp_path / "results"))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: --model-id Nobody/Nothing: not a folder here, and the model hub cannot be reached ("
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_help_names_every_argument_and_exits_with_0() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--storage-path" in done.stdout


# --- one message out of many failures -----------------------------------------------------------------------


def failure(**of_ranks: Exception) -> Exception:
    failures = {int(rank.removeprefix("rank")): error for rank, error in of_ranks.items()}
    return worker_failure(WorkerGroupError("tracebacks of all ranks", failures))


def test_the_ranks_that_only_lost_their_peer_are_not_mentioned() -> None:
    told = failure(rank0=RuntimeError("connection closed by peer"), rank1=DataError("rank 1: no data"))
    assert str(told) == "rank 1: no data"


def test_the_same_error_of_several_ranks_is_told_once() -> None:
    assert str(failure(rank0=DataError("no data"), rank1=DataError("no data"))) == "no data"


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    assert "tracebacks of all ranks" in str(failure(rank0=ZeroDivisionError("division by zero")))


def test_arguments_that_only_the_workers_could_refuse_stay_usage_errors() -> None:
    assert isinstance(failure(rank0=UsageError(["--seq-len 9: too long"])), UsageError)
