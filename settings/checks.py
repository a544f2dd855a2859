"""Checks that need more than one setting, or more than the value itself.

Each function takes settings by parameter name and runs once all of those are valid by themselves.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import Any

from ray_train_eks.instance_types import allocatable, find, system_pods

from settings.model import JOB_DIGEST_LENGTH, MAX_RAY_JOB_NAME
from training.config import Problem


def kubectl_layer_package(kubernetes_version: str) -> str:
    """PyPI name of the kubectl layer for a cluster version (kubectl tolerates one minor of skew)."""
    return f"aws-cdk.lambda-layer-kubectl-v{kubernetes_version.split('.')[1]}"


def _azs_are_enough(region: str, azs: tuple[str, ...]) -> list[Problem]:
    found = []
    if len(set(azs)) < 2:
        found.append(Problem("azs", azs, "EKS needs at least two different Availability Zones"))
    elif len(set(azs)) < len(azs):
        found.append(Problem("azs", azs, "names a zone twice"))
    if strangers := [az for az in azs if not re.fullmatch(re.escape(region) + "[a-z]", az)]:
        found.append(
            Problem("azs", azs, f"{', '.join(strangers)} not in the Region {region} (setting region)")
        )
    return found


def _gpu_az_is_one_of_azs(region: str, azs: tuple[str, ...], gpu_az: str) -> list[Problem]:
    if not gpu_az.startswith(region):
        return [Problem("gpu_az", gpu_az, f"not in the Region {region} (setting region)")]
    if gpu_az not in azs:
        return [
            Problem(
                "gpu_az", gpu_az, f"not among azs ({', '.join(azs)}); choose one of them or add it to azs"
            )
        ]
    return []


def _gpu_nodes_can_do_efa(gpu_instance_type: str) -> list[Problem]:
    instance = find(gpu_instance_type)
    lacks = [what for what, count in (("GPUs", instance.num_gpus), ("EFA", instance.efa_cards)) if not count]
    if not lacks:
        return []
    return [
        Problem(
            "gpu_instance_type",
            gpu_instance_type,
            f"has no {' and no '.join(lacks)}; use one such as g6.12xlarge",
        )
    ]


def _capacity_is_consistent(
    capacity: str, capacity_reservation_id: str, capacity_block_started: bool
) -> list[Problem]:
    if capacity == "on-demand" and capacity_reservation_id:
        remedy = "but capacity_reservation_id is given; use reservation or capacity-block, or empty that id"
        return [Problem("capacity", capacity, remedy)]
    if capacity != "on-demand" and not capacity_reservation_id:
        return [
            Problem(
                "capacity_reservation_id", "", f"capacity {capacity} needs the id of the reservation, cr-..."
            )
        ]
    if capacity_block_started and capacity != "capacity-block":
        return [
            Problem(
                "capacity_block_started",
                True,
                "only means something with capacity capacity-block; set it to false",
            )
        ]
    return []


def _type_has_capacity_blocks(capacity: str, gpu_instance_type: str) -> list[Problem]:
    """The same rule as ray_train_eks.node_capacity, which serves those who use the construct alone."""
    if capacity != "capacity-block" or gpu_instance_type.startswith("p"):
        return []
    remedy = f"EC2 offers Capacity Blocks for P types only, not for {gpu_instance_type}; use reservation"
    return [Problem("capacity", capacity, remedy)]


def _each_az_takes_one_nat_gateway(azs: tuple[str, ...], num_nat_gateways: int) -> list[Problem]:
    if num_nat_gateways <= len(azs):
        return []
    remedy = f"more than azs, of which there are {len(azs)}; one a zone is the most that helps"
    return [Problem("num_nat_gateways", num_nat_gateways, remedy)]


def _cached_image_is_public(image: str, image_pull_through_cache: bool) -> list[Problem]:
    if not image_pull_through_cache or image.startswith("public.ecr.aws/"):
        return []
    remedy = f"only images of public.ecr.aws can be cached, not {image}; set it to false"
    return [Problem("image_pull_through_cache", True, remedy)]


def _head_fits(system_instance_type: str, head_cpu: int, head_memory_gib: int) -> list[Problem]:
    node, others = allocatable(find(system_instance_type)), system_pods()
    room_cpu, room_mib = node.cpu_millicores - others.cpu_millicores, node.memory_mib - others.memory_mib
    where = f"does not fit on {system_instance_type} beside the pods every cluster runs"
    found = []
    if head_cpu * 1000 > room_cpu:
        found.append(
            Problem(
                "head_cpu", head_cpu, f"{where}; at most {room_cpu // 1000}, or a larger system_instance_type"
            )
        )
    if head_memory_gib * 1024 > room_mib:
        remedy = f"{where}; at most {room_mib // 1024}, or a larger system_instance_type"
        found.append(Problem("head_memory_gib", head_memory_gib, remedy))
    return found


def _job_name_fits(ray_cluster_name: str) -> list[Problem]:
    most = MAX_RAY_JOB_NAME - JOB_DIGEST_LENGTH - 1
    if len(ray_cluster_name) <= most:
        return []
    remedy = (
        f"{len(ray_cluster_name)} characters; at most {most}, since the RayJob's name is this and a digest "
        f"and KubeRay allows it {MAX_RAY_JOB_NAME}"
    )
    return [Problem("ray_cluster_name", ray_cluster_name, remedy)]


def _kubectl_layer_is_installed(kubernetes_version: str) -> list[Problem]:
    package = kubectl_layer_package(kubernetes_version)
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"no kubectl layer for it is installed; add {package} to requirements-cdk.txt and install it"
        return [Problem("kubernetes_version", kubernetes_version, remedy)]
    return []


def _workers_fill_nodes(
    gpu_instance_type: str, num_gpu_nodes: int, num_workers: int, sharding: str, on_uneven_placement: str
) -> list[Problem]:
    per_node = find(gpu_instance_type).num_gpus
    total = per_node * num_gpu_nodes
    if num_workers > total:
        remedy = f"{num_gpu_nodes} x {gpu_instance_type} have {total} GPUs; use 0 for all"
        return [Problem("num_workers", num_workers, remedy)]
    # Ray packs workers onto as few nodes as possible, so only full nodes hold equal numbers.
    uneven = num_workers > per_node > 0 and num_workers % per_node
    if uneven and sharding == "hybrid" and on_uneven_placement == "fail":
        remedy = (
            f"hybrid sharding needs the same number of workers on each node; use a multiple of {per_node}, "
            "sharding full, or on_uneven_placement full"
        )
        return [Problem("num_workers", num_workers, remedy)]
    return []


def _gpudirect_exists(
    gpu_instance_type: str, require_gpudirect: bool, require_transport: str
) -> list[Problem]:
    if not require_gpudirect:
        return []
    if require_transport != "efa":
        return [Problem("require_gpudirect", True, "only means something with require_transport efa")]
    if not find(gpu_instance_type).gpudirect:
        return [
            Problem("require_gpudirect", True, f"{gpu_instance_type} has no GPUDirect RDMA; set it to false")
        ]
    return []


def _data_reaches_the_pods(data: str) -> list[Problem]:
    if not data or re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+/[^*?]+|python:[\w.]+:\w+", data):
        return []
    remedy = (
        "pods see no files of this machine; use s3://<bucket>/<key> of one text file, "
        "python:<module>:<function>, or nothing for random tokens"
    )
    return [Problem("data", data, remedy)]


def _comparison_can_be_made(compare: str, train: bool, steps: int, untimed_steps: int) -> list[Problem]:
    if not compare:
        return []
    found = []
    if not train:
        found.append(Problem("compare", compare, "is what the RayJob does; set train to true"))
    if steps <= untimed_steps:
        found.append(Problem("steps", steps, f"must exceed untimed_steps ({untimed_steps}) to compare"))
    return found


def _batch_divides(
    gpu_instance_type: str, num_gpu_nodes: int, num_workers: int, batch_size: int, global_batch_size: int
) -> list[Problem]:
    per_round = batch_size * (num_workers or find(gpu_instance_type).num_gpus * num_gpu_nodes)
    if per_round < 1 or global_batch_size % per_round == 0:
        return []
    return [
        Problem(
            "global_batch_size",
            global_batch_size,
            f"must be a multiple of workers x batch_size = {per_round}",
        )
    ]


_CROSS_CHECKS: tuple[Callable[..., list[Problem]], ...] = (
    _azs_are_enough,
    _gpu_az_is_one_of_azs,
    _gpu_nodes_can_do_efa,
    _capacity_is_consistent,
    _type_has_capacity_blocks,
    _each_az_takes_one_nat_gateway,
    _cached_image_is_public,
    _head_fits,
    _job_name_fits,
    _kubectl_layer_is_installed,
    _workers_fill_nodes,
    _gpudirect_exists,
    _data_reaches_the_pods,
    _comparison_can_be_made,
    _batch_divides,
)


def cross_check(values: Mapping[str, Any]) -> list[Problem]:
    """Runs every check whose settings are all in `values` (those that are valid by themselves)."""
    found: list[Problem] = []
    for check in _CROSS_CHECKS:
        needed = check.__code__.co_varnames[: check.__code__.co_argcount]
        if all(name in values for name in needed):
            found += check(*(values[name] for name in needed))
    return found
