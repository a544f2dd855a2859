"""Bytes counted by the kernel between two network namespaces, against theory."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import boundary_bytes, hosts
from benchmarks.report import Report
from tests.benchmarks.marks import needs_hosts


@needs_hosts
def test_counted_bytes_are_within_2_percent_of_theory_and_hybrid_does_not_grow(tmp_path):
    out = tmp_path / "bytes.json"
    schemes = ["aws-sample", "full-gathered-twice", "hybrid"]
    argv = ["--ranks-per-node", "1", "--accumulation", "2", "--num-steps", "3", "--schemes", *schemes]
    assert boundary_bytes.main(["--out", str(out), *argv]) == 0
    content = json.loads(out.read_text())
    rows = {row["scheme"]: row for row in content["rows"]}
    assert content["complete"] and list(rows) == schemes
    assert all(abs(row["off"]) <= 0.02 for row in rows.values())
    fp32_gradients_once = rows["hybrid"]["measured_gb"]
    assert fp32_gradients_once == pytest.approx(4 * 6_953_216 / 1e9, rel=0.02)


@needs_hosts
def test_hosts_are_gone_after_use_and_after_an_error():
    def namespaces():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with hosts.Hosts(2) as two:
        assert two._name(0) in namespaces()
        with pytest.raises(hosts.HostsError, match="rank 1 failed with exit code 3\nwhy"):
            two.run([0, 1], ["sh", "-c", "test $RANK = 0 || { echo why; exit 3; }"], timeout_s=20)
    assert two._name(0) not in namespaces()


@needs_hosts
def test_a_rank_that_does_not_end_is_ended():
    with hosts.Hosts(1) as one, pytest.raises(hosts.HostsError, match="did not end in time"):
        one.run([0], ["sleep", "60"], timeout_s=0.2)


@needs_hosts
def test_only_what_leaves_a_host_is_counted():
    # Five datagrams of 1,000 bytes, and the growth of the counter meanwhile compared with 5,000.
    script = (
        "sent=/sys/class/net/eth0/statistics/tx_bytes; before=$(cat $sent); "
        "for i in 1 2 3 4 5; do head -c 1000 /dev/zero > /dev/udp/$0/9; sleep 0.02; done; "
        "test $(($(cat $sent) - before)) $1 5000"
    )
    with hosts.Hosts(2) as two:
        for target, comparison in ((two.address(0), "-lt"), (two.address(1), "-ge")):
            two.run([0], ["bash", "-c", script, target, comparison], timeout_s=20)


@needs_hosts
def test_what_was_counted_in_time_is_kept_and_the_rest_is_named(tmp_path, monkeypatch):
    out = tmp_path / "bytes.json"
    argv = ["--ranks-per-node", "1", "--num-steps", "1", "--schemes", "hybrid", "--budget-s", "1"]
    assert boundary_bytes.main(["--out", str(out), *argv]) == 1
    content = json.loads(out.read_text())
    assert content["stopped"] == "time was up before hybrid, k=1"
    assert not content["complete"] and content["rows"] == []


def test_ranks_that_share_gpus_are_hosts_of_their_own_for_nccl():
    def host_ids(model, num_ranks, num_gpus):
        return boundary_bytes.environment(model, num_ranks, num_gpus)["NCCL_HOSTID"]

    assert host_ids("small", 8, 1) == "rank{rank}"
    assert host_ids("small", 8, 8) == "{node}"


def test_only_a_small_model_is_told_its_protocol():
    assert boundary_bytes.environment("small", 8, 1)["NCCL_PROTO"] == "Simple"
    assert "NCCL_PROTO" not in boundary_bytes.environment("qwen2.5-1.5b-random", 8, 1)


def test_a_count_that_is_off_fails_the_run_and_is_named(tmp_path, capsys):
    report = Report.start(tmp_path / "bytes.json", "boundary_bytes", {})
    row = {
        "scheme": "hybrid",
        "gradient_accumulation": 1,
        "measured_gb": 1.03,
        "expected_gb": 1.0,
        "ring_gb": 1.0,
    }
    report.put(row | {"off": 0.03}, boundary_bytes.KEY)
    assert boundary_bytes._conclude(tmp_path / "bytes.json") == 1
    assert "hybrid, k=1: off by +3.0%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-nodes", "1"], "--num-nodes 1"),
        (["--num-nodes", "1", "--transport", "nccl"], "--transport nccl: no GPU here"),
    ],
)
def test_bad_input_names_the_argument_of_boundary_bytes(tmp_path, capsys, argv, named):
    with pytest.raises(SystemExit) as exit_:
        boundary_bytes.main(["--out", str(tmp_path / "x.json"), *argv])
    assert exit_.value.code == 2 and named in capsys.readouterr().err


def test_without_root_the_reason_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as exit_:
        boundary_bytes.main(["--out", str(tmp_path / "x.json")])
    assert exit_.value.code == 2 and "need" in capsys.readouterr().err
