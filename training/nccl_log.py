"""Reads NCCL's debug output into evidence: what each process said about its network.

Only facts that stand in one line by themselves are taken, so the order of lines, the mix of ranks in a file
and the split over files do not matter. Files are streamed: memory depends on the evidence, not on their size.

Line formats: NCCL 2.12-2.30 (src/debug.cc, src/init.cc, src/transport/net.cc, src/plugin/net.cc) and
aws-ofi-nccl 1.3-1.20. A line may have anything in front: a time stamp, mpirun's `[1,0]<stdout>:`, Ray's
`(Worker pid=...)`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from training.nccl_symptoms import recognise

_BLOCK_BYTES = 1 << 20
# How much of a line is looked at, before and after NCCL's mark. NCCL's own lines are short (a format buffer
# of 1,024 bytes in src/debug.cc); what is longer is other output, such as a progress bar without line ends.
_BEFORE_MARK_BYTES = 1 << 10
_AFTER_MARK_BYTES = 1 << 12


@dataclass(frozen=True, order=True)
class Place:
    """Where a line stands."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Channel:
    """One end of a connection over the network, as its process announced it.

    Attributes:
        index: channel and connection, such as "00/0".
        source: sending rank, numbered within its communicator.
        target: receiving rank, numbered within its communicator.
        direction: "send" at the source's end, "receive" at the target's.
        network: NCCL's name of the network: Libfabric, Socket, IB, ...
        gpudirect: data go from GPU to network card without a copy in host memory.
    """

    index: str
    source: int
    target: int
    direction: str
    network: str
    gpudirect: bool


@dataclass
class Communicator:
    """A communicator as one of its ranks saw it.

    Attributes:
        pointer: its address in that process.
        rank: of this process in it.
        num_ranks: how many ranks it has.
        num_hosts: hosts it spans, as NCCL counted them (`nNodes`); None where NCCL is too old to say.
        ids: NCCL's hash of it, equal on all of its ranks; empty for communicators split from another.
        split_from: (parent's pointer, count, color) of a communicator split from another.
    """

    pointer: str
    rank: int
    num_ranks: int
    num_hosts: int | None = None
    ids: set[str] = field(default_factory=set)
    split_from: tuple[str, str, str] | None = None


@dataclass
class ProcessLog:
    """Everything one process said. Where a fact can repeat, its first place is kept.

    Attributes:
        host: host name in front of its lines.
        environment: NCCL's variables that it found in the environment and used.
        networks: networks that its communicators were assigned.
        providers: (libfabric provider, fabric) pairs; the fabric is "" before aws-ofi-nccl 1.14.
        num_local_channels: channels that used no network, by transport (P2P, SHM).
        symptoms: name of a `nccl_symptoms.Symptom` -> where it first stood.
        first: its first line.
    """

    host: str
    pid: int
    first: Place
    environment: dict[str, str] = field(default_factory=dict)
    nccl_version: str = ""
    plugin_version: str = ""
    networks: dict[str, Place] = field(default_factory=dict)
    providers: dict[tuple[str, str], Place] = field(default_factory=dict)
    communicators: dict[tuple[str, int, int], Communicator] = field(default_factory=dict)
    channels: dict[Channel, Place] = field(default_factory=dict)
    num_local_channels: dict[str, int] = field(default_factory=dict)
    symptoms: dict[str, Place] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.host, self.pid

    @property
    def node(self) -> str:
        """What NCCL takes for this process's host: NCCL_HOSTID, else the host name."""
        return self.environment.get("NCCL_HOSTID") or self.host

    def facts(self) -> dict[str, Any]:
        """JSON-ready form, for reports."""
        return {
            "host": self.host,
            "pid": self.pid,
            "file": self.first.file,
            "nccl_version": self.nccl_version,
            "plugin_version": self.plugin_version,
            "environment": dict(sorted(self.environment.items())),
            "networks": sorted(self.networks),
            "providers": sorted({provider for provider, _ in self.providers}),
            "fabrics": sorted({fabric for _, fabric in self.providers if fabric}),
            "communicators": [
                {
                    **dataclasses.asdict(comm),
                    "ids": sorted(comm.ids),
                    "split_from": list(comm.split_from or ()),
                }
                for comm in self.communicators.values()
            ],
            "num_channels": _count(f"NET/{channel.network} {channel.direction}" for channel in self.channels)
            | self.num_local_channels,
            "num_gpudirect_channels": sum(channel.gpudirect for channel in self.channels),
            "symptoms": {name: str(place) for name, place in self.symptoms.items()},
        }


