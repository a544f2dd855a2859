"""Every setting of the app: one frozen, typed, validated object made from the CDK context.

`cdk.json` holds each setting with its default; `-c name=value` overrides one. The context is read once, in
`load`; below it, everything gets the slice it needs. What is wrong is reported all at once, each line naming
the setting, its value and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import ipaddress
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from ray_train_eks.instance_types import (
    InstanceType,
    UnknownInstanceType,
    allocatable,
    find,
    system_pods,
)

from training.config import Problem, TrainingConfig, find_problems

# Fields of the job that the app decides itself: they are not settings.
_DERIVED_TRAINING_FIELDS = {"storage_path", "run_name", "device", "instance_type", "nccl_log_dir"}


class SettingsError(ValueError):
    """The context cannot be used.

    Attributes:
        problems: one sentence for each thing that is wrong.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def _split(value: Any) -> Any:
    """`-c azs=a,b` arrives as one string, a list in cdk.json as a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _known_instance_type(name: str) -> str:
    find(name)  # raises UnknownInstanceType, a ValueError that names the nearest types
    return name


def _cidr(text: str) -> str:
    ipaddress.ip_network(text)
    return text


def _pattern(pattern: str, wanted: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(wanted)
        return text

    return AfterValidator(check)


# DNS-1035 labels; the length limits are those of KubeRay 1.7 (validation.go: RayCluster 53, RayJob 47) and
# of Kubernetes namespaces (63). The RayJob's name is `<ray_cluster_name>-<10 hex digits>`.
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
MAX_RAY_CLUSTER_NAME = 53
MAX_RAY_JOB_NAME = 47
JOB_DIGEST_LENGTH = 10

Text = Annotated[str, Field(min_length=1)]
Label = Annotated[str, _pattern(_LABEL, "use lower-case letters, digits and '-', starting with a letter")]
Names = Annotated[tuple[Text, ...], BeforeValidator(_split)]
Cidr = Annotated[str, AfterValidator(_cidr)]
Cidrs = Annotated[tuple[Cidr, ...], BeforeValidator(_split)]
RoleArn = Annotated[
    str, _pattern(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "use the ARN of an IAM role, arn:aws:iam::<account>:role/<name>")
]
RoleArns = Annotated[tuple[RoleArn, ...], BeforeValidator(_split)]
KnownInstanceType = Annotated[str, AfterValidator(_known_instance_type)]
AtLeastOne = Annotated[int, Field(ge=1)]


def kubectl_layer_package(kubernetes_version: str) -> str:
    """PyPI name of the kubectl layer for a cluster version (kubectl tolerates one minor of skew)."""
    return f"aws-cdk.lambda-layer-kubectl-v{kubernetes_version.split('.')[1]}"


@dataclass(frozen=True)
class NetworkSettings:
    """VPC and where it lies."""

    region: Annotated[str, _pattern(r"[a-z]{2}(-[a-z]+)+-\d", "use a Region such as us-east-2")]
    azs: Names
    gpu_az: Text
    vpc_cidr: Cidr
    num_nat_gateways: AtLeastOne


@dataclass(frozen=True)
class ClusterSettings:
    """Control plane, access, and the system node group."""

    kubernetes_version: Annotated[str, _pattern(r"1\.\d+", "use a minor version such as 1.36")]
    api_public_cidrs: Cidrs
    admin_role_arns: RoleArns
    system_instance_type: KnownInstanceType
    num_system_nodes: AtLeastOne
    system_disk_gib: Annotated[int, Field(ge=100)]

    @property
    def system_instance(self) -> InstanceType:
        return find(self.system_instance_type)


@dataclass(frozen=True)
class NodesSettings:
    """The GPU node group and how its capacity is had."""

    gpu_instance_type: KnownInstanceType
    num_gpu_nodes: AtLeastOne
    gpu_disk_gib: Annotated[int, Field(ge=100)]
    capacity: Literal["on-demand", "reservation", "capacity-block"]
    capacity_reservation_id: Annotated[
        str, _pattern(r"(cr-[0-9a-f]{8,17})?", "use the id of a capacity reservation, cr-...")
    ]
    capacity_block_started: bool
    capacity_guard: bool

    @property
    def gpu_instance(self) -> InstanceType:
        return find(self.gpu_instance_type)

    @property
    def num_gpus(self) -> int:
        return self.num_gpu_nodes * self.gpu_instance.num_gpus


@dataclass(frozen=True)
class PlatformSettings:
    """Pinned Helm charts."""

    nvidia_device_plugin_version: Text
    efa_device_plugin_version: Text
    kuberay_operator_version: Text


@dataclass(frozen=True)
class RaySettings:
    """The RayCluster, the RayJob around the training module, and where its results are kept."""

    namespace: Annotated[Label, Field(max_length=63)]
    ray_cluster_name: Annotated[Label, Field(max_length=MAX_RAY_CLUSTER_NAME)]
    ray_version: Annotated[str, _pattern(r"\d+\.\d+\.\d+", "use the image's Ray version, such as 2.58.0")]
    image: Text
    image_pull_through_cache: bool
    head_cpu: AtLeastOne
    head_memory_gib: AtLeastOne
    train: bool
    job_deadline_s: Annotated[int, Field(ge=60)]
    checkpoint_days: AtLeastOne
    keep_bucket: bool


@dataclass(frozen=True)
class Settings:
    """All settings, in slices by stack; `job` is what the RayJob's command line says."""

    prefix: str
    network: NetworkSettings
    cluster: ClusterSettings
    nodes: NodesSettings
    platform: PlatformSettings
    ray: RaySettings
    job: TrainingConfig

    @property
    def num_workers(self) -> int:
        """Ranks of the job: the setting, or one for each GPU."""
        return self.job.num_workers or self.nodes.num_gpus

    def warnings(self) -> list[str]:
        """What works but deserves a second thought."""
        return [warning for check in _WARNINGS if (warning := check(self))]


