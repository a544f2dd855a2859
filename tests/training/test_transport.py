"""The verifier's verdicts, its exit codes, and what a report must tell."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from training.transport import log_files, main

ROOT = Path(__file__).parents[2]
CASES = sorted(path.parent for path in (ROOT / "tests/cases/nccl").glob("*/expected.json"))


def expected(case: Path) -> dict:
    return json.loads((case / "expected.json").read_text())


def cases_with(key: str) -> list[Path]:
    return [case for case in CASES if key in expected(case)]


def arguments(case: Path, *more: str) -> list[str]:
    want = expected(case)
    gpudirect = ["--require-gpudirect"] if want.get("require_gpudirect") else []
    return [str(case), "--world-size", str(want["world_size"]), *gpudirect, *more]


def verdict_of(capsys, argv: list[str]) -> dict:
    main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def name(case: Path) -> str:
    return case.name


def test_there_are_cases_of_both_outcomes():
    assert {expected(case)["pass"] for case in CASES} == {True, False}
    assert len(CASES) > 30


@pytest.mark.parametrize("case", CASES, ids=name)
def test_each_case_passes_or_fails_as_it_must(case, capsys):
    want = expected(case)
    assert main(arguments(case, "--require", want["require"])) == (0 if want["pass"] else 1)


@pytest.mark.parametrize("case", cases_with("verdict"), ids=name)
def test_each_case_gets_its_word(case, capsys):
    assert verdict_of(capsys, arguments(case))["verdict"] == expected(case)["verdict"]


@pytest.mark.parametrize("case", cases_with("socket_pass"), ids=name)
def test_sockets_can_be_required_too(case, capsys):
    want = 0 if expected(case)["socket_pass"] else 1
    assert main(arguments(case, "--require", "socket")) == want


@pytest.mark.parametrize("case", [case for case in CASES if expected(case)["pass"]], ids=name)
def test_a_job_on_efa_is_no_job_on_sockets(case, capsys):
    assert main(arguments(case, "--require", "socket")) == 1


@pytest.mark.parametrize("case", [case for case in CASES if not expected(case)["pass"]], ids=name)
def test_a_failure_says_why_and_what_to_do(case, capsys):
    assert main(arguments(case)) == 1
    report = capsys.readouterr().out
    assert "FAILED" in report
    assert "remedy: " in report


@pytest.mark.parametrize("case", cases_with("rank"), ids=name)
def test_a_failure_names_rank_host_and_line(case, capsys):
    rank = expected(case)["rank"]
    finding = next(
        found for found in verdict_of(capsys, arguments(case))["findings"] if found["rank"] == rank
    )
    file, _, line = finding["place"].rpartition(":")
    assert finding["host"] in Path(file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("case", cases_with("symptom"), ids=name)
def test_a_known_symptom_explains_the_failure(case, capsys):
    from training.nccl_symptoms import BY_NAME

    symptom = expected(case)["symptom"]
    main(arguments(case))
    report = capsys.readouterr().out
    assert (BY_NAME[symptom].remedy if symptom in BY_NAME else "FI_PROVIDER=efa") in report


def test_a_rank_that_fell_back_to_sockets_is_named_with_its_line(capsys):
    case = ROOT / "tests/cases/nccl/efa-one-rank-on-socket"
    main(arguments(case))
    report = capsys.readouterr().out
    assert "FAILED rank 5 on " in report
    assert f"{case}/rank5.log:7)" in report
    assert report.count("  FAILED ") == 1, "the other ranks are blameless"


def test_ranks_without_a_log_are_named(capsys):
    main(arguments(ROOT / "tests/cases/nccl/rank-logs-missing"))
    assert "ranks 4-7 of 8" in capsys.readouterr().out


def test_one_host_is_no_pass_and_says_why(capsys):
    main(arguments(ROOT / "tests/cases/nccl/single-node-p2p"))
    assert "not applicable: all ranks run on one host" in capsys.readouterr().out


def test_a_network_inside_one_host_links_no_hosts(capsys):
    found = verdict_of(capsys, arguments(ROOT / "tests/cases/nccl/efa-inside-one-host"))
    assert found["links"] == []


@pytest.mark.parametrize(
    ("case", "largest", "size"), [("smaller-world-than-expected", 4, 8), ("larger-world-than-expected", 4, 2)]
)
def test_a_world_of_another_size_is_told_with_both_sizes(case, largest, size, capsys):
    main(arguments(ROOT / "tests/cases/nccl" / case))
    report = capsys.readouterr().out
    assert f"the world has {size} ranks, but the largest communicator in the logs has {largest}" in report


def with_rank_3_saying(tmp_path, text: str, case: str = "efa-hybrid-mesh") -> list[str]:
    """Arguments for a passing case with more in the last rank's log."""
    shutil.copytree(ROOT / "tests/cases/nccl" / case, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "rank3.log").open("a") as stream:
        stream.write(text)
    return [str(tmp_path), "--world-size", "4"]


RANK_3 = "gpu-workers-worker-b1x1:301:301 [1] NCCL INFO "


