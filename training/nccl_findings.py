"""The faults in a job's NCCL logs, one function for each kind, each naming rank, host, line and remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from training.nccl_log import Place, ProcessLog
from training.nccl_symptoms import BY_NAME, SYMPTOMS
from training.nccl_world import World

# aws-ofi-nccl calls itself "AWS Libfabric" up to 1.11, and whatever of these NCCL_NET says (1.20).
LIBFABRIC_NAMES = ("Libfabric", "AWS Libfabric", "OFI")
_NETWORKS_OF = {"efa": LIBFABRIC_NAMES, "socket": ("Socket",)}
_SEE_LOG = (
    "set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET, "
    "and one NCCL_DEBUG_FILE for each rank and run"
)


@dataclass(frozen=True)
class Finding:
    """One reason why the logs are not a pass.

    Attributes:
        message: what is wrong.
        rank: world rank, None when it is not one rank's fault or unknown.
        host: host name in the log.
        place: the line that shows it.
        cause: likely cause.
        remedy: what to change.
    """

    message: str
    rank: int | None = None
    host: str = ""
    place: Place | None = None
    cause: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "place": str(self.place) if self.place else None}

    def __str__(self) -> str:
        rank = f"rank {self.rank}" if self.rank is not None else ""
        who = " on ".join(part for part in (rank, self.host) if part)
        where = f" ({self.place})" if self.place else ""
        lines = [f"  FAILED {who}{where}: {self.message}" if who or where else f"  FAILED {self.message}"]
        lines += [
            f"    {name}: {text}"
            for name, text in (("likely cause", self.cause), ("remedy", self.remedy))
            if text
        ]
        return "\n".join(lines)


def families(process: ProcessLog) -> set[str]:
    """The networks of a process in our words: `efa`, `socket`, `libfabric over tcp`, `ib`, ..."""
    named = set(process.networks) | {channel.network for channel in process.channels}
    return {family for network in named for family in _families_of(network, process)}


def _families_of(network: str, process: ProcessLog) -> set[str]:
    if network not in LIBFABRIC_NAMES:
        return {network.lower()}
    # "efa" alone is EFA; libfabric's layered providers are named like "tcp;ofi_rxm".
    providers = {provider for provider, _ in process.providers} or {"a provider that no line names"}
    return {"efa" if provider == "efa" else f"libfabric over {provider}" for provider in providers}


# --- is the evidence whole? ---------------------------------------------------------------------------------


def find_structural_faults(world: World, processes: Sequence[ProcessLog]) -> list[Finding]:
    """Missing, contradictory or foreign evidence: with any of it, nothing is proven."""
    if not processes:
        message = "no log holds a line of NCCL: silence is not evidence"
        return [
            Finding(message, cause="NCCL did not start, or its debug output went elsewhere", remedy=_SEE_LOG)
        ]
    checks = (
        _wrong_size,
        _missing_ranks,
        _claimed_twice,
        _strangers,
        _half_seen,
        _uncounted_hosts,
        _unassigned,
    )
    return [finding for check in checks for finding in check(world)]


def _wrong_size(world: World) -> Iterable[Finding]:
    sizes = sorted({group.num_ranks for group in world.groups.values()})
    if sizes and sizes[-1] != world.size:
        yield Finding(
            f"the world has {world.size} ranks, but the largest communicator in the logs has {sizes[-1]}",
            cause="logs of another run, or not all of this one's",
            remedy="give the logs of one run only, and its number of ranks",
        )


def _missing_ranks(world: World) -> Iterable[Finding]:
    missing = [rank for rank in range(world.size) if rank not in world.ranks]
    if missing:
        yield Finding(
            f"{_spans(missing)} of {world.size} left no log of joining the world's communicator",
            cause="their logs were not given, or they failed or hung before",
            remedy=f"give the logs of all ranks; {_SEE_LOG}",
        )


def _spans(ranks: Sequence[int]) -> str:
    """[4, 5, 6, 9] -> "ranks 4-6, 9"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _claimed_twice(world: World) -> Iterable[Finding]:
    for rank, claims in world.ranks.items():
        if len(claims) > 1:
            who = ", ".join(f"{claim.host}:{claim.pid} in {claim.first}" for claim in claims)
            yield Finding(
                f"{len(claims)} processes claim this rank: {who}",
                rank,
                claims[0].host,
                claims[0].first,
                cause="logs of two runs",
                remedy="remove the logs of earlier runs: one folder for each run",
            )


def _strangers(world: World) -> Iterable[Finding]:
    for process in world.strangers:
        if process.communicators:
            message = f"process {process.pid} is in no communicator that spans this world"
            cause, remedy = (
                "its log is of another run",
                "remove the logs of earlier runs: one folder for each run",
            )
        else:
            message = f"process {process.pid} never joined a communicator"
            cause, remedy = (
                "NCCL failed while starting, hung, or its log was cut short",
                "read the end of this log",
            )
        yield _of(process, _rank_by_file(process), message, cause=cause, remedy=remedy)


def _rank_by_file(process: ProcessLog) -> int | None:
    """The rank that a log file's name tells: the only hint there is when NCCL failed before naming it."""
    match = re.search(r"rank[-_.]?(\d+)[^/]*$", process.first.file)
    return int(match[1]) if match else None


def _half_seen(world: World) -> Iterable[Finding]:
    for key, group in world.groups.items():
        missing = [rank for rank in range(group.num_ranks) if rank not in group.members]
        if key[0] == "id" and group.num_ranks < world.size and missing:
            yield Finding(
                f"communicator {key[1]}: {_spans(missing)} of its {group.num_ranks} left no line about it",
                cause="logs cut short, or of another run",
                remedy="give the whole logs of all ranks of one run",
            )


