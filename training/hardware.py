"""What GPUs and EC2 instances can do at best: sourced facts, standard library only.

The construct library has its own table of instance types (it is installable alone, and so is this package);
a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes:
        name: NVIDIA's short name.
        torch_names: what `torch.cuda.get_device_name` returns for it.
        peak_bf16_flops: dense bf16 FLOP/s of the tensor cores (half of a figure given "with sparsity"); None
            where the chip has none for bf16 (T4) or no data sheet of NVIDIA's was at hand.
        memory_gib: nominal memory.
        usable_gib: memory that the driver leaves to programs, as `torch.cuda.mem_get_info` totals it: GDDR6
            cards keep about 8% for ECC and firmware.
        memory_gb_per_s: bandwidth of that memory, in 1e9 bytes a second.
    """

    name: str
    torch_names: tuple[str, ...]
    peak_bf16_flops: float | None
    memory_gib: int
    usable_gib: float
    memory_gb_per_s: float


# NVIDIA's data sheets: L4 (242 TFLOPS with sparsity), A10G (70 dense, AWS's variant), L40S (362.05 dense),
# A100 (312 dense), H100 (SXM 1,979, PCIe 1,513, NVL 1,671 with sparsity), H200 (1,979 with sparsity),
# HGX B200 (8 GPUs: 36 PFLOPS with sparsity).
_GPUS = (
    Gpu("T4", ("Tesla T4",), None, 16, 14.6, 320),
    Gpu("L4", ("NVIDIA L4",), 121e12, 24, 22.0, 300),
    Gpu("A10G", ("NVIDIA A10G",), 70e12, 24, 22.1, 600),
    Gpu("L40S", ("NVIDIA L40S",), 362e12, 48, 44.4, 864),
    Gpu("A100", ("NVIDIA A100-SXM4-40GB",), 312e12, 40, 39.4, 1555),
    Gpu("A100 80GB", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12, 80, 79.1, 2039),
    Gpu("H100", ("NVIDIA H100 80GB HBM3",), 989e12, 80, 79.1, 3350),
    Gpu("H100 PCIe", ("NVIDIA H100 PCIe",), 756e12, 80, 79.1, 2000),
    Gpu("H100 NVL", ("NVIDIA H100 NVL",), 835e12, 94, 93.1, 3900),
    Gpu("H200", ("NVIDIA H200",), 989e12, 141, 139.8, 4800),
    Gpu("B200", ("NVIDIA B200",), 2250e12, 179, 178.3, 8000),
    Gpu("RTX PRO Server 6000", (), None, 96, 94.0, 1597),
    Gpu("B300", (), None, 268, 266.0, 8000),
)
_BY_NAME = {gpu.name: gpu for gpu in _GPUS}
_BY_TORCH_NAME = {name: gpu for gpu in _GPUS for name in gpu.torch_names}


@dataclass(frozen=True)
class Node:
    """One EC2 instance type with GPUs.

    Attributes:
        instance_type: its name.
        gpu: the GPU model.
        num_gpus: GPUs of one instance.
        line_rate_gbps: network of all cards together, in 1e9 bits a second.
        intra_gb_per_s: bus bandwidth that NCCL is assumed to reach between the GPUs of one instance, in
            1e9 bytes a second. An assumption: PCIe through host memory on G types (no peer-to-peer), NVLink
            on P types. `training.predict` takes a measured one.
    """

    instance_type: str
    gpu: Gpu
    num_gpus: int
    line_rate_gbps: float
    intra_gb_per_s: float


_PCIE_GB_PER_S = 10.0
_NVLINK_3_GB_PER_S = 230.0
_NVLINK_4_GB_PER_S = 350.0
_NVLINK_5_GB_PER_S = 650.0

