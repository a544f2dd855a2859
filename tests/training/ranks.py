"""Runs a function on several ranks: processes of this machine, joined by gloo."""

import dataclasses
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from training.worker import Worker

# One process imports PyTorch and Transformers once; ranks fork from it, before it has computed anything.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "transformers.models.qwen2.modeling_qwen2", "training.step"])

_TIMEOUT_S = 120


def run_ranks(function, world_size, *args, nodes=None, group_timeout_s=60):
    """Calls `function(worker, *args)` on every rank; returns what each returned, in rank order.

    Args:
        function: at the top level of an importable module.
        nodes: node of each rank; all on one by default.
        group_timeout_s: of the default process group.

    Raises:
        RankError: with the tracebacks of all ranks that failed.
    """
    nodes = nodes or ["node"] * world_size
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            job = (function, args, rank, nodes, f"{folder}/store", group_timeout_s)
            process = _context.Process(target=_rank, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            outcomes = [_receive(end) for end in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = {rank: text for rank, (is_right, text) in enumerate(outcomes) if not is_right}
    if failures:
        raise RankError(failures)
    return [value for _, value in outcomes]


class RankError(Exception):
    """Tracebacks by rank."""

    def __init__(self, failures):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))


def _receive(end):
    if not end.poll(_TIMEOUT_S):
        return False, f"no answer within {_TIMEOUT_S} s"
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return False, "the process ended"


def _rank(end, function, args, rank, nodes, store, group_timeout_s):
    try:
        answer = True, function(_join(rank, nodes, store, group_timeout_s), *args)
    except BaseException:
        answer = False, traceback.format_exc()
    # Plain pickle copies tensors; multiprocessing's would share memory with a process that is about to end.
    end.send_bytes(pickle.dumps(answer))
    signal.pause()  # others may still want to talk; all are killed together


def _join(rank, nodes, store, group_timeout_s):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, len(nodes)),
        rank=rank,
        world_size=len(nodes),
        timeout=timedelta(seconds=group_timeout_s),
    )
    local_rank = nodes[:rank].count(nodes[rank])
    return Worker(rank, len(nodes), local_rank, nodes[rank], torch.device("cpu"), lambda record: None, print)


def reporting_to(worker, records):
    """The same worker, with its records kept in a list."""
    return dataclasses.replace(worker, report=lambda record: records.append(dict(record)))
