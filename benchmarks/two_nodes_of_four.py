"""The product's own shape on one host: its GPUs as two nodes, with TCP over loopback between them.

    python -m benchmarks.two_nodes_of_four --out benchmarks/results/two_nodes_of_four.json
    python -m benchmarks.two_nodes_of_four --device cpu --model tiny --num-ranks 8 --quick --out smoke.json

Any even number of GPUs makes two nodes. First the same trials without the emulation ("direct"): they give the
rate of arithmetic. Then over the emulated network, with NCCL's logs, bytes counted on the loopback interface,
and the network's own rate before and after each trial. From these rates the predictor must reproduce each
step's time. On CPUs with gloo only the plumbing is exercised: no bytes, no memory, no NCCL.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cli, figures, ranks
from benchmarks.report import Report, present
from benchmarks.two_nodes import DIRECT, EMULATED, KEY, Options, run_network, with_predictions
from training.nccl_log import read
from training.transport import judge, log_files

COLUMNS = {
    "network": "",
    "scheme": "",
    "batch_size": "d",
    "seq_len": "d",
    "tokens_per_s_per_gpu": ",.0f",
    "mfu": ".3f",
    "step_s": ".3f",
    "predicted_step_s": ".3f",
    "step_off": "+.1%",
    "boundary_gb": ".3f",
    "predicted_boundary_gb": ".3f",
    "boundary_off": "+.1%",
    "peak_gib": ".1f",
    "predicted_peak_gib": ".1f",
    "memory_off": "+.1%",
}
TOLERANCES = {"step_off": 0.15, "boundary_off": 0.05, "memory_off": 0.10}
_LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET"}


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("two_nodes_of_four", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="keep NCCL's logs here, addresses replaced"
    )
    parser.add_argument(
        "--only", nargs="+", choices=(DIRECT, EMULATED), default=[DIRECT, EMULATED], help="networks"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        type=_setting,
        default=["4x2048", "1x128"],
        metavar="BxS",
        help="sequences x tokens",
    )
    parser.add_argument(
        "--model", choices=("qwen2.5-1.5b-random", "small", "tiny"), default="qwen2.5-1.5b-random"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--num-ranks", type=cli.positive, help="an even number (default: all GPUs; 8 on a CPU)"
    )
    parser.add_argument("--num-steps", type=cli.positive, default=8, help="timed steps of each trial")
    parser.add_argument("--num-warmup", type=cli.positive, default=2, help="steps before those")
    parser.add_argument("--budget-s", type=cli.positive, default=540, help="begin no trial after this time")
    parser.add_argument(
        "--continue",
        dest="goes_on",
        action="store_true",
        help="go on with a file that was cut off: measure only what is missing in it",
    )
    parser.add_argument("--quick", action="store_true", help="two steps, one of them timed: does it run?")
    return parser


def _setting(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text}: write sequences x tokens, such as 4x2048")
    return text


def _options(args: argparse.Namespace, report: Report) -> Options:
    settings = [tuple(int(part) for part in text.split("x")) for text in args.settings]
    if args.device == "cpu":
        settings = [(batch_size, min(seq_len, 32)) for batch_size, seq_len in settings]
    warmup, steps = (1, 1) if args.quick else (args.num_warmup, args.num_steps)
    return Options(
        args.out,
        args.model,
        args.device,
        tuple(settings),
        warmup,
        steps,
        stop_at=time.time() + args.budget_s,
        done=frozenset(tuple(row[name] for name in KEY) for row in report.rows if "rates" in row),
        has_checkpoint=report.get("checkpoint") is not None,
    )


def _run(args: argparse.Namespace, num_ranks: int, logs: Path) -> bool:
    """Runs both networks; returns whether each could be measured to its end."""
    options = _options(args, Report.resume(args.out))
    nodes = [f"node{rank // (num_ranks // 2)}" for rank in range(num_ranks)]
    emulation = ranks.SLOW_NETWORK | _LOGGING | {"NCCL_DEBUG_FILE": f"{logs}/rank{{rank}}.log"}
    complete = True
    for network in args.only:
        emulated = network == EMULATED
        environment = emulation if emulated else {}
        try:
            ranks.run(
                run_network, (network, options), nodes, args.device, environment, hosts_are_separate=emulated
            )
        except ranks.RanksError as error:
            print(f"{network}: ended early: {str(error).splitlines()[-1]}", file=sys.stderr, flush=True)
            complete = False
    return complete


def verdicts(logs: Path, world_size: int) -> dict[str, Any]:
    """What the transport check says of NCCL's logs: sockets must pass, EFA must be refused."""
    files = log_files([logs])
    if not files:
        return {"verdict": "not applicable", "why": "no NCCL here: gloo on CPUs writes no such log"}
    processes = read(files)
    socket, efa = (judge(processes, require, world_size) for require in ("socket", "efa"))
    return {
        "verdict": socket.word,
        "socket_passed": socket.passed,
        "efa_passed": efa.passed,
        "num_ranks": len(socket.world.ranks),
        "num_hosts": socket.world.num_hosts,
        "links": socket.links(),
        "findings": [str(finding) for finding in socket.findings],
    }


