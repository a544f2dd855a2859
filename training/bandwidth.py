"""Collectives over the groups that training uses: a first exercise, and their bus bandwidth.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md): what each rank would have to move over its slowest link for
an ideal ring, so that figures of different operations and group sizes compare with the speed of the hardware.
  all-reduce: bytes / time x 2 (n - 1) / n;  all-gather: bytes of the whole result / time x (n - 1) / n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from training.agreement import Agreement

MIB = 1 << 20
CUDA_SIZES_BYTES = (MIB, 16 * MIB, 128 * MIB)
CPU_SIZES_BYTES = (MIB // 16, MIB)
_NUM_REPEATS = 3
# Larger sizes are left out once one took this long: a slow network is known to be slow by then.
_SLOW_S = 0.5
# PyTorch 2.13 renames these; the older names still exist, and warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """A process group of the job, as this rank sees it.

    Attributes:
        name: "world", or the mesh dimension.
        ranks: its members' world ranks, in the group's order.
        num_hosts: hosts they are on.
        num_parallel: groups of this kind that share each node's network: four replicate groups on a node of
            four GPUs, but one world.
        handle: PyTorch's object.
    """

    name: str
    ranks: tuple[int, ...]
    num_hosts: int
    num_parallel: int
    handle: dist.ProcessGroup


def groups_of(mesh: DeviceMesh, nodes: Sequence[str]) -> list[Group]:
    """The groups of each mesh dimension, and the world's.

    Args:
        mesh: of one or two dimensions.
        nodes: the node of each world rank.
    """
    handles = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()} | {"world": dist.group.WORLD}
    return [_group(name, handle, nodes) for name, handle in handles.items()]


def _group(name: str, handle: dist.ProcessGroup, nodes: Sequence[str]) -> Group:
    ranks = tuple(dist.get_process_group_ranks(handle))
    mine = nodes[dist.get_rank()]
    num_here = sum(nodes[rank] == mine for rank in ranks)
    return Group(name, ranks, len({nodes[rank] for rank in ranks}), nodes.count(mine) // num_here, handle)


def exercise(groups: Sequence[Group], device: torch.device) -> None:
    """All-reduce, reduce-scatter and all-gather once over every group, with their results checked.

    Raises:
        RuntimeError: a collective failed, or gave a wrong result.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device of its own
    for group in groups:
        own, num_ranks = group.ranks.index(dist.get_rank()), len(group.ranks)
        ones = torch.ones(num_ranks * 1024, device=device)
        reduced = ones * (own + 1)
        dist.all_reduce(reduced, group=group.handle)
        part = torch.empty(1024, device=device)
        _reduce_scatter(part, ones * (own + 1), group=group.handle)
        gathered = torch.empty_like(ones)
        _all_gather(gathered, part * 0 + own, group=group.handle)
        total = num_ranks * (num_ranks + 1) / 2
        ranks = torch.arange(num_ranks, device=device, dtype=torch.float32).repeat_interleave(1024)
        if not (
            bool((reduced == total).all()) and bool((part == total).all()) and torch.equal(gathered, ranks)
        ):
            raise RuntimeError(f"a collective over the {group.name} group of {num_ranks} gave a wrong result")


def measure(groups: Sequence[Group], device: torch.device, agreement: Agreement) -> list[dict[str, Any]]:
    """Bus bandwidth of all-reduce and all-gather, at several sizes, over every set of two ranks or more.

    Returns:
        The same rows on every rank: `group`, `operation`, `num_ranks`, `num_hosts`, `bytes`, `time_s` (of the
        slowest rank), `bus_gb_per_s` (1e9 bytes a second), and `node_gb_per_s`: the same over all groups that
        share a node's network, None for groups within a node.
    """
    sizes = CUDA_SIZES_BYTES if device.type == "cuda" else CPU_SIZES_BYTES
    rows = []
    for group in {frozenset(group.ranks): group for group in reversed(groups)}.values():
        if len(group.ranks) < 2:
            continue
        for operation in ("all_reduce", "all_gather"):
            for num_bytes in sizes:
                time_s = max(agreement.gather(_time(group, operation, num_bytes, device)))
                rows.append(_row(group, operation, num_bytes, time_s))
                if time_s > _SLOW_S:
                    break
    if device.type == "cuda":
        torch.cuda.empty_cache()  # training shall find the memory as if nothing had been measured
    return rows


def _time(group: Group, operation: str, num_bytes: int, device: torch.device) -> float:
    """Seconds of one collective, on this rank; the first one is not counted."""
    run = _collective(group, operation, num_bytes, device)
    run()
    _wait(device)
    started = time.perf_counter()
    for _ in range(_NUM_REPEATS):
        run()
    _wait(device)
    return (time.perf_counter() - started) / _NUM_REPEATS


def _collective(group: Group, operation: str, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    num_ranks = len(group.ranks)
    per_rank = torch.zeros(num_bytes // 4 // num_ranks, device=device)
    whole = torch.zeros(per_rank.numel() * num_ranks, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group.handle)
    return lambda: _all_gather(whole, per_rank, group=group.handle)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(group: Group, operation: str, num_bytes: int, time_s: float) -> dict[str, Any]:
    bus = bus_gb_per_s(operation, num_bytes, len(group.ranks), time_s)
    return {
        "group": group.name,
        "operation": operation,
        "num_ranks": len(group.ranks),
        "num_hosts": group.num_hosts,
        "bytes": num_bytes,
        "time_s": time_s,
        "bus_gb_per_s": bus,
        "node_gb_per_s": bus * group.num_parallel if group.num_hosts > 1 else None,
    }


def bus_gb_per_s(operation: str, num_bytes: int, num_ranks: int, time_s: float) -> float:
    """Bus bandwidth in 1e9 bytes a second, by the formulas of this module's docstring.

    Args:
        operation: "all_reduce" or "all_gather".
        num_bytes: of the whole buffer (for all-gather: of the gathered result).
    """
    rounds = {"all_reduce": 2, "all_gather": 1}[operation]
    return num_bytes / time_s * rounds * (num_ranks - 1) / num_ranks / 1e9


def best_between_hosts(rows: Sequence[dict[str, Any]]) -> float | None:
    """The highest rate at which a node was seen to talk to others, in GB/s; None if none did."""
    return max((row["node_gb_per_s"] for row in rows if row["node_gb_per_s"] is not None), default=None)
