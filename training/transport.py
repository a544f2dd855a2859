"""Did NCCL use EFA? A verdict on the whole job, from the logs of all of its ranks. Standard library only.

    python -m training.transport PATH... [--require efa|socket|any] [--world-size N] [--json]

The verdict is `efa` only if all of this stands in the logs:
  - every rank of the world left a log, and all of them joined the same communicator;
  - every process was assigned Libfabric and nothing else, and libfabric's provider is efa;
  - no channel goes over another network;
  - the hosts are connected: following channels over Libfabric, seen at both of their ends, one can go from
    every host to every other. Between two hosts that is a channel in each direction. With more hosts NCCL's
    rings are one-way from neighbour to neighbour, so each sends to the next and receives from the one before.
`socket` asks the same of NCCL's own sockets. A job on one host is `not applicable`, never a pass. Silence is
a failure: `unproven`.

What a pass does not prove: how many bytes went over each channel, or that later communicators are like these
(the job looks again at its end). A network that was only set up at start, without a channel, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.nccl_findings import (
    LIBFABRIC_NAMES,
    Finding,
    families,
    find_network_faults,
    find_structural_faults,
)
from training.nccl_log import ProcessLog, read
from training.nccl_world import World, assemble

REQUIREMENTS = ("efa", "socket", "any")
EXIT_PASSED, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


@dataclass
class Verdict:
    """What the logs prove.

    Attributes:
        word: `efa`, `socket`, `other` (one network, but neither of these), `mixed` (several networks),
            `not applicable` (one host), or `unproven`.
        require: what was asked for.
        findings: why it is not a pass; empty for a pass.
        world: ranks, hosts and links.
        processes: the evidence itself.
    """

    word: str
    require: str
    world: World
    processes: Sequence[ProcessLog]
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "verdict": self.word,
            "require": self.require,
            "passed": self.passed,
            "world_size": self.world.size,
            "num_hosts": self.world.num_hosts,
            "findings": [finding.to_dict() for finding in self.findings],
            "links": self.links(),
            "ranks": [
                {"rank": rank, **process.facts()}
                for rank, claims in self.world.ranks.items()
                for process in claims
            ],
            "strangers": [process.facts() for process in self.world.strangers],
        }

    def links(self) -> list[dict[str, Any]]:
        """Channels between hosts, counted by direction and network."""
        counts: dict[tuple[str, str, str], list[int]] = {}
        for link in self.world.links:
            count = counts.setdefault((link.from_node, link.to_node, link.network), [0, 0])
            count[0] += 1
            count[1] += link.gpudirect
        return [
            {"from": start, "to": end, "network": network, "num_channels": total, "num_gpudirect": direct}
            for (start, end, network), (total, direct) in sorted(counts.items())
        ]

    def report(self) -> str:
        """The verdict in words, with every finding and its remedy."""
        return "\n".join([self._headline(), *self._evidence(), *(str(finding) for finding in self.findings)])

    def _headline(self) -> str:
        if self.require == "any":  # not a pass: nothing was proven
            return f"NCCL transport: {self.word} - nothing was required{'' if self.passed else ': FAILED'}"
        result = "passed" if self.passed else "FAILED"
        return f"NCCL transport: {self.word} - {self.require} was required: {result}"

    def _evidence(self) -> Iterable[str]:
        versions = sorted({process.nccl_version for process in self.processes if process.nccl_version})
        plugins = sorted({process.plugin_version for process in self.processes if process.plugin_version})
        yield (
            f"  {len(self.world.ranks)} of {self.world.size} ranks seen on {self.world.num_hosts} host(s), "
            f"NCCL {', '.join(versions) or '(unknown)'}, aws-ofi-nccl {', '.join(plugins) or 'not seen'}"
        )
        for link in self.links():
            direct = f", {link['num_gpudirect']} of them GPUDirect" if link["num_gpudirect"] else ""
            channels = f"{link['num_channels']} channel(s) over {link['network']}"
            yield f"  {link['from']} -> {link['to']}: {channels}{direct}"


def judge(
    processes: Sequence[ProcessLog],
    require: str = "efa",
    world_size: int | None = None,
    require_gpudirect: bool = False,
) -> Verdict:
    """Takes the verdict on the whole world.

    Args:
        processes: evidence of every process (`nccl_log.read`).
        require: one of `REQUIREMENTS`; with `any`, only missing or contradictory evidence is a failure.
        world_size: ranks of the job; None: as many as the largest communicator has. Without it, a job whose
            logs are all those of one smaller job cannot be told from that job.
        require_gpudirect: with `efa`: every channel between hosts must use GPUDirect RDMA.
    """
    world = assemble(processes, world_size)
    faults = find_structural_faults(world, processes)
    word = _word(world, processes, bool(faults))
    if require != "any":
        faults += find_network_faults(world, processes, require, require_gpudirect)
    elif word == "unproven" and not faults:
        faults.append(Finding("no channel between hosts was seen in both directions"))
    return Verdict(word, require, world, processes, faults)


def _word(world: World, processes: Sequence[ProcessLog], is_incomplete: bool) -> str:
    if is_incomplete:
        return "unproven"
    if world.num_hosts == 1:
        return "not applicable"
    seen = {family for process in processes for family in families(process)}
    if len(seen) > 1:
        return "mixed"
    family = seen.pop()
    networks = {link.network for link in world.links} | set(LIBFABRIC_NAMES if family == "efa" else ())
    if world.unreachable(sorted(networks)):
        return "unproven"
    return family if family in ("efa", "socket") else "other"


def log_files(paths: Iterable[Path]) -> list[Path]:
    """Files given, and every file below the folders given.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(child for child in path.rglob("*") if child.is_file())
        elif path.exists():
            files.append(path)
        else:
            raise FileNotFoundError(2, "no such file or folder", str(path))
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 passed, 1 failed, 2 bad usage or unreadable."""
    arguments = _parser().parse_args(argv)
    try:
        processes = read(log_files(arguments.paths))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; give NCCL log files or a folder of them", file=sys.stderr)
        return EXIT_USAGE
    verdict = judge(processes, arguments.require, arguments.world_size, arguments.require_gpudirect)
    _print(json.dumps(verdict.to_dict(), indent=2) if arguments.json else verdict.report())
    return EXIT_PASSED if verdict.passed else EXIT_FAILED


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader (`| head`) has seen enough; the exit code still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give the number of ranks, 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.transport",
        description="Tells from NCCL's logs whether a job's ranks really talked over EFA.",
        epilog="Exit code 0: as required. 1: not, or not proven. 2: bad usage or unreadable logs. "
        "Logs are those of NCCL_DEBUG=INFO; give the logs of one run only, of all of its ranks.",
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="log file, or folder of log files"
    )
    parser.add_argument(
        "--require", choices=REQUIREMENTS, default="efa", help="network to be proven (default: efa)"
    )
    parser.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="ranks of the job (default: those of the largest communicator)",
    )
    parser.add_argument(
        "--require-gpudirect",
        action="store_true",
        help="with efa: every channel between hosts must use GPUDirect RDMA",
    )
    parser.add_argument("--json", action="store_true", help="print verdict and evidence as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
