"""Predicts a run before it is paid for: bytes between nodes, step time, memory per GPU, tokens/s.

    python -m training.predict --instance-type g6.12xlarge --num-nodes 2 --seq-len 2048 --batch-size 4
    python -m training.predict --preset aws-sample

A prediction, not a measurement: the arithmetic is in `training.cost_model`, what it rests on is printed with
every result. Rates that were measured (`--network-gb-per-s`, `--intra-gb-per-s`, `--compute-tflops`) replace
assumed ones. Takes the job's own flags as well (`python -m training.run --help`).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from training import cost_model, hardware
from training.config import TrainingConfig, UsageError, activation_budget, flag, from_argv, to_argv
from training.cost_model import Cluster, Rates, StepTime, recompute_slowdown
from training.estimate import (
    AWS_SAMPLE,
    OURS,
    boundary_gb,
    boundary_gb_by_scheme,
    load_of,
    memory_gib,
    memory_warning,
    predict_time,
)
from training.shape import KNOWN_SHAPES, ModelShape

PROG = "python -m training.predict"
DEFAULT_INSTANCE_TYPE = "g6.12xlarge"
# The sample's published run, 0.5173 steps/s on 2 x g6.12xlarge; what is given beside the preset overrides it.
_SAMPLE_ARGV = to_argv(
    TrainingConfig(
        batch_size=1,
        seq_len=128,
        gradient_accumulation=1,
        sharding="full",
        reduce_dtype="bfloat16",
        reshard_after_forward=True,
        activation_memory="none",
        max_grad_norm=0.0,
    )
)
# Share of the peak that the arithmetic of a step reached at 4 x 2048 on 2 x NVIDIA H200 with NVLink.
# Whether an L4, with less memory bandwidth per FLOP and a 72 W limit, reaches the same is not known.
_EFFICIENCY = {OURS: 0.46, AWS_SAMPLE: 0.238}
_EFFICIENCY_SPREAD = 0.2
# Seconds a step of 1 x 128 tokens took on 2 x NVIDIA H200, where launching kernels is all there is to do.
_HOST_S = {OURS: 0.11, AWS_SAMPLE: 0.29}


@dataclass(frozen=True)
class Prediction:
    """One predicted run.

    Attributes:
        step_s: seconds of one optimizer step.
        steps_per_s: its inverse.
        tokens_per_s: tokens of all GPUs together.
        tokens_per_s_range: the same at 20% less and 20% more arithmetic per second than assumed.
        mfu: share of the GPUs' peak, 0 ... 1; None where the peak is unknown.
        boundary_gb: 1e9 bytes that leave one node per step.
        boundary_gb_by_scheme: the same under other ways to shard.
        memory_gib: peak of allocated memory per GPU.
        time: where the step's time goes.
        warnings: what will not fit.
        assumptions: what the figures rest on.
    """

    name: str
    instance_type: str
    num_nodes: int
    num_gpus: int
    step_s: float
    steps_per_s: float
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    mfu: float | None
    boundary_gb: float
    boundary_gb_by_scheme: dict[str, float]
    memory_gib: float
    usable_memory_gib: float
    time: StepTime
    warnings: list[str]
    assumptions: list[str]


@dataclass(frozen=True)
class Request:
    """A checked command line.

    Attributes:
        measured: rates given by the caller, by their name in `Rates`; they replace assumed ones.
    """

    loop: str
    config: TrainingConfig
    shape: ModelShape
    node: hardware.Node
    cluster: Cluster
    measured: dict[str, float]
    as_json: bool


def predict(request: Request) -> Prediction:
    """Predicts one run."""
    config, shape, cluster, loop = request.config, request.shape, request.cluster, request.loop
    rates = _rates(request)
    time = predict_time(config, shape, cluster, rates, loop)
    load = load_of(config, cluster.num_gpus)
    tokens = load.step_tokens * cluster.num_gpus
    low, high = (
        tokens / predict_time(config, shape, cluster, _scaled(rates, 1 + spread), loop).step_s
        for spread in (-_EFFICIENCY_SPREAD, _EFFICIENCY_SPREAD)
    )
    peak = request.node.gpu.peak_bf16_flops
    flops_per_s = tokens / time.step_s * shape.flops_per_token(config.seq_len)
    warning = memory_warning(config, shape, cluster, request.node.gpu.usable_gib, loop)
    return Prediction(
        name=loop,
        instance_type=request.node.instance_type,
        num_nodes=cluster.num_nodes,
        num_gpus=cluster.num_gpus,
        step_s=time.step_s,
        steps_per_s=1 / time.step_s,
        tokens_per_s=tokens / time.step_s,
        tokens_per_s_range=(low, high),
        mfu=flops_per_s / (peak * cluster.num_gpus) if peak else None,
        boundary_gb=boundary_gb(config, shape, cluster, loop),
        boundary_gb_by_scheme=boundary_gb_by_scheme(shape, cluster, load),
        memory_gib=memory_gib(config, shape, cluster, loop),
        usable_memory_gib=request.node.gpu.usable_gib,
        time=time,
        warnings=[warning] if warning else [],
        assumptions=_assumptions(request, rates),
    )


def _scaled(rates: Rates, factor: float) -> Rates:
    return dataclasses.replace(rates, compute_tflops=rates.compute_tflops * factor)


def _rates(request: Request) -> Rates:
    node, loop = request.node, request.loop
    efficiency = _EFFICIENCY[loop] / (_recompute_slowdown(request) if loop == OURS else 1.0)
    assumed = {
        "network_gb_per_s": node.line_rate_gbps / 8,
        "intra_gb_per_s": node.intra_gb_per_s,
        "compute_tflops": (node.gpu.peak_bf16_flops or 0.0) * efficiency / 1e12,
    }
    return Rates(
        **(assumed | request.measured), memory_gb_per_s=node.gpu.memory_gb_per_s, host_s=_HOST_S[loop]
    )


def _recompute_slowdown(request: Request) -> float:
    budget = activation_budget(request.config.activation_memory) or 0.0
    return recompute_slowdown(request.shape, request.config.seq_len, budget)


def _assumptions(request: Request, rates: Rates) -> list[str]:
    given = request.measured
    line_rate = request.node.line_rate_gbps

    def source(rate: str, assumed: str) -> str:
        return "given on the command line" if rate in given else assumed

    return [
        f"network {rates.network_gb_per_s:.2f} GB/s out of a node: "
        + source(
            "network_gb_per_s", f"the line rate of {line_rate:g} Gbit/s, which a real network stays below"
        ),
        f"{rates.intra_gb_per_s:.1f} GB/s between GPUs of a node: "
        + source("intra_gb_per_s", "assumed, not measured on this type"),
        f"{rates.compute_tflops:.1f} TFLOP/s of arithmetic per GPU: "
        + source(
            "compute_tflops", "the share of the peak that 2 x NVIDIA H200 reached; range: 20% less and more"
        ),
        f"the shorter of arithmetic and communication hides by {cost_model.OVERLAP:.0%}",
        "memory: formula fitted to Qwen2.5-1.5B on 2 x NVIDIA H200; allocated bytes, without fragmentation",
        "activations: what PyTorch 2.13 keeps and recomputes of a layer of Qwen2.5-1.5B, counted on a CPU",
    ]


# --- command line -------------------------------------------------------------------------------------------

_RATES = {
    "network_gb_per_s": "measured network rate out of one node, 1e9 bytes/s (default: line rate)",
    "intra_gb_per_s": "measured NCCL bus bandwidth inside a node, 1e9 bytes/s (default: assumed)",
    "compute_tflops": "measured model TFLOP/s per GPU without network (default: from the H200 measurements)",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse declares NoReturn
        raise UsageError([message])


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Predicts bytes between nodes, step time, memory per GPU and tokens/s of a training run.",
        epilog=f"Also takes the job's flags (python -m training.run --help); --instance-type is one of them, "
        f"here {DEFAULT_INSTANCE_TYPE} when left out.",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--num-nodes", default="2", help="nodes (default: 2)")
    parser.add_argument(
        "--preset", default=OURS, help=f"{OURS} or {AWS_SAMPLE}, the sample's loop and settings"
    )
    for name, help_text in _RATES.items():
        parser.add_argument(flag(name), help=help_text)
    return parser


def read_request(argv: Sequence[str]) -> Request:
    """Reads a command line.

    Raises:
        UsageError: with every problem found.
    """
    options, job_argv = _parser().parse_known_args(list(argv))
    problems: list[str] = []

    def attempt(read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except UsageError as error:
            problems.extend(error.problems)
            return None

    loop = attempt(_read_preset, options.preset)
    num_nodes = attempt(_read_number, "--num-nodes", options.num_nodes, int)
    measured = {
        name: attempt(_read_number, flag(name), text, float)
        for name in _RATES
        if (text := getattr(options, name)) is not None
    }
    config = attempt(from_argv, [*(_SAMPLE_ARGV if loop == AWS_SAMPLE else ()), *job_argv], PROG)
    node = attempt(_find_node, config.instance_type, measured) if config else None
    shape = attempt(find_shape, config.model_id) if config else None
    cluster = attempt(_cluster, config, node, num_nodes) if config and node and num_nodes else None
    if problems:
        raise UsageError(problems)
    return Request(loop, config, shape, node, cluster, measured, options.as_json)


def _read_preset(name: str) -> str:
    if name not in (OURS, AWS_SAMPLE):
        raise UsageError([f"--preset {name}: use {OURS} or {AWS_SAMPLE}"])
    return name


def _read_number(name: str, text: str, kind: type) -> Any:
    try:
        number = kind(text)
    except ValueError:
        raise UsageError([f"{name} {text}: not a {'whole ' if kind is int else ''}number"]) from None
    if not (math.isfinite(number) and number > 0):
        raise UsageError([f"{name} {text}: must be above 0"])
    return number


def _find_node(instance_type: str, measured: dict[str, float]) -> hardware.Node:
    instance_type = instance_type or DEFAULT_INSTANCE_TYPE
    node = hardware.node(instance_type)
    if node is None:
        near = difflib.get_close_matches(instance_type, hardware.instance_types(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError([f"--instance-type {instance_type}: not in the table of training/hardware.py{hint}"])
    if node.gpu.peak_bf16_flops is None and "compute_tflops" not in measured:
        problem = f"--instance-type {instance_type}: no bf16 peak of its GPU ({node.gpu.name}) is known"
        raise UsageError([f"{problem}; give a measured --compute-tflops"])
    return node


def _cluster(config: TrainingConfig, node: hardware.Node, num_nodes: int) -> Cluster:
    num_gpus = node.num_gpus * num_nodes
    world_size = config.num_workers or num_gpus
    if world_size % num_nodes or world_size > num_gpus:
        at_most = f"at most {num_gpus} on {num_nodes} x {node.instance_type}"
        raise UsageError([f"--num-workers {world_size}: must divide into {num_nodes} nodes and be {at_most}"])
    config.num_micro_batches(world_size)  # raises UsageError when the global batch does not divide
    return Cluster(num_nodes, world_size // num_nodes)


def find_shape(model_id: str) -> ModelShape:
    """Sizes of a model by its name, or from the config.json of a local folder.

    Raises:
        UsageError: the sizes are not known here.
    """
    if model_id in KNOWN_SHAPES:
        return KNOWN_SHAPES[model_id]
    path = Path(model_id) / "config.json"
    try:
        return ModelShape.from_hf_config(SimpleNamespace(**json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as error:
        reason = f"{error.strerror}: {path}" if isinstance(error, OSError) else f"{path}: {error}"
        remedy = (
            f"name one of {', '.join(KNOWN_SHAPES)}, or a local folder that holds the model's config.json"
        )
        raise UsageError([f"--model-id {model_id}: sizes unknown ({reason}); {remedy}"]) from None


def as_text(prediction: Prediction) -> str:
    """The prediction for people."""
    p, time = prediction, prediction.time
    low, high = p.tokens_per_s_range
    mfu = f", MFU {p.mfu:.1%}" if p.mfu is not None else ""
    lines = [
        f"PREDICTION, not measured: {p.name} on {p.num_nodes} x {p.instance_type} ({p.num_gpus} GPUs)",
        f"  step            {p.step_s:.3f} s = {p.steps_per_s:.4f} steps/s",
        f"  tokens/s        {p.tokens_per_s:,.0f} ({low:,.0f} to {high:,.0f}){mfu}",
        f"  node boundary   {p.boundary_gb:.2f} GB out of each node per step",
        f"  memory per GPU  {p.memory_gib:.1f} GiB of {p.usable_memory_gib:.1f} GiB usable",
        f"  time            arithmetic {time.compute_s:.3f} s, network {time.network_s:.3f} s, "
        f"inside the node {time.intra_s:.3f} s, optimizer {time.optimizer_s:.3f} s (they overlap)",
        "  node boundary by scheme, GB per step:",
        *(f"    {scheme:<42}{num_gb:8.2f}" for scheme, num_gb in p.boundary_gb_by_scheme.items()),
        "  assumed:",
        *(f"    - {assumption}" for assumption in p.assumptions),
        *(f"  WARNING: {warning}" for warning in p.warnings),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a prediction; returns 0, or 2 when the command line cannot be used."""
    try:
        request = read_request(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    prediction = predict(request)
    if request.as_json:
        print(json.dumps({"kind": "prediction", **dataclasses.asdict(prediction)}, indent=2))
    else:
        print(as_text(prediction))
    return 0


if __name__ == "__main__":
    sys.exit(main())
