"""The training package's table of hardware, held against the construct library's."""

from __future__ import annotations

import pytest
from ray_train_eks.instance_types import INSTANCE_TYPES

from training import hardware

GPU_TYPES = [instance for instance in INSTANCE_TYPES.values() if instance.num_gpus]


@pytest.mark.parametrize("instance", GPU_TYPES, ids=lambda instance: instance.name)
def test_both_tables_of_instance_types_agree(instance):
    node = hardware.node(instance.name)
    assert node is not None, f"{instance.name} is missing in training/hardware.py"
    facts = (node.gpu.name.removesuffix(" 80GB"), node.num_gpus, node.gpu.memory_gib, node.line_rate_gbps)
    assert facts == (instance.gpu, instance.num_gpus, instance.gpu_memory_gib, instance.network_gbps)


def test_neither_table_knows_types_that_the_other_does_not():
    assert {instance.name for instance in GPU_TYPES} == set(hardware.instance_types())


def test_an_unknown_gpu_has_no_peak():
    assert hardware.peak_bf16_flops("NVIDIA GeForce RTX 9090") is None
    assert hardware.peak_bf16_flops("") is None


def test_peaks_are_dense_figures():
    assert hardware.peak_bf16_flops("NVIDIA L4") == 121e12
    assert hardware.peak_bf16_flops("NVIDIA H200") == 989e12
    assert hardware.peak_bf16_flops("NVIDIA A100-SXM4-40GB") == 312e12


def test_variants_of_one_chip_with_different_clocks_are_kept_apart():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")
    assert len({hardware.peak_bf16_flops(name) for name in names}) == 3


def test_line_rates_are_per_instance_and_unknown_types_have_none():
    assert hardware.line_rate_gbps("g6.12xlarge") == 40
    assert hardware.line_rate_gbps("p5.48xlarge") == 3200
    assert hardware.line_rate_gbps("t3.micro") is None


def test_no_gpu_offers_more_than_its_nominal_memory():
    for name in hardware.instance_types():
        gpu = hardware.node(name).gpu
        assert 0.9 * gpu.memory_gib < gpu.usable_gib < gpu.memory_gib
