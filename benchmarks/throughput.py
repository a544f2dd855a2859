"""Throughput of our training loop against AWS's sample and accelerate FSDP2, all in one run, alternating.

    python -m benchmarks.throughput --out benchmarks/results/throughput.json
    python -m benchmarks.throughput --only slow-network --budget-s 300 --out slow.json
    python -m benchmarks.throughput --device cpu --model tiny --quick --out smoke.json

Rounds go through all loops in turn, so that a machine that slows down slows all of them; every round builds
its loop anew on an empty device. The result file is written after each measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import cli, figures, ranks
from benchmarks.loops import BUILDERS, architecture, clear, is_finite
from benchmarks.plans import CONDITIONS, DESCRIPTIONS, L4_MEMORY_GB, Trial
from benchmarks.ranks import Place
from benchmarks.report import Report, present, table
from benchmarks.timing import Timing, measure
from training.hardware import peak_bf16_flops
from training.shape import ModelShape

_SIZES = ("name", "batch_size", "seq_len")
KEY = ("condition", "name", "batch_size", "seq_len", "settings")
OUT_OF_MEMORY = "out of memory"
COLUMNS = {
    "condition": "",
    "name": "",
    "batch_size": "d",
    "seq_len": "d",
    "settings": "",
    "tokens_per_s_per_gpu": ",.0f",
    "mfu": ".3f",
    "peak_gib": ".1f",
    "spread": ".3f",
    "num_alloc_retries": "d",
    "num_steps": "d",
    "error": "",
}


@dataclass(frozen=True)
class Options:
    """What one run does, for all ranks.

    Attributes:
        stop_at: `time.time()` after which no measurement begins.
    """

    out: Path
    model: str
    device_type: str
    num_rounds: int
    num_warmup: int
    num_steps: int
    stop_at: float


def measure_condition(place: Place, condition: str, trials: Sequence[Trial], options: Options) -> None:
    """Every rank's part of one condition; rank 0 writes the result file."""
    report = Report.resume(options.out) if place.rank == 0 else None
    timings: dict[int, Timing] = {}
    failures: dict[int, str] = {}
    for round_index, (index, trial) in product(range(options.num_rounds), enumerate(trials)):
        if index in failures:
            continue
        if ranks.time_is_up(options.stop_at):
            _tell(report, f"time is up before {trial.name} {trial.batch_size}x{trial.seq_len}")
            return
        timing, failure = _attempt(place, condition, trial, options)
        if failure:
            failures[index] = failure
        else:
            timings[index] = timings.get(index, Timing()) + timing
        if report:
            row = _row(place, condition, trial, options, timings.get(index), failure)
            report.put(row, KEY)
            print(f"round {round_index + 1}: {_line(row)}", flush=True)


def _tell(report: Report | None, what: str) -> None:
    if report:
        report.note(stopped=what)
        print(what, flush=True)


def _attempt(place: Place, condition: str, trial: Trial, options: Options) -> tuple[Timing, str | None]:
    """One measurement, or why there is none. A loop that fails does not end the comparison of the others."""
    timing, failure = Timing(), None
    try:
        timing = _measure_trial(place, condition, trial, options)
    except torch.cuda.OutOfMemoryError:
        failure = OUT_OF_MEMORY
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    failure = ranks.agree(failure)
    clear(place.device)
    return timing, failure


def _measure_trial(place: Place, condition: str, trial: Trial, options: Options) -> Timing:
    _limit_memory(place, _memory_cap_gb(condition))
    step = BUILDERS[trial.name](place, trial.workload(options.model, options.device_type))
    dist.barrier()
    return measure(step, place.device, options.num_warmup, options.num_steps)


def _memory_cap_gb(condition: str) -> float | None:
    """Memory a rank may use under a condition, in 1e9 bytes; None for all there is."""
    return L4_MEMORY_GB if condition == "cap-22gb" else None


def _limit_memory(place: Place, cap_gb: float | None) -> None:
    if place.device.type == "cuda":
        total = torch.cuda.get_device_properties(place.device).total_memory
        share = 1.0 if cap_gb is None else min(1.0, cap_gb * 1e9 / total)
        torch.cuda.set_per_process_memory_fraction(share, place.device)


def _shape(model: str) -> ModelShape:
    return ModelShape.from_hf_config(architecture(model))


def _row(
    place: Place, condition: str, trial: Trial, options: Options, timing: Timing | None, error: str | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "condition": condition,
        "name": trial.name,
        "batch_size": trial.batch_size,
        "seq_len": trial.seq_len,
        "gradient_accumulation": trial.num_micro_batches,
        "settings": trial.settings,
        "model": options.model,
        "world_size": place.world_size,
        "num_nodes": place.num_nodes,
        "memory_cap_gb": _memory_cap_gb(condition),
        "error": error,
    }
    return row | (_figures(place, trial, options, timing) if timing else dict.fromkeys(_FIGURES))


_FIGURES = (
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_gib",
    "spread",
    "step_s",
    "num_steps",
    "num_alloc_retries",
    "last_loss",
)


def _figures(place: Place, trial: Trial, options: Options, timing: Timing) -> dict[str, Any]:
    rate = trial.batch_size * trial.seq_len * trial.num_micro_batches / timing.median_s
    peak = peak_bf16_flops(torch.cuda.get_device_name(place.device)) if place.device.type == "cuda" else None
    mfu = rate * _shape(options.model).flops_per_token(trial.seq_len) / peak if peak else None
    return {
        "tokens_per_s_per_gpu": rate,
        "mfu": mfu,
        "peak_gib": timing.peak_gib,
        "spread": timing.spread,
        "step_s": timing.median_s,
        "num_steps": len(timing.step_s),
        "num_alloc_retries": timing.num_alloc_retries,
        "last_loss": timing.last_loss if is_finite(timing.last_loss) else None,
    }


