"""The table against EC2's own answer, and the facts that settings, manifests and launch templates rest on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import boto3
import pytest
from moto import mock_aws
from ray_train_eks.instance_types import INSTANCE_TYPES, InstanceType, UnknownInstanceType, allocatable, find

GPU_TYPES = [instance for instance in INSTANCE_TYPES.values() if instance.num_gpus]


@pytest.fixture(scope="module")
def described() -> Mapping[str, Mapping[str, Any]]:
    """DescribeInstanceTypes as EC2 answered it when moto's snapshot was taken."""
    with mock_aws():
        pages = (
            boto3.client("ec2", region_name="us-east-1").get_paginator("describe_instance_types").paginate()
        )
        return {row["InstanceType"]: row for page in pages for row in page["InstanceTypes"]}


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=lambda instance: instance.name)
def test_size_and_network_are_what_ec2_says(instance: InstanceType, described: Mapping[str, Any]) -> None:
    fact = described[instance.name]
    network = fact["NetworkInfo"]
    first_card = next(card for card in network["NetworkCards"] if card["NetworkCardIndex"] == 0)
    assert instance.vcpus == fact["VCpuInfo"]["DefaultVCpus"]
    assert instance.memory_gib * 1024 == fact["MemoryInfo"]["SizeInMiB"]
    # nodeadm's formula: prefix delegation off, interfaces of the default card only.
    addresses = network["Ipv4AddressesPerInterface"]
    assert instance.max_pods == first_card["MaximumNetworkInterfaces"] * (addresses - 1) + 2
    assert fact["ProcessorInfo"]["SupportedArchitectures"] == ["x86_64"]  # the image and the AMI are x86-64


@pytest.mark.parametrize("instance", GPU_TYPES, ids=lambda instance: instance.name)
def test_gpus_and_efa_are_what_ec2_says(instance: InstanceType, described: Mapping[str, Any]) -> None:
    fact = described[instance.name]
    (gpu,) = fact["GpuInfo"]["Gpus"]
    network = fact["NetworkInfo"]
    cards_with_efa = [card for card in network["NetworkCards"] if "efa" in card.get("InterfaceTypes", [])]
    assert (instance.num_gpus, instance.gpu) == (gpu["Count"], gpu["Name"])
    assert instance.gpu_memory_gib == pytest.approx(gpu["MemoryInfo"]["SizeInMiB"] / 1024, rel=0.08)
    assert instance.efa_cards == network["EfaInfo"]["MaximumEfaInterfaces"] == len(cards_with_efa)
    assert instance.efa_on_first_card == any(card["NetworkCardIndex"] == 0 for card in cards_with_efa)
    assert instance.network_gbps == _gbps(network["NetworkPerformance"])


def _gbps(text: str) -> int:
    """`3200 Gigabit` or `4x 100 Gigabit`."""
    times, _, each = text.removesuffix(" Gigabit").rpartition("x ")
    return int(times or 1) * int(each)


def test_every_x86_gpu_type_with_efa_is_in_the_table_or_left_out_for_a_reason(
    described: Mapping[str, Any],
) -> None:
    with_efa = {
        name
        for name, fact in described.items()
        if fact["NetworkInfo"].get("EfaSupported")
        and fact.get("GpuInfo", {}).get("Gpus", [{}])[0].get("Manufacturer") == "NVIDIA"
        and fact["ProcessorInfo"]["SupportedArchitectures"] == ["x86_64"]
    }
    # p3dn: CUDA 13 dropped its GPU; g7: not in the list of the EKS AMI.
    left_out = {name for name in with_efa if name.startswith(("p3dn.", "g7."))}
    assert with_efa - left_out == {instance.name for instance in GPU_TYPES}


@pytest.mark.parametrize(
    ("name", "efa_cards"),
    [
        ("g6.12xlarge", 1),
        ("g6e.24xlarge", 2),
        ("g6e.48xlarge", 4),
        ("p4d.24xlarge", 4),
        ("p5.48xlarge", 32),
        ("p5e.48xlarge", 32),
        ("p5en.48xlarge", 16),
    ],
)
def test_efa_cards_are_those_of_the_efa_documentation(name: str, efa_cards: int) -> None:
    assert find(name).efa_cards == efa_cards


def test_the_default_gpu_node_is_the_sample_s() -> None:
    node = find("g6.12xlarge")
    assert (node.vcpus, node.memory_gib, node.num_gpus, node.gpu, node.gpu_memory_gib) == (
        48,
        192,
        4,
        "L4",
        24,
    )


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=lambda instance: instance.name)
def test_each_type_counts_against_the_quota_of_its_own_family(instance: InstanceType) -> None:
    expected = {"g": "L-DB2E81BA", "p": "L-417A185B"}.get(instance.name[0], "L-1216C47A")
    assert instance.quota_code == expected
    assert instance.name[0].upper() in instance.quota_name


@pytest.mark.parametrize("instance", GPU_TYPES, ids=lambda instance: instance.name)
def test_gpudirect_is_promised_for_the_large_p_types_only(instance: InstanceType) -> None:
    assert instance.gpudirect == (instance.name.startswith("p") and instance.name != "p5.4xlarge")


def test_a_worker_pod_of_the_sample_fits_its_node_and_a_head_of_four_cpus_does_not_fit_m7i_xlarge() -> None:
    worker_node, system_node = allocatable(find("g6.12xlarge")), allocatable(find("m7i.xlarge"))
    assert worker_node.cpu_millicores >= 40_000 and worker_node.memory_mib >= 160 * 1024
    assert system_node.cpu_millicores == 3920
    assert system_node.memory_mib < 16 * 1024


@pytest.mark.parametrize("instance", GPU_TYPES, ids=lambda instance: instance.name)
def test_the_worker_pod_fits_every_gpu_type(instance: InstanceType) -> None:
    room = allocatable(instance)
    assert instance.worker_pod_cpu * 1000 <= room.cpu_millicores
    assert instance.worker_pod_memory_gib * 1024 <= room.memory_mib


def test_an_unknown_type_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UnknownInstanceType, match=r"g6\.12xlrage is not in the table.*g6\.12xlarge"):
        find("g6.12xlrage")
