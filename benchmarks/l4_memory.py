"""Does a job fit an L4's memory? The product's own sharding with every rank limited to 22 GB.

    python -m benchmarks.l4_memory --out benchmarks/results/l4_memory.json
    python -m benchmarks.l4_memory --num-full-nodes 1 --settings 4x2048:0.3 4x2048:0.5 --out one_gpu.json

Eight ranks form the mesh of 2 x g6.12xlarge, however few GPUs there are: several ranks share one. Allocator,
sharding and kernels are those of the job, so that peaks and allocation retries are real. Step times are not,
and are left out: ranks take turns on a GPU and talk TCP over loopback, since NCCL refuses two ranks of one
host on one GPU.

One GPU of 140 GB does not hold eight such ranks. With --num-full-nodes 1 it does: the ranks of the other node
hold the same shards and take part in every collective, but train on one short sequence, without the compiler.
Only the ranks of full nodes are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import cli, figures, ranks
from benchmarks.loops import OURS, Workload, architecture, build_ours
from benchmarks.plans import L4_MEMORY_GB
from benchmarks.ranks import Place
from benchmarks.report import Report, present
from training import estimate, metrics
from training.config import TrainingConfig, activation_budget
from training.cost_model import Cluster
from training.diagnosis import WORKER_ENVIRONMENT
from training.shape import ModelShape

GPUS_PER_NODE = 4
# More micro-batches need no more memory than two, and take longer.
_NUM_MICRO_BATCHES = 2
_SHORT_BATCH_SIZE, _SHORT_SEQ_LEN = 1, 128
_DEFAULTS = TrainingConfig()
_DEFAULT_SETTING = f"{_DEFAULTS.batch_size}x{_DEFAULTS.seq_len}:{_DEFAULTS.activation_memory}"
KEY = ("batch_size", "seq_len", "activation_memory", "allocator", "cap_gib")
COLUMNS = {
    "batch_size": "d",
    "seq_len": "d",
    "activation_memory": "",
    "allocator": "",
    "num_nodes": "d",
    "num_full_nodes": "d",
    "peak_allocated_gib": ".2f",
    "peak_reserved_gib": ".2f",
    "cap_gib": ".2f",
    "num_alloc_retries": "d",
    "predicted_gib": ".2f",
    "off": "+.1%",
    "error": "",
}
ALLOCATORS = {"expandable": WORKER_ENVIRONMENT["PYTORCH_CUDA_ALLOC_CONF"], "default": ""}
DESCRIPTIONS = {
    "expandable": "segments that grow, as the job's workers have them",
    "default": "PyTorch's default, of segments with fixed sizes",
}


@dataclass(frozen=True)
class Options:
    """What every rank needs to know of one trial.

    Attributes:
        num_full_nodes: nodes, the first ones, whose ranks train on the whole batch.
    """

    out: Path
    model: str
    allocator: str
    num_steps: int
    num_full_nodes: int
    cap_gb: int
    config: TrainingConfig


def measure(place: Place, options: Options) -> None:
    """Every rank's part of one trial; rank 0 writes the row."""
    cap_bytes = options.cap_gb * 1_000_000_000
    total_bytes = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), place.device)
    step = build_ours(place, _workload(place, options))
    for _ in range(options.num_steps):
        step()
        torch.cuda.synchronize(place.device)
    of_ranks: list[Any] = [None] * place.world_size
    dist.all_gather_object(of_ranks, metrics.memory(place.device))
    if place.rank == 0:
        full = of_ranks[: options.num_full_nodes * GPUS_PER_NODE]
        row = _row(place.num_nodes, options) | _figures(full, options, place)
        Report.resume(options.out).put(row, KEY)


def _workload(place: Place, options: Options) -> Workload:
    """The whole batch, or a short one on a rank that only makes up the mesh."""
    config = options.config
    if place.rank >= options.num_full_nodes * GPUS_PER_NODE:
        config = dataclasses.replace(
            config, batch_size=_SHORT_BATCH_SIZE, seq_len=_SHORT_SEQ_LEN, compile="off"
        )
    return Workload(options.model, config.batch_size, config.seq_len, _NUM_MICRO_BATCHES, config)


def _row(num_nodes: int, options: Options) -> dict[str, Any]:
    config = options.config
    return {
        "name": OURS,
        "model": options.model,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "activation_memory": config.activation_memory,
        "allocator": options.allocator,
        "gradient_accumulation": config.gradient_accumulation,
        "num_nodes": num_nodes,
        "num_full_nodes": options.num_full_nodes,
        "world_size": num_nodes * GPUS_PER_NODE,
        "num_steps": options.num_steps,
        "cap_gib": options.cap_gb * 1e9 / metrics.GIB,
        "error": None,
        **dict.fromkeys(
            ("peak_allocated_gib", "peak_reserved_gib", "num_alloc_retries", "predicted_gib", "off")
        ),
    }


