"""Several hosts on one machine: network namespaces joined by a bridge. Needs root and iproute2.

What ranks of one host say to each other stays on that namespace's loopback; what leaves the host passes its
`eth0`, where the kernel counts it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_SUBNET = "10.77.0"


class HostsError(RuntimeError):
    """The hosts cannot be made here, or a rank failed; the message says why."""


def why_not() -> str | None:
    """Why hosts cannot be made on this machine; None if they can."""
    if shutil.which("ip") is None:
        return "the command ip is missing; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


class Hosts:
    """As many hosts as asked for, with addresses of their own, gone again at the end of the `with` block."""

    def __init__(self, num_hosts: int) -> None:
        self._prefix = f"bb{os.getpid()}"
        self.num_hosts = num_hosts

    def address(self, host: int) -> str:
        """The host's IP address."""
        return f"{_SUBNET}.{host + 1}"

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def __enter__(self) -> Hosts:
        switch = f"{self._prefix}sw"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for host in range(self.num_hosts):
                self._add(host, switch)
        except HostsError:
            self._remove()
            raise
        return self

    def _add(self, host: int, switch: str) -> None:
        name, port = self._name(host), f"port{host}"
        _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in [f"{self._prefix}sw", *(self._name(host) for host in range(self.num_hosts))]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def run(self, host_of_rank: Sequence[int], argv: Sequence[str], timeout_s: float) -> None:
        """Runs one process per rank, each on its host, with torchrun's variables set.

        Args:
            host_of_rank: for each rank the host it runs on.
            argv: the command, the same for all.
            timeout_s: all are ended after this.

        Raises:
            HostsError: a rank ended with an error or not in time; with the end of its output.
        """
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", self._name(host), *argv],
                env=dict(os.environ) | self._variables(rank, host_of_rank),
                stdout=subprocess.PIPE if rank else None,
                stderr=subprocess.STDOUT if rank else None,
                text=True,
                start_new_session=True,  # Ctrl-C is for this process, which ends them
            )
            for rank, host in enumerate(host_of_rank)
        ]
        try:
            _wait(processes, time.monotonic() + timeout_s)
        finally:
            # All at once: one that outlived another would print what it makes of that.
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def _variables(self, rank: int, host_of_rank: Sequence[int]) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(host_of_rank)),
            "LOCAL_RANK": str(host_of_rank[:rank].count(host_of_rank[rank])),
            "MASTER_ADDR": self.address(host_of_rank[0]),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


def _wait(processes: Sequence[subprocess.Popen[str]], deadline: float) -> None:
    """Returns when all have succeeded; raises as soon as one has not."""
    running = list(enumerate(processes))
    while running:
        for rank, process in running:
            if process.poll() not in (None, 0):
                output = process.stdout.read() if process.stdout else ""
                raise HostsError(f"rank {rank} failed with exit code {process.returncode}\n{output[-2000:]}")
        running = [(rank, process) for rank, process in running if process.poll() is None]
        if running and time.monotonic() > deadline:
            raise HostsError(f"ranks {[rank for rank, _ in running]} did not end in time")
        time.sleep(0.05)


def bytes_sent(interface: str) -> int:
    """Bytes that left through an interface of this host since it was made."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text(encoding="ascii"))


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if result.returncode:
        raise HostsError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
