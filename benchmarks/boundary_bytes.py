"""Bytes that really cross a node boundary per optimizer step, counted by the kernel, against theory.

    sudo python -m benchmarks.boundary_bytes --out benchmarks/results/boundary_bytes_gloo.json
    sudo python -m benchmarks.boundary_bytes --transport nccl --out nccl.json

Hosts are network namespaces, and the counter is that of each host's veth interface. Ranks of NCCL may share
GPUs, however few there are; NCCL then sends between all of them over the network stack, and what stays inside
a namespace is not counted.

gloo has no ring reduce-scatter of its own: PyTorch makes it an all-reduce and drops the rest, so that it
sends twice what a ring (and NCCL) needs. The result file has both expectations: `ring_gb` for a ring, and
`expected_gb` for the transport that was used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import cli, figures, ranks
from benchmarks.hosts import INTERFACE, Hosts, HostsError, why_not
from benchmarks.loops import AWS_SAMPLE, BUILDERS, OURS, Workload, architecture, clear
from benchmarks.ranks import Place
from benchmarks.report import Report, present
from training import estimate
from training.config import TrainingConfig
from training.cost_model import Cluster, reduce_traffic
from training.shape import ModelShape

KEY = ("scheme", "gradient_accumulation")
COLUMNS = {
    "scheme": "",
    "gradient_accumulation": "d",
    "measured_gb": ".5f",
    "expected_gb": ".5f",
    "off": "+.3%",
    "ring_gb": ".5f",
}
TOLERANCE = 0.02
# Small messages go by NCCL's LL protocol, which sends a flag with every 4 bytes. A small model's would be
# counted with their flags: they are sent by the protocol of large messages, as those of a real model are.
_SMALL, _SMALL_PROTOCOL = "small", {"NCCL_PROTO": "Simple"}
_MODELS = {"gloo": _SMALL, "nccl": "qwen2.5-1.5b-random"}
TIMEOUT_S = 900


@dataclass(frozen=True)
class Scheme:
    """A way to shard.

    Attributes:
        label: its name in tables and on the command line.
        loop: which training loop.
        ours: fields of `TrainingConfig` that choose it, for our loop.
    """

    label: str
    loop: str
    ours: dict[str, Any]


SCHEMES = (
    Scheme("aws-sample", AWS_SAMPLE, {}),
    Scheme("full-gathered-twice", OURS, {"sharding": "full", "reshard_after_forward": True}),
    Scheme("full-kept-gathered", OURS, {"sharding": "full"}),
    Scheme("hybrid", OURS, {"sharding": "hybrid"}),
)


@dataclass(frozen=True)
class Options:
    """What every rank needs to know.

    Attributes:
        stop_at: `time.time()` after which no scheme begins.
    """

    out: Path
    model: str
    transport: str
    schemes: tuple[str, ...]
    accumulations: tuple[int, ...]
    num_steps: int
    stop_at: float


def count_all(place: Place, options: Options) -> None:
    """Every rank's part; rank 0 writes the result file."""
    report = Report.resume(options.out) if place.rank == 0 else None
    schemes = [scheme for scheme in SCHEMES if scheme.label in options.schemes]
    for k, scheme in product(options.accumulations, schemes):
        if ranks.time_is_up(options.stop_at):
            if report:
                report.note(stopped=f"time was up before {scheme.label}, k={k}")
            return
        workload = _workload(scheme, k, options, place)
        measured = _count(place, scheme, workload, options)
        clear(place.device)
        if report:
            row = _row(place, scheme, workload, options, measured)
            report.put(row, KEY)
            print(f"{scheme.label}, k={k}: {row['measured_gb']:.5f} GB, {row['off']:+.2%}", flush=True)


def _workload(scheme: Scheme, k: int, options: Options, place: Place) -> Workload:
    config = TrainingConfig(
        model_id=options.model,
        device=place.device.type,
        num_workers=place.world_size,
        batch_size=1,
        seq_len=32,
        gradient_accumulation=k,
        activation_memory="none",
        compile="off",
        **scheme.ours,
    )
    return Workload(options.model, 1, 32, k, config)


def _count(place: Place, scheme: Scheme, workload: Workload, options: Options) -> float:
    """Bytes that left one node in one optimizer step: mean over nodes, median over steps.

    The median, since TCP sends again what is acknowledged late: on a busy machine a step can count too much,
    and none too little.
    """
    step = BUILDERS[scheme.loop](place, workload)
    step()  # the first creates communicators
    counts = []
    for _ in range(options.num_steps):
        before = ranks.bytes_sent_at_rest(place, INTERFACE)
        step()
        counts.append(ranks.bytes_sent_at_rest(place, INTERFACE) - before)
    of_ranks = [None] * place.world_size
    dist.all_gather_object(of_ranks, counts)
    by_node = dict(zip(place.nodes, of_ranks, strict=True))  # ranks of one node read the same counter
    of_steps = [statistics.mean(step_counts) for step_counts in zip(*by_node.values(), strict=True)]
    return statistics.median(of_steps)


