"""The QoS class is Kubernetes' own, worked out from every container."""

from __future__ import annotations

from decimal import Decimal

import pytest

from k8s.qos import qos_class, quantity


def container(requests=None, limits=None):
    return {"resources": {"requests": requests or {}, "limits": limits or {}}}


EQUAL = container({"cpu": "1", "memory": "1Gi"}, {"cpu": "1", "memory": "1Gi"})


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([EQUAL], "Guaranteed"),
        ([container(limits={"cpu": "1", "memory": "1Gi"})], "Guaranteed"),
        ([container({"cpu": "1000m", "memory": "1024Mi"}, {"cpu": "1", "memory": "1Gi"})], "Guaranteed"),
        ([container({"cpu": "500m", "memory": "1Gi"}, {"cpu": "1", "memory": "1Gi"})], "Burstable"),
        ([container({"cpu": "1", "memory": "1Gi"}, {"memory": "1Gi"})], "Burstable"),
        ([container({"cpu": "1", "memory": "1Gi"})], "Burstable"),
        ([EQUAL, container()], "Burstable"),
        ([container(), container()], "BestEffort"),
        ([container(limits={"nvidia.com/gpu": "4"})], "BestEffort"),
        ([container({"cpu": "0"}, {"cpu": "0"})], "BestEffort"),
        ([{}], "BestEffort"),
    ],
)
def test_the_class_follows_from_cpu_and_memory_of_all_containers(containers, expected):
    assert qos_class({"containers": containers}) == expected


def test_an_init_container_without_resources_costs_the_class():
    assert qos_class({"containers": [EQUAL], "initContainers": [EQUAL]}) == "Guaranteed"
    assert qos_class({"containers": [EQUAL], "initContainers": [container()]}) == "Burstable"


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("500m", Decimal("0.5")), ("1.5", Decimal("1.5")), ("160Gi", 160 * 2**30), ("1G", 10**9)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text, number):
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1 Gi", "lots", "1Gim"])
def test_what_is_no_quantity_is_refused_with_its_value(text):
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        quantity(text)
