"""Step records and summary: on a disk, and in S3 (moto's server on loopback)."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from training import records
from training.progress import Progress
from training.records import RunFolder
from training.storage import STORAGE_ERRORS, absolute, locate


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue("s3")


def content(storage: str, name: str) -> bytes:
    return locate(storage).child(f"run/{name}").read()


def steps(storage: str) -> list[int]:
    return [json.loads(line)["step"] for line in content(storage, "steps.jsonl").splitlines()]


def summary(storage: str) -> dict:
    return json.loads(content(storage, "summary.json"))


def test_records_and_summary_are_there_at_the_end(storage: str) -> None:
    folder = RunFolder(storage, "run")
    folder.start({"steps": 3})
    for step in (1, 2, 3):
        folder.add({"step": step, "loss": 1.0 / step})
    told = folder.finish("succeeded", {"last_loss": 0.5})
    assert steps(storage) == [1, 2, 3]
    assert summary(storage) == told
    assert told["status"] == "succeeded"
    assert told["last_loss"] == 0.5
    assert told["config"] == {"steps": 3}


def test_records_are_there_while_the_job_runs(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_REWRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr(records, "_REWRITE_BYTES_PER_S", 1e12)
    folder = RunFolder(storage, "run")
    folder.start({})
    for step in (1, 2):
        folder.add({"step": step})
        assert steps(storage) == list(range(1, step + 1))


def test_a_new_attempt_hides_the_result_of_the_one_before(storage: str) -> None:
    folder = RunFolder(storage, "run")
    folder.start({})
    folder.add({"step": 1})
    folder.finish("succeeded", {})
    RunFolder(storage, "run").start({})
    assert summary(storage)["status"] == "running"
    assert steps(storage) == []


def test_a_failure_is_recorded_with_its_reason(storage: str) -> None:
    folder = RunFolder(storage, "run")
    folder.start({})
    folder.finish("failed", {}, "rank 1: no data")
    assert summary(storage)["error"] == "rank 1: no data"


def test_an_object_store_is_not_written_for_every_step(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_REWRITE_INTERVAL_S", 3600.0)
    folder = RunFolder(s3, "run")
    folder.start({})
    for step in range(5):
        folder.add({"step": step})
    assert steps(s3) == []
    folder.finish("succeeded", {})
    assert steps(s3) == [0, 1, 2, 3, 4]


def test_a_store_that_fails_for_a_while_loses_no_record(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_REWRITE_INTERVAL_S", 0.0)
    folder = RunFolder(s3, "run")
    folder.start({})
    with monkeypatch.context() as away:
        away.setattr(records.Place, "write", lambda *_: (_ for _ in ()).throw(OSError("slow down")))
        folder.add({"step": 1})
    folder.finish("succeeded", {})
    assert steps(s3) == [1]


def test_a_bucket_that_does_not_exist_is_found_at_the_start(s3: str) -> None:
    with pytest.raises(STORAGE_ERRORS, match="NO_SUCH_BUCKET"):
        RunFolder("s3://no-such-bucket/runs", "run").start({})


def test_uris_stay_as_they_are_and_paths_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("s3://bucket/key") == "s3://bucket/key"
    assert absolute("results") == str(tmp_path / "results")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


RECORD = {"step": 7, "loss": 2.5, "tokens_per_s": 12345.6}


def test_a_log_gets_one_plain_line_a_step() -> None:
    log = StringIO()
    progress = Progress(100, log)
    progress.show(RECORD)
    progress.close()
    assert log.getvalue() == "step   7/100  loss 2.5000  12,346 tokens/s\n"


def test_a_terminal_gets_the_line_and_a_bar() -> None:
    terminal = Terminal()
    progress = Progress(100, terminal)
    progress.show(RECORD)
    progress.close()
    assert "step   7/100  loss 2.5000" in terminal.getvalue()
    assert "7/100 [" in terminal.getvalue()


def test_a_loss_that_is_not_finite_is_said_in_words() -> None:
    log = StringIO()
    Progress(9, log).show({"step": 1, "loss": None, "tokens_per_s": 1.0, "skipped": True})
    assert log.getvalue() == "step 1/9  loss not finite  1 tokens/s  skipped\n"
