"""The ranks' part of `benchmarks.two_nodes_of_four`: trials, bytes, rates, and a checkpoint's stall."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import ranks
from benchmarks.checkpoint_stall import measure_stall
from benchmarks.loops import AWS_SAMPLE, BUILDERS, OURS, Workload, architecture, clear
from benchmarks.ranks import Place
from benchmarks.report import Report
from benchmarks.timing import Timing, measure
from training import estimate
from training.config import TrainingConfig
from training.cost_model import Cluster, Rates
from training.hardware import peak_bf16_flops
from training.shape import ModelShape

DIRECT, EMULATED = "direct", "emulated"
KEY = ("network", "scheme", "batch_size", "seq_len")
# Rates that a measured compute rate already contains: links inside a node, the optimizer, kernel launches.
_CONTAINED_GB_PER_S = 1e9
_RATE_BYTES = 256 << 20
_LOOPBACK = "lo"  # emulated nodes talk over it, and little else does
# PyTorch 2.13 renames it; the older name still exists, and warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Scheme:
    """A way to train over two nodes.

    Attributes:
        label: its name in tables.
        loop: which training loop.
        ours: fields of `TrainingConfig` for our loop.
    """

    label: str
    loop: str
    ours: tuple[tuple[str, Any], ...] = ()


SCHEMES = (
    Scheme("hybrid, accumulation 8", OURS, (("gradient_accumulation", 8),)),
    Scheme("hybrid", OURS),
    Scheme("full", OURS, (("sharding", "full"),)),
    Scheme("aws-sample", AWS_SAMPLE),
)


@dataclass(frozen=True)
class Options:
    """What every rank needs to know.

    Attributes:
        settings: (batch_size, seq_len) of each trial.
        stop_at: `time.time()` after which no trial begins.
        done: trials, as (network, scheme, batch_size, seq_len), that are measured already.
        has_checkpoint: so is the checkpoint.
    """

    out: Path
    model: str
    device_type: str
    settings: tuple[tuple[int, int], ...]
    num_warmup: int
    num_steps: int
    stop_at: float
    done: frozenset[tuple[str, str, int, int]]
    has_checkpoint: bool


def run_network(place: Place, network: str, options: Options) -> None:
    """Every rank's part on one kind of network; rank 0 writes the result file."""
    report = Report.resume(options.out) if place.rank == 0 else None
    replicate = _replicate_group(place)
    for setting in options.settings:
        for scheme in SCHEMES:
            if (network, scheme.label, *setting) in options.done:
                continue
            if ranks.time_is_up(options.stop_at):
                _note(
                    report, stopped=f"time was up before {network} {scheme.label} {setting[0]}x{setting[1]}"
                )
                return
            # A rate from the start of the run did not predict trials minutes later: measured around each.
            before = _network_rates(place, replicate)
            row = _run_trial(place, network, scheme, setting, options)
            clear(place.device)
            row["rates"] = _mean(before, _network_rates(place, replicate))
            if report:
                report.put(row, KEY)
                rate = row["tokens_per_s_per_gpu"]
                print(
                    f"{network} {scheme.label} {setting[0]}x{setting[1]}: {rate:,.0f} tokens/s/GPU",
                    flush=True,
                )
    if network == DIRECT and not options.has_checkpoint:
        workload = _workload(place, SCHEMES[1], options.settings[0], options)
        saves = list(measure_stall(place, workload))
        stall = {
            "blocked_s": [save.blocked_s for save in saves],
            "write_s": [save.write_s for save in saves],
            "size_gb": saves[-1].size_gb,
        }
        _note(report, checkpoint=stall)


def _note(report: Report | None, **facts: Any) -> None:
    if report:
        report.note(**facts)
        print(facts, flush=True)


# --- one trial --------------------------------------------------------------------------------------------


def _workload(place: Place, scheme: Scheme, setting: tuple[int, int], options: Options) -> Workload:
    batch_size, seq_len = setting
    fields = {"gradient_accumulation": 1, "activation_memory": "none"} | dict(scheme.ours)
    config = TrainingConfig(
        model_id=options.model,
        device=options.device_type,
        num_workers=place.world_size,
        batch_size=batch_size,
        seq_len=seq_len,
        **fields,
    )
    return Workload(options.model, batch_size, seq_len, config.gradient_accumulation, config)


def _run_trial(
    place: Place, network: str, scheme: Scheme, setting: tuple[int, int], options: Options
) -> dict[str, Any]:
    workload = _workload(place, scheme, setting, options)
    step = BUILDERS[scheme.loop](place, workload)
    for _ in range(options.num_warmup):
        step()
    before = ranks.bytes_sent_at_rest(place, _LOOPBACK)
    timing = measure(step, place.device, 0, options.num_steps)
    after = ranks.bytes_sent_at_rest(place, _LOOPBACK)
    boundary_gb = (after - before) / place.num_nodes / options.num_steps / 1e9
    counted = network == EMULATED and place.device.type == "cuda"  # gloo says everything over loopback
    return _row(place, network, scheme, workload, timing, boundary_gb if counted else None)