def _count(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def read(paths: Iterable[Path]) -> list[ProcessLog]:
    """Evidence of every process that speaks in the files.

    Args:
        paths: log files; other output between NCCL's lines is skipped.

    Raises:
        OSError: a file cannot be read.
    """
    processes: dict[tuple[str, int], ProcessLog] = {}
    for path in paths:
        for number, text in _nccl_lines(path):
            _take(text, Place(str(path), number), processes)
    return [processes[key] for key in sorted(processes)]


# --- finding NCCL's lines in the stream ---------------------------------------------------------------------

_MARK = re.compile(rb"NCCL (?:INFO|WARN)")


def _nccl_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of each line that NCCL wrote."""
    with path.open("rb") as stream:
        number, carry = 1, b""
        while block := stream.read(_BLOCK_BYTES):
            block = carry + block
            end = block.rfind(b"\n") + 1
            yield from _marked(block[:end], number)
            number += block.count(b"\n", 0, end)
            carry = block[end:]
            if len(carry) > _BLOCK_BYTES:  # a line without end: keep what could still become NCCL's
                carry = carry[-_BEFORE_MARK_BYTES - _AFTER_MARK_BYTES :]
        yield from _marked(carry, number)


def _marked(block: bytes, first_number: int) -> Iterator[tuple[int, str]]:
    """Lines of `block` with NCCL's mark; cheap where there are none."""
    position, number = 0, first_number
    while match := _MARK.search(block, position):
        start = block.rfind(b"\n", position, match.start()) + 1 or position
        stop = block.find(b"\n", match.end())
        stop = len(block) if stop < 0 else stop
        number += block.count(b"\n", position, start)
        seen = block[
            max(start, match.start() - _BEFORE_MARK_BYTES) : min(stop, match.end() + _AFTER_MARK_BYTES)
        ]
        yield number, seen.decode("utf-8", "replace")
        position = stop + 1
        number += 1


# --- what a line says --------------------------------------------------------------------------------------
# Every pattern ends with something that follows the value, or with a value that a cut cannot turn into
# another valid one, so that a truncated last line is no evidence rather than wrong evidence.

_HEAD = re.compile(
    r"([A-Za-z0-9][\w.-]*):(\d+):\d+ \[-?\d+\] (?:\S+:\d+ |\S+:\d+ \(\S*\) )?NCCL (?:INFO|WARN) "
)
_VARIABLE = re.compile(r"\b(NCCL_\w+) set by environment to (.+?)\.?$")
_VERSION = re.compile(r"NCCL version (\d[\w.]*)\+")
_PLUGIN = re.compile(r"NET/OFI (?:Initializing|Using) aws-ofi-nccl (\S+)")
_NETWORK = re.compile(r"Assigned NET plugin (.+) to comm\b|Using network (\S.*)")
_NETWORK_NAMES = ("Libfabric", "AWS Libfabric", "OFI", "Socket")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)(?:, fabric is (\S+) | \(found |\s*$)")
_COMMUNICATOR = re.compile(
    r"\bcomm (0x[0-9a-f]+) rank (\d+) n[rR]anks (\d+) (?:nNodes (\d+) localRanks|cudaDev)"
)
_COMMUNICATOR_ID = re.compile(r"commId (0x[0-9a-f]+) - Init")
_SPLIT = re.compile(r"parent (0x[0-9a-f]+) (?:splitCount|childCount) (-?\d+) color (-?\d+) key")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) (\d+(?:/\d+)?) : (\d+)(?:\[[0-9a-f]+\])? -> (\d+)(?:\[[0-9a-f]+\])? "
    r"(?:\[(send|receive)\] via NET/(.+?)/\d+(.*)|via (P2P|SHM)/)"
)


def _take(text: str, place: Place, processes: dict[tuple[str, int], ProcessLog]) -> None:
    """Adds what one line says to its process; a line can hold several messages that lost their ends."""
    heads = list(_HEAD.finditer(text))
    for head, following in zip_longest(heads, heads[1:]):
        host, pid = head[1], int(head[2])
        process = processes.get((host, pid))
        if process is None:
            process = processes[host, pid] = ProcessLog(host, pid, place)
        message = text[head.end() : following.start() if following else None].rstrip()
        if _take_channel(process, message, place) or _take_communicator(process, message):
            continue  # most lines; they show no symptom
        _take_network(process, message, place)
        _take_about(process, message)
        if symptom := recognise(message):
            process.symptoms.setdefault(symptom.name, place)


def _take_channel(process: ProcessLog, message: str, place: Place) -> bool:
    if not (match := _CHANNEL.search(message)):
        return False
    if local := match[7]:
        process.num_local_channels[local] = process.num_local_channels.get(local, 0) + 1
        return True
    channel = Channel(match[1], int(match[2]), int(match[3]), match[4], match[5], "/GDRDMA" in match[6])
    process.channels.setdefault(channel, place)
    return True


def _take_communicator(process: ProcessLog, message: str) -> bool:
    if not (match := _COMMUNICATOR.search(message)):
        return False
    key = match[1], int(match[2]), int(match[3])
    comm = process.communicators.setdefault(key, Communicator(*key))
    if match[4]:
        comm.num_hosts = max(comm.num_hosts or 0, int(match[4]))
    if named := _COMMUNICATOR_ID.search(message, match.end()):
        comm.ids.add(named[1])
    if split := _SPLIT.search(message, match.end()):
        comm.split_from = (split[1], split[2], split[3])
    return True


def _take_network(process: ProcessLog, message: str, place: Place) -> None:
    if match := _NETWORK.search(message):
        name = match[1] or match[2]
        if not any(known != name and known.startswith(name) for known in _NETWORK_NAMES):  # else: cut short
            process.networks.setdefault(name, place)
    elif match := _PROVIDER.search(message):
        process.providers.setdefault((match[1], match[2] or ""), place)


def _take_about(process: ProcessLog, message: str) -> None:
    if match := _VARIABLE.search(message):
        process.environment[match[1]] = match[2]
    elif match := _VERSION.search(message):
        process.nccl_version = match[1]
    elif match := _PLUGIN.search(message):
        process.plugin_version = match[1]