def _uncounted_hosts(world: World) -> Iterable[Finding]:
    if world.num_hosts_by_nccl and world.ranks and world.num_hosts_by_nccl != world.num_hosts:
        yield Finding(
            f"NCCL counted {world.num_hosts_by_nccl} host(s) in the world, "
            f"the names in the logs show {world.num_hosts}",
            cause="ranks are missing, hosts share a name, or NCCL_HOSTID is set and its line was not logged",
            remedy="give all logs, with ENV in NCCL_DEBUG_SUBSYS",
        )


def _unassigned(world: World) -> Iterable[Finding]:
    for rank, claims in world.ranks.items():
        for process in claims:
            if not process.networks:
                yield _of(process, rank, "no line says which network NCCL assigned to it", remedy=_SEE_LOG)


# --- is it the network that was asked for? ------------------------------------------------------------------


def find_network_faults(
    world: World, processes: Sequence[ProcessLog], require: str, require_gpudirect: bool
) -> list[Finding]:
    """Where the logs show something other than `require` ("efa" or "socket")."""
    is_one_host = world.num_hosts == 1 and world.num_hosts_by_nccl <= 1
    if is_one_host and not any(process.channels for process in processes):
        return [_one_host(require)]
    found = [
        _wrong_network(world, process, family, require)
        for process in processes
        for family in sorted(families(process) - {require})
    ]
    if is_one_host:
        found.append(_one_host(require))
    if not found:
        found += _one_way(world, require)
    if require == "efa" and require_gpudirect:
        found += _without_gpudirect(world)
    return found


def _one_host(require: str) -> Finding:
    return Finding(
        f"not applicable: all ranks run on one host, so no network was used and {require} is not proven",
        remedy="run on two hosts or more, or do not require a network",
    )


def _wrong_network(world: World, process: ProcessLog, family: str, require: str) -> Finding:
    rank = world.rank_of(process)
    rank = _rank_by_file(process) if rank is None else rank
    place = _place_of(process, family)
    if require == "socket":
        remedy = "set NCCL_NET=Socket (and NCCL_NET_PLUGIN=none)"
        return Finding(f"NCCL uses {family}, not its sockets", rank, process.host, place, remedy=remedy)
    cause, remedy = _cause(process, family)
    return Finding(f"NCCL uses {family}, not EFA", rank, process.host, place, cause, remedy)


def _place_of(process: ProcessLog, family: str) -> Place | None:
    """The line that shows it: a channel's if there is one, else the assignment, else the provider."""
    for places in (
        {channel.network: place for channel, place in process.channels.items()},
        process.networks,
    ):
        for network, place in places.items():
            if family in _families_of(network, process):
                return place
    return None


def _cause(process: ProcessLog, family: str) -> tuple[str, str]:
    if family.startswith("libfabric over") and process.providers:
        return (
            "libfabric chose a provider other than efa: FI_PROVIDER names it, or the pod has no EFA device",
            "set FI_PROVIDER=efa, and request and limit vpc.amazonaws.com/efa in the pod",
        )
    symptom = next((symptom for symptom in SYMPTOMS if symptom.name in process.symptoms), None)
    if symptom:
        return f"{symptom.cause} ({process.symptoms[symptom.name]})", symptom.remedy
    return (
        "no line tells; NCCL falls back to sockets when the plugin or the EFA device is missing",
        "set NCCL_NET_PLUGIN=ofi and NCCL_NET=Libfabric (then NCCL fails instead), "
        "and request vpc.amazonaws.com/efa in the pod",
    )


def _one_way(world: World, require: str) -> Iterable[Finding]:
    members = [process for claims in world.ranks.values() for process in claims]
    for start, end in world.unreachable(_NETWORKS_OF[require]):
        message = f"no channel over {require} was logged at both of its ends on the way from {start} to {end}"
        told = [process for process in members if process.node in (start, end) and process.symptoms]
        cause, remedy = _cause(told[0], require) if told else _NO_CHANNEL
        yield Finding(message, host=start, cause=cause, remedy=remedy)


_NO_CHANNEL = (
    "no collective ran between these hosts, the logs are cut short, or the connection was refused",
    "run an all-reduce over the whole world before judging; see that the EFA security group allows all "
    "traffic to and from itself, both ingress and egress",
)


def _without_gpudirect(world: World) -> Iterable[Finding]:
    for link in world.links:
        if not link.gpudirect and link.network in LIBFABRIC_NAMES:
            yield Finding(
                f"a channel to {link.to_node} does not use GPUDirect RDMA",
                host=link.from_node,
                place=link.place,
                cause="the instance type has none (G types), FI_EFA_USE_DEVICE_RDMA=0, or an old driver",
                remedy="set require_gpudirect to false on G types; else update EFA and NVIDIA drivers",
            )


def _of(process: ProcessLog, rank: int | None, message: str, cause: str = "", remedy: str = "") -> Finding:
    """A finding about one process; a symptom in its log is a better cause than the general one."""
    symptom = next((BY_NAME[symptom.name] for symptom in SYMPTOMS if symptom.name in process.symptoms), None)
    place = process.symptoms[symptom.name] if symptom else process.first
    if symptom:
        cause, remedy = symptom.cause, symptom.remedy
    return Finding(message, rank, process.host, place, cause, remedy)
