"""Seconds and host memory to load one model on all ranks of a node: shards streamed, or whole on each rank.

    python -m benchmarks.load --out benchmarks/results/load.json
    python -m benchmarks.load --model tiny --num-ranks 2 --out smoke.json

Without GPUs the shards themselves stay in host memory (fp32 weights, 4 bytes per parameter over all ranks);
with GPUs they do not. `beyond_shards_gib` leaves them out, so that both can be compared. Each way to load has
processes of its own; the files are in the kernel's cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks import cli, figures, ranks
from benchmarks.loops import architecture, shard_as_sample
from benchmarks.processes import PeakMemory
from benchmarks.ranks import Place
from benchmarks.report import Report, present
from training.config import TrainingConfig
from training.loading import load_model
from training.model import read_config
from training.parallel import build_mesh
from training.weights import FileWeights

STREAMED, WHOLE = "ours", "from-pretrained"
DESCRIPTIONS = {
    STREAMED: "each rank reads the rows of its own shards, in fp32",
    WHOLE: "each rank calls from_pretrained in bf16, then FSDP1 takes its shards of that (the sample)",
}
COLUMNS = {
    "name": "",
    "seconds": ".1f",
    "peak_gib": ".2f",
    "peak_unreclaimable_gib": ".2f",
    "shards_gib": ".2f",
    "beyond_shards_gib": ".2f",
    "copies_beyond_shards": ".2f",
    "start_gib": ".2f",
}


@dataclass(frozen=True)
class Options:
    """What every rank needs to know.

    Attributes:
        folder: of the model, as `save_pretrained` writes it.
        model_gib: size of its weights, one copy in bf16.
    """

    out: Path
    model: str
    folder: str
    model_gib: float


def write_model(name: str, folder: str) -> float:
    """Writes an architecture with arbitrary bf16 weights; returns the weights' size in GiB."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture(name), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    block = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0.0, 0.02)
    with torch.no_grad():
        for parameter in model.parameters():
            copies = -(-parameter.numel() // block.numel())
            parameter.copy_(block.repeat(copies)[: parameter.numel()].view_as(parameter))
    model.save_pretrained(folder)
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**30


def load(place: Place, options: Options, name: str) -> None:
    """Every rank's part; rank 0 watches all ranks' memory and writes the result file."""
    pids = [0] * place.world_size
    dist.all_gather_object(pids, os.getpid())
    row = _measure(place, options, name, pids)
    if place.rank == 0:
        Report.resume(options.out).put(row, ("name",))
        print(f"{name}: {row['seconds']:.1f} s, {row['beyond_shards_gib']:.2f} GiB beyond shards", flush=True)


def _measure(place: Place, options: Options, name: str, pids: Sequence[int]) -> dict[str, Any]:
    dist.barrier()
    # One watcher is enough: its counts are of all ranks.
    with PeakMemory(pids if place.rank == 0 else ()) as memory:
        began = time.perf_counter()
        model = _ARMS[name](place, options)
        dist.barrier()
        seconds = time.perf_counter() - began
    about = {"name": name, "description": DESCRIPTIONS[name], "num_ranks": place.world_size}
    return about | _figures(memory, seconds, _on_host_gib(model), options.model_gib)


def _figures(memory: PeakMemory, seconds: float, shards_gib: float, model_gib: float) -> dict[str, Any]:
    start, peak = memory.start, memory.peak
    beyond = peak.total_gib - start.total_gib - shards_gib
    return {
        "seconds": seconds,
        "peak_gib": peak.total_gib,
        "peak_anonymous_gib": peak.anonymous_gib,
        "peak_file_gib": peak.file_gib,
        "peak_unreclaimable_gib": memory.peak_unreclaimable_gib,
        "start_gib": start.total_gib,
        "model_gib": model_gib,
        "shards_gib": shards_gib,
        "beyond_shards_gib": beyond,
        "copies_beyond_shards": beyond / model_gib,
    }


def _on_host_gib(model: nn.Module) -> float:
    """GiB of all ranks' shards, if those are in host memory."""
    own = sum(_local(p).numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu")
    of_ranks = [0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return sum(of_ranks) / 2**30


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _streamed(place: Place, options: Options) -> nn.Module:
    config = TrainingConfig(model_id=options.folder, device=place.device.type, num_workers=place.world_size)
    mesh = build_mesh(place.nodes, config, place.device.type)
    hf_config = read_config(options.folder)
    return load_model(hf_config, FileWeights(options.folder), mesh, config, place.device)


def _whole(place: Place, options: Options) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
    return shard_as_sample(model, options.model, place.device)


_ARMS: dict[str, Callable[[Place, Options], nn.Module]] = {STREAMED: _streamed, WHOLE: _whole}


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "load", __doc__, "Arms: " + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()) + "."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument(
        "--arms", nargs="+", choices=DESCRIPTIONS, default=list(DESCRIPTIONS), help="how to load"
    )
    parser.add_argument(
        "--model", choices=("qwen2.5-1.5b-random", "small", "tiny"), default="qwen2.5-1.5b-random"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="where the model goes")
    parser.add_argument("--num-ranks", type=cli.positive, default=4, help="ranks of the node")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 when it ended early, or 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device == "cuda" and args.num_ranks > torch.cuda.device_count():
        parser.error(f"--num-ranks {args.num_ranks}: {torch.cuda.device_count()} GPUs here")
    Report.start(args.out, "load", {"model": args.model, "num_ranks": args.num_ranks, "device": args.device})
    with tempfile.TemporaryDirectory() as folder:
        model_gib = write_model(args.model, folder)
        options = Options(args.out, args.model, folder, model_gib)
        try:
            for name in args.arms:
                ranks.run(load, (options, name), ["node0"] * args.num_ranks, args.device)
        except ranks.RanksError as error:
            print(error, file=sys.stderr)
            return 1
    present(args.out, COLUMNS, figures.load)
    return 0


if __name__ == "__main__":
    cli.run(main)
