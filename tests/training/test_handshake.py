"""The proof inside the job: what passes, what fails, and that all ranks fail together with one report."""

import functools
import json
import os

import pytest

from tests.training import fake_nccl
from tests.training.ranks import RankError, run_ranks
from training import bandwidth, efa_device, handshake
from training.config import TrainingConfig, UsageError

TWO_BY_TWO = ["a", "a", "b", "b"]


def run_fake(case, fields, nodes=TWO_BY_TWO, **faults):
    rank = functools.partial(fake_nccl.on_fake_nccl, **faults)
    return run_ranks(rank, len(nodes), nodes, fields, case, nodes=nodes)


def reports_of(case, fields, nodes=TWO_BY_TWO, **faults):
    """What each rank raised."""
    with pytest.raises(RankError) as raised:
        run_fake(case, fields, nodes, **faults)
    assert sorted(raised.value.failures) == list(range(len(nodes))), "every rank fails"
    texts = raised.value.failures.values()
    assert all("training.errors.TransportError: " in text for text in texts)
    return [text.split("training.errors.TransportError: ")[-1] for text in texts]


@pytest.fixture
def required(tmp_path):
    return {"require_transport": "efa", "nccl_log_dir": str(tmp_path / "nccl")}


def test_gloo_is_not_applicable_in_words():
    results = run_ranks(fake_nccl.on_gloo, 4, TWO_BY_TWO, {}, nodes=TWO_BY_TWO)
    proven, confirmed = results[0]
    for result in (proven, confirmed):
        assert result["verdict"] == "not applicable"
        assert result["passed"] is False
        assert "gloo on CPU, not NCCL" in result["why"]
    assert json.loads(json.dumps(proven)) == proven
    assert all(result == results[0] for result in results), "the same on every rank"
    assert proven["num_hosts"] == 2
    measured = {(row["group"], row["num_hosts"]) for row in proven["bandwidth"]}
    assert measured == {("world", 2), ("shard", 1), ("replicate", 2)}


def test_a_mesh_of_one_dimension_is_measured_once():
    proven, _ = run_ranks(fake_nccl.on_gloo, 2, ["a", "a"], {}, nodes=["a", "a"])[0]
    assert {row["group"] for row in proven["bandwidth"]} == {"shard"}


def test_one_rank_alone_is_not_applicable():
    proven, _ = run_ranks(fake_nccl.on_gloo, 1, ["a"], {}, nodes=["a"])[0]
    assert (proven["verdict"], proven["bandwidth"]) == ("not applicable", [])


def test_a_network_cannot_be_required_of_gloo():
    with pytest.raises(UsageError, match="--require-transport efa: --device cpu uses gloo"):
        TrainingConfig(device="cpu", num_workers=2, require_transport="efa")


@pytest.mark.parametrize(("case", "require"), [("efa-hybrid-mesh", "efa"), ("socket-two-nodes", "socket")])
def test_logs_that_lie_in_a_folder_never_make_a_run_on_gloo_pass(case, require):
    """Else a folder of good logs would be a way to fool the check."""
    nodes = TWO_BY_TWO if case == "efa-hybrid-mesh" else ["a", "b"]
    fields = {"require_transport": require, "nccl_log_dir": str(fake_nccl.CASES / case)}
    with pytest.raises(RankError) as raised:
        run_ranks(fake_nccl.on_gloo, len(nodes), nodes, fields, nodes=nodes)
    assert len(raised.value.failures) == len(nodes)
    assert "gloo on CPU, not NCCL" in str(raised.value)
    assert (fake_nccl.CASES / case / "rank0.log").stat().st_size, "logs that are not ours are left alone"


def test_efa_is_proven_with_evidence_of_each_rank(required):
    results = run_fake("efa-hybrid-mesh", required)
    proven, confirmed = results[0]
    assert (proven["verdict"], proven["passed"], confirmed["passed"]) == ("efa", True, True)
    assert [rank["rank"] for rank in proven["ranks"]] == [0, 1, 2, 3]
    assert {tuple(rank["providers"]) for rank in proven["ranks"]} == {("efa",)}
    assert {rank["node"] for rank in proven["ranks"]} == {"a", "b"}
    assert json.loads(json.dumps(proven)) == proven
    assert all(result == results[0] for result in results)


def test_sockets_pass_where_sockets_are_required(required):
    proven, _ = run_fake("socket-two-nodes", required | {"require_transport": "socket"}, ["a", "b"])[0]
    assert (proven["verdict"], proven["passed"]) == ("socket", True)


def test_nothing_fails_where_nothing_is_required(required):
    proven, _ = run_fake("second-communicator-on-socket", required | {"require_transport": "any"})[0]
    assert (proven["verdict"], proven["passed"]) == ("mixed", False)


