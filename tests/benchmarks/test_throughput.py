"""The comparison of three loops, run whole on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import loops, plans, ranks, throughput
from benchmarks.loops import ACCELERATE, AWS_SAMPLE, OURS

SMOKE = ["--device", "cpu", "--model", "tiny", "--quick", "--num-ranks", "1", "--only", "plain"]


def read(path):
    return json.loads(path.read_text())


def test_every_loop_is_measured_and_written(one_rank, tmp_path, capsys):
    out = tmp_path / "throughput.json"
    assert throughput.main([*SMOKE, "--settings", "1x128", "--out", str(out)]) == 0
    content = read(out)
    assert content["complete"]
    assert [row["name"] for row in content["rows"]] == [OURS, AWS_SAMPLE, ACCELERATE]
    for row in content["rows"]:
        assert row["tokens_per_s_per_gpu"] == pytest.approx(
            row["batch_size"] * row["seq_len"] / row["step_s"]
        )
        assert row["num_steps"] == 3 and row["world_size"] == 1 and row["condition"] == "plain"
        assert row["mfu"] is None and row["peak_gib"] is None, "a CPU has neither"
        assert 0 < row["last_loss"] < 2 * math.log(259)
    assert out.with_suffix(".png").stat().st_size > 0
    assert "aws-sample" in capsys.readouterr().out


def test_a_loop_out_of_memory_becomes_a_row_that_says_so_and_the_others_go_on(
    one_rank, tmp_path, monkeypatch
):
    def too_large(place, workload):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setitem(loops.BUILDERS, AWS_SAMPLE, too_large)
    out = tmp_path / "throughput.json"
    argv = [*SMOKE, "--settings", "1x128", "--loops", OURS, AWS_SAMPLE, "--out", str(out)]
    assert throughput.main(argv) == 0
    rows = {row["name"]: row for row in read(out)["rows"]}
    assert rows[AWS_SAMPLE]["error"] == "out of memory" and rows[AWS_SAMPLE]["step_s"] is None
    assert rows[OURS]["error"] is None and rows[OURS]["step_s"] > 0


def test_a_loop_that_fails_is_a_row_with_its_error_and_fails_the_run(one_rank, tmp_path, monkeypatch):
    def broken(place, workload):
        raise RuntimeError("no such kernel\nmore")

    monkeypatch.setitem(loops.BUILDERS, ACCELERATE, broken)
    out = tmp_path / "throughput.json"
    argv = [*SMOKE, "--settings", "1x128", "--loops", OURS, ACCELERATE, "--out", str(out)]
    assert throughput.main(argv) == 1
    rows = {row["name"]: row for row in read(out)["rows"]}
    assert rows[ACCELERATE]["error"] == "RuntimeError: no such kernel"
    assert rows[OURS]["step_s"] > 0


def test_nothing_begins_after_the_time_is_up_and_the_file_says_so(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput.ranks, "agree", lambda failure: "time is up")
    out = tmp_path / "throughput.json"
    assert throughput.main([*SMOKE, "--out", str(out)]) == 0
    content = read(out)
    assert content["rows"] == [] and content["stopped"].startswith("time is up before ours")


def test_a_rank_that_fails_ends_the_run_with_its_error():
    with pytest.raises(ranks.RanksError, match="int"):
        ranks.run(int, (), ["node0"], "cpu")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--settings", "9x9"], "--settings 9x9"),
        (["--num-steps", "0"], "0: must be a whole number above 0"),
        (["--only", "fast"], "plain"),
        (["--device", "cuda"], "--device cuda: no GPU here"),
    ],
)
def test_bad_input_names_the_argument(tmp_path, capsys, argv, named):
    with pytest.raises(SystemExit) as exit_:
        throughput.main(["--device", "cpu", "--out", str(tmp_path / "x.json"), *argv])
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_a_plan_is_printed_without_a_gpu_or_a_result_file(capsys):
    assert throughput.main(["--plan"]) == 0
    text = capsys.readouterr().out
    for condition, trials in plans.CONDITIONS.items():
        assert text.count(f"\n{condition} ") == len(trials)


def test_the_plan_holds_every_comparison_that_the_goals_speak_of():
    plain = {(trial.name, trial.batch_size, trial.seq_len) for trial in plans.PLAIN}
    for setting in ((1, 128), (4, 2048), (8, 2048), (16, 2048)):
        assert {(name, *setting) for name in loops.BUILDERS} <= plain
    slow = [(trial.name, trial.num_micro_batches) for trial in plans.SLOW_NETWORK]
    assert {(OURS, 1), (OURS, 8), (AWS_SAMPLE, 1), (ACCELERATE, 1)} <= set(slow)


def test_every_trial_can_be_built_as_a_job():
    for trials in plans.CONDITIONS.values():
        for trial in trials:
            assert trial.workload("qwen2.5-1.5b-random", "cuda").tokens_per_step > 0


def test_the_slow_network_makes_every_rank_a_host():
    assert throughput._nodes("slow-network", 3) == ["node0", "node1", "node2"]
    assert throughput._nodes("plain", 3) == ["node0"] * 3
