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
        gpu: EC2's name of the GPU ("L4"), "" for system types.
        gpu_memory_gib: memory of one GPU.
        efa_cards: network cards with EFA; 0 means no EFA.
        efa_on_first_card: whether network card 0 is one of them. If not, they are cards 1 ... efa_cards.
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
        """CPUs of the one Ray worker pod on a node: 5/6 of the node (g6.12xlarge: 40)."""
        return self.vcpus * 5 // 6

    @property
    def worker_pod_memory_gib(self) -> int:
        """Memory of that pod: 5/6 of the nominal memory (g6.12xlarge: 160 GiB)."""
        return self.memory_gib * 5 // 6


class UnknownInstanceType(ValueError):
    """The type is not in the table; the message names the nearest ones."""


# Service Quotas codes and names (service code ec2): https://docs.aws.amazon.com/ec2/latest/instancetypes/
# ec2-instance-quotas.html and `aws service-quotas list-aws-default-service-quotas --service-code ec2`.
# Each is counted in vCPUs of running and pending On-Demand instances of the families it names.
_G = {"quota_code": "L-DB2E81BA", "quota_name": "Running On-Demand G and VT instances"}
_P = {"quota_code": "L-417A185B", "quota_name": "Running On-Demand P instances"}
_STANDARD = {
    "quota_code": "L-1216C47A",
    "quota_name": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
}

