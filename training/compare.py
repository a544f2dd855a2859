"""The same training over one network and over another, several times in turn: what the network was worth.

    python -m training.compare [--ab efa-tcp|shm-memcpy|same] [--repeats 3] [--json PATH] [--png PATH] -- JOB

JOB is the arguments of `python -m training.run`. Each run is a process of its own and must be seen, in its
own summary, to have used what its arm claims; else the comparison stops, keeps what it has, and fails. Arms
take turns, in opposite order every second time, so that a drift of the machine falls on both.

Two workloads are compared: `sample`, the published sample's 1 sequence of 128 tokens for each worker, where
the network is nearly all of a step; and `configured`, JOB as it is.

The ratio's interval is a bootstrap over runs. From three runs it cannot be narrower or wider than what those
three show: read it as the range of likely medians on this cluster on this day, not as a property of EFA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.compare_runs import RunFailure, run_training
from training.compare_stats import METRICS, compare, table
from training.config import TrainingConfig, UsageError, from_argv
from training.storage import STORAGE_ERRORS, absolute, is_uri, locate, one_line
from training.time_limit import TimeLimit


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        name: in tables and run names.
        argv: arguments of the job that make this side.
        verdict: what the transport check must have found in such a run; "" for anything.
        variables: NCCL variables that every rank's log must show with this value.
    """

    name: str
    argv: tuple[str, ...] = ()
    verdict: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def objection(self, summary: Mapping[str, Any]) -> str:
        """Why a run is none of this arm's; "" if it is one."""
        transport = summary.get("transport") or {}
        for name, check in (("before", transport), ("after", transport.get("confirmed") or {})):
            if self.verdict and check.get("verdict") != self.verdict:
                found = check.get("verdict", "no transport check")
                return f"{self.name} was claimed, but {name} training the check found: {found}"
        for rank in transport.get("ranks", []) if self.variables else []:
            for variable, value in self.variables.items():
                if (found := rank.get("environment", {}).get(variable)) != value:
                    return (
                        f"rank {rank['rank']}'s NCCL did not take {variable}={value} (its log says: {found})"
                    )
        return ""


def _memcpy_arm(value: str) -> Arm:
    variable = "NCCL_SHM_USE_CUDA_MEMCPY"
    return Arm(f"memcpy-{value}", ("--nccl-variables", f"{variable}={value}"), variables={variable: value})


COMPARISONS = {
    "efa-tcp": (
        Arm("efa", ("--require-transport", "efa"), verdict="efa"),
        Arm("tcp", ("--require-transport", "socket"), verdict="socket"),
    ),
    # Copies between GPUs of a node that cannot reach each other's memory: by the copy engine, or by kernels.
    "shm-memcpy": (_memcpy_arm("1"), _memcpy_arm("0")),
    # Twice the same: how far two medians lie apart when nothing differs.
    "same": (Arm("first"), Arm("second")),
}
WORKLOADS = {
    "sample": (
        "--batch-size",
        "1",
        "--seq-len",
        "128",
        "--gradient-accumulation",
        "1",
        "--global-batch-size",
        "0",
    ),
    "configured": (),
}


@dataclass
class Comparison:
    """What was asked for, and what came of it so far.

    Attributes:
        runs: one record for each finished run, in the order they ran.
    """

    ab: str
    repeats: int
    job: Sequence[str]
    workloads: Sequence[str]
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    runs: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def arms(self) -> tuple[Arm, Arm]:
        return COMPARISONS[self.ab]

    def schedule(self) -> list[tuple[int, str, Arm]]:
        """(repeat, workload, arm) of every run, in order."""
        return [
            (repeat, workload, arm)
            for repeat in range(self.repeats)
            for workload in self.workloads
            for arm in (self.arms if repeat % 2 == 0 else self.arms[::-1])
        ]

    def results(self) -> list[dict[str, Any]]:
        """For each workload and metric: both arms' medians and spreads, their ratio and its interval."""
        names = [arm.name for arm in self.arms]
        return [row for workload in self.workloads for row in compare(self.runs, workload, names)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "comparison": self.ab,
            "arms": [arm.name for arm in self.arms],
            "job": list(self.job),
            "repeats": self.repeats,
            "started_at": self.started_at,
            "complete": len(self.runs) == len(self.schedule()),
            "failure": self.failure,
            "results": self.results(),
            "runs": self.runs,
        }


