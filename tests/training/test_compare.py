"""Comparing networks: what counts as a run of an arm, what is kept, and the figures."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from training import compare, compare_runs, compare_stats
from training.storage import locate

ROOT = Path(__file__).parents[2]
JOB = ["--steps", "10", "--model", "tiny"]
# A training run that ends at once: EFA makes 0.5 steps/s, sockets 0.25, and every run a little more.
FAKE_RUN = textwrap.dedent("""
    import json, os, signal, sys, time
    from pathlib import Path
    state = Path(__file__).with_name("calls.jsonl")
    calls = state.read_text().splitlines() if state.exists() else []
    with state.open("a") as stream:
        stream.write(json.dumps(sys.argv[1:]) + "\\n")
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    faults = json.loads(Path(__file__).with_name("faults.json").read_text())
    fault = faults.get(str(len(calls)), "")
    print("step 1/10 loss 5.5", flush=True)
    if fault == "hang":
        def end(*_):
            Path(__file__).with_name("ended").write_text("by SIGINT")
            sys.exit(130)
        signal.signal(signal.SIGINT, end)
        Path(__file__).with_name("hangs").write_text(str(os.getpid()))
        time.sleep(300)
    if fault == "fails":
        print("summary: " + json.dumps({"status": "failed", "error": "rank 3 on node b: out of memory"}))
        sys.exit(1)
    if fault == "silent":
        sys.exit(0)
    word = {"efa": "efa", "socket": "socket"}.get(given.get("--require-transport"), "not applicable")
    variables = dict(pair.split("=") for pair in given.get("--nccl-variables", "").split(",") if pair)
    steps_per_s = (0.5 if word == "efa" else 0.25) * (1 + len(calls) / 100)
    print("summary: " + json.dumps({
        "status": "succeeded", "run_name": given["--run-name"], "steps_per_s": steps_per_s,
        "tokens_per_s": steps_per_s * 1024, "mfu": None, "device_name": "NVIDIA L4",
        "transport": {
            "verdict": "socket" if fault == "on sockets" else word, "best_node_gb_per_s": 4.0,
            "confirmed": {"verdict": "socket" if fault == "later on sockets" else word},
            "ranks": [{"rank": 0, "environment": {} if fault == "ignored" else variables}],
        },
    }))
""")


@pytest.fixture
def fake_run(tmp_path, monkeypatch):
    """Replaces `training.run`; returns its folder. `faults`: {number of the call: what goes wrong}."""
    monkeypatch.setattr(compare_runs, "COMMAND", (sys.executable, str(tmp_path / "run.py")))
    (tmp_path / "run.py").write_text(FAKE_RUN)

    def with_faults(**faults):
        (tmp_path / "faults.json").write_text(json.dumps({name[1:]: fault for name, fault in faults.items()}))
        return tmp_path

    with_faults()
    return with_faults


def calls(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [dict(zip(line[::2], line[1::2], strict=True)) for line in lines]


def run(folder: Path, *options: str) -> tuple[int, dict]:
    code = compare.main([*options, "--json", str(folder / "result.json"), "--", *JOB])
    return code, json.loads((folder / "result.json").read_text())


def test_arms_take_turns_in_changing_order_at_both_workloads(fake_run, capsys):
    folder = fake_run()
    code, result = run(folder, "--repeats", "2")
    assert (code, result["complete"], result["failure"]) == (0, True, "")
    order = [(run["repeat"], run["workload"], run["arm"]) for run in result["runs"]]
    assert order == [
        *((0, workload, arm) for workload in ("sample", "configured") for arm in ("efa", "tcp")),
        *((1, workload, arm) for workload in ("sample", "configured") for arm in ("tcp", "efa")),
    ]
    sample, configured = calls(folder)[0], calls(folder)[2]
    assert (sample["--batch-size"], sample["--seq-len"], sample["--gradient-accumulation"]) == (
        "1",
        "128",
        "1",
    )
    assert "--batch-size" not in configured
    assert len({call["--run-name"] for call in calls(folder)}) == 8, "no run writes into another's folder"


def test_medians_spread_and_ratio_are_reported(fake_run, capsys):
    _, result = run(fake_run(), "--repeats", "3", "--workload", "sample")
    rows = {row["metric"]: row for row in result["results"]}
    assert set(rows) == {"steps_per_s", "tokens_per_s", "bus_gb_per_s"}, "no MFU where it is unknown"
    row = rows["steps_per_s"]
    assert row["arms"]["efa"]["num_runs"] == row["arms"]["tcp"]["num_runs"] == 3
    assert row["ratio"] == pytest.approx(2, rel=0.05)
    low, high = row["ratio_interval"]
    assert low <= row["ratio"] <= high
    out = capsys.readouterr().out
    assert "steps/s" in out
    assert f"{row['ratio']:.2f}x [" in out


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("on sockets", "efa was claimed, but before training the check found: socket"),
        ("later on sockets", "efa was claimed, but after training the check found: socket"),
        ("fails", "exit code 1: rank 3 on node b: out of memory"),
        ("silent", "exit code 0: see its output above"),
    ],
)
def test_a_run_that_is_not_what_its_arm_claims_ends_the_comparison_and_keeps_the_rest(
    fake_run, fault, says, capsys
):
    code, result = run(
        fake_run(_3=fault), "--repeats", "2", "--workload", "sample"
    )  # the fourth run is on EFA
    assert code == 1
    assert says in capsys.readouterr().err
    assert says in result["failure"]
    assert result["complete"] is False
    assert len(result["runs"]) == 3
    assert result["results"], "what was measured is compared all the same"


def test_shared_memory_copies_are_compared_the_same_way(fake_run, capsys):
    folder = fake_run()
    code, result = run(folder, "--ab", "shm-memcpy", "--repeats", "1", "--workload", "configured")
    assert (code, result["arms"]) == (0, ["memcpy-1", "memcpy-0"])
    given = [call["--nccl-variables"] for call in calls(folder)]
    assert given == ["NCCL_SHM_USE_CUDA_MEMCPY=1", "NCCL_SHM_USE_CUDA_MEMCPY=0"]


def test_a_variable_that_nccl_did_not_take_is_no_run_of_its_arm(fake_run, capsys):
    code, result = run(fake_run(_0="ignored"), "--ab", "shm-memcpy", "--repeats", "1", "--workload", "sample")
    assert code == 1
    assert "rank 0's NCCL did not take NCCL_SHM_USE_CUDA_MEMCPY=1" in result["failure"]


def test_results_and_picture_can_go_to_s3(fake_run, s3):
    folder = fake_run()
    addresses = {"--json": f"{s3}/a/comparison.json", "--png": f"{s3}/a/comparison.png"}
    options = [word for pair in addresses.items() for word in pair]
    assert compare.main(["--repeats", "1", "--workload", "sample", *options, "--", *JOB]) == 0
    assert json.loads(locate(addresses["--json"]).read())["complete"] is True
    assert locate(addresses["--png"]).read().startswith(b"\x89PNG")
    assert len(calls(folder)) == 2


def test_an_address_that_cannot_be_written_is_said_before_the_first_run(fake_run, s3, capsys):
    folder = fake_run()
    assert compare.main(["--workload", "sample", "--json", "s3://no-such-bucket/x.json", "--", *JOB]) == 1
    assert "error: s3://no-such-bucket/x.json: cannot be written" in capsys.readouterr().err
    assert not (folder / "calls.jsonl").exists()


def _signalled(folder, how, *arguments):
    """Sends a signal once the second run hangs; returns the comparison's process, ended, and what it said."""
    program = (
        "import sys; from training import compare, compare_runs;"
        f"compare_runs.COMMAND = (sys.executable, {str(folder / 'run.py')!r});"
        "sys.exit(compare.main(sys.argv[1:]))"
    )
    options = ["--workload", "sample", "--json", str(folder / "result.json")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *options, "--", *JOB, *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ((folder / "hangs").exists() and (folder / "hangs").read_text()):
        assert process.poll() is None
    process.send_signal(how)
    said = process.communicate(timeout=60)[1]
    assert (folder / "ended").read_text() == "by SIGINT"
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "hangs").read_text()), 0)
    return process, said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_run_too_and_keeps_the_rest(fake_run, how):
    folder = fake_run(_1="hang")
    process, said = _signalled(folder, how)
    assert process.returncode == 130
    assert "error: interrupted; results so far are kept" in said
    result = json.loads((folder / "result.json").read_text())
    assert (result["failure"], len(result["runs"])) == ("interrupted", 1)