def _row(
    place: Place,
    network: str,
    scheme: Scheme,
    workload: Workload,
    timing: Timing,
    boundary_gb: float | None,
) -> dict[str, Any]:
    shape, cluster = _shape(workload.model), cluster_of(place)
    rate = workload.tokens_per_step / timing.median_s
    peak = peak_bf16_flops(torch.cuda.get_device_name(place.device)) if place.device.type == "cuda" else None
    flops_per_s = rate * shape.flops_per_token(workload.seq_len)
    return {
        "network": network,
        "scheme": scheme.label,
        "name": scheme.loop,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "gradient_accumulation": workload.num_micro_batches,
        "model": workload.model,
        "world_size": place.world_size,
        "num_nodes": place.num_nodes,
        "tokens_per_s_per_gpu": rate,
        "step_s": timing.median_s,
        "spread": timing.spread,
        "num_steps": len(timing.step_s),
        "mfu": flops_per_s / peak if peak else None,
        "model_tflops": flops_per_s / 1e12,
        "peak_gib": timing.peak_gib,
        "predicted_peak_gib": estimate.memory_gib(workload.config, shape, cluster, scheme.loop),
        "boundary_gb": boundary_gb,
        "predicted_boundary_gb": estimate.boundary_gb(workload.config, shape, cluster, scheme.loop),
    }


def _shape(model: str) -> ModelShape:
    return ModelShape.from_hf_config(architecture(model))


def cluster_of(place: Place) -> Cluster:
    """Two nodes, each with half of the ranks."""
    return Cluster(place.num_nodes, place.world_size // place.num_nodes)


# --- the predictor, fed with what was measured --------------------------------------------------------------


def with_predictions(row: dict[str, Any], direct: dict[str, Any]) -> dict[str, Any]:
    """Adds the step time that the predictor expects from measured rates.

    Args:
        row: of the emulated network, with the network's own rates around it.
        direct: the same trial without it: its rate is arithmetic, links inside the node and optimizer.
    """
    fields = next(dict(scheme.ours) for scheme in SCHEMES if scheme.label == row["scheme"])
    config = TrainingConfig(
        batch_size=row["batch_size"],
        seq_len=row["seq_len"],
        **({"gradient_accumulation": 1, "activation_memory": "none"} | fields),
    )
    over_all = row["name"] == AWS_SAMPLE or config.sharding == "full"
    measured = Rates(
        network_gb_per_s=row["rates"]["world_gb_per_s" if over_all else "replicate_gb_per_s"],
        intra_gb_per_s=_CONTAINED_GB_PER_S,
        compute_tflops=direct["model_tflops"],
        memory_gb_per_s=_CONTAINED_GB_PER_S,
        host_s=0.0,
    )
    cluster = Cluster(row["num_nodes"], row["world_size"] // row["num_nodes"])
    time = estimate.predict_time(config, _shape(row["model"]), cluster, measured, row["name"])
    return row | {"predicted_step_s": time.step_s, "step_off": time.step_s / row["step_s"] - 1}


def _network_rates(place: Place, replicate: dist.ProcessGroup) -> dict[str, float]:
    """GB/s out of one node that collectives reach just now: all replicate groups at once, and the world."""
    num_bytes = _RATE_BYTES if place.device.type == "cuda" else 1 << 20
    tensor = torch.ones(num_bytes // 4 // place.world_size * place.world_size, device=place.device)
    own = tensor[: tensor.numel() // place.world_size].clone()
    all_reduce_s = _seconds(place, lambda: dist.all_reduce(tensor, group=replicate))
    all_gather_s = _seconds(place, lambda: _all_gather(tensor, own))
    gb = tensor.numel() * 4 / 1e9
    nodes, world, per_node = place.num_nodes, place.world_size, cluster_of(place).gpus_per_node
    return {
        "replicate_gb_per_s": per_node * gb * 2 * (nodes - 1) / nodes / all_reduce_s,
        "world_gb_per_s": gb * (world - 1) / world / all_gather_s,
    }


def _replicate_group(place: Place) -> dist.ProcessGroup:
    """The ranks that hold the same shard as this one."""
    shape = (place.num_nodes, cluster_of(place).gpus_per_node)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return mesh.get_group("replicate")


def _mean(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: (before[name] + after[name]) / 2 for name in before}


def _seconds(place: Place, collective: Callable[[], Any], num_repeats: int = 4) -> float:
    """Mean time of one call; the first, which connects, is left out."""

    def finished() -> float:
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        dist.barrier()
        return time.perf_counter()

    collective()
    began = finished()
    for _ in range(num_repeats):
        collective()
    return (finished() - began) / num_repeats
