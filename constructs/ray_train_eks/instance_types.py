"""EFA-capable GPU instance types and the system types we size pods for: sourced facts, no AWS calls."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class InstanceType:
    """Facts of one EC2 instance type.

    Attributes:
        vcpus: virtual CPUs.
        memory_gib: nominal memory.
        max_pods: pods the VPC CNI can address (EKS's eni-max-pods list).
        num_gpus: GPUs; 0 for system types.
        gpu: NVIDIA's name of the GPU ("L4"), "" for system types.
        gpu_memory_gib: memory of one GPU.
        efa_cards: network cards with EFA; 0 means no EFA.
        efa_on_first_card: on multi-card types, whether network card 0 offers EFA beside its ENA interface.
        gpudirect: GPUDirect RDMA between EFA and the GPUs.
        network_gbps: line rate of all cards together.
        quota_code: Service Quotas code of the On-Demand vCPU limit that counts this type.
        quota_name: that quota's name in the console.
    """

    name: str
    vcpus: int
    memory_gib: int
    max_pods: int
    num_gpus: int = 0
    gpu: str = ""
    gpu_memory_gib: int = 0
    efa_cards: int = 0
    efa_on_first_card: bool = True
    gpudirect: bool = False
    network_gbps: int = 0
    quota_code: str = ""
    quota_name: str = ""

    @property
    def worker_pod_cpu(self) -> int:
        """CPUs of the one Ray worker pod on a node: 5/6 of the node (g6.12xlarge: 40); the rest is the node's own."""
        return self.vcpus * 5 // 6

    @property
    def worker_pod_memory_gib(self) -> int:
        """Memory of that pod: 5/6 of the nominal memory (g6.12xlarge: 160 GiB)."""
        return self.memory_gib * 5 // 6


class UnknownInstanceType(ValueError):
    """The type is not in the table; the message names the nearest ones."""


_G = {"quota_code": "L-DB2E81BA", "quota_name": "Running On-Demand G and VT instances"}
_STANDARD = {
    "quota_code": "L-1216C47A",
    "quota_name": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
}

_TABLE = (
    InstanceType("m7i.xlarge", 4, 16, 58, **_STANDARD),
    InstanceType("m7i.2xlarge", 8, 32, 58, **_STANDARD),
    InstanceType("g6.12xlarge", 48, 192, 234, 4, "L4", 24, 1, network_gbps=40, **_G),
)
INSTANCE_TYPES = {instance.name: instance for instance in _TABLE}


def find(name: str) -> InstanceType:
    """The facts of an instance type.

    Raises:
        UnknownInstanceType: with the nearest known names.
    """
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        near = difflib.get_close_matches(name, INSTANCE_TYPES, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnknownInstanceType(f"{name} is not in the table of instance types{hint}") from None


@dataclass(frozen=True)
class Allocatable:
    """What a node offers to pods.

    Attributes:
        cpu_millicores: after EKS's CPU reservation.
        memory_mib: after EKS's memory reservation, eviction threshold and the kernel's own share.
    """

    cpu_millicores: int
    memory_mib: int


# Share of the nominal memory that firmware and kernel take before kubelet sees it. Seen at 3-5% on Nitro
# instances; the larger figure keeps a pod that fits here from being refused by the scheduler.
_KERNEL_SHARE = 0.05
_EVICTION_MIB = 100


def allocatable(instance: InstanceType) -> Allocatable:
    """Allocatable CPU and memory by the formula of the EKS AMI's bootstrap (nodeadm, `kubelet` reserved).

    Memory: total - (255 MiB + 11 MiB x max pods) - 100 MiB eviction. CPU reserved: 6% of the first core,
    1% of the second, 0.5% of the next two, 0.25% of the rest.
    """
    cores = instance.vcpus
    reserved = 60 * min(cores, 1) + 10 * min(max(cores - 1, 0), 1) + 5 * min(max(cores - 2, 0), 2)
    reserved += 2.5 * max(cores - 4, 0)
    memory_mib = instance.memory_gib * 1024 * (1 - _KERNEL_SHARE)
    memory_mib -= 255 + 11 * instance.max_pods + _EVICTION_MIB
    return Allocatable(int(cores * 1000 - reserved), int(memory_mib))


@dataclass(frozen=True)
class PodRequest:
    """What one pod asks of its node."""

    name: str
    cpu_millicores: int
    memory_mib: int


# What runs on a system node before the Ray head does. Requests are those of the add-ons' and charts' default
# manifests; the submitter is the job's own pod (k8s/ray_job.py).
SYSTEM_PODS = (
    PodRequest("aws-node with network policy agent", 50, 0),
    PodRequest("kube-proxy", 100, 0),
    PodRequest("eks-pod-identity-agent", 0, 0),
    PodRequest("eks-node-monitoring-agent", 10, 30),
    PodRequest("coredns, two replicas", 200, 140),
    PodRequest("kuberay-operator", 100, 512),
    PodRequest("RayJob submitter", 500, 1024),
)


def system_pods() -> PodRequest:
    """The sum of what a system node runs beside the Ray head."""
    return PodRequest(
        "system pods",
        sum(pod.cpu_millicores for pod in SYSTEM_PODS),
        sum(pod.memory_mib for pod in SYSTEM_PODS),
    )