def keep_logs(logs: Path, kept: Path) -> None:
    """Copies NCCL's logs with this machine's name and addresses replaced."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in sorted(logs.glob("*.log")):
        kept.joinpath(path.name).write_text(
            anonymous(path.read_text(encoding="utf-8", errors="replace")), "utf-8"
        )


def anonymous(text: str) -> str:
    """A log without the host's name (the start of each line) and without addresses but loopback's."""
    text = re.sub(r"^[^\s:\[]+(?=:\d+:\d+ \[)", "host", text, flags=re.MULTILINE)
    return re.sub(r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b", "10.0.0.1", text)


def conclude(report: Report, logs: Path, world_size: int) -> list[str]:
    """Compares with the predictor; returns what is off by more than it may be."""
    direct = {_trial(row): row for row in report.rows if row["network"] == DIRECT}
    for row in list(report.rows):
        row = row | _off(row, "boundary_gb", "boundary_off") | _off(row, "peak_gib", "memory_off")
        if row["network"] == EMULATED and "rates" in row and _trial(row) in direct:
            row = with_predictions(row, direct[_trial(row)])
        report.put(row, KEY)
    if log_files([logs]) or not report.get("transport"):  # else those of the run that is continued
        report.note(transport=verdicts(logs, world_size))
    return [
        f"{row['network']} {row['scheme']} {row['batch_size']}x{row['seq_len']}: {field} {row[field]:+.1%}"
        for row in report.rows
        for field, tolerance in TOLERANCES.items()
        if row.get(field) is not None and abs(row[field]) > tolerance
    ]


def _trial(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["scheme"], row["batch_size"], row["seq_len"]


def _off(row: dict[str, Any], measured: str, name: str) -> dict[str, float | None]:
    if not row[measured]:
        return {name: None}
    return {name: row[f"predicted_{measured}"] / row[measured] - 1}


def _open_report(parser: argparse.ArgumentParser, args: argparse.Namespace, num_ranks: int) -> None:
    """A new file, or the one to go on with."""
    parameters = {"num_ranks": num_ranks, "model": args.model, "settings": args.settings}
    if not args.goes_on:
        Report.start(args.out, "two_nodes_of_four", parameters)
        return
    try:
        report = Report.resume(args.out)
    except (OSError, ValueError) as error:
        parser.error(f"--continue: {args.out} cannot be read: {error}")
    if report.get("parameters") != parameters:
        parser.error(f"--continue: {args.out} was measured with {report.get('parameters')}, not {parameters}")
    report.continued()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0, 1 when it ended early or a GPU's figure is off, 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    num_ranks = args.num_ranks or (torch.cuda.device_count() if on_gpu else 8)
    if on_gpu and num_ranks > torch.cuda.device_count():
        parser.error(f"--num-ranks {num_ranks}: only {torch.cuda.device_count()} GPUs here")
    if num_ranks % 2 or not num_ranks:
        parser.error(f"--num-ranks {num_ranks}: two nodes need an even number of ranks, at least 2")
    _open_report(parser, args, num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        complete = _run(args, num_ranks, Path(folder))
        off = conclude(Report.resume(args.out), Path(folder), num_ranks)
        if args.logs:
            keep_logs(Path(folder), args.logs)
    present(args.out, COLUMNS, figures.two_nodes, complete)
    print("\n".join(off), file=sys.stderr)
    return 0 if complete and not (on_gpu and off) else 1


if __name__ == "__main__":
    cli.run(main)
