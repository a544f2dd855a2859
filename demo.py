"""`make demo`: the product from end to end on this machine, without an AWS account.

1. The CDK CLI synthesizes the five stacks, and what they would create is printed.
2. A local Ray cluster of the same shape starts: a head that trains nothing, and two worker nodes.
3. The RayJob's own command line, with the zip contents that a deployment would upload, goes through Ray's job
   server and trains a small model on real text until its loss falls.

Everything listens on loopback and is gone at the end, also after Ctrl-C. Exit codes: 0 all of it worked, 1 a
part failed, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import pydoc_data.topics
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from ray_train_eks.instance_types import find

from k8s.ray_job import entrypoint
from settings import load
from training.config import TrainingConfig
from training.records import SUMMARY_MARK

ROOT = Path(__file__).parent
NUM_NODES = 2
WORKERS_PER_NODE = 2
RUN_NAME = "demo"
_KINDS_SHOWN = 5


class DemoError(Exception):
    """A part of the demo failed; the message says which, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code.
    """
    steps = _arguments(argv).steps
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    try:
        with _scratch_folder() as scratch:
            _prepare_environment(scratch)
            _title("1. The stacks, synthesized by the CDK CLI")
            synthesize(scratch / "cdk.out")
            print("\n".join(describe_stacks(scratch / "cdk.out")))
            _title(f"2. A local Ray cluster: a head that trains nothing, and {NUM_NODES} worker nodes")
            with local_cluster() as job_server:
                _title("3. The RayJob's command line, through Ray's job server")
                run_job(job_server, demo_config(scratch, steps), job_package(scratch / "cdk.out"))
            _title("Result")
            print("\n".join(describe_result(scratch / "results" / RUN_NAME)))
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 130
    print(f"The demo took {time.monotonic() - started_s:.0f} s.")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="Synthesizes the stacks, then runs the RayJob's own command line on a local Ray cluster.",
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: must be at least 2, or no loss can fall")
    return arguments


def _title(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards. In /tmp itself: Ray's socket names may have 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare_environment(scratch: Path) -> None:
    """What child processes inherit: the CDK CLI, this Python, Ray on loopback, one thread a worker."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{ROOT / 'node_modules' / '.bin'}"
    os.environ |= {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        # jsii, on which aws-cdk-lib runs, prints a banner at every start under Node 20, which still works.
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
        # Sessions, and the file that says which cluster is the current one, beside those of a user's cluster.
        "RAY_TMPDIR": str(scratch),
        # Otherwise Ray listens on all interfaces (training/ray_cluster.py).
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    os.environ.pop("RAY_ADDRESS", None)


# --- 1. the stacks ------------------------------------------------------------------------------------------


def synthesize(output: Path) -> None:
    """Writes the CloudFormation templates.

    Args:
        output: folder to write to.

    Raises:
        DemoError: with what the CLI said.
    """
    command = ["cdk", "synth", "--quiet", "--output", str(output)]
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise DemoError("the CDK CLI is not installed; run `make demo`, which installs it") from None
    try:
        said, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the CLI's children as well
        process.wait()
        raise
    if process.returncode:
        raise DemoError(f"`{' '.join(command[:2])}` failed:\n{said.strip()}")


def describe_stacks(output: Path) -> list[str]:
    """A line for each stack in a synthesized app, and one for each node group."""
    templates = {
        name: json.loads((output / f"{name}.template.json").read_text())["Resources"]
        for name in _stacks_in_order(output)
    }
    width = max(len(name) for name in templates)
    lines = [f"{name:{width}}  {_describe_resources(resources)}" for name, resources in templates.items()]
    lines.append("")
    for resources in templates.values():
        lines += [
            _describe_node_group(group, resources) for group in _of_type(resources, "AWS::EKS::Nodegroup")
        ]
    return lines


def _stacks_in_order(output: Path) -> list[str]:
    """The stacks in the order in which they would be deployed."""
    artifacts = json.loads((output / "manifest.json").read_text())["artifacts"]
    needs = {name: artifact.get("dependencies", []) for name, artifact in artifacts.items()}
    in_order = TopologicalSorter(needs).static_order()
    return [name for name in in_order if artifacts[name]["type"] == "aws:cloudformation:stack"]


def _describe_resources(resources: dict[str, Any]) -> str:
    kinds = Counter(_kind(resource["Type"]) for resource in resources.values())
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(_KINDS_SHOWN)]
    if len(kinds) > _KINDS_SHOWN:
        shown.append(f"{len(kinds) - _KINDS_SHOWN} more kinds")
    return f"{len(resources):2} resources: {', '.join(shown)}"


def _kind(resource_type: str) -> str:
    """AWS::EC2::Subnet -> EC2 Subnet, Custom::AWSCDK-EKS-HelmChart -> HelmChart."""
    if resource_type.startswith("AWS::"):
        return " ".join(resource_type.split("::")[1:])
    return resource_type.rpartition("::")[2].rpartition("-")[2]


def _of_type(resources: dict[str, Any], resource_type: str) -> list[dict[str, Any]]:
    return [resource["Properties"] for resource in resources.values() if resource["Type"] == resource_type]


