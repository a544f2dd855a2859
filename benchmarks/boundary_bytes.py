"""Bytes that really cross a node boundary per optimizer step, counted by the kernel, against theory.

    sudo python -m benchmarks.boundary_bytes --out benchmarks/results/boundary_bytes_gloo.json
    python -m benchmarks.boundary_bytes --transport nccl --model qwen2.5-1.5b-random --out nccl.json

With gloo, hosts are network namespaces, and the counter is that of each host's veth interface. With NCCL,
hosts are groups of GPUs that NCCL is told to treat as hosts (NCCL_HOSTID); they talk TCP over the loopback
interface, whose counter is shared out evenly.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import cli, figures, ranks
from benchmarks.hosts import INTERFACE, Hosts, HostsError, bytes_sent, why_not
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
# Small collectives go by NCCL's LL protocol, which sends a flag with every 4 bytes: only with a model whose
# messages are large are the bytes counted those of the data.
_MODELS = {"gloo": "small", "nccl": "qwen2.5-1.5b-random"}
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
        interface: whose counter is read.
        nodes_per_counter: nodes whose traffic one counter sees: 1 for a host's veth, all for loopback.
    """

    out: Path
    model: str
    transport: str
    schemes: tuple[str, ...]
    accumulations: tuple[int, ...]
    num_steps: int
    interface: str
    nodes_per_counter: int


def count_all(place: Place, options: Options) -> None:
    """Every rank's part; rank 0 writes the result file."""
    report = Report.resume(options.out) if place.rank == 0 else None
    for scheme in (scheme for scheme in SCHEMES if scheme.label in options.schemes):
        for k in options.accumulations:
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
        before = _read_counter(place, options.interface)
        step()
        counts.append(_read_counter(place, options.interface) - before)
    of_ranks = [None] * place.world_size
    dist.all_gather_object(of_ranks, counts)
    by_node = dict(zip(place.nodes, of_ranks, strict=True))  # ranks of one node read the same counter
    of_steps = [statistics.mean(step_counts) for step_counts in zip(*by_node.values(), strict=True)]
    return statistics.median(of_steps) / options.nodes_per_counter


def _read_counter(place: Place, interface: str) -> int:
    """The counter at a moment when no rank is sending."""
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    dist.barrier()
    now = bytes_sent(interface)
    dist.barrier()
    return now


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
    parser.add_argument("--transport", choices=("gloo", "nccl"), default="gloo", help="and so CPU or GPUs")
    parser.add_argument("--model", choices=_MODELS.values(), help="default: small for gloo, 1.5 B for nccl")
    labels = [scheme.label for scheme in SCHEMES]
    parser.add_argument("--schemes", nargs="+", choices=labels, default=labels, help="ways to shard")
    parser.add_argument("--num-nodes", type=cli.positive, default=2, help="hosts")
    parser.add_argument("--ranks-per-node", type=cli.positive, help="default: 4, or all GPUs shared out")
    parser.add_argument(
        "--accumulation", nargs="+", type=cli.positive, default=[1, 8], help="micro-batches a step"
    )
    parser.add_argument("--num-steps", type=cli.positive, default=3, help="optimizer steps counted")
    return parser


def _run_gloo(options: Options, nodes: list[str], num_nodes: int) -> None:
    hosts_of_ranks = [int(node.removeprefix("node")) for node in nodes]
    with tempfile.TemporaryDirectory() as folder, Hosts(num_nodes) as hosts:
        task = Path(folder) / "task.json"
        task.write_text(
            json.dumps({"nodes": nodes, "options": dataclasses.asdict(options)}, default=str), "utf-8"
        )
        argv = [sys.executable, "-m", "benchmarks.boundary_worker", str(task)]
        hosts.run(hosts_of_ranks, argv, TIMEOUT_S)


def _run_nccl(options: Options, nodes: list[str], num_nodes: int) -> None:
    options = dataclasses.replace(options, interface="lo", nodes_per_counter=num_nodes)
    ranks.run(count_all, (options,), nodes, "cuda", ranks.SLOW_NETWORK)


def _check(args: argparse.Namespace) -> list[str]:
    if args.num_nodes < 2:
        return [f"--num-nodes {args.num_nodes}: a boundary needs at least 2"]
    if args.transport == "gloo":
        reason = why_not()
        return [f"--transport gloo: {reason}"] if reason else []
    wanted = args.num_nodes * (args.ranks_per_node or 1)
    if wanted > torch.cuda.device_count():
        return [f"--transport nccl: {wanted} ranks need as many GPUs; {torch.cuda.device_count()} here"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 when a count is off by more than 2%, or 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if problems := _check(args):
        parser.error("; ".join(problems))
    per_node = args.ranks_per_node or (
        4 if args.transport == "gloo" else torch.cuda.device_count() // args.num_nodes
    )
    nodes = [f"node{rank // per_node}" for rank in range(args.num_nodes * per_node)]
    options = Options(
        args.out.resolve(),
        args.model or _MODELS[args.transport],
        args.transport,
        tuple(args.schemes),
        tuple(args.accumulation),
        args.num_steps,
        INTERFACE,
        1,
    )
    Report.start(args.out, "boundary_bytes", {"transport": args.transport, "nodes": nodes})
    try:
        (_run_gloo if args.transport == "gloo" else _run_nccl)(options, nodes, args.num_nodes)
    except (HostsError, ranks.RanksError) as error:
        print(error, file=sys.stderr)
        return 1
    return _conclude(args.out)


def _conclude(path: Path) -> int:
    rows = present(path, COLUMNS, figures.boundary_bytes)
    wrong = [row for row in rows if abs(row["off"]) > TOLERANCE]
    for row in wrong:
        print(f"{row['scheme']}, k={row['gradient_accumulation']}: off by {row['off']:+.1%}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
