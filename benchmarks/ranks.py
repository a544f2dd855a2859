"""Starts a benchmark's ranks on this machine, one process each, and says where each one stands."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessContext, ProcessException

from benchmarks.hosts import bytes_sent

TIMEOUT_S = 180
# NCCL treats processes with different host ids as being on different hosts: what they say to each other goes
# over the network, here TCP on the loopback interface. MNNVL would find the NVLink between them all the same.
SLOW_NETWORK = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
_RANK, _NODE = "{rank}", "{node}"  # stand for the rank's own in values of the environment
# For several ranks on one GPU. NCCL refuses two ranks of one host there, so each is a host of its own; and
# what NCCL then takes for hosts of one GPU must not get PAT, an algorithm that nodes of several GPUs never
# run (`ncclPatEnable` in NCCL's src/graph/tuning.cc).
SHARED_GPUS = SLOW_NETWORK | {"NCCL_HOSTID": f"rank{_RANK}", "NCCL_PAT_ENABLE": "0"}
# Multicast over NVLink needs a fabric manager that virtual machines may not reach; NCCL then fails at start.
_ALWAYS = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


class RanksError(RuntimeError):
    """A rank failed; the message ends with its error."""


@dataclass(frozen=True)
class Place:
    """One rank.

    Attributes:
        nodes: for each rank the name of its (emulated) node.
    """

    rank: int
    nodes: tuple[str, ...]
    device: torch.device

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


def agree(failure: str | None) -> str | None:
    """The first rank's failure, or None if no rank has one; the same on all.

    Objects travel over gloo, so this works when NCCL no longer does.
    """
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next(filter(None, failures), None)


def time_is_up(stop_at: float) -> bool:
    """Whether it is past this `time.time()` on any rank; the same on all."""
    return agree("time is up" if time.time() > stop_at else None) is not None


def bytes_sent_at_rest(place: Place, interface: str) -> int:
    """An interface's counter at a moment when no rank is sending. Every rank calls this."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    dist.barrier()
    now = bytes_sent(interface)
    dist.barrier()
    return now


def run(
    work: Callable[..., None],
    arguments: Sequence[Any],
    nodes: Sequence[str],
    device_type: str,
    environment: Mapping[str, str] | None = None,
    hosts_are_separate: bool = True,
) -> None:
    """Runs `work(place, *arguments)` in one process per entry of `nodes`; returns when all have ended.

    Args:
        work: a function of a module (it is pickled).
        nodes: for each rank its node's name.
        device_type: "cuda" or "cpu".
        environment: for every rank, set before any collective library looks; "{rank}" and
            "{node}" in a value become the rank's own.
        hosts_are_separate: tell NCCL that nodes of different names are different hosts.

    Raises:
        RanksError: a rank failed; the others have been ended.
    """
    settings = dict(environment or {})
    if hosts_are_separate and len(set(nodes)) > 1:
        settings["NCCL_HOSTID"] = _NODE
    of_all = (work, tuple(arguments), tuple(nodes), device_type, _free_port(), settings)
    try:
        _run_to_the_end(mp.start_processes(_process, of_all, len(nodes), join=False, start_method="spawn"))
    except ProcessException as error:
        raise RanksError(str(error).strip()) from None


def _run_to_the_end(processes: ProcessContext) -> None:
    try:
        while not processes.join():
            pass
    finally:
        end(processes.processes)


def end(processes: Sequence[BaseProcess]) -> None:
    """Kills ranks all at once: one that outlived another would print what it makes of that."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _process(rank: int, *arguments: Any) -> None:
    # Ctrl-C is for the process that started this one, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _rank(rank, *arguments)


def _rank(
    rank: int,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    nodes: tuple[str, ...],
    device_type: str,
    port: int,
    environment: Mapping[str, str],
) -> None:
    set_environment(environment, rank, nodes)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(nodes)))
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(nodes)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = Place(rank, nodes, device_of(device_type, rank))
    join(place)
    try:
        work(place, *arguments)
    finally:
        dist.destroy_process_group()


def set_environment(environment: Mapping[str, str], rank: int, nodes: Sequence[str]) -> None:
    """Sets this rank's variables: "{rank}" and "{node}" in a value become the rank's own."""
    for name, value in (_ALWAYS | dict(environment)).items():
        os.environ[name] = value.replace(_RANK, str(rank)).replace(_NODE, nodes[rank])


def device_of(device_type: str, rank: int) -> torch.device:
    """Where a rank computes: ranks share GPUs in turn where there are fewer."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def join(place: Place) -> None:
    """Makes the default process group of this rank."""
    on_gpu = place.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
