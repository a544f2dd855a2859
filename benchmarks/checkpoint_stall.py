"""How long an asynchronous checkpoint keeps training waiting: PyTorch's own, with pinned staging.

    python -m benchmarks.checkpoint_stall --out benchmarks/results/checkpoint_stall.json
    python -m benchmarks.checkpoint_stall --device cpu --model tiny --out smoke.json

The ranks shard the model over all GPUs of this machine. The fewer there are, the more each has to copy over
its own link to host memory: one GPU copies what the four of a g6.12xlarge share.
`benchmarks.two_nodes_of_four` measures the same in the mesh of two nodes.

A save has two parts. Staging copies the sharded state into pinned host memory; until it is done, the weights
may not change, so training waits: these seconds are reported. Writing the files then goes on beside training,
over a gloo group of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks import cli, ranks
from benchmarks.loops import Workload, load_ours, our_step
from benchmarks.ranks import Place
from benchmarks.report import Report, table
from training.config import TrainingConfig

_NUM_STEPS = 3
_SEQ_LEN = 128  # of the one sequence of a step
KEY = ("save",)
COLUMNS = {
    "save": "d",
    "world_size": "d",
    "blocked_s": ".2f",
    "write_s": ".1f",
    "size_gb": ".2f",
}


class _Stager(DefaultStager):
    """Keeps its pinned memory from save to save: PyTorch 2.11 closes a given stager after the first."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        """Gives the memory back."""
        super().close()


@dataclass(frozen=True)
class Save:
    """One checkpoint.

    Attributes:
        blocked_s: how long training waited, on the slowest rank.
        write_s: until the files were complete, on the slowest rank.
        size_gb: of all files, in 1e9 bytes.
    """

    blocked_s: float
    write_s: float
    size_gb: float


def measure_stall(place: Place, workload: Workload) -> Iterator[Save]:
    """Saves twice while training, since the first save also allocates the pinned memory."""
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
    for name in ("first", "second"):
        path = Path(folder[0]) / name
        blocked_s, write_s = _save(place, _state(model, adamw), path, group, stager, step)
        save = Save(_slowest(blocked_s), _slowest(write_s), _size_gb(path))
        dist.barrier()
        _remove(place, path)
        yield save
    stager.end()
    _remove(place, Path(folder[0]))


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


# --- command line -----------------------------------------------------------------------------------------


def _measure(place: Place, workload: Workload, out: Path) -> None:
    """Every rank's part; rank 0 writes the result file."""
    for number, save in enumerate(measure_stall(place, workload), start=1):
        if place.rank == 0:
            row = {"save": number, "model": workload.model, "world_size": place.world_size} | asdict(save)
            Report.resume(out).put(row, KEY)
            print(f"save {number}: training waited {save.blocked_s:.2f} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("checkpoint_stall", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument("--model", choices=("qwen2.5-1.5b-random", "tiny"), default="qwen2.5-1.5b-random")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-ranks", type=cli.positive, help="ranks (default: all GPUs; 2 on a CPU)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 when a rank failed, or 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; use --device cpu --model tiny to see that everything runs")
    num_ranks = args.num_ranks or (torch.cuda.device_count() if on_gpu else 2)
    if on_gpu and num_ranks > torch.cuda.device_count():
        parser.error(f"--num-ranks {num_ranks}: only {torch.cuda.device_count()} GPUs here")
    config = TrainingConfig(
        model_id=args.model,
        device=args.device,
        num_workers=num_ranks,
        batch_size=1,
        seq_len=_SEQ_LEN,
        gradient_accumulation=1,
        compile="off",
    )
    workload = Workload(args.model, 1, _SEQ_LEN, 1, config)
    Report.start(args.out, "checkpoint_stall", {"num_ranks": num_ranks})
    try:
        ranks.run(_measure, (workload, args.out), ["node0"] * num_ranks, args.device)
    except ranks.RanksError as error:
        print(str(error).splitlines()[-1], file=sys.stderr)
        return 1
    report = Report.resume(args.out)
    report.finish()
    print(table(report.rows, COLUMNS))
    return 0


if __name__ == "__main__":
    cli.run(main)