def carry_out(comparison: Comparison, json_path: str) -> None:
    """Runs the schedule; after each run the JSON file holds all that is known.

    Args:
        comparison: what to run; filled while it runs.
        json_path: file or s3:// address; "" for none.

    Raises:
        RunFailure: a run failed, or did not use what its arm claims, or the file cannot be written. Results
            so far are kept.
        KeyboardInterrupt: interrupted; the run in progress has been ended. Results so far are kept.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    _write(comparison, json_path)  # an address that cannot be written is known before the first run
    try:
        for number, (repeat, workload, arm) in enumerate(schedule := comparison.schedule(), start=1):
            print(f"run {number} of {len(schedule)}: {workload} over {arm.name}", file=sys.stderr, flush=True)
            name = f"compare-{stamp}-{workload}-{arm.name}-{repeat}"
            summary = run_training([*comparison.job, *WORKLOADS[workload], *arm.argv, "--run-name", name])
            if objection := arm.objection(summary):
                raise RunFailure(f"{name}: {objection}")
            comparison.runs.append(_record(repeat, workload, arm, summary))
            _write(comparison, json_path)
    except (RunFailure, KeyboardInterrupt) as error:
        comparison.failure = str(error) or "interrupted"
        _write(comparison, json_path)
        raise


def _record(repeat: int, workload: str, arm: Arm, summary: Mapping[str, Any]) -> dict[str, Any]:
    transport = summary.get("transport") or {}
    values = {**summary, "bus_gb_per_s": transport.get("best_node_gb_per_s")}
    about = ("run_name", "num_steps", "num_timed_steps", "world_size", "device_name", "torch_version")
    return {
        "workload": workload,
        "arm": arm.name,
        "repeat": repeat,
        "verdict": transport.get("verdict"),
        **{metric: values.get(metric) for metric in METRICS},
        **{name: summary.get(name) for name in about},
    }


def _write(comparison: Comparison, json_path: str) -> None:
    if json_path:
        _store(json_path, (json.dumps(comparison.to_dict(), indent=1) + "\n").encode())


def _store(path: str, content: bytes) -> None:
    try:
        locate(path).write(content)
    except STORAGE_ERRORS as error:
        raise RunFailure(f"{path}: cannot be written: {one_line(error)}") from None


def _draw(comparison: Comparison, png_path: str) -> None:
    try:
        from training.compare_figure import draw
    except ImportError as error:
        print(
            f"no picture: {error.name} is not installed here; draw it elsewhere from --json", file=sys.stderr
        )
        return
    if picture := draw(comparison.to_dict()):
        _store(png_path, picture)
        print(f"picture: {png_path}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 compared, 1 a run failed, 2 bad usage, 130 interrupted."""
    own, job = _split(sys.argv[1:] if argv is None else list(argv))
    options = _parser().parse_args(own)
    workloads = list(WORKLOADS) if options.workload == "both" else [options.workload]
    if problems := _problems(options, job, workloads):
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    comparison = Comparison(options.ab, options.repeats, job, workloads)
    code = 0
    limit = TimeLimit(_max_run_s(comparison))
    try:
        with limit:
            carry_out(comparison, options.json)
    except RunFailure as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print(f"error: {comparison.failure}; results so far are kept", file=sys.stderr)
        code = 1 if limit.is_over else 130
    print(table(comparison.results(), [arm.name for arm in comparison.arms]))
    try:
        if options.png and comparison.runs:
            _draw(comparison, options.png)
    except RunFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return code or 1
    return code


def _max_run_s(comparison: Comparison) -> int:
    """What one run may take is what all of them may: they are one RayJob, with one deadline."""
    _, workload, arm = comparison.schedule()[0]
    return from_argv([*comparison.job, *WORKLOADS[workload], *arm.argv], prog="JOB").max_run_s


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of this program and those of the job, which stand after the first `--`."""
    where = argv.index("--") if "--" in argv else len(argv)
    return argv[:where], argv[where + 1 :]


def _problems(options: argparse.Namespace, job: Sequence[str], workloads: Sequence[str]) -> list[str]:
    """What is wrong with the arguments, all at once, before anything runs."""
    found = []
    for path in (options.json, options.png):
        folder = os.path.dirname(absolute(path))
        if path and not is_uri(path) and not os.access(folder, os.W_OK):
            found.append(f"{path}: its folder {folder} cannot be written; create it or give another")
    configs: list[TrainingConfig] = []
    for workload in workloads:
        for arm in COMPARISONS[options.ab]:
            try:
                configs.append(from_argv([*job, *WORKLOADS[workload], *arm.argv], prog="JOB"))
            except UsageError as error:
                found += [f"JOB, {workload} over {arm.name}: {problem}" for problem in error.problems]
    for config in configs:
        if config.steps <= config.untimed_steps:
            found.append(f"--steps {config.steps}: must exceed --untimed-steps {config.untimed_steps}")
    return list(dict.fromkeys(found))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of runs, 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.compare",
        usage="%(prog)s [options] -- JOB",
        description="Runs the same training over two networks in turn and compares what came of it.",
        epilog="JOB: arguments of python -m training.run. Exit code 0: compared. 1: a run failed or was not "
        "what its arm claims. 2: bad usage. 130: interrupted.",
    )
    parser.add_argument(
        "--ab", choices=COMPARISONS, default="efa-tcp", help="what differs (default: efa-tcp)"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=3, metavar="N", help="runs of each arm (default: 3)"
    )
    parser.add_argument(
        "--workload", choices=[*WORKLOADS, "both"], default="both", help="what is trained (default: both)"
    )
    parser.add_argument(
        "--json",
        default="",
        metavar="PATH",
        help="file or s3:// address for all runs and results, written after each run",
    )
    parser.add_argument("--png", default="", metavar="PATH", help="file or s3:// address for a picture")
    return parser


if __name__ == "__main__":
    sys.exit(main())
