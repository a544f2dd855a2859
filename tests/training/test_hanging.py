"""A hanging collective is named, with the ranks that did not come, while everybody only waits."""

import dataclasses
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ray.util.queue import Empty

from tests.training.engine import configured
from tests.training.ranks import run_ranks
from training import hanging, ray_trainer
from training.diagnosis import WORKER_ENVIRONMENT, Stage
from training.errors import JobError
from training.ray_worker import LastWords

HOUR_NS = 3600 * 10**9


def _wait_beside(worker, clock_moved_ns):
    """Rank 1 comes 4 s late to a collective of this size; what the others' watch said until then."""
    said: list[str] = []
    hanging._POLL_S, hanging._GRACE_S = 0.2, 1.0
    now_ns = time.time_ns
    dist.barrier()
    hanging.time = SimpleNamespace(time_ns=lambda: now_ns() + clock_moved_ns)
    on_cuda = dataclasses.replace(worker, device=torch.device("cuda"), say_last=said.append)
    with hanging.watched(on_cuda, configured(collective_timeout_s=60), Stage("step 4")):
        if worker.rank == 1:
            time.sleep(4)
        dist.all_reduce(torch.ones(5))
    return said


def test_the_collective_and_the_ranks_that_did_not_come_are_named():
    first, late, last = run_ranks(_wait_beside, 3, HOUR_NS)  # for the watch, the timeout of 60 s is over
    assert late == []
    for rank, said in ((0, first), (2, last)):
        assert said == [
            f"rank {rank} on node: gloo:all_reduce of [[5]] in group default_pg in step 4 did not finish "
            "within --collective-timeout-s 60. "
            "Still somewhere else, and the ones to look at: rank 1."
        ]


def test_a_collective_that_takes_less_than_its_timeout_is_nobody_s_business():
    assert run_ranks(_wait_beside, 2, 0) == [[], []]


def test_no_thread_is_left(monkeypatch):
    worker = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(hanging, "_POLL_S", 0.01)
    with hanging.watched(worker, configured(), Stage()):
        (watch,) = (thread for thread in threading.enumerate() if thread.name == "hanging")
    watch.join(timeout=5)
    assert not watch.is_alive()


def test_a_pytorch_without_recorder_is_no_error(monkeypatch):
    monkeypatch.setattr(hanging, "_recorder", lambda: None)
    assert hanging.overdue() is None
    with hanging.watched(SimpleNamespace(device=torch.device("cuda")), configured(), Stage()):
        assert "hanging" not in {thread.name for thread in threading.enumerate()}


def test_the_watchdog_waits_longer_than_the_watch_needs():
    # PyTorch sleeps four times this between finding a timeout and ending the process.
    watchdog_s = 4 * int(WORKER_ENVIRONMENT["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) / 1000
    assert watchdog_s >= 2 * (hanging._POLL_S + hanging._GRACE_S)


class _Queue:
    def __init__(self, *items):
        self._items = list(items)

    def get(self, timeout):
        if not self._items:
            raise Empty
        return self._items.pop(0)


def test_last_words_travel_among_the_records():
    ended, records = Future(), []
    ended.set_result(None)
    words = ray_trainer._follow(
        _Queue({"step": 1}, LastWords("rank 0: x"), {"step": 2}), ended, records.append
    )
    assert (words, records) == (["rank 0: x"], [{"step": 1}, {"step": 2}])


@pytest.mark.parametrize(
    ("own_error", "expected"), [(None, "rank 0: a\nrank 2: b"), (JobError("its own"), "its own")]
)
def test_last_words_explain_a_death_but_not_an_error_with_a_reason(own_error, expected):
    failures = {0: RuntimeError("died"), 1: own_error or RuntimeError("died")}
    error = SimpleNamespace(worker_failures=failures)
    assert str(ray_trainer.worker_failure(error, ["rank 2: b", "rank 0: a"])) == expected
