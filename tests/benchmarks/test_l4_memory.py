"""The command line of the L4 memory benchmark, and what it makes of a rank that ran out of memory."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import l4_memory, ranks
from training.config import TrainingConfig

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB."


@pytest.fixture
def ending(monkeypatch):
    """Lets every trial end with an error's last line; returns the trials that were asked for."""

    def end_with(last_line):
        asked = []

        def run(work, arguments, nodes, device_type, environment, hosts_are_separate):
            asked.append((arguments[0], nodes, environment, hosts_are_separate))
            raise ranks.RanksError(f"-- Process 3 terminated\nTraceback ...\n{last_line}")

        monkeypatch.setattr(ranks, "run", run)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
        return asked

    return end_with


def test_the_default_job_runs_as_two_nodes_of_four_with_each_allocator(ending, tmp_path):
    out, asked = tmp_path / "l4.json", ending(OUT_OF_MEMORY)
    assert l4_memory.main(["--out", str(out)]) == 1
    default = TrainingConfig()
    assert [options.allocator for options, *_ in asked] == ["expandable", "default"]
    for options, nodes, environment, hosts_are_separate in asked:
        assert nodes == ["node0"] * 4 + ["node1"] * 4
        # NCCL refuses two ranks of one host on one GPU, so each is a host of its own.
        assert environment["NCCL_HOSTID"] == "rank{rank}" and not hosts_are_separate
        config = options.config
        for name in ("batch_size", "seq_len", "activation_memory", "sharding", "reduce_dtype", "compile"):
            assert getattr(config, name) == getattr(default, name)
    rows = json.loads(out.read_text())["rows"]
    assert [row["error"] for row in rows] == ["out of memory", "out of memory"]
    assert {row["activation_memory"] for row in rows} == {default.activation_memory}


def test_of_two_nodes_the_second_may_make_up_the_mesh_with_short_batches(ending, tmp_path):
    out, asked = tmp_path / "l4.json", ending(OUT_OF_MEMORY)
    l4_memory.main(["--out", str(out), "--num-full-nodes", "1", "--allocators", "expandable"])
    ((options, nodes, *_),) = asked
    cpu = torch.device("cpu")
    tokens = [
        l4_memory._workload(ranks.Place(rank, tuple(nodes), cpu), options).tokens_per_step
        for rank in range(len(nodes))
    ]
    assert tokens == [2 * 4 * 2048] * 4 + [2 * 1 * 128] * 4
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["num_nodes"], row["num_full_nodes"], row["world_size"]) == (2, 1, 8)


def test_more_full_nodes_than_nodes_are_refused(ending, tmp_path, capsys):
    ending(OUT_OF_MEMORY)
    with pytest.raises(SystemExit) as ended:
        l4_memory.main(["--out", str(tmp_path / "l4.json"), "--num-full-nodes", "3"])
    assert ended.value.code == 2
    assert "--num-full-nodes 3: --num-nodes is 2" in capsys.readouterr().err


def test_another_failure_is_told_as_it_is(ending, tmp_path):
    out = tmp_path / "l4.json"
    ending("RuntimeError: NCCL error")
    assert l4_memory.main(["--out", str(out), "--allocators", "expandable"]) == 1
    assert [row["error"] for row in json.loads(out.read_text())["rows"]] == ["RuntimeError: NCCL error"]


@pytest.mark.parametrize("setting", ["4x2048", "4x2048:", "0x2048:full", "4x2048:1.5", "4x2048:much"])
def test_a_setting_that_cannot_be_read_is_said_with_an_example(setting, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        l4_memory.main(["--out", str(tmp_path / "l4.json"), "--settings", setting])
    assert ended.value.code == 2
    assert (
        f"{setting}: write sequences x tokens : activation memory, such as 4x2048" in capsys.readouterr().err
    )


def test_without_a_gpu_there_is_nothing_to_limit(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        l4_memory.main(["--out", str(tmp_path / "l4.json")])
    assert ended.value.code == 2
    assert "no GPU here" in capsys.readouterr().err