# Sources of every row: EC2's own DescribeInstanceTypes answer (vCPUs, memory, GPUs, cards, EFA, bandwidth),
# as recorded in moto 5.2.5 and compared in tests; the pages "Accelerated computing instances" and "Elastic
# Fabric Adapter: supported instance types" of the EC2 documentation; max_pods from nodeadm's
# instance-info.jsonl (awslabs/amazon-eks-ami, July 2026): interfaces of card 0 x (addresses - 1) + 2.
# GPU memory is the vendor's figure; the driver offers some 5% less on GDDR cards.
#
# Left out although they have GPUs and EFA: p3dn (V100: CUDA 13 no longer runs on it), p6e-gb200 (ARM: another
# AMI and another image), g7 (not among the types of the EKS AMI AL2023_X86_64_NVIDIA,
# https://docs.aws.amazon.com/eks/latest/userguide/ml-eks-optimized-ami.html).
_TABLE = (
    # G: no GPUDirect RDMA between EFA and the GPUs.
    InstanceType("g4dn.8xlarge", 32, 128, 58, 1, "T4", 16, 1, network_gbps=50, **_G),
    InstanceType("g4dn.12xlarge", 48, 192, 234, 4, "T4", 16, 1, network_gbps=50, **_G),
    InstanceType("g4dn.16xlarge", 64, 256, 58, 1, "T4", 16, 1, network_gbps=50, **_G),
    InstanceType("g4dn.metal", 96, 384, 737, 8, "T4", 16, 1, network_gbps=100, **_G),
    InstanceType("g5.8xlarge", 32, 128, 234, 1, "A10G", 24, 1, network_gbps=25, **_G),
    InstanceType("g5.12xlarge", 48, 192, 737, 4, "A10G", 24, 1, network_gbps=40, **_G),
    InstanceType("g5.16xlarge", 64, 256, 234, 1, "A10G", 24, 1, network_gbps=25, **_G),
    InstanceType("g5.24xlarge", 96, 384, 737, 4, "A10G", 24, 1, network_gbps=50, **_G),
    InstanceType("g5.48xlarge", 192, 768, 345, 8, "A10G", 24, 1, network_gbps=100, **_G),
    InstanceType("g6.8xlarge", 32, 128, 234, 1, "L4", 24, 1, network_gbps=25, **_G),
    InstanceType("g6.12xlarge", 48, 192, 234, 4, "L4", 24, 1, network_gbps=40, **_G),
    InstanceType("g6.16xlarge", 64, 256, 737, 1, "L4", 24, 1, network_gbps=25, **_G),
    InstanceType("g6.24xlarge", 96, 384, 737, 4, "L4", 24, 1, network_gbps=50, **_G),
    InstanceType("g6.48xlarge", 192, 768, 737, 8, "L4", 24, 1, network_gbps=100, **_G),
    InstanceType("gr6.8xlarge", 32, 256, 234, 1, "L4", 24, 1, network_gbps=25, **_G),
    InstanceType("g6e.8xlarge", 32, 256, 234, 1, "L40S", 48, 1, network_gbps=25, **_G),
    InstanceType("g6e.12xlarge", 48, 384, 292, 4, "L40S", 48, 1, network_gbps=100, **_G),
    InstanceType("g6e.16xlarge", 64, 512, 737, 1, "L40S", 48, 1, network_gbps=35, **_G),
    InstanceType("g6e.24xlarge", 96, 768, 492, 4, "L40S", 48, 2, network_gbps=200, **_G),
    InstanceType("g6e.48xlarge", 192, 1536, 492, 8, "L40S", 48, 4, network_gbps=400, **_G),
    # g7e: no source read here says whether EFA reaches its GPUs directly, so it is never required of it.
    InstanceType("g7e.8xlarge", 32, 256, 506, 1, "RTX PRO Server 6000", 96, 1, network_gbps=100, **_G),
    InstanceType("g7e.12xlarge", 48, 512, 632, 2, "RTX PRO Server 6000", 96, 1, network_gbps=400, **_G),
    InstanceType("g7e.24xlarge", 96, 1024, 632, 4, "RTX PRO Server 6000", 96, 2, network_gbps=800, **_G),
    InstanceType("g7e.48xlarge", 192, 2048, 632, 8, "RTX PRO Server 6000", 96, 4, network_gbps=1600, **_G),
    # P: GPUDirect RDMA. Cards: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html;
    # card 0 of p6-b300 (the 17th card) is for ENA alone. p5.4xlarge is the exception: no GPUDirect RDMA
    # (footnote at https://aws.amazon.com/ec2/instance-types/p5/).
    InstanceType("p4d.24xlarge", 96, 1152, 737, 8, "A100", 40, 4, gpudirect=True, network_gbps=400, **_P),
    InstanceType("p4de.24xlarge", 96, 1152, 737, 8, "A100", 80, 4, gpudirect=True, network_gbps=400, **_P),
    InstanceType("p5.4xlarge", 16, 256, 118, 1, "H100", 80, 1, network_gbps=100, **_P),
    InstanceType("p5.48xlarge", 192, 2048, 100, 8, "H100", 80, 32, gpudirect=True, network_gbps=3200, **_P),
    InstanceType("p5e.48xlarge", 192, 2048, 100, 8, "H200", 141, 32, gpudirect=True, network_gbps=3200, **_P),
    InstanceType(
        "p5en.48xlarge", 192, 2048, 198, 8, "H200", 141, 16, gpudirect=True, network_gbps=3200, **_P
    ),
    InstanceType(
        "p6-b200.48xlarge", 192, 2048, 198, 8, "B200", 179, 8, gpudirect=True, network_gbps=3200, **_P
    ),
    InstanceType("p6-b300.48xlarge", 192, 4096, 198, 8, "B300", 268, 16, False, True, 6400, **_P),
    # System nodes: general purpose, compute and memory optimized, current and previous Intel generations.
    InstanceType("m6i.large", 2, 8, 29, **_STANDARD),
    InstanceType("m6i.xlarge", 4, 16, 58, **_STANDARD),
    InstanceType("m6i.2xlarge", 8, 32, 58, **_STANDARD),
    InstanceType("m6i.4xlarge", 16, 64, 234, **_STANDARD),
    InstanceType("m7i.large", 2, 8, 29, **_STANDARD),
    InstanceType("m7i.xlarge", 4, 16, 58, **_STANDARD),
    InstanceType("m7i.2xlarge", 8, 32, 58, **_STANDARD),
    InstanceType("m7i.4xlarge", 16, 64, 234, **_STANDARD),
    InstanceType("m8i.large", 2, 8, 59, **_STANDARD),
    InstanceType("m8i.xlarge", 4, 16, 118, **_STANDARD),
    InstanceType("m8i.2xlarge", 8, 32, 118, **_STANDARD),
    InstanceType("m8i.4xlarge", 16, 64, 394, **_STANDARD),
    InstanceType("c7i.large", 2, 4, 29, **_STANDARD),
    InstanceType("c7i.xlarge", 4, 8, 58, **_STANDARD),
    InstanceType("c7i.2xlarge", 8, 16, 58, **_STANDARD),
    InstanceType("c7i.4xlarge", 16, 32, 234, **_STANDARD),
    InstanceType("r7i.large", 2, 16, 29, **_STANDARD),
    InstanceType("r7i.xlarge", 4, 32, 58, **_STANDARD),
    InstanceType("r7i.2xlarge", 8, 64, 58, **_STANDARD),
    InstanceType("r7i.4xlarge", 16, 128, 234, **_STANDARD),
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