def _row(
    place: Place, scheme: Scheme, workload: Workload, options: Options, measured: float
) -> dict[str, Any]:
    shape = ModelShape.from_hf_config(architecture(options.model))
    cluster = Cluster(place.num_nodes, place.world_size // place.num_nodes)
    ring = estimate.boundary_gb(workload.config, shape, cluster, scheme.loop)
    extra = _gloo_extra_gb(scheme, workload, shape, cluster) if options.transport == "gloo" else 0.0
    return {
        "scheme": scheme.label,
        "gradient_accumulation": workload.num_micro_batches,
        "model": options.model,
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.gpus_per_node,
        "num_steps": options.num_steps,
        "measured_gb": measured / 1e9,
        "expected_gb": ring + extra,
        "ring_gb": ring,
        "off": measured / 1e9 / (ring + extra) - 1,
    }


def _gloo_extra_gb(scheme: Scheme, workload: Workload, shape: ModelShape, cluster: Cluster) -> float:
    """What gloo sends more than a ring would: every reduce-scatter once more."""
    load = estimate.load_of(workload.config, cluster.num_gpus)
    sharding = estimate.sharding_of(workload.config, load, scheme.loop)
    if scheme.loop == AWS_SAMPLE:
        shape = dataclasses.replace(shape, tied=False)
    return sharding.num_reduces * reduce_traffic(shape, cluster, sharding).network_bytes / 1e9


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("boundary_bytes", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument("--transport", choices=_MODELS, default="gloo", help="and so CPU or GPUs")
    parser.add_argument("--model", choices=_MODELS.values(), help="default: small for gloo, 1.5 B for nccl")
    labels = [scheme.label for scheme in SCHEMES]
    parser.add_argument("--schemes", nargs="+", choices=labels, default=labels, help="ways to shard")
    parser.add_argument("--num-nodes", type=cli.positive, default=2, help="hosts")
    parser.add_argument("--ranks-per-node", type=cli.positive, default=4, help="they may share GPUs")
    parser.add_argument(
        "--accumulation", nargs="+", type=cli.positive, default=[1, 8], help="micro-batches a step"
    )
    parser.add_argument("--num-steps", type=cli.positive, default=3, help="optimizer steps counted")
    parser.add_argument("--budget-s", type=cli.positive, default=800, help="begin no scheme after this time")
    return parser


def _run(options: Options, num_nodes: int, ranks_per_node: int) -> None:
    """Runs all ranks, each on its node's host."""
    host_of_rank = [rank // ranks_per_node for rank in range(num_nodes * ranks_per_node)]
    task = {
        "nodes": [f"node{host}" for host in host_of_rank],
        "device_type": "cpu" if options.transport == "gloo" else "cuda",
        "environment": environment(options.model, len(host_of_rank), torch.cuda.device_count()),
        "options": dataclasses.asdict(options),
    }
    with tempfile.TemporaryDirectory() as folder, Hosts(num_nodes) as hosts:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(task, default=str), "utf-8")
        hosts.run(host_of_rank, [sys.executable, "-m", "benchmarks.boundary_worker", str(path)], TIMEOUT_S)


def environment(model: str, num_ranks: int, num_gpus: int) -> dict[str, str]:
    """What makes NCCL send over a host's interface; gloo does not look at it."""
    shared = ranks.SHARED_GPUS if num_ranks > num_gpus else ranks.SLOW_NETWORK | {"NCCL_HOSTID": "{node}"}
    protocol = _SMALL_PROTOCOL if model == _SMALL else {}
    return shared | protocol | {"NCCL_SOCKET_IFNAME": INTERFACE}


def _check(args: argparse.Namespace) -> list[str]:
    problems = [reason] if (reason := why_not()) else []
    if args.num_nodes < 2:
        problems.append(f"--num-nodes {args.num_nodes}: a boundary needs at least 2")
    if args.transport == "nccl" and not torch.cuda.is_available():
        problems.append("--transport nccl: no GPU here; use --transport gloo")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, 1 when a count is off by more than 2% or is missing, 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if problems := _check(args):
        parser.error("; ".join(problems))
    options = Options(
        args.out.resolve(),
        args.model or _MODELS[args.transport],
        args.transport,
        tuple(args.schemes),
        tuple(args.accumulation),
        args.num_steps,
        time.time() + args.budget_s,
    )
    shape = {"num_nodes": args.num_nodes, "ranks_per_node": args.ranks_per_node}
    Report.start(args.out, "boundary_bytes", {"transport": args.transport} | shape)
    try:
        _run(options, args.num_nodes, args.ranks_per_node)
    except HostsError as error:
        print(error, file=sys.stderr)
        return 1
    return _conclude(args.out)


def _conclude(path: Path) -> int:
    stopped = Report.resume(path).get("stopped")
    rows = present(path, COLUMNS, figures.boundary_bytes, is_complete=not stopped)
    wrong = [row for row in rows if abs(row["off"]) > TOLERANCE]
    for row in wrong:
        print(f"{row['scheme']}, k={row['gradient_accumulation']}: off by {row['off']:+.1%}", file=sys.stderr)
    if stopped:
        print(stopped, file=sys.stderr)
    return 1 if wrong or stopped else 0


if __name__ == "__main__":
    cli.run(main)
