"""What the settings are: one frozen slice for each stack, and the types that validate single values."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from ray_train_eks.instance_types import InstanceType, find

from training.config import TrainingConfig


def _split(value: Any) -> Any:
    """`-c azs=a,b` arrives as one string, a list in cdk.json as a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _known_instance_type(name: str) -> str:
    find(name)  # raises UnknownInstanceType, a ValueError that names the nearest types
    return name


def _cidr(text: str) -> str:
    ipaddress.ip_network(text)
    return text


def _vpc_cidr(text: str) -> str:
    # A VPC is /16 to /28 (Amazon VPC guide, "VPC CIDR blocks"); below /24 the subnets have no room for pods.
    network = ipaddress.ip_network(text)
    if network.version != 4 or not network.is_private or not 16 <= network.prefixlen <= 24:
        raise ValueError("use a private range from /16 to /24, such as 10.0.0.0/16")
    return text


def _own_namespace(name: str) -> str:
    if name == "default" or name.startswith("kube-") or name == "kuberay-operator":
        raise ValueError("belongs to Kubernetes or to the operator; use a namespace of the job's own")
    return name


def _ray_version(text: str) -> str:
    if tuple(map(int, text.split("."))) < (2, 52, 0):
        raise ValueError("token authentication needs 2.52 or newer")
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
    str,
    _pattern(
        r"arn:aws[a-z-]*:iam::\d{12}:role/.+",
        "use the ARN of an IAM role, arn:aws:iam::<account>:role/<name>",
    ),
]
RoleArns = Annotated[tuple[RoleArn, ...], BeforeValidator(_split)]
ChartVersion = Annotated[
    str, _pattern(r"v?\d+\.\d+\.\d+([-+][0-9A-Za-z.-]+)?", "use one exact version of the chart such as 1.2.3")
]
KnownInstanceType = Annotated[str, AfterValidator(_known_instance_type)]
AtLeastOne = Annotated[int, Field(ge=1)]


Prefix = Annotated[
    str, _pattern(r"[A-Za-z]([-A-Za-z0-9]{0,38}[A-Za-z0-9])?", "use up to 40 letters, digits and '-'")
]


@dataclass(frozen=True)
class NetworkSettings:
    """VPC and where it lies."""

    region: Annotated[str, _pattern(r"[a-z]{2}(-[a-z]+)+-\d", "use a Region such as us-east-2")]
    azs: Names
    gpu_az: Text
    vpc_cidr: Annotated[str, AfterValidator(_vpc_cidr)]
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

    nvidia_device_plugin_version: ChartVersion
    efa_device_plugin_version: ChartVersion
    kuberay_operator_version: ChartVersion


@dataclass(frozen=True)
class RaySettings:
    """The RayCluster, the RayJob around the training module, and where its results are kept."""

    namespace: Annotated[Label, Field(max_length=63), AfterValidator(_own_namespace)]
    ray_cluster_name: Annotated[Label, Field(max_length=MAX_RAY_CLUSTER_NAME)]
    ray_version: Annotated[
        str,
        _pattern(r"\d+\.\d+\.\d+", "use the image's Ray version, such as 2.58.0"),
        AfterValidator(_ray_version),
    ]
    image: Text
    image_pull_through_cache: bool
    head_cpu: AtLeastOne
    head_memory_gib: AtLeastOne
    train: bool
    compare: Literal["", "efa-tcp", "shm-memcpy"]
    compare_repeats: AtLeastOne
    job_deadline_s: Annotated[int, Field(ge=60)]
    checkpoint_days: AtLeastOne
    keep_bucket: bool


@dataclass(frozen=True)
class Settings:
    """All settings, in slices by stack; `job` is the RayJob's command line, `num_workers` resolved."""

    prefix: Prefix
    network: NetworkSettings
    cluster: ClusterSettings
    nodes: NodesSettings
    platform: PlatformSettings
    ray: RaySettings
    job: TrainingConfig
