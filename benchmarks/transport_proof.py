"""The transport check against real NCCL, on a machine with one GPU or more.

    python -m benchmarks.transport_proof --out FOLDER [--device cuda|cpu]

NCCL_HOSTID makes NCCL take processes of one machine for several hosts: what they say to each other then goes
over its network, here sockets. There is no EFA here, so what must be seen is that the check fails where efa
is required, passes where sockets are, and does not apply on one host. Writes FOLDER/transport_proof.json, and
FOLDER/logs.tar.gz: NCCL's logs with host names and addresses replaced, as cases for tests/cases/nccl. Exit
code 1 if anything came out otherwise.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import cli, ranks
from benchmarks.report import Report
from training import handshake
from training.config import TrainingConfig
from training.errors import TransportError
from training.nccl_log import read
from training.parallel import build_mesh
from training.transport import judge
from training.worker import Worker

_RANK_TIMEOUT_S = 100
_COLLECTIVE_TIMEOUT_S = 40
# One machine, whatever its interfaces; multicast over NVLink needs a fabric manager that virtual machines may
# not reach; MNNVL would find the NVLink between "hosts" all the same.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
_NO_PLUGIN = "Failed to initialize any NET plugin"


@dataclass(frozen=True)
class Condition:
    """One situation, and what the check must make of it.

    Attributes:
        nodes: host of each rank, as NCCL is told.
        require: as the job's `require_transport`.
        word: verdict that must come out.
        passes: whether the job may go on.
        says: a text that the report must hold.
        environment: more variables for all ranks.
    """

    name: str
    nodes: tuple[str, ...]
    require: str
    word: str
    passes: bool
    says: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def conditions(device: str, num_gpus: int) -> list[Condition]:
    """What can be shown with this many GPUs."""
    one, two = ("a",) * min(max(num_gpus, 1), 2), ("a", "b")
    if device == "cpu":
        return [Condition("gloo-two-hosts", two, "any", "not applicable", True, "gloo on CPU, not NCCL")]
    fallback, two_of_four = {"NCCL_NET_PLUGIN": "ofi"}, ("a",) * 4 + ("b",) * 4
    found = [
        Condition("one-host", one, "any", "not applicable", True),
        Condition(
            "one-host-socket-required", one, "socket", "not applicable", False, "all ranks run on one host"
        ),
        Condition("two-hosts-socket-required", two, "socket", "socket", True),
        Condition("two-hosts-efa-required", two, "efa", "unproven", False, _NO_PLUGIN),
        Condition("two-hosts-silent-fallback", two, "any", "socket", True, environment=fallback),
        Condition("two-nodes-of-four-socket-required", two_of_four, "socket", "socket", True),
        Condition("two-nodes-of-four-efa-required", two_of_four, "efa", "unproven", False, _NO_PLUGIN),
    ]
    if num_gpus > 1:
        found.append(Condition("hybrid-mesh-socket-required", ("a", "a", "b", "b"), "socket", "socket", True))
    return found


# --- one rank -----------------------------------------------------------------------------------------------


def _rank(end: Connection, rank: int, condition: Condition, device: str, folder: str) -> None:
    """Proves and confirms as a job does; sends the result, or the report it failed with."""
    # Ctrl-C is for the process that started this one, and ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({**_ENVIRONMENT, **condition.environment})
    os.environ.update(hosts_for_nccl(rank, condition.nodes, torch.cuda.device_count()))
    world_size = len(condition.nodes)
    config = TrainingConfig(
        device=device,
        num_workers=world_size,
        require_transport=condition.require,
        nccl_log_dir=f"{folder}/logs" if device == "cuda" else "",
        collective_timeout_s=_COLLECTIVE_TIMEOUT_S,
    )
    handshake.open_log(config, rank)
    worker = _join(rank, condition, device, f"{folder}/store")
    try:
        mesh = build_mesh(condition.nodes, config, device)
        proven = handshake.prove(mesh, config, worker)
        end.send({**proven, "confirmed": handshake.confirm(mesh, config, worker)})
    except TransportError as error:
        end.send({"failed": str(error)})
    end.close()
    os._exit(0)  # NCCL may be stuck in a call that never returns: nothing is left to clean up


def gpu_of(rank: int, nodes: Sequence[str], num_gpus: int) -> int:
    """Which GPU a rank takes: ranks of one host take different ones; hosts share them where they must."""
    is_one_each = len(set(nodes)) == len(nodes)
    return (rank if is_one_each else nodes[:rank].count(nodes[rank])) % num_gpus


def hosts_for_nccl(rank: int, nodes: Sequence[str], num_gpus: int) -> dict[str, str]:
    """What NCCL is told of a rank's host: its node, or a host of its own where nodes have too few GPUs.

    NCCL refuses two ranks of one host on one GPU. As hosts of their own they still form the job's mesh of
    nodes, with all its communicators; but not with PAT, which nodes of several GPUs never use (see
    `ranks.SHARED_GPUS`).
    """
    if len(set(nodes)) == 1:
        return {}
    if max(map(nodes.count, nodes)) > num_gpus:
        return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_PAT_ENABLE": "0"}
    return {"NCCL_HOSTID": f"node-{nodes[rank]}"}


def _join(rank: int, condition: Condition, device: str, store: str) -> Worker:
    nodes = condition.nodes
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", gpu_of(rank, nodes, torch.cuda.device_count()))
        torch.cuda.set_device(here)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, len(nodes)),
        rank=rank,
        world_size=len(nodes),
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
    )
    return Worker(
        rank, len(nodes), nodes[:rank].count(nodes[rank]), nodes[rank], here, lambda record: None, print
    )


# --- all ranks ----------------------------------------------------------------------------------------------


def run(condition: Condition, device: str, folder: Path) -> list[dict[str, Any]]:
    """Runs one condition; what each rank sent, in rank order ("no answer" where one did not)."""
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for rank in range(len(condition.nodes)):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, rank, condition, device, str(folder)), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    deadline_s = time.monotonic() + _RANK_TIMEOUT_S
    try:
        return [_receive(end, deadline_s) for end in ends]
    finally:
        ranks.end(processes)


def _receive(end: Connection, deadline_s: float) -> dict[str, Any]:
    try:
        if end.poll(max(deadline_s - time.monotonic(), 0)):
            return end.recv()
    except EOFError:
        pass
    return {"failed": "no answer"}


def objections(condition: Condition, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the check came out otherwise than it must; empty if nowhere."""
    found = []
    for rank, result in enumerate(results):
        report = result.get("failed", "")
        if bool(report) == condition.passes:
            found.append(f"rank {rank} {'failed' if report else 'passed'}: {report or result['why']}")
        word = re.match(r"NCCL transport: (.+?) - ", report)
        seen = word[1] if word else result.get("verdict")
        if seen != condition.word:
            found.append(f"rank {rank}: verdict {seen}, not {condition.word}")
        if condition.says not in (report or result["why"]):
            found.append(f"rank {rank}: the report does not say: {condition.says}")
    if len({result.get("failed", "") for result in results}) > 1:
        found.append("the ranks' reports differ")
    return found