def test_a_comparison_has_no_more_time_than_one_run(fake_run):
    folder = fake_run(_1="hang")
    process, said = _signalled(folder, signal.SIGALRM, "--max-run-s", "600")  # as once the time is over
    assert process.returncode == 1
    assert "error: the run was ended after --max-run-s 600." in said
    result = json.loads((folder / "result.json").read_text())
    assert result["failure"].startswith("the run was ended after") and len(result["runs"]) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--", "--stepz", "3"], "--stepz: no such argument"),
        (["--", "--steps", "2"], "--steps 2: must exceed --untimed-steps 3"),
        (["--", "--steps", "9", "--device", "cpu", "--num-workers", "2"], "--device cpu uses gloo"),
        (["--json", "/nowhere/x.json", "--", *JOB], "/nowhere/x.json: its folder /nowhere cannot be written"),
        (["--repeats", "0", "--", *JOB], "'0': give a number of runs"),
        (["--ab", "ib", "--", *JOB], "--ab"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(fake_run, argv, says, capsys):
    folder = fake_run()
    try:
        code = compare.main(argv)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert not (folder / "calls.jsonl").exists()


def test_the_picture_shows_the_runs(fake_run, capsys):
    folder = fake_run()
    code, _ = run(folder, "--repeats", "2", "--workload", "sample", "--png", str(folder / "result.png"))
    assert code == 0
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_everything_but_the_picture_is_written(fake_run, capsys, monkeypatch):
    folder = fake_run()
    monkeypatch.delitem(sys.modules, "training.compare_figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, result = run(folder, "--repeats", "1", "--workload", "sample", "--png", str(folder / "result.png"))
    assert (code, result["complete"]) == (0, True)
    assert "no picture: matplotlib is not installed" in capsys.readouterr().err
    assert not (folder / "result.png").exists()


def test_the_interval_is_within_what_the_runs_show_and_repeats():
    first, second = [2.0, 2.2, 2.1], [1.0, 1.1, 0.9]
    low, high = compare_stats.ratio_interval(first, second)
    assert 2.0 / 1.1 <= low <= 2.1 / 1.0 <= high <= 2.2 / 0.9
    assert compare_stats.ratio_interval(first, second) == (low, high)
    assert compare_stats.ratio_interval([2.0] * 3, [1.0] * 3) == (2.0, 2.0)
    assert compare_stats.ratio_interval([2.0], [1.0]) is None, "one run has no spread"


def test_a_table_without_results_says_so():
    assert "no result" in compare_stats.table([], ["efa", "tcp"])