def _line(row: dict[str, Any]) -> str:
    what = f"{row['condition']} {row['name']} {row['batch_size']}x{row['seq_len']} {row['settings']}".strip()
    return f"{what}: " + (row["error"] or f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU")


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "throughput",
        __doc__,
        "Conditions: " + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()) + ".",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="result file (JSON); not needed with --plan")
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), help="conditions")
    parser.add_argument("--loops", nargs="+", choices=BUILDERS, default=list(BUILDERS), help="loops")
    parser.add_argument(
        "--first",
        type=cli.positive,
        metavar="N",
        help="only the first N of each condition",
    )
    parser.add_argument("--settings", nargs="+", metavar="BxS", help="only these, such as 4x2048")
    parser.add_argument("--model", choices=("qwen2.5-1.5b-random", "tiny"), default="qwen2.5-1.5b-random")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-ranks", type=cli.positive, help="ranks (default: all GPUs; 2 on a CPU)")
    parser.add_argument(
        "--num-rounds", type=cli.positive, default=2, help="times each loop is built and measured"
    )
    parser.add_argument("--num-steps", type=cli.positive, default=10, help="timed steps in each round")
    parser.add_argument("--num-warmup", type=cli.positive, default=3, help="steps before those")
    parser.add_argument(
        "--budget-s", type=cli.positive, default=540, help="begin no measurement after this time"
    )
    parser.add_argument("--quick", action="store_true", help="one round of 3 steps: does everything run?")
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and end")
    return parser


def select(args: argparse.Namespace) -> dict[str, list[Trial]]:
    """The trials of each chosen condition; on a CPU their sequences are shortened."""
    chosen: dict[str, list[Trial]] = {}
    for condition in args.only:
        trials = [trial for trial in CONDITIONS[condition] if trial.name in args.loops]
        if args.settings:
            trials = [trial for trial in trials if f"{trial.batch_size}x{trial.seq_len}" in args.settings]
        if args.device == "cpu":
            trials = [dataclasses.replace(trial, seq_len=min(trial.seq_len, 32)) for trial in trials]
        trials = trials[: args.first]
        if trials:
            chosen[condition] = trials
    return chosen


def _problems(args: argparse.Namespace, num_ranks: int) -> list[str]:
    found = [] if args.out else ["--out: name the result file"]
    if args.device == "cuda" and not torch.cuda.is_available():
        found.append("--device cuda: no GPU here; use --device cpu --model tiny to see that everything runs")
    elif args.device == "cuda" and num_ranks > torch.cuda.device_count():
        found.append(f"--num-ranks {num_ranks}: only {torch.cuda.device_count()} GPUs here")
    return found


def _plan_table(plan: dict[str, list[Trial]]) -> str:
    lines = [
        {
            "condition": condition,
            "settings": trial.settings,
            **{name: getattr(trial, name) for name in _SIZES},
        }
        for condition, trials in plan.items()
        for trial in trials
    ]
    return table(lines, {name: COLUMNS[name] for name in KEY})


def _nodes(condition: str, num_ranks: int) -> list[str]:
    """The slow network makes each rank a node; otherwise all are on one."""
    return [f"node{rank}" if condition == "slow-network" else "node0" for rank in range(num_ranks)]


def _impossible(condition: str, num_ranks: int, device_type: str) -> str | None:
    if condition == "slow-network" and num_ranks < 2:
        return "needs at least two ranks"
    if condition == "cap-22gb" and device_type == "cpu":
        return "needs a GPU, whose memory can be limited"
    return None


def _run(args: argparse.Namespace, plan: dict[str, list[Trial]], num_ranks: int) -> bool:
    """Runs the conditions; returns whether each of them could be measured."""
    rounds, steps, warmup = (1, 3, 2) if args.quick else (args.num_rounds, args.num_steps, args.num_warmup)
    stop_at = time.time() + args.budget_s
    options = Options(args.out, args.model, args.device, rounds, warmup, steps, stop_at)
    complete = True
    for condition, trials in plan.items():
        if reason := _impossible(condition, num_ranks, args.device):
            print(f"{condition}: left out, {reason}", flush=True)
            continue
        environment = ranks.SLOW_NETWORK if condition == "slow-network" else {}
        try:
            arguments = (condition, trials, options)
            ranks.run(measure_condition, arguments, _nodes(condition, num_ranks), args.device, environment)
        except ranks.RanksError as error:
            print(
                f"{condition}: ended early: {str(error).splitlines()[-1]}",
                file=sys.stderr,
                flush=True,
            )
            complete = False
    return complete


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 when a loop failed (not for memory), or 2 when nothing can run."""
    parser = _parser()
    args = parser.parse_args(argv)
    plan = select(args)
    if not plan:
        parser.error(f"--settings {' '.join(args.settings or [])}: no such setting in the chosen conditions")
    if args.plan:
        print(_plan_table(plan))
        return 0
    num_ranks = args.num_ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if problems := _problems(args, num_ranks):
        parser.error("; ".join(problems))
    parameters = {"conditions": {name: DESCRIPTIONS[name] for name in plan}, "num_ranks": num_ranks}
    Report.start(args.out, "throughput", parameters)
    complete = _run(args, plan, num_ranks)
    rows = present(args.out, COLUMNS, figures.throughput, complete)
    broken = [row for row in rows if row["error"] not in (None, OUT_OF_MEMORY)]
    return 0 if complete and not broken else 1


if __name__ == "__main__":
    cli.run(main)