@pytest.mark.parametrize(
    "case", ["second-communicator-on-socket", "efa-one-direction", "libfabric-over-tcp-on-one-rank"]
)
def test_every_rank_raises_the_same_whole_report(case, required):
    reports = reports_of(case, required)
    assert len(set(reports)) == 1
    assert "efa was required: FAILED" in reports[0]
    assert "remedy: " in reports[0]


def test_a_silent_nccl_is_a_failure(required):
    assert "silence is not evidence" in reports_of("", required)[0]


def test_nccl_s_own_failure_becomes_the_report(required):
    error = (
        "NCCL error in: ProcessGroupNCCL.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Failed to initialize any NET plugin"
    )
    report = reports_of("libfabric-unavailable", required, ["a", "b"], errors={0: error, 1: error})[0]
    assert "FAILED rank 0 on a: RuntimeError: NCCL error" in report
    assert "FAILED rank 1 on b: RuntimeError: NCCL error" in report
    assert "request vpc.amazonaws.com/efa" in report


def test_ranks_that_wait_for_a_failed_one_stop_waiting(required):
    """Without it the job would hang until the collective's timeout, 10 minutes by default."""
    reports = reports_of("", required, errors={2: "Failed to initialize any NET plugin"}, hangs=(0, 1, 3))
    assert len(set(reports)) == 1
    assert "FAILED rank 2 on b" in reports[0]


def test_ranks_report_that_another_one_has_died(required):
    with pytest.raises(RankError) as raised:
        run_fake("", required, ["a", "b"], dies=(1,), hangs=(0,))
    assert raised.value.failures[1] == "the process ended"
    assert "FAILED rank 0 on a: another rank ended during the first collectives" in raised.value.failures[0]


def test_nccl_failing_fails_the_job_also_where_nothing_is_required(required):
    fields = required | {"require_transport": "any"}
    assert "FAILED rank 1" in reports_of("", fields, ["a", "b"], errors={1: "unhandled system error"})[0]


def test_collectives_that_never_end_name_the_silent_ranks_and_the_security_group(required):
    report = reports_of("", required | {"collective_timeout_s": 1}, ["a", "b"], hangs=(1,))[0]
    assert "FAILED rank 1 on b: the first collectives did not finish within 1 s" in report
    assert "security group" in report
    assert "FAILED rank 0" not in report


def test_a_later_communicator_on_sockets_fails_the_confirmation(required):
    line = (
        "gpu-workers-worker-b1x1:300:300 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/Socket/0"
    )
    report = reports_of("efa-hybrid-mesh", required, later={2: line})[0]
    assert "FAILED rank 2 on gpu-workers-worker-b1x1" in report
    assert "NCCL uses socket" in report


@pytest.fixture
def fi_info(tmp_path):
    """A fi_info that prints endpoints of the given types; returns the PATH that has it."""

    def install(*types, error=""):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        blocks = "".join(
            f"provider: efa\n    fabric: efa\n    domain: rdmap0s6-rdm\n    type: {name}\n" for name in types
        )
        (folder / "fi_info").write_text(
            f"#!/bin/sh\n[ \"$*\" = '-p efa' ] || exit 64\nprintf '{blocks}'\n"
            + (f"echo '{error}' >&2; exit 61\n" if error else "")
        )
        (folder / "fi_info").chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return install


def test_endpoints_are_read_from_fi_info(fi_info, monkeypatch):
    monkeypatch.setenv("PATH", fi_info("FI_EP_RDM", "FI_EP_DGRAM", "FI_EP_RDM"))
    found = efa_device.endpoints()
    assert found.types == ("FI_EP_DGRAM", "FI_EP_RDM")
    assert found.has_rdm


def test_a_node_without_fi_info_says_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(efa_device, "_EFA_INSTALLER_BIN", "/nowhere")
    assert efa_device.endpoints() == efa_device.Endpoints(has_tool=False)


def test_an_endpoint_that_is_not_rdm_fails_the_proof(required, fi_info):
    path = fi_info("FI_EP_DGRAM", error="fi_getinfo: -61")
    report = reports_of("efa-hybrid-mesh", required, environment={"PATH": path})[0]
    assert report.count("no endpoint of type RDM") == 2, "once for each node"
    assert "FAILED rank 0 on a" in report
    assert "FAILED rank 2 on b" in report


def test_rdm_endpoints_are_part_of_the_result(required, fi_info):
    proven, _ = run_fake("efa-hybrid-mesh", required, environment={"PATH": fi_info("FI_EP_RDM")})[0]
    assert proven["endpoint_types"] == {"a": ["FI_EP_RDM"], "b": ["FI_EP_RDM"]}


