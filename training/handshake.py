"""The proof inside the job: the ranks talk over the groups of training, then judge what NCCL logged of it.

`prove` runs before a model is downloaded, `confirm` after the last step, since communicators made in between
can differ. Each rank has a log of its own (`open_log`) and reads it, and all ranks judge all logs: there is
one verdict for the world, and one error.

**Which logs count.** Only those that NCCL wrote for this run: `open_log` removes a file of the same name
before NCCL starts, and the verdict refuses processes that are not of this world (training.nccl_world).

**CPU.** Collectives go over gloo, which proves nothing about NCCL: `not applicable`, in words. With
`device=cpu`, `nccl_log_dir` and a required network, the ranks judge the logs that lie in that folder: that is
how the path of a failure is rehearsed without GPUs (tests/training/test_transport_ray.py). Such a run always
fails, whatever those logs say, since they are not this run's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from training import bandwidth, efa_device
from training.agreement import Agreement
from training.config import TrainingConfig
from training.errors import TransportError
from training.hardware import line_rate_gbps
from training.nccl_findings import Finding
from training.nccl_log import ProcessLog, read
from training.nccl_symptoms import recognise
from training.transport import Verdict, judge
from training.worker import Worker

logger = logging.getLogger(__name__)

DEFAULT_LOG_ROOT = Path("/tmp/nccl")
# Connecting 8 GPUs takes NCCL seconds. A rank that is silent for this long is not going to answer: a security
# group that drops packets of EFA looks like this.
EXERCISE_TIMEOUT_S = 90
_GATHER_TIMEOUT_S = 60
_POLL_S = 0.05
# Once one rank has failed, the others get 2 s to fail by themselves: their errors belong in the report too.
_GRACE_POLLS = 40
_GLOO = "this run used gloo on CPU, not NCCL: it says nothing about EFA"


@dataclass
class _ThisProcess:
    """What this process must remember between the calls."""

    log: Path | None = None
    counters_at_start: dict[str, int] = field(default_factory=dict)


_this_process = _ThisProcess()


@dataclass(frozen=True)
class _Evidence:
    """What one rank contributes.

    Attributes:
        failure: why its collectives did not end well; "" if they did.
        endpoints: of its node; on the node's first rank only.
        counters: growth of the node's hardware counters since `prove` began.
    """

    rank: int
    node: str
    log: str
    processes: Sequence[ProcessLog]
    failure: str
    endpoints: efa_device.Endpoints | None
    counters: dict[str, int]


def environment(config: TrainingConfig) -> dict[str, str]:
    """Variables that every worker process needs before NCCL starts; the same on all ranks.

    `NCCL_NET` makes NCCL fail where it would otherwise fall back to sockets.
    """
    if config.device != "cuda":
        return {}
    variables = dict(pair.split("=", 1) for pair in config.nccl_variables.split(",") if pair)
    variables |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET"}
    if config.require_transport == "efa":
        variables |= {"NCCL_NET": "Libfabric", "NCCL_NET_PLUGIN": "ofi", "FI_PROVIDER": "efa"}
    elif config.require_transport == "socket":
        variables |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
    return variables


def open_log(config: TrainingConfig, rank: int) -> Path:
    """Gives this rank's NCCL a log of its own, and the variables of `environment`.

    Called first in each worker process: NCCL reads its environment once, when it first starts.

    Returns:
        The log's path. NCCL creates the file; one of an earlier run is removed.

    Raises:
        TransportError: the folder cannot be written.
    """
    folder = Path(config.nccl_log_dir or DEFAULT_LOG_ROOT / (config.run_name or "unnamed"))
    path = folder / f"rank{rank}.log"
    _this_process.log = path
    if config.device != "cuda":
        return path
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        remedy = "give a folder that every worker can write"
        raise TransportError(f"rank {rank}: --nccl-log-dir {folder}: {error.strerror}; {remedy}") from None
    os.environ.update(environment(config))
    os.environ["NCCL_DEBUG_FILE"] = str(path).replace("%", "%%")  # NCCL expands %h and %p
    return path


def prove(mesh: DeviceMesh, config: TrainingConfig, worker: Worker) -> dict[str, Any]:
    """Talks over the groups of training, and judges on every rank what NCCL did.

    Args:
        mesh: that training will use: ("shard",) or ("replicate", "shard").
        config: `require_transport`, `require_gpudirect`, `instance_type`, `nccl_log_dir` are read.
        worker: this rank.

    Returns:
        JSON-ready and the same on every rank: the verdict, evidence of each rank, bus bandwidth, warnings.

    Raises:
        TransportError: on every rank, with the whole report: the required network is not proven, or NCCL
            failed.
    """
    agreement = Agreement(_GATHER_TIMEOUT_S)
    if _this_process.log is None:
        agreement.together(lambda: open_log(config, worker.rank))
    nodes = agreement.gather(worker.node)
    _this_process.counters_at_start = efa_device.counters()
    groups = bandwidth.groups_of(mesh, nodes)
    try:
        failure = _talk(agreement, partial(bandwidth.exercise, groups, worker.device), config)
    except RuntimeError as error:  # gloo's: a rank has ended, and the next message to it will fail as well
        failure = f"another rank ended during the first collectives ({str(error).splitlines()[0]})"
    result = _judged(agreement, config, worker, failure)
    rows = bandwidth.measure(groups, worker.device, agreement)
    return {**result, **_speed(rows, config), "warnings": result["warnings"] + _speed_warnings(rows, config)}


def confirm(mesh: DeviceMesh, config: TrainingConfig, worker: Worker) -> dict[str, Any]:
    """Judges again what NCCL has logged by the end of training.

    Args and errors: as `prove`. The result has no bandwidth.
    """
    return _judged(Agreement(_GATHER_TIMEOUT_S), config, worker, failure="")


# --- talking ------------------------------------------------------------------------------------------------


@dataclass
class _Talk:
    """How a rank's exercise stands. None: still running; "": done; else why it failed."""

    failure: str | None = None


