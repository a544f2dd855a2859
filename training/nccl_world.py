"""Puts the logs of single processes together: who has which rank, on which host, connected to whom.

NCCL names a communicator by a hash that is equal on all of its ranks (`commId`), or, when it was split from
another, by the parent, a count and a color. Logs that hold neither are told apart by their sizes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from training.nccl_log import Channel, Communicator, Place, ProcessLog

GroupKey = tuple[str, ...]


@dataclass
class Group:
    """A communicator, over all processes that joined it.

    Attributes:
        num_ranks: ranks it has, as its members say.
        num_hosts: hosts it spans by NCCL's own count (0 where NCCL is too old to say).
        members: rank in the communicator -> the processes that claim it (more than one: logs of two runs).
    """

    num_ranks: int
    num_hosts: int = 0
    members: dict[int, list[ProcessLog]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Link:
    """A connection over the network between two hosts, announced at both of its ends."""

    from_node: str
    to_node: str
    network: str
    gpudirect: bool
    place: Place


@dataclass
class World:
    """The job as its logs show it.

    Attributes:
        size: number of ranks: as given, or that of the largest communicator; 0 when there is none.
        ranks: world rank -> the processes that claim it.
        strangers: processes that have no rank in the world.
        groups: every communicator.
        node_of: process -> the host it counts to.
        num_hosts: hosts the world's communicator spans.
        num_hosts_by_nccl: NCCL's own count of them; 0 where it did not say.
        links: connections between hosts.
    """

    size: int
    ranks: dict[int, list[ProcessLog]] = field(default_factory=dict)
    strangers: list[ProcessLog] = field(default_factory=list)
    groups: dict[GroupKey, Group] = field(default_factory=dict)
    node_of: dict[tuple[str, int], str] = field(default_factory=dict)
    num_hosts: int = 0
    num_hosts_by_nccl: int = 0
    links: list[Link] = field(default_factory=list)

    def rank_of(self, process: ProcessLog) -> int | None:
        """The (first) world rank of a process."""
        return next((rank for rank, claims in self.ranks.items() if _has(claims, process)), None)

    def unreachable(self, networks: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs (from, to) of hosts with no way from one to the other over links of these networks."""
        nodes = sorted(set(self.node_of.values()))
        next_of: dict[str, set[str]] = defaultdict(set)
        for link in self.links:
            if link.network in networks:
                next_of[link.from_node].add(link.to_node)
        return [(start, end) for start in nodes for end in nodes if end not in _reachable(start, next_of)]


def _has(claims: Iterable[ProcessLog], process: ProcessLog) -> bool:
    return any(claim.key == process.key for claim in claims)


def _reachable(start: str, next_of: dict[str, set[str]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        for node in next_of[todo.pop()] - seen:
            seen.add(node)
            todo.append(node)
    return seen


def assemble(processes: Sequence[ProcessLog], world_size: int | None = None) -> World:
    """Builds the world.

    Args:
        processes: evidence of all processes whose logs were read.
        world_size: ranks the job has; None: as many as the largest communicator.
    """
    groups = _groups(processes)
    size = world_size or max((group.num_ranks for group in groups.values()), default=0)
    world = World(size, groups=groups)
    candidates = [group for group in groups.values() if group.num_ranks == size]
    if candidates:
        everyone = max(candidates, key=lambda group: len(group.members))
        world.ranks = {rank: list(claims) for rank, claims in sorted(everyone.members.items())}
        world.num_hosts_by_nccl = everyone.num_hosts
    known = {process.key for claims in world.ranks.values() for process in claims}
    world.strangers = [process for process in processes if process.key not in known]
    world.node_of = _nodes(world)
    world.num_hosts = len(set(world.node_of.values()))
    world.links = list(_links(groups.values(), world.node_of))
    return world


def _groups(processes: Iterable[ProcessLog]) -> dict[GroupKey, Group]:
    groups: dict[GroupKey, Group] = {}
    for process in processes:
        for comm in process.communicators.values():
            for key in _keys(comm, process):
                group = groups.setdefault(key, Group(comm.num_ranks))
                group.num_hosts = max(group.num_hosts, comm.num_hosts or 0)
                if not _has(group.members[comm.rank], process):
                    group.members[comm.rank].append(process)
    return dict(sorted(groups.items()))


def _keys(comm: Communicator, process: ProcessLog) -> list[GroupKey]:
    size = str(comm.num_ranks)
    if comm.ids:
        return [("id", identity, size) for identity in sorted(comm.ids)]
    if comm.split_from:
        pointer, count, color = comm.split_from
        parents = {
            i for other in process.communicators.values() if other.pointer == pointer for i in other.ids
        }
        return [("split", parent, count, color, size) for parent in sorted(parents or {""})]
    return [("size", size, str(comm.num_hosts or 0))]


def _nodes(world: World) -> dict[tuple[str, int], str]:
    """Which host each process counts to: its NCCL_HOSTID, else its host name."""
    members = [process for claims in world.ranks.values() for process in claims]
    return {process.key: process.node for process in members}


def _links(groups: Iterable[Group], node_of: dict[tuple[str, int], str]) -> Iterable[Link]:
    """Channels between hosts of which both ends were logged.

    A line gives ranks within a communicator but not which one, so a sender's line counts if some communicator
    has that sender and a receiver, on another host, which logged the other end.
    """
    found: dict[Link, None] = {}
    for group in groups:
        for rank, claims in group.members.items():
            for sender in claims:
                for channel, place in sender.channels.items():
                    if channel.direction == "send" and channel.source == rank:
                        for link in _to_other_hosts(channel, place, sender, group, node_of):
                            found.setdefault(link)
    return found


def _to_other_hosts(
    channel: Channel, place: Place, sender: ProcessLog, group: Group, node_of: dict[tuple[str, int], str]
) -> Iterable[Link]:
    for receiver in group.members.get(channel.target, ()):
        ends = node_of.get(sender.key), node_of.get(receiver.key)
        if None in ends or ends[0] == ends[1]:
            continue
        if other := _other_end(channel, receiver):
            yield Link(*ends, channel.network, channel.gpudirect and other.gpudirect, place)


def _other_end(channel: Channel, receiver: ProcessLog) -> Channel | None:
    """The receiver's line for the sender's channel; each end chooses GPUDirect for itself."""
    ends = (
        Channel(channel.index, channel.source, channel.target, "receive", channel.network, gpudirect)
        for gpudirect in (channel.gpudirect, not channel.gpudirect)
    )
    return next((end for end in ends if end in receiver.channels), None)