def test_counters_of_all_devices_and_ports_are_read(tmp_path):
    for device, name, text in (
        ("efa_0", "tx_bytes", "12\n"),
        ("efa_1", "tx_bytes", "30\n"),
        ("efa_0", "lifespan", "-\n"),
    ):
        folder = tmp_path / device / "ports/1/hw_counters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = efa_device.counters(tmp_path)
    assert before == {"efa_0/1/tx_bytes": 12, "efa_1/1/tx_bytes": 30}
    (tmp_path / "efa_1/ports/1/hw_counters/tx_bytes").write_text("100\n")
    grown = efa_device.increase(before, efa_device.counters(tmp_path))
    assert grown == {"efa_0/1/tx_bytes": 0, "efa_1/1/tx_bytes": 70}
    assert efa_device.sent_bytes(grown) == 70
    assert efa_device.sent_bytes({}) is None


def test_each_requirement_sets_what_makes_nccl_fail_closed():
    def variables(**fields):
        return handshake.environment(TrainingConfig(**fields))

    assert variables(require_transport="efa")["NCCL_NET"] == "Libfabric"
    assert variables(require_transport="socket")["NCCL_NET"] == "Socket"
    assert "NCCL_NET" not in variables(require_transport="any")
    assert all(variables(require_transport=word)["NCCL_DEBUG"] == "INFO" for word in ("efa", "socket", "any"))
    assert variables(device="cpu", num_workers=2) == {}


@pytest.fixture
def clean_environment(monkeypatch):
    for name in (*handshake.environment(TrainingConfig(require_transport="efa")), "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(handshake, "_this_process", handshake._ThisProcess())


def test_a_log_of_an_earlier_run_is_removed(tmp_path, clean_environment):
    (tmp_path / "rank1.log").write_text("an earlier run was on EFA")
    path = handshake.open_log(TrainingConfig(nccl_log_dir=str(tmp_path)), rank=1)
    assert path.read_text() == ""
    assert os.environ["NCCL_DEBUG_FILE"] == str(path)


def test_a_symbolic_link_in_place_of_the_log_is_not_followed(tmp_path, clean_environment):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "rank0.log").symlink_to(tmp_path / "precious")
    handshake.open_log(TrainingConfig(nccl_log_dir=str(tmp_path)), rank=0)
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_per_cent_sign_in_the_folder_is_not_expanded_by_nccl(tmp_path, clean_environment):
    path = handshake.open_log(TrainingConfig(nccl_log_dir=str(tmp_path / "50%h")), rank=0)
    assert os.environ["NCCL_DEBUG_FILE"] == str(path).replace("%", "%%")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, clean_environment):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        handshake.TransportError, match=rf"rank 3: --nccl-log-dir {tmp_path}/file: .*; give a folder"
    ):
        handshake.open_log(TrainingConfig(nccl_log_dir=str(tmp_path / "file")), rank=3)


def test_runs_have_folders_of_their_own(clean_environment, tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "DEFAULT_LOG_ROOT", tmp_path)
    one, other = (handshake.open_log(TrainingConfig(run_name=name), 0) for name in ("one", "other"))
    assert one.parent != other.parent


@pytest.mark.parametrize(
    ("operation", "num_ranks", "time_s", "bus"),
    # Rows of nccl-tests: size 128 MiB, time, busbw = algbw x 2 (n - 1) / n, or (n - 1) / n for all-gather.
    [
        ("all_reduce", 2, 0.0134217728, 10.0),
        ("all_reduce", 8, 0.0134217728, 17.5),
        ("all_gather", 8, 0.0134217728, 8.75),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation, num_ranks, time_s, bus):
    assert bandwidth.bus_gb_per_s(operation, 128 << 20, num_ranks, time_s) == pytest.approx(bus)


def row(node_gb_per_s):
    return {"node_gb_per_s": node_gb_per_s}


def test_less_than_half_of_the_line_rate_is_warned_of():
    config = TrainingConfig(instance_type="g6.12xlarge")  # 40 Gbit/s: 5 GB/s
    (warning,) = handshake._speed_warnings([row(None), row(1.0), row(2.4)], config)
    assert "at most 2.40 GB/s" in warning
    assert "5.00 GB/s" in warning
    assert handshake._speed_warnings([row(2.6)], config) == []
    assert handshake._speed_warnings([row(None)], config) == [], "nothing between nodes was measured"
    assert handshake._speed_warnings([row(0.1)], TrainingConfig()) == [], "no instance type, no line rate"


def test_more_nccl_variables_reach_every_worker_but_not_those_of_the_check():
    config = TrainingConfig(
        require_transport="efa", nccl_variables="NCCL_SHM_USE_CUDA_MEMCPY=1,NCCL_ALGO=Ring"
    )
    found = handshake.environment(config)
    assert (found["NCCL_SHM_USE_CUDA_MEMCPY"], found["NCCL_ALGO"], found["NCCL_NET"]) == (
        "1",
        "Ring",
        "Libfabric",
    )
    for forbidden in (
        "NCCL_NET=Socket",
        "NCCL_DEBUG=WARN",
        "NCCL_DEBUG_FILE=/x",
        "NCCL_NET_PLUGIN=none",
        "PATH=/x",
    ):
        with pytest.raises(UsageError, match="--nccl-variables"):
            TrainingConfig(nccl_variables=forbidden)