def _talk(agreement: Agreement, exercise: Callable[[], None], config: TrainingConfig) -> str:
    """Runs the exercise on all ranks; returns why it failed on this one, or "".

    In a thread, because NCCL waits inside a call for peers that never answer, for as long as its own timeout.
    Meanwhile the ranks tell each other how they stand, so that all stop as soon as one has failed.
    """
    talk = _Talk()

    def run() -> None:
        try:
            exercise()
            talk.failure = ""
        except Exception as error:
            talk.failure = f"{type(error).__name__}: {error}"

    timeout_s = min(EXERCISE_TIMEOUT_S, config.collective_timeout_s)
    deadline_s = time.monotonic() + timeout_s
    threading.Thread(target=run, name="transport-exercise", daemon=True).start()
    num_polls_left = _GRACE_POLLS  # the same on all ranks, since they poll together
    while num_polls_left:
        stands = agreement.gather((talk.failure, time.monotonic() > deadline_s))
        if all(failure is not None for failure, _ in stands):
            break
        if any(is_late for _, is_late in stands):
            silent = stands[agreement.rank][0] is None
            return f"the first collectives did not finish within {timeout_s} s" if silent else ""
        num_polls_left -= any(failure for failure, _ in stands)
        time.sleep(_POLL_S)
    return stands[agreement.rank][0] or ""


# --- judging ------------------------------------------------------------------------------------------------


def _judged(agreement: Agreement, config: TrainingConfig, worker: Worker, failure: str) -> dict[str, Any]:
    own = _own_evidence(config, worker, failure)
    try:
        evidence = agreement.gather(own)
    except RuntimeError as error:  # a rank is stuck or gone: what this one knows is all there will be
        findings = _failures([own]) or [Finding("another rank does not answer", own.rank, own.node)]
        verdict = _verdict([own], config, worker)
        raise TransportError(_report(verdict, findings), _summary(verdict, [own], config)) from error
    verdict = _verdict(evidence, config, worker)
    findings = _failures(evidence)
    if config.require_transport != "any":
        findings += verdict.findings + _other_findings(evidence, config)
    if findings:
        raise TransportError(_report(verdict, findings), _summary(verdict, evidence, config))
    return _summary(verdict, evidence, config)


def _own_evidence(config: TrainingConfig, worker: Worker, failure: str) -> _Evidence:
    log = _this_process.log
    processes: list[ProcessLog] = []
    if config.device == "cuda" or config.require_transport != "any":
        with contextlib.suppress(FileNotFoundError):  # judged as silence
            processes = read([log]) if log else []
    return _Evidence(
        worker.rank,
        worker.node,
        str(log),
        processes,
        failure,
        efa_device.endpoints() if worker.local_rank == 0 else None,
        efa_device.increase(_this_process.counters_at_start, efa_device.counters()),
    )


def _verdict(evidence: Sequence[_Evidence], config: TrainingConfig, worker: Worker) -> Verdict:
    processes = [process for one in evidence for process in one.processes]
    return judge(processes, config.require_transport, worker.world_size, config.require_gpudirect)


