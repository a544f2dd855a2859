"""Out of memory and hanging collectives: the message says who, where, and what to change."""

import dataclasses
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.training.engine import configured
from tests.training.ranks import run_ranks
from training.diagnosis import WORKER_ENVIRONMENT, Stage, explained
from training.errors import JobError
from training.worker import Worker

WORKER = Worker(3, 8, 3, "node-1", torch.device("cpu"), lambda record: None, print)


def _raised(error, **changes):
    config = dataclasses.replace(configured(), **changes)
    with pytest.raises(JobError) as raised, explained(WORKER, config, Stage("step 7")):
        raise error
    return str(raised.value)


def test_out_of_memory_names_rank_step_and_settings():
    text = _raised(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), activation_memory="0.5"
    )
    assert text.startswith("rank 3 on node-1: out of device memory in step 7.")
    assert "--activation-memory 0.5 lower, or full; --batch-size 2 lower" in text
    assert "--reshard-after-forward" in text and "--sharding full" in text
    assert text.endswith("PyTorch says: CUDA out of memory. Tried to allocate 2 GiB.")


def test_out_of_memory_advises_only_what_is_left_to_change():
    text = _raised(
        torch.OutOfMemoryError("x"),
        activation_memory="full",
        batch_size=1,
        reshard_after_forward=True,
        sharding="full",
    )
    advice = text.partition("helps: ")[2].partition(". PyTorch")[0]
    assert advice == "--seq-len 16 lower"


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shape mismatch"), explained(WORKER, configured(), Stage()):
        raise RuntimeError("shape mismatch")


def _hang(worker):
    """Rank 1 does not come to the collective that the others wait in."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    if worker.rank == 1:
        time.sleep(6)
        return "was elsewhere"
    try:
        with explained(worker, configured(collective_timeout_s=2), Stage("step 4")):
            dist.all_reduce(torch.ones(4))
    except JobError as error:
        return str(error)


def test_a_hanging_collective_names_rank_collective_step_and_who_is_missing():
    first, missing, last = run_ranks(_hang, 3)
    assert missing == "was elsewhere"
    for rank, text in ((0, first), (2, last)):
        assert text.startswith(
            f"rank {rank} on node: all_reduce in step 4 did not finish within --collective-timeout-s 2."
        )
        assert "Still somewhere else, and the ones to look at: rank 1." in text


def test_the_environment_makes_nccl_s_watchdog_compare_the_ranks():
    assert WORKER_ENVIRONMENT["TORCH_NCCL_DESYNC_DEBUG"] == "1"
    assert WORKER_ENVIRONMENT["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