_PREFIX = Annotated[str, _pattern(r"[A-Za-z]([-A-Za-z0-9]{0,38}[A-Za-z0-9])?", "use up to 40 letters, digits and '-'")]
_SLICES = {
    "network": NetworkSettings,
    "cluster": ClusterSettings,
    "nodes": NodesSettings,
    "platform": PlatformSettings,
    "ray": RaySettings,
    "job": TrainingConfig,
}


def _field_types(of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(of, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(of)}


def setting_types() -> dict[str, Any]:
    """Name -> type of every setting, in the order of the slices."""
    types: dict[str, Any] = {"prefix": _PREFIX}
    for slice_type in _SLICES.values():
        types |= {name: kind for name, kind in _field_types(slice_type).items() if name not in _DERIVED_TRAINING_FIELDS}
    return types


def load(context: Mapping[str, Any]) -> Settings:
    """Reads the settings out of a CDK context.

    Args:
        context: cdk.json's context with the command line's overrides. Keys with ':' or '/' are the CDK's own.

    Raises:
        SettingsError: with every problem found.
    """
    given = {key: value for key, value in context.items() if not re.search(r"[:/]", key)}
    types = setting_types()
    problems = _unknown_keys(given, types) + _missing_keys(given, types)
    values: dict[str, Any] = {}
    for name, kind in types.items():
        if name in given:
            try:
                values[name] = TypeAdapter(kind).validate_python(given[name])
            except ValidationError as error:
                problems.append(_line(name, given[name], _first_reason(error)))
    problems += [_line(problem.field, problem.value, problem.remedy) for problem in find_problems(values)]
    problems += _cross_check(values)
    if problems:
        raise SettingsError(problems)
    return _assemble(values)


def _assemble(values: dict[str, Any]) -> Settings:
    slices = {}
    for slice_name, slice_type in _SLICES.items():
        names = _field_types(slice_type).keys() - _DERIVED_TRAINING_FIELDS
        derived = {"instance_type": values["gpu_instance_type"]} if slice_type is TrainingConfig else {}
        slices[slice_name] = slice_type(**{name: values[name] for name in names}, **derived)
    return Settings(prefix=values["prefix"], **slices)


def _line(name: str, value: Any, remedy: str) -> str:
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return f"{name} = {shown if shown != '' else '(empty)'}: {remedy}"


def _first_reason(error: ValidationError) -> str:
    reason = error.errors()[0]
    message = reason["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{reason['input']!r}: {message}" if reason["loc"] and isinstance(reason["loc"][-1], int) else message


def _unknown_keys(given: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in given.keys() - types.keys():
        near = difflib.get_close_matches(key, types, n=1)
        lines.append(_line(key, given[key], "no such setting" + (f"; did you mean {near[0]}?" if near else "")))
    return sorted(lines)


def _missing_keys(given: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    return [f"{key}: missing; cdk.json holds every setting with its default" for key in types if key not in given]


# --- checks across settings -------------------------------------------------------------------------------
# Each takes settings by parameter name and runs once those are all valid; it returns problems.


def _azs_are_enough(region: str, azs: tuple[str, ...]) -> list[Problem]:
    found = []
    if len(set(azs)) < 2:
        found.append(Problem("azs", azs, "EKS needs at least two different Availability Zones"))
    if strangers := [az for az in azs if not re.fullmatch(re.escape(region) + "[a-z]", az)]:
        found.append(Problem("azs", azs, f"{', '.join(strangers)} not in the Region {region} (setting region)"))
    return found


def _gpu_az_is_one_of_azs(region: str, azs: tuple[str, ...], gpu_az: str) -> list[Problem]:
    if not gpu_az.startswith(region):
        return [Problem("gpu_az", gpu_az, f"not in the Region {region} (setting region)")]
    if gpu_az not in azs:
        return [Problem("gpu_az", gpu_az, f"not among azs ({', '.join(azs)}); choose one of them or add it to azs")]
    return []


def _gpu_nodes_can_do_efa(gpu_instance_type: str) -> list[Problem]:
    instance = find(gpu_instance_type)
    lacks = [what for what, count in (("GPUs", instance.num_gpus), ("EFA", instance.efa_cards)) if not count]
    if not lacks:
        return []
    return [Problem("gpu_instance_type", gpu_instance_type, f"has no {' and no '.join(lacks)}; use one such as g6.12xlarge")]


def _capacity_is_consistent(capacity: str, capacity_reservation_id: str, capacity_block_started: bool) -> list[Problem]:
    if capacity == "on-demand" and capacity_reservation_id:
        remedy = "a reservation is given; set capacity to reservation or capacity-block, or empty capacity_reservation_id"
        return [Problem("capacity", capacity, remedy)]
    if capacity != "on-demand" and not capacity_reservation_id:
        return [Problem("capacity_reservation_id", "", f"capacity {capacity} needs the id of the reservation, cr-...")]
    if capacity_block_started and capacity != "capacity-block":
        return [Problem("capacity_block_started", True, "only means something with capacity capacity-block; set it to false")]
    return []


def _head_fits(system_instance_type: str, head_cpu: int, head_memory_gib: int) -> list[Problem]:
    node, others = allocatable(find(system_instance_type)), system_pods()
    room_cpu, room_mib = node.cpu_millicores - others.cpu_millicores, node.memory_mib - others.memory_mib
    where = f"does not fit on {system_instance_type} beside the pods every cluster runs"
    found = []
    if head_cpu * 1000 > room_cpu:
        found.append(Problem("head_cpu", head_cpu, f"{where}; at most {room_cpu // 1000}, or a larger system_instance_type"))
    if head_memory_gib * 1024 > room_mib:
        remedy = f"{where}; at most {room_mib // 1024}, or a larger system_instance_type"
        found.append(Problem("head_memory_gib", head_memory_gib, remedy))
    return found


def _job_name_fits(ray_cluster_name: str) -> list[Problem]:
    most = MAX_RAY_JOB_NAME - JOB_DIGEST_LENGTH - 1
    if len(ray_cluster_name) <= most:
        return []
    remedy = f"{len(ray_cluster_name)} characters; at most {most}, since KubeRay allows a RayJob {MAX_RAY_JOB_NAME} and its name is this one and a digest"
    return [Problem("ray_cluster_name", ray_cluster_name, remedy)]


def _kubectl_layer_is_installed(kubernetes_version: str) -> list[Problem]:
    package = kubectl_layer_package(kubernetes_version)
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"no kubectl layer for it is installed; add {package} to requirements-cdk.txt and install it"
        return [Problem("kubernetes_version", kubernetes_version, remedy)]
    return []


def _workers_have_gpus(gpu_instance_type: str, num_gpu_nodes: int, num_workers: int, sharding: str) -> list[Problem]:
    total = find(gpu_instance_type).num_gpus * num_gpu_nodes
    if num_workers > total:
        return [Problem("num_workers", num_workers, f"{num_gpu_nodes} x {gpu_instance_type} have {total} GPUs; use 0 for all")]
    return []


def _batch_divides(
    gpu_instance_type: str, num_gpu_nodes: int, num_workers: int, batch_size: int, global_batch_size: int
) -> list[Problem]:
    per_round = batch_size * (num_workers or find(gpu_instance_type).num_gpus * num_gpu_nodes)
    if per_round < 1 or global_batch_size % per_round == 0:
        return []
    return [Problem("global_batch_size", global_batch_size, f"must be a multiple of workers x batch_size = {per_round}")]


_CROSS_CHECKS: tuple[Callable[..., list[Problem]], ...] = (
    _azs_are_enough,
    _gpu_az_is_one_of_azs,
    _gpu_nodes_can_do_efa,
    _capacity_is_consistent,
    _head_fits,
    _job_name_fits,
    _kubectl_layer_is_installed,
    _workers_have_gpus,
    _batch_divides,
)


def _cross_check(values: Mapping[str, Any]) -> list[str]:
    lines = []
    for check in _CROSS_CHECKS:
        needed = check.__code__.co_varnames[: check.__code__.co_argcount]
        if all(name in values for name in needed):
            lines += [_line(found.field, found.value, found.remedy) for found in check(*(values[name] for name in needed))]
    return lines


# --- warnings ---------------------------------------------------------------------------------------------

# Standard and extended support have both ended for these (AWS's EKS version calendar, read November 2026).
_EKS_ENDED = ("1.30", "1.31")


def _moving_tag(settings: Settings) -> str | None:
    image = settings.ray.image
    if "@sha256:" in image:
        return None
    tag = image.rpartition(":")[2] if ":" in image.rpartition("/")[2] else "latest"
    if re.fullmatch(r".*v\d+\.\d+\.\d+", tag):
        return None
    return (
        f"image = {image}: the tag {tag} moves with security rebuilds, so two deployments can run different images. "
        "A tag that ends in vX.Y.Z keeps one build; only <name>@sha256:<digest> is byte-identical."
    )


def _ended_version(settings: Settings) -> str | None:
    version = settings.cluster.kubernetes_version
    if version not in _EKS_ENDED:
        return None
    return f"kubernetes_version = {version}: EKS no longer creates clusters of this version; use 1.34 or later."


def _open_endpoint(settings: Settings) -> str | None:
    opened = [cidr for cidr in settings.cluster.api_public_cidrs if ipaddress.ip_network(cidr).prefixlen == 0]
    return f"api_public_cidrs = {','.join(opened)}: the Kubernetes API answers the whole internet." if opened else None


def _block_not_started(settings: Settings) -> str | None:
    if settings.nodes.capacity != "capacity-block" or settings.nodes.capacity_block_started:
        return None
    return "capacity_block_started = false: the GPU node group is created with 0 nodes; set it to true once the block has started."


_WARNINGS = (_moving_tag, _ended_version, _open_endpoint, _block_not_started)
