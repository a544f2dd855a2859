"""The program that shows the check against real NCCL: its plumbing, as far as a machine without GPUs goes."""

import io
import json
import re
import shutil
import socket
import tarfile
from pathlib import Path

import pytest

from benchmarks import ranks, transport_proof
from benchmarks.transport_proof import (
    Condition,
    add_case,
    anonymous,
    conditions,
    gpu_of,
    hosts_for_nccl,
    objections,
)

CASES = Path(__file__).parents[1] / "cases/nccl"
ON_SOCKETS = Condition("two-hosts", ("a", "b"), "socket", "socket", True)
WITHOUT_EFA = Condition("no-efa", ("a", "b"), "efa", "unproven", False, "any NET plugin")


def test_ranks_run_and_answer_without_a_gpu(tmp_path, capsys):
    assert transport_proof.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "transport_proof.json").read_text())
    assert report["complete"]
    assert [row["as_expected"] for row in report["rows"]] == [True]
    assert socket.gethostname() not in json.dumps(report["rows"])


def test_without_a_gpu_nothing_is_shown_of_nccl(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transport_proof.torch.cuda, "device_count", lambda: 0)
    assert transport_proof.main(["--out", str(tmp_path)]) == 2
    assert "has no GPU" in capsys.readouterr().err


def test_each_outcome_of_the_check_is_shown_with_one_gpu_and_with_two():
    for num_gpus in (1, 2):
        shown = {
            (condition.require, condition.word, condition.passes)
            for condition in conditions("cuda", num_gpus)
        }
        assert {
            ("efa", "unproven", False),
            ("socket", "socket", True),
            ("any", "not applicable", True),
        } <= shown
    assert len(conditions("cuda", 2)) > len(conditions("cuda", 1))


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "gpus"),
    [("ab", 1, [0, 0]), ("ab", 2, [0, 1]), ("aa", 2, [0, 1]), ("aabb", 2, [0, 1, 0, 1])],
)
def test_ranks_of_one_host_take_different_gpus(nodes, num_gpus, gpus):
    assert [gpu_of(rank, nodes, num_gpus) for rank in range(len(nodes))] == gpus


def test_nccl_takes_nodes_for_hosts_or_ranks_where_a_node_has_too_few_gpus():
    def host_ids(nodes, num_gpus):
        return [hosts_for_nccl(rank, nodes, num_gpus).get("NCCL_HOSTID") for rank in range(len(nodes))]

    assert host_ids("aa", 1) == [None, None]
    assert host_ids("ab", 1) == ["node-a", "node-b"]
    assert host_ids("aabb", 2) == ["node-a", "node-a", "node-b", "node-b"]
    assert host_ids("aabb", 1) == ["rank-0", "rank-1", "rank-2", "rank-3"]


@pytest.mark.parametrize("environment", [hosts_for_nccl(0, "aabb", 1), ranks.SHARED_GPUS])
def test_ranks_as_hosts_of_their_own_do_not_get_the_algorithm_of_hosts_with_one_gpu(environment):
    assert environment["NCCL_PAT_ENABLE"] == "0"


def test_the_job_s_own_mesh_is_shown_with_one_gpu():
    eight = [condition for condition in conditions("cuda", 1) if len(condition.nodes) == 8]
    assert {(condition.require, condition.passes) for condition in eight} == {
        ("socket", True),
        ("efa", False),
    }


def test_what_came_out_otherwise_is_told():
    good = {"verdict": "socket", "why": "NCCL transport: socket - socket was required: passed"}
    bad = {
        "failed": "NCCL transport: unproven - efa was required: FAILED\n  Failed to initialize any NET plugin"
    }
    assert objections(ON_SOCKETS, [good, good]) == []
    assert objections(WITHOUT_EFA, [bad, bad]) == []
    assert "rank 1 failed" in objections(ON_SOCKETS, [good, bad])[0]
    assert "rank 0 passed" in objections(WITHOUT_EFA, [good, bad])[0]
    other = {
        "failed": "NCCL transport: mixed - efa was required: FAILED\n  Failed to initialize any NET plugin"
    }
    assert "rank 0: verdict mixed, not unproven" in objections(WITHOUT_EFA, [other, other])
    assert any("does not say" in line for line in objections(WITHOUT_EFA, [{"failed": "no answer"}] * 2))


def test_kept_logs_are_a_case_without_the_machine_s_name(tmp_path):
    from training.nccl_log import read
    from training.transport import judge

    logs = tmp_path / "logs"
    shutil.copytree(CASES / "socket-two-nodes", logs)
    for path in logs.glob("*.log"):
        text = (
            path.read_text().replace("ip-10-0-1-10", socket.gethostname()).replace("10.0.1.10", "172.31.9.7")
        )
        path.write_text(text)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add_case(archive, ON_SOCKETS, logs)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        archive.extractall(tmp_path, filter="data")
    kept = tmp_path / "real-two-hosts"
    text = "".join(path.read_text() for path in kept.iterdir())
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert "nvmlDev" in text  # a short host name inside of a word stays
    assert "172.31.9.7" not in text
    assert json.loads((kept / "expected.json").read_text())["socket_pass"] is True
    assert judge(read(sorted(kept.glob("*.log"))), "socket", 2).passed


def test_logs_that_say_something_else_than_was_seen_are_not_kept(tmp_path):
    shutil.copytree(CASES / "single-node-p2p", tmp_path / "logs")
    with tarfile.open(tmp_path / "x.tar", "w") as archive, pytest.raises(SystemExit, match="not applicable"):
        add_case(archive, ON_SOCKETS, tmp_path / "logs")


def test_addresses_of_both_families_are_replaced():
    text = anonymous(
        "Using eth0:172.31.9.7<0> and eth1:172.31.9.8<0> and ib0:fe80::a:b:c:d%ib0<0> and 127.0.0.1<1>"
    )
    assert text == "Using eth0:10.0.1.10<0> and eth1:10.0.1.11<0> and ib0:fe80::1%ib0<0> and 127.0.0.1<1>"
