"""What may never change a verdict: order, mixture, other output. What a cut may never do: become a pass."""

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.nccl_log import read
from training.transport import Verdict, judge, log_files

CASES = {
    path.parent: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "cases/nccl").glob("*/expected.json"))
}
PASSING = [case for case, want in CASES.items() if want["pass"]]
# In this one a single line is the whole fault, so that logs cut before it rightly pass.
FAILING = [case for case, want in CASES.items() if not want["pass"] and case.name != "one-channel-on-socket"]

quickly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def logs_of(case: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log_files([case]) if path.suffix == ".log"}


def verdict_on(case: Path, logs: dict[str, bytes], folder: Path) -> Verdict:
    for path in folder.iterdir():
        path.unlink()
    for name, content in logs.items():
        (folder / name).write_bytes(content)
    want = CASES[case]
    return judge(read(log_files([folder])), "efa", want["world_size"], want.get("require_gpudirect", False))


def outcome(verdict: Verdict) -> tuple[str, bool]:
    return verdict.word, verdict.passed


def lines_of(logs: dict[str, bytes]) -> list[bytes]:
    return [line for content in logs.values() for line in content.splitlines(keepends=True)]


@quickly
@given(case=st.sampled_from(list(CASES)), data=st.data())
def test_the_order_of_lines_does_not_matter(case, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shuffled")
    logs = logs_of(case)
    want = outcome(verdict_on(case, logs, folder))
    shuffled = {
        name: b"".join(data.draw(st.permutations(content.splitlines(keepends=True))))
        for name, content in logs.items()
    }
    assert outcome(verdict_on(case, shuffled, folder)) == want


@quickly
@given(case=st.sampled_from(list(CASES)), seed=st.randoms(use_true_random=False))
def test_the_split_over_files_does_not_matter(case, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interleaved")
    logs = logs_of(case)
    want = outcome(verdict_on(case, logs, folder))
    queues = [content.splitlines(keepends=True) for content in logs.values() if content]
    mixed = []
    while queues:
        queue = seed.choice(queues)
        mixed.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    assert outcome(verdict_on(case, {"job.log": b"".join(mixed)}, folder)) == want


@quickly
@given(
    case=st.sampled_from(list(CASES)),
    chatter=st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(
                [
                    b"using NET/Socket here",
                    b"NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
                    b"Selected provider is tcp",
                    b"NCCL WARN",
                    b"a:1:1 [0] NCCL",
                    b"\x00\xff",
                    b"Using network Socket",
                ]
            ),
        ),
        max_size=20,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_other_output_between_the_lines_does_not_matter(case, chatter, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatter")
    logs = logs_of(case)
    want = outcome(verdict_on(case, logs, folder))
    lines = lines_of(logs)
    for noise in chatter:
        lines.insert(seed.randint(0, len(lines)), noise.replace(b"\n", b" ") + b"\n")
    assert outcome(verdict_on(case, {"job.log": b"".join(lines)}, folder)) == want


@quickly
@given(case=st.sampled_from(FAILING), data=st.data())
def test_cutting_a_log_never_makes_a_failure_pass(case, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    logs = logs_of(case)
    name = data.draw(st.sampled_from(sorted(logs)))
    logs[name] = logs[name][: data.draw(st.integers(0, len(logs[name])))]
    assert not verdict_on(case, logs, folder).passed


@quickly
@given(case=st.sampled_from(PASSING), data=st.data())
def test_a_cut_log_is_unproven_at_worst_and_never_another_network(case, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    logs = logs_of(case)
    name = data.draw(st.sampled_from(sorted(logs)))
    logs[name] = logs[name][: data.draw(st.integers(0, len(logs[name])))]
    assert verdict_on(case, logs, folder).word in ("efa", "unproven")


@quickly
@given(case=st.sampled_from(PASSING), num_bytes=st.integers(1, 200))
def test_a_truncated_last_line_costs_only_that_line(case, num_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("truncated")
    logs = logs_of(case)
    last = {name: content.splitlines(keepends=True)[-1] for name, content in logs.items()}
    cut = {name: content[: -min(num_bytes, len(last[name]))] for name, content in logs.items()}
    without = {name: content[: -len(last[name])] for name, content in logs.items()}
    assert outcome(verdict_on(case, cut, folder)) in (
        outcome(verdict_on(case, logs, folder)),
        outcome(verdict_on(case, without, folder)),
    )


@quickly
@given(case=st.sampled_from(PASSING), data=st.data())
def test_a_rank_less_is_never_a_pass(case, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("less")
    logs = logs_of(case)
    hosts = sorted({process.key for process in read(log_files([case]))})
    host, pid = data.draw(st.sampled_from(hosts))
    gone = f"{host}:{pid}:".encode()
    less = {
        name: b"".join(line for line in content.splitlines(keepends=True) if gone not in line)
        for name, content in logs.items()
    }
    assert verdict_on(case, less, folder).word == "unproven"


@quickly
@given(content=st.binary(max_size=4000))
def test_no_content_makes_the_reader_fail(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "rank0.log"
    path.write_bytes(content)
    assert not judge(read([path])).passed