# https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html (network and accelerator specifications).
# Instance type: GPU, GPUs, network in Gbit/s, NCCL inside the node in GB/s.
_NODES = {
    name: Node(name, _BY_NAME[gpu], num_gpus, line_rate_gbps, intra_gb_per_s)
    for name, gpu, num_gpus, line_rate_gbps, intra_gb_per_s in (
        ("g4dn.8xlarge", "T4", 1, 50, _PCIE_GB_PER_S),
        ("g4dn.12xlarge", "T4", 4, 50, _PCIE_GB_PER_S),
        ("g4dn.16xlarge", "T4", 1, 50, _PCIE_GB_PER_S),
        ("g4dn.metal", "T4", 8, 100, _PCIE_GB_PER_S),
        ("g5.8xlarge", "A10G", 1, 25, _PCIE_GB_PER_S),
        ("g5.12xlarge", "A10G", 4, 40, _PCIE_GB_PER_S),
        ("g5.16xlarge", "A10G", 1, 25, _PCIE_GB_PER_S),
        ("g5.24xlarge", "A10G", 4, 50, _PCIE_GB_PER_S),
        ("g5.48xlarge", "A10G", 8, 100, _PCIE_GB_PER_S),
        ("g6.8xlarge", "L4", 1, 25, _PCIE_GB_PER_S),
        ("g6.12xlarge", "L4", 4, 40, _PCIE_GB_PER_S),
        ("g6.16xlarge", "L4", 1, 25, _PCIE_GB_PER_S),
        ("g6.24xlarge", "L4", 4, 50, _PCIE_GB_PER_S),
        ("g6.48xlarge", "L4", 8, 100, _PCIE_GB_PER_S),
        ("gr6.8xlarge", "L4", 1, 25, _PCIE_GB_PER_S),
        ("g6e.8xlarge", "L40S", 1, 25, _PCIE_GB_PER_S),
        ("g6e.12xlarge", "L40S", 4, 100, _PCIE_GB_PER_S),
        ("g6e.16xlarge", "L40S", 1, 35, _PCIE_GB_PER_S),
        ("g6e.24xlarge", "L40S", 4, 200, _PCIE_GB_PER_S),
        ("g6e.48xlarge", "L40S", 8, 400, _PCIE_GB_PER_S),
        ("g7e.8xlarge", "RTX PRO Server 6000", 1, 100, _PCIE_GB_PER_S),
        ("g7e.12xlarge", "RTX PRO Server 6000", 2, 400, _PCIE_GB_PER_S),
        ("g7e.24xlarge", "RTX PRO Server 6000", 4, 800, _PCIE_GB_PER_S),
        ("g7e.48xlarge", "RTX PRO Server 6000", 8, 1600, _PCIE_GB_PER_S),
        ("p4d.24xlarge", "A100", 8, 400, _NVLINK_3_GB_PER_S),
        ("p4de.24xlarge", "A100 80GB", 8, 400, _NVLINK_3_GB_PER_S),
        ("p5.4xlarge", "H100", 1, 100, _NVLINK_4_GB_PER_S),
        ("p5.48xlarge", "H100", 8, 3200, _NVLINK_4_GB_PER_S),
        ("p5e.48xlarge", "H200", 8, 3200, _NVLINK_4_GB_PER_S),
        ("p5en.48xlarge", "H200", 8, 3200, _NVLINK_4_GB_PER_S),
        ("p6-b200.48xlarge", "B200", 8, 3200, _NVLINK_5_GB_PER_S),
        ("p6-b300.48xlarge", "B300", 8, 6400, _NVLINK_5_GB_PER_S),
    )
}


def gpu_by_torch_name(device_name: str) -> Gpu | None:
    """The GPU that torch reports under this name; None if it is not in the table."""
    return _BY_TORCH_NAME.get(device_name)


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a GPU; None for an unknown one, since a wrong peak makes a wrong MFU.

    Args:
        device_name: as `torch.cuda.get_device_name()` returns it.
    """
    gpu = gpu_by_torch_name(device_name)
    return gpu.peak_bf16_flops if gpu else None


def node(instance_type: str) -> Node | None:
    """The facts of an instance type; None if it is not in the table."""
    return _NODES.get(instance_type)


def instance_types() -> tuple[str, ...]:
    """All instance types of the table."""
    return tuple(_NODES)


def line_rate_gbps(instance_type: str) -> float | None:
    """Network line rate of an instance in 1e9 bits a second, all cards together; None if unknown."""
    found = node(instance_type)
    return found.line_rate_gbps if found else None