@pytest.mark.parametrize(
    "cut", ["Using network Libfab", "Assigned NET plugin Libf", "Channel 00/0 : 3[1] -> 0[0] [se"]
)
def test_a_line_cut_short_is_not_taken_for_another_network(tmp_path, cut, capsys):
    assert main(with_rank_3_saying(tmp_path, RANK_3 + cut)) == 0


def test_a_run_on_one_host_is_never_called_a_pass(capsys):
    folder = str(ROOT / "tests/cases/nccl/single-node-p2p")
    assert main([folder, "--require", "any"]) == 0
    assert "pass" not in capsys.readouterr().out
    assert main([folder, "--require", "efa"]) == 1


def test_two_messages_in_one_line_are_both_read(tmp_path, capsys):
    local = "Channel 02/0 : 2[0] -> 3[1] via SHM/direct/direct"
    glued = f"{RANK_3}{local} {RANK_3}Channel 02/0 : 3[1] -> 0[0] [send] via NET/Socket/0\n"
    assert main(with_rank_3_saying(tmp_path, glued)) == 1
    assert "FAILED rank 3" in capsys.readouterr().out


def test_lines_are_counted_across_other_output(tmp_path, capsys):
    noise = "no line of NCCL's\n" * 200_000  # more than is read at once
    socket = f"{RANK_3}Channel 02/0 : 3[1] -> 0[0] [send] via NET/Socket/0\n"
    argv = with_rank_3_saying(tmp_path, noise + socket)
    assert main(argv) == 1
    log = tmp_path / "rank3.log"
    assert f"{log}:{len(log.read_text().splitlines())})" in capsys.readouterr().out


def test_any_network_will_do_when_none_is_required(capsys):
    for case in ("efa-two-nodes", "socket-two-nodes", "single-node-p2p", "efa-one-rank-on-socket"):
        assert main(arguments(ROOT / "tests/cases/nccl" / case, "--require", "any")) == 0


@pytest.mark.parametrize("case", ["empty", "efa-init-only", "rank-logs-missing", "efa-one-direction"])
def test_silence_is_a_failure_whatever_is_required(case, capsys):
    for require in ("efa", "socket", "any"):
        assert main(arguments(ROOT / "tests/cases/nccl" / case, "--require", require)) == 1


def test_the_world_size_is_that_of_the_largest_communicator_by_default(capsys):
    assert main([str(ROOT / "tests/cases/nccl/efa-two-nodes")]) == 0
    assert main([str(ROOT / "tests/cases/nccl/rank-logs-missing")]) == 1


def test_files_and_folders_can_be_given_together(capsys):
    case = ROOT / "tests/cases/nccl/efa-two-nodes"
    files = log_files([case])
    assert main([str(path) for path in files]) == 0
    assert main([str(path) for path in files if path.name != "rank6.log"]) == 1


def test_json_holds_evidence_for_each_rank(capsys):
    found = verdict_of(capsys, arguments(ROOT / "tests/cases/nccl/efa-hybrid-mesh"))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        assert rank["plugin_version"] == "1.20.0"
        assert rank["networks"] == ["Libfabric"]
        assert (rank["providers"], rank["fabrics"]) == (["efa"], ["efa"])
        assert sorted(comm["num_hosts"] for comm in rank["communicators"]) == [1, 2, 2]
    assert found["num_hosts"] == 2
    assert {(link["from"][-1], link["to"][-1]) for link in found["links"]} == {("0", "1"), ("1", "0")}


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all"),
        ([], "PATH"),
        (["x", "--require", "ib"], "--require"),
        (["x", "--world-size", "0"], "'0'"),
        (["x", "--world-size", "many"], "'many'"),
    ],
)
def test_bad_usage_exits_with_2_and_names_what_is_wrong(argv, names, capsys):
    try:
        code = main(argv)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert names in capsys.readouterr().err


def test_the_command_runs_by_itself_without_torch():
    case = ROOT / "tests/cases/nccl/efa-two-nodes"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules['torch'] = None\n"
        "from training.transport import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(case)])
    assert done.returncode == 0


def _chatter(path: Path, num_bytes: int, end: bytes) -> None:
    block = (
        b"step 12: loss 2.3140, 46294 tokens/s, this line is about NET/Socket but not NCCL's" + end
    ) * 4096
    with path.open("ab") as stream:
        for _ in range(num_bytes // len(block)):
            stream.write(block)


@pytest.mark.parametrize("end", [b"\n", b"\r"], ids=["lines", "one endless line"])
def test_other_output_of_any_length_needs_no_memory(tmp_path, end):
    log = tmp_path / "job.log"
    lines = (
        (ROOT / "tests/cases/nccl/efa-all-ranks-in-one-file/job.log").read_bytes().splitlines(keepends=True)
    )
    for start in range(0, len(lines), len(lines) // 3):
        _chatter(log, 35_000_000, end)
        with log.open("ab") as stream:
            stream.writelines([b"\n", *lines[start : start + len(lines) // 3]])
    assert log.stat().st_size > 100_000_000

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (80_000_000, 80_000_000))

    command = [sys.executable, "-m", "training.transport", str(log), "--world-size", "4"]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit_memory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
