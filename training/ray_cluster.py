"""The Ray cluster a run uses: the one that RAY_ADDRESS names, or a local one for the length of the run."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Without it Ray replaces loopback by the machine's address and listens on all interfaces (Ray 2.58,
# services.resolve_ip_for_localhost). It is read when Ray is imported, and means nothing to a running cluster.
if not os.environ.get("RAY_ADDRESS"):
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray

from training.config import TrainingConfig
from training.errors import JobError

GRACE_S = 60.0
"""How long nodes of an existing cluster may take to join before the run gives up."""

_CONNECT_TIMEOUT_S = 10.0


@contextmanager
def connected(config: TrainingConfig) -> Iterator[None]:
    """Connects to Ray, and disconnects at the end; a local cluster ends with it.

    Ray's job server and KubeRay's pods set RAY_ADDRESS. Without it a cluster is started on this machine,
    bound to loopback and without a dashboard.

    Raises:
        JobError: RAY_ADDRESS names a cluster that does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _require_reachable(address)
        ray.init(address=address, logging_level=logging.WARNING)
    else:
        _start_local(config)
    try:
        yield
    finally:
        ray.shutdown()


def _require_reachable(address: str) -> None:
    """Ray itself tries for minutes, and logs each attempt."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:  # auto, ray://...: for Ray to understand
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise JobError(f"the Ray cluster at RAY_ADDRESS={address} does not answer: {error}") from None


def _start_local(config: TrainingConfig) -> None:
    group = os.getpgrp()
    ray.init(
        address="local",
        num_cpus=config.num_workers if config.device == "cpu" else None,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        logging_level=logging.WARNING,
        # One of Ray Train's actors warns every second that there is no dashboard. The workers' log level
        # is set by Ray Train and stays INFO.
        logging_config=ray.LoggingConfig(log_level="ERROR"),
    )
    # Ray moves this process into a group of its own; under make or a script, Ctrl-C in a terminal would then
    # not reach it.
    if os.getpgrp() != group:
        os.setpgid(0, group)


def resources_per_worker(config: TrainingConfig) -> dict[str, float]:
    """What one worker reserves. One GPU each puts as many workers on a node as it has GPUs."""
    return {"CPU": 1.0, "GPU": 1.0} if config.device == "cuda" else {"CPU": 1.0}


def num_workers_with_room(config: TrainingConfig, grace_s: float | None = None) -> int:
    """Waits until the cluster is large enough for the run, and tells how many workers that is.

    Args:
        config: `num_workers` (0: one for each GPU) and `device` are read.
        grace_s: how long to wait; by default `GRACE_S`, or not at all for a local cluster: it cannot grow.

    Raises:
        JobError: it is not large enough.
    """
    if grace_s is None:
        grace_s = GRACE_S if os.environ.get("RAY_ADDRESS") else 0.0
    deadline_s = time.monotonic() + grace_s
    while True:
        total = ray.cluster_resources()
        wanted = config.num_workers or int(total.get("GPU", 0))
        lacking = _lacking(config, wanted or 1, total)
        if not lacking:
            return wanted
        if time.monotonic() >= deadline_s:
            raise JobError(_shortage(config, wanted, lacking, total, grace_s))
        time.sleep(1.0)


def _lacking(config: TrainingConfig, num_workers: int, total: dict[str, float]) -> list[str]:
    needed = resources_per_worker(config)
    return [name for name in needed if total.get(name, 0.0) < needed[name] * num_workers]


def _shortage(
    config: TrainingConfig, wanted: int, lacking: list[str], total: dict[str, float], grace_s: float
) -> str:
    has = " and ".join(f"{total.get(name, 0):g} {name}s" for name in lacking)
    needs = (
        f"{wanted} workers with one {' and one '.join(resources_per_worker(config))} each"
        if wanted
        else "a GPU"
    )
    after = f" after {grace_s:g} s" if grace_s else ""
    remedy = (
        "lower --num-workers or add nodes" if wanted else "use --device cpu --num-workers 2, or add GPU nodes"
    )
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return f"the job needs {needs}, but the Ray cluster has{after} only {has} on {num_nodes} nodes; {remedy}"
