"""Two emulated nodes: the plumbing with gloo, and what is concluded from figures of GPUs."""

from __future__ import annotations

import json

import pytest

from benchmarks import two_nodes, two_nodes_of_four
from benchmarks.report import Report


def test_both_networks_are_run_and_predicted_with_gloo(tmp_path):
    out = tmp_path / "two.json"
    argv = ["--device", "cpu", "--model", "tiny", "--num-ranks", "2", "--quick", "--settings", "1x16"]
    assert two_nodes_of_four.main([*argv, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["complete"]
    schemes = [scheme.label for scheme in two_nodes.SCHEMES]
    for network in (two_nodes.DIRECT, two_nodes.EMULATED):
        assert [row["scheme"] for row in content["rows"] if row["network"] == network] == schemes
    for row in content["rows"]:
        assert row["num_nodes"] == 2 and row["boundary_gb"] is None and row["peak_gib"] is None
        assert ("predicted_step_s" in row) == (row["network"] == two_nodes.EMULATED)
    assert all(min(row["rates"].values()) > 0 for row in content["rows"])
    assert len(content["checkpoint"]["blocked_s"]) == 2 and content["checkpoint"]["size_gb"] > 0.003
    assert content["transport"]["verdict"] == "not applicable"


def test_a_run_that_was_cut_off_is_continued(tmp_path):
    out = tmp_path / "two.json"
    argv = ["--device", "cpu", "--model", "tiny", "--num-ranks", "2", "--quick", "--settings", "1x16"]
    two_nodes_of_four.main([*argv, "--only", "direct", "--out", str(out)])
    first = json.loads(out.read_text())
    assert two_nodes_of_four.main([*argv, "--continue", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    before, after = first["rows"], content["rows"][: len(first["rows"])]
    assert [row["step_s"] for row in after] == [row["step_s"] for row in before]  # not measured again
    assert len(content["rows"]) == 2 * len(before)
    assert content["checkpoint"] == first["checkpoint"]
    assert len(content["continued"]) == 1


def test_a_file_of_another_run_is_not_continued(tmp_path, capsys):
    out = tmp_path / "two.json"
    argv = ["--device", "cpu", "--model", "tiny", "--num-ranks", "2", "--continue", "--out", str(out)]
    with pytest.raises(SystemExit) as missing:
        two_nodes_of_four.main(argv)
    Report.start(out, "two_nodes_of_four", {"num_ranks": 4})
    with pytest.raises(SystemExit) as other:
        two_nodes_of_four.main(argv)
    assert missing.value.code == other.value.code == 2
    said = capsys.readouterr().err
    assert "cannot be read" in said and "was measured with {'num_ranks': 4}, not" in said


def row(network, **fields):
    return {
        "network": network,
        "scheme": "hybrid",
        "name": "ours",
        "batch_size": 4,
        "seq_len": 2048,
        "model": "qwen2.5-1.5b-random",
        "num_nodes": 2,
        "world_size": 8,
        "step_s": 0.2,
        "rates": {"replicate_gb_per_s": 3.0, "world_gb_per_s": 3.0},
        "model_tflops": 450.0,
        "boundary_gb": None,
        "predicted_boundary_gb": 6.17,
        "peak_gib": 20.0,
        "predicted_peak_gib": 21.0,
    } | fields


def conclude(tmp_path, *rows):
    report = Report.start(tmp_path / "two.json", "two_nodes_of_four", {})
    for each in rows:
        report.put(each, two_nodes.KEY)
    return two_nodes_of_four.conclude(report, tmp_path, 8), report


def test_the_predictor_is_fed_with_the_rates_that_were_measured(tmp_path):
    emulated = row("emulated", step_s=2.2, boundary_gb=6.18)
    off, report = conclude(tmp_path, row("direct"), emulated)
    assert off == []
    predicted = report.rows[1]["predicted_step_s"]
    assert 6.175 / 3.0 < predicted < 6.175 / 3.0 + 0.2
    assert report.rows[1]["boundary_off"] == pytest.approx(6.17 / 6.18 - 1)


def test_figures_beyond_their_tolerance_are_named(tmp_path):
    emulated = row("emulated", step_s=4.0, boundary_gb=7.0, peak_gib=30.0)
    off, _ = conclude(tmp_path, row("direct"), emulated)
    assert [line.split(": ")[1].split()[0] for line in off] == ["step_off", "boundary_off", "memory_off"]


def test_a_kept_log_names_neither_this_machine_nor_its_addresses():
    log = (
        "gpu-box-7:4242:4250 [0] NCCL INFO NET/Socket : Using [0]eth0:172.31.9.14<0>\n"
        "gpu-box-7:4242:4250 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>\n"
        "NCCL version 2.29.7+cuda13.0\n"
    )
    kept = two_nodes_of_four.anonymous(log)
    assert "gpu-box-7" not in kept and "172.31" not in kept
    assert (
        kept.startswith("host:4242:4250 [0] NCCL INFO") and "127.0.0.1" in kept and "2.29.7+cuda13.0" in kept
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-ranks", "3"], "--num-ranks 3: two nodes need an even number"),
        (["--settings", "4*2048"], "4*2048: write sequences x tokens"),
    ],
)
def test_bad_input_names_the_argument_of_two_nodes(tmp_path, capsys, argv, named):
    with pytest.raises(SystemExit) as exit_:
        two_nodes_of_four.main(["--device", "cpu", "--out", str(tmp_path / "x.json"), *argv])
    assert exit_.value.code == 2 and named in capsys.readouterr().err