def _failures(evidence: Sequence[_Evidence]) -> list[Finding]:
    """What NCCL's own errors say, with the cause where it is known."""
    found = []
    for one in evidence:
        if one.failure:
            symptom = recognise(one.failure)
            cause, remedy = (symptom.cause, symptom.remedy) if symptom else _UNKNOWN_FAILURE
            found.append(Finding(one.failure.strip(), one.rank, one.node, None, cause, remedy))
    return found


_UNKNOWN_FAILURE = (
    "packets between the nodes are dropped, or another rank failed",
    "see that the EFA security group allows all traffic to and from itself, both ingress and egress, "
    "and read the other ranks' findings",
)


def _other_findings(evidence: Sequence[_Evidence], config: TrainingConfig) -> list[Finding]:
    """What speaks against the required network beside NCCL's logs."""
    if config.device != "cuda":
        return [
            Finding(_GLOO, remedy="run on GPUs; on CPU do not require a network (--require-transport any)")
        ]
    if config.require_transport != "efa":
        return []
    return [
        Finding(
            f"`fi_info -p efa` shows no endpoint of type RDM ({one.endpoints.error or one.endpoints.types})",
            one.rank,
            one.node,
            cause="the pod has no EFA device",
            remedy="request and limit vpc.amazonaws.com/efa in the pod, and see that the device plugin runs",
        )
        for one in evidence
        if one.endpoints and one.endpoints.has_tool and not one.endpoints.has_rdm
    ]


def _report(verdict: Verdict, findings: Sequence[Finding]) -> str:
    verdict.findings = list(findings)
    return verdict.report()


# --- reporting ----------------------------------------------------------------------------------------------


def _summary(verdict: Verdict, evidence: Sequence[_Evidence], config: TrainingConfig) -> dict[str, Any]:
    is_nccl = config.device == "cuda"
    is_judged = is_nccl or config.require_transport != "any"  # without NCCL that can only end in a failure
    facts = verdict.to_dict()
    per_node = {one.node: one for one in reversed(evidence)}.values()
    return {
        "verdict": verdict.word if is_judged else "not applicable",
        "why": verdict.report() if is_judged else _GLOO,
        "require": config.require_transport,
        "passed": is_nccl and config.require_transport == verdict.word,
        "world_size": len(evidence),
        "num_hosts": facts["num_hosts"] if is_nccl else len(per_node),
        "links": facts["links"],
        "ranks": [_rank_summary(one) for one in evidence],
        "endpoint_types": {
            one.node: list(one.endpoints.types)
            for one in evidence
            if one.endpoints and one.endpoints.has_tool
        },
        "counters": {one.node: one.counters for one in per_node if one.counters},
        "warnings": _counter_warnings(verdict, evidence),
    }


def _rank_summary(one: _Evidence) -> dict[str, Any]:
    shown = ("host", "nccl_version", "plugin_version", "environment", "networks", "providers", "fabrics")
    shown += ("num_channels",)
    facts = [process.facts() for process in one.processes]
    return {"rank": one.rank, "node": one.node, "log": one.log} | {
        name: facts[0][name] for name in shown if facts
    }


def _counter_warnings(verdict: Verdict, evidence: Sequence[_Evidence]) -> list[str]:
    if verdict.word != "efa":
        return []
    silent = sorted({one.node for one in evidence if efa_device.sent_bytes(one.counters) == 0})
    return [
        f"{node}: NCCL logged channels over EFA, but the kernel counted no byte sent over it"
        for node in silent
    ]


def _speed(rows: Sequence[dict[str, Any]], config: TrainingConfig) -> dict[str, Any]:
    line_rate = line_rate_gbps(config.instance_type)
    return {
        "bandwidth": list(rows),
        "best_node_gb_per_s": bandwidth.best_between_hosts(rows),
        "line_rate_gb_per_s": line_rate / 8 if line_rate and config.device == "cuda" else None,
    }


def _speed_warnings(rows: Sequence[dict[str, Any]], config: TrainingConfig) -> list[str]:
    speed = _speed(rows, config)
    best, line_rate = speed["best_node_gb_per_s"], speed["line_rate_gb_per_s"]
    if best is None or line_rate is None or best >= line_rate / 2:
        return []
    warning = (
        f"between nodes at most {best:.2f} GB/s were reached, under half of the line rate of "
        f"{config.instance_type}, {line_rate:.2f} GB/s; see that the nodes share a placement group "
        "and that every EFA card is in use"
    )
    logger.warning(warning)
    return [warning]
