"""How long an asynchronous checkpoint keeps training waiting: PyTorch's own, with pinned staging.

A save has two parts. Staging copies the sharded state into pinned host memory; until it is done, the weights
may not change, so training waits: these seconds are reported. Writing the files then goes on beside training,
over a gloo group of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.loops import Workload, load_ours, our_step
from benchmarks.ranks import Place

_NUM_STEPS = 3


class _Stager(DefaultStager):
    """Keeps its pinned memory from save to save: PyTorch 2.11 closes a given stager after the first."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        """Gives the memory back."""
        super().close()


def measure_stall(place: Place, workload: Workload) -> dict[str, Any]:
    """Saves twice while training, since the first save also allocates the pinned memory.

    Returns:
        `blocked_s`: of each save, the slowest rank's; `write_s`: until the files were complete;
        `size_gb`: of all files.
    """
    model, adamw = load_ours(place, workload)
    step = our_step(place, workload, model, adamw)
    group = dist.new_group(backend="gloo")
    on_gpu = place.device.type == "cuda"
    stager = _Stager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=on_gpu,
            use_non_blocking_copy=on_gpu,
        )
    )
    for _ in range(_NUM_STEPS):
        step()
    folder = [tempfile.mkdtemp() if place.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    blocked, written, size_gb = [], [], 0.0
    for save in ("first", "second"):
        path = Path(folder[0]) / save
        blocked_s, written_s = _save(place, _state(model, adamw), path, group, stager, step)
        blocked.append(_slowest(blocked_s))
        written.append(_slowest(written_s))
        size_gb = _size_gb(path)
        dist.barrier()
        _remove(place, path)
    stager.end()
    _remove(place, Path(folder[0]))
    return {"blocked_s": blocked, "write_s": written, "size_gb": size_gb}


def _save(
    place: Place,
    state: dict[str, Any],
    path: Path,
    group: dist.ProcessGroup,
    stager: _Stager,
    step: Any,
) -> tuple[float, float]:
    """One save, with training going on as soon as it may: seconds blocked, seconds until written."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    dist.barrier()
    began = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=path, process_group=group, async_stager=stager)
    staged = getattr(future, "staging_completion", None)
    if staged is not None:
        staged.result()
    blocked_s = time.perf_counter() - began
    for _ in range(_NUM_STEPS):
        step()
    getattr(future, "upload_completion", future).result()
    return blocked_s, time.perf_counter() - began


def _state(model: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and moments; a tied head is left out, since it would be written twice."""
    weights, moments = get_state_dict(model, adamw)
    embedding, head = model.hf.get_input_embeddings().weight, model.hf.get_output_embeddings().weight
    if embedding is head:
        weights.pop("hf.lm_head.weight", None)
    return {"model": weights, "optimizer": moments}


def _slowest(seconds: float) -> float:
    of_ranks = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, seconds)
    return max(of_ranks)


def _size_gb(path: Path) -> float:
    return sum(file.stat().st_size for file in path.iterdir()) / 1e9


def _remove(place: Place, path: Path) -> None:
    if place.rank == 0:
        for file in path.iterdir():
            os.remove(file)
        path.rmdir()