# --- logs as test cases -------------------------------------------------------------------------------------


_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_IPV6 = re.compile(
    r"(?<=\w:)[0-9a-f]{1,4}:[0-9a-f:]*[0-9a-f](?=[%<])"
)  # as NCCL writes them, after the interface
_KEPT = ("127.0.0.1", "0.0.0.0")


def anonymous(text: str) -> str:
    """A log without this machine's name and addresses."""
    text = re.sub(rf"\b{re.escape(socket.gethostname().split('.')[0])}\b", "gpu-host", text)
    found = sorted(set(_IPV4.findall(text)) - set(_KEPT))
    stand_ins = {address: f"10.0.1.{10 + number}" for number, address in enumerate(found)}
    text = _IPV4.sub(lambda match: stand_ins.get(match[0], match[0]), text)
    return _IPV6.sub("fe80::1", text)


def add_case(archive: tarfile.TarFile, condition: Condition, logs: Path) -> None:
    """Adds a condition's logs to the archive as a case: they must give the verdict that was seen live."""
    want = {
        "require": "efa",
        "world_size": len(condition.nodes),
        "pass": False,
        "verdict": condition.word,
        "socket_pass": condition.word == "socket",
        "why": f"real NCCL, condition {condition.name}",
    }
    folder = f"real-{condition.name}"
    for path in sorted(logs.glob("rank*.log")):
        path.write_text(anonymous(path.read_text(errors="replace")))
        archive.add(path, f"{folder}/{path.name}")
    verdict = judge(read(sorted(logs.glob("rank*.log"))), "efa", len(condition.nodes))
    if verdict.word != condition.word or verdict.passed:
        raise SystemExit(f"{condition.name}: the kept logs say {verdict.word}\n{verdict.report()}")
    content = json.dumps(want, indent=2).encode() + b"\n"
    entry = tarfile.TarInfo(f"{folder}/expected.json")
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every condition; 0 if all came out as they must."""
    options = _parser().parse_args(argv)
    num_gpus = torch.cuda.device_count()
    if options.device == "cuda" and not num_gpus:
        print("error: --device cuda: this machine has no GPU; use --device cpu", file=sys.stderr)
        return 2
    report = Report.start(options.out / "transport_proof.json", "transport_proof", {"device": options.device})
    is_right = True
    with tarfile.open(options.out / "logs.tar.gz", "w:gz") as archive:
        for condition in conditions(options.device, num_gpus):
            with tempfile.TemporaryDirectory() as folder:
                is_right &= _one(condition, options.device, Path(folder), report, archive)
    report.finish()
    return 0 if is_right else 1


def _one(condition: Condition, device: str, folder: Path, report: Report, archive: tarfile.TarFile) -> bool:
    started = time.monotonic()
    results = run(condition, device, folder)
    problems = objections(condition, results)
    row = {
        "condition": condition.name,
        "nodes": list(condition.nodes),
        "require": condition.require,
        "expected": condition.word,
        "as_expected": not problems,
        "problems": problems,
        "seconds": round(time.monotonic() - started, 1),
        "rank_0": json.loads(anonymous(json.dumps(results[0]))),
    }
    report.put(row, ["condition"])
    state = "as it must" if not problems else "WRONG: " + "; ".join(problems)
    must = f"{condition.word}, {'passes' if condition.passes else 'fails'}"
    print(
        f"{condition.name:28} require {condition.require:6} -> {must:24} {row['seconds']:6.1f} s  {state}",
        flush=True,
    )
    if not problems and device == "cuda":
        add_case(archive, condition, folder / "logs")
    return not problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport_proof", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the plumbing only")
    return parser


if __name__ == "__main__":
    cli.run(main)