def _figures(of_ranks: Sequence[dict[str, Any]], options: Options, place: Place) -> dict[str, Any]:
    """The worst rank's memory, and what the predictor says of it."""
    worst = metrics.highest(of_ranks)
    shape = ModelShape.from_hf_config(architecture(options.model))
    cluster = Cluster(place.num_nodes, place.world_size // place.num_nodes)
    predicted = estimate.memory_gib(options.config, shape, cluster)
    return worst | {"predicted_gib": predicted, "off": predicted / worst["peak_allocated_gib"] - 1}


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "l4_memory",
        __doc__,
        "Allocators: " + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()) + ".",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument(
        "--settings",
        nargs="+",
        type=_setting,
        default=[_DEFAULT_SETTING],
        metavar="BxS:A",
        help="sequences x tokens : activation memory",
    )
    parser.add_argument(
        "--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS), help="of GPU memory"
    )
    parser.add_argument("--num-nodes", type=cli.positive, default=2, help="nodes of four ranks each")
    parser.add_argument(
        "--num-full-nodes",
        type=cli.positive,
        help=f"the others train on {_SHORT_BATCH_SIZE}x{_SHORT_SEQ_LEN} (default: all nodes)",
    )
    parser.add_argument(
        "--num-steps", type=cli.positive, default=3, help="the second is the first with Adam's moments"
    )
    parser.add_argument(
        "--cap-gb",
        type=cli.positive,
        default=L4_MEMORY_GB,
        help="memory of a rank, in 1e9 bytes; with more, what it would reserve is seen",
    )
    parser.add_argument("--model", choices=("qwen2.5-1.5b-random", "tiny"), default="qwen2.5-1.5b-random")
    return parser


def _setting(text: str) -> str:
    found = re.fullmatch(r"[1-9]\d*x[1-9]\d*:(.+)", text)
    if not found or activation_budget(found[1]) is None:
        raise argparse.ArgumentTypeError(
            f"{text}: write sequences x tokens : activation memory, such as {_DEFAULT_SETTING} or 8x2048:full"
        )
    return text


def _config(text: str, model: str, num_ranks: int) -> TrainingConfig:
    sizes, _, activation_memory = text.partition(":")
    batch_size, seq_len = map(int, sizes.split("x"))
    return dataclasses.replace(
        _DEFAULTS,
        model_id=model,
        num_workers=num_ranks,
        batch_size=batch_size,
        seq_len=seq_len,
        activation_memory=activation_memory,
        gradient_accumulation=_NUM_MICRO_BATCHES,
    )


def _run(options: Options, num_nodes: int) -> None:
    """One trial in processes of its own: a rank that runs out of memory ends them all."""
    nodes = [f"node{rank // GPUS_PER_NODE}" for rank in range(num_nodes * GPUS_PER_NODE)]
    environment = ranks.SHARED_GPUS | {
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[options.allocator],
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }
    try:
        ranks.run(measure, (options,), nodes, "cuda", environment, hosts_are_separate=False)
    except ranks.RanksError as error:
        reason = str(error).splitlines()[-1]
        failure = "out of memory" if "OutOfMemoryError" in reason else reason
        Report.resume(options.out).put(_row(num_nodes, options) | {"error": failure}, KEY)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, 1 when a trial failed or had to retry an allocation, 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU here, and only a GPU's memory can be limited")
    num_full_nodes = args.num_full_nodes or args.num_nodes
    if num_full_nodes > args.num_nodes:
        parser.error(f"--num-full-nodes {num_full_nodes}: --num-nodes is {args.num_nodes}")
    parameters = {"num_nodes": args.num_nodes, "allocators": args.allocators, "settings": args.settings}
    Report.start(args.out, "l4_memory", parameters)
    for setting in args.settings:
        config = _config(setting, args.model, args.num_nodes * GPUS_PER_NODE)
        for allocator in args.allocators:
            print(f"{setting}, allocator {allocator} ...", flush=True)
            options = Options(
                args.out, args.model, allocator, args.num_steps, num_full_nodes, args.cap_gb, config
            )
            _run(options, args.num_nodes)
    rows = present(args.out, COLUMNS, figures.l4_memory)
    return 1 if any(row["error"] or row["num_alloc_retries"] for row in rows) else 0


if __name__ == "__main__":
    cli.run(main)