def _describe_node_group(group: dict[str, Any], resources: dict[str, Any]) -> str:
    count = group["ScalingConfig"]["DesiredSize"]
    instance = find(_instance_type(group, resources))
    text = f"Node group: {count} x {instance.name}"
    if instance.num_gpus:
        efa = f"{count * instance.efa_cards} EFA interfaces"
        text += f" = {count * instance.num_gpus} GPUs (NVIDIA {instance.gpu}), {efa}"
    return text


def _instance_type(group: dict[str, Any], resources: dict[str, Any]) -> str:
    if group.get("InstanceTypes"):
        return group["InstanceTypes"][0]
    template = resources[group["LaunchTemplate"]["Id"]["Ref"]]
    return template["Properties"]["LaunchTemplateData"]["InstanceType"]


# --- 2. the cluster -----------------------------------------------------------------------------------------


@contextmanager
def local_cluster() -> Iterator[str]:
    """A Ray cluster on loopback: a head without CPUs or GPUs for training, and the worker nodes.

    Yields:
        Address of its job server.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    port = _free_port()
    try:
        _add_node(
            cluster, num_cpus=0, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=port
        )
        for _ in range(NUM_NODES):
            _add_node(cluster, num_cpus=WORKERS_PER_NODE)
        print(f"Ray's job server and dashboard: http://127.0.0.1:{port} (while the demo runs)")
        yield f"http://127.0.0.1:{port}"
    finally:
        with _signals_ignored():
            cluster.shutdown()


def _add_node(cluster: Any, **options: Any) -> None:
    group = os.getpgrp()
    cluster.add_node(node_ip_address="127.0.0.1", dashboard_agent_listen_port=0, **options)
    # Ray moves this process into a group of its own, where Ctrl-C in a terminal does not reach it under make.
    if os.getpgrp() != group:
        os.setpgid(0, group)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C would leave the clean-up half done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- 3. the job ---------------------------------------------------------------------------------------------


def demo_config(scratch: Path, steps: int) -> TrainingConfig:
    """The job of the settings in cdk.json with what a machine without GPUs needs changed."""
    text = scratch / "text.txt"
    text.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    return dataclasses.replace(
        load(json.loads((ROOT / "cdk.json").read_text())["context"]).job,
        model_id="tiny",
        data=str(text),
        steps=steps,
        batch_size=4,
        seq_len=128,
        gradient_accumulation=1,
        learning_rate=1e-2,
        num_workers=NUM_NODES * WORKERS_PER_NODE,
        device="cpu",
        require_transport="any",
        instance_type="",
        nccl_log_dir=str(scratch / "nccl"),
        storage_path=str(scratch / "results"),
        run_name=RUN_NAME,
    )


def job_package(output: Path) -> Path:
    """The folder that a deployment would upload as the job's working directory."""
    found = [path.parents[1] for path in output.glob("asset.*/training/run.py")]
    if len(found) != 1:
        raise DemoError(f"{output} has {len(found)} packages with training/run.py; there should be one")
    return found[0]


def run_job(job_server: str, config: TrainingConfig, package: Path) -> None:
    """Submits the job and prints its log until it ends.

    Raises:
        DemoError: the job did not succeed.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    for chatty in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env"):
        logging.getLogger(f"ray.{chatty}").setLevel(logging.WARNING)
    command = entrypoint(config)
    print(f"{command}\n", flush=True)
    client = JobSubmissionClient(job_server)
    job = client.submit_job(entrypoint=command, runtime_env={"working_dir": str(package)})
    asyncio.run(_print_log(client, job))
    while not (status := client.get_job_status(job)).is_terminal():
        time.sleep(0.5)
    if status != JobStatus.SUCCEEDED:
        raise DemoError(f"the job ended as {status}: {client.get_job_info(job).message}")


async def _print_log(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        lines = text.splitlines(keepends=True)
        # The summary comes in words later.
        print("".join(line for line in lines if not line.startswith(SUMMARY_MARK)), end="", flush=True)


# --- the result ---------------------------------------------------------------------------------------------


def describe_result(folder: Path) -> list[str]:
    """What the run left behind, in words.

    Args:
        folder: holds summary.json.

    Raises:
        DemoError: the loss did not fall.
    """
    summary = json.loads((folder / "summary.json").read_text())
    first, last = summary["first_loss"], summary["last_loss"]
    if last >= first:
        raise DemoError(f"the loss did not fall: {first:.4f} at first, {last:.4f} at the end")
    rate = summary["tokens_per_s"]  # None when all steps were warm-up
    throughput = (
        "not measured: too few steps" if rate is None else f"{rate:,.0f} tokens/s on this machine's CPU"
    )
    per_node = ", ".join(str(count) for count in summary["num_ranks_per_node"].values())
    return [
        f"Loss          {first:.4f} -> {last:.4f} in {summary['num_steps']} steps",
        f"Throughput    {throughput}",
        f"Ranks         {summary['world_size']} on {len(summary['num_ranks_per_node'])} nodes ({per_node})",
        f"Transport     {summary['transport']['verdict']}: {summary['transport']['why']}",
        "",
        "A local run proves nothing about EFA: it has neither NCCL nor a network between its nodes.",
    ]


if __name__ == "__main__":
    sys.exit(main())
