"""The EFA node group as others would use it: alone, without this app's settings."""

import functools

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk.assertions import Template
from ray_train_eks.efa_node_group import GPU_LABELS, GPU_TAINT_KEY, EfaNodeGroup
from ray_train_eks.instance_types import INSTANCE_TYPES, UnknownInstanceType
from ray_train_eks.node_capacity import NodeCapacity

from k8s.pods import GPU_NODE_LABELS
from k8s.pods import GPU_TAINT_KEY as TOLERATED_TAINT_KEY

RESERVATION = "cr-0123456789abcdef0"
EFA_TYPES = [each for each in INSTANCE_TYPES.values() if each.efa_cards]


def _cluster():
    stack = cdk.Stack(cdk.App(), "Alone")
    vpc = ec2.Vpc(stack, "Vpc")
    return eks.Cluster(stack, "Cluster", vpc=vpc, version=eks.KubernetesVersion.of("1.36"))


def _add(instance_type="g6.12xlarge", cluster=None, **arguments):
    cluster = cluster or _cluster()
    given = {"subnet": cluster.vpc.private_subnets[0], "num_nodes": 2} | arguments
    return EfaNodeGroup(cluster.stack, "Gpus", cluster=cluster, instance_type=instance_type, **given)


@functools.cache
def _interfaces(instance_type):
    """(network card, device, type) of every interface of the launch template."""
    template = Template.from_stack(_add(instance_type).node.scope)
    templates = template.find_resources("AWS::EC2::LaunchTemplate").values()
    (data,) = [each["Properties"]["LaunchTemplateData"] for each in templates]
    assert data["InstanceType"] == instance_type
    keys = ("NetworkCardIndex", "DeviceIndex", "InterfaceType")
    return [tuple(interface[key] for key in keys) for interface in data["NetworkInterfaces"]]


def test_an_app_of_five_lines_gets_an_efa_node_group():
    stack = cdk.Stack(cdk.App(), "Alone")
    vpc = ec2.Vpc(stack, "Vpc")
    cluster = eks.Cluster(stack, "Cluster", vpc=vpc, version=eks.KubernetesVersion.of("1.36"))
    subnet = vpc.private_subnets[0]
    EfaNodeGroup(stack, "Gpus", cluster=cluster, subnet=subnet, instance_type="g6.12xlarge", num_nodes=2)

    template = Template.from_stack(stack)
    template.resource_count_is("AWS::EKS::Nodegroup", 1)
    template.resource_count_is("AWS::EC2::PlacementGroup", 1)
    template.has_resource_properties("AWS::EKS::Nodegroup", {"AmiType": "AL2023_x86_64_NVIDIA"})


def test_one_network_card_is_one_interface_for_ip_and_efa():
    assert _interfaces("g6.12xlarge") == [(0, 0, "efa")]


@pytest.mark.parametrize(
    ("instance_type", "num_efa"),
    [
        ("g6e.24xlarge", 2),
        ("g6e.48xlarge", 4),
        ("p4d.24xlarge", 4),
        ("p5.48xlarge", 32),
        ("p5en.48xlarge", 16),
    ],
)
def test_several_network_cards_have_an_ip_primary_and_efa_on_every_card(instance_type, num_efa):
    primary, *others = _interfaces(instance_type)
    assert primary == (0, 0, "interface")
    assert others == [(0, 1, "efa-only")] + [(card, 0, "efa-only") for card in range(1, num_efa)]


@pytest.mark.parametrize(
    "name",
    [each.name for each in INSTANCE_TYPES.values() if each.efa_cards > 1 and not each.efa_on_first_card],
)
def test_a_first_card_without_efa_gets_none(name):
    cards = range(1, INSTANCE_TYPES[name].efa_cards + 1)
    assert _interfaces(name) == [(0, 0, "interface"), *[(card, 0, "efa-only") for card in cards]]


@pytest.mark.parametrize("name", [each.name for each in EFA_TYPES])
def test_every_type_of_the_table_gets_all_its_efa_and_no_efa_only_primary(name):
    interfaces = _interfaces(name)
    assert interfaces[0][2] in ("efa", "interface")
    assert sum(kind.startswith("efa") for _, _, kind in interfaces) == INSTANCE_TYPES[name].efa_cards
    places = [(card, device) for card, device, _ in interfaces]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"instance_type": "m7i.xlarge"}, "m7i.xlarge: needs GPUs and EFA, such as g6.12xlarge"),
        ({"num_nodes": 0}, "num_nodes 0: at least 1"),
        (
            {"capacity": NodeCapacity("capacity-block", RESERVATION)},
            "EC2 offers blocks for P types only; use reservation",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        _add(**arguments)


def test_a_type_that_is_not_in_the_table_is_refused_with_the_nearest_ones():
    with pytest.raises(UnknownInstanceType, match=r"g6\.12xlarge"):
        _add("g6.12xlrge")


def test_a_public_subnet_is_refused():
    cluster = _cluster()
    with pytest.raises(ValueError, match="is public; GPU nodes belong into a private subnet"):
        _add(cluster=cluster, subnet=cluster.vpc.public_subnets[0])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("spot",), "use on-demand, reservation or capacity-block"),
        (("on-demand", RESERVATION), "On-Demand launches ignore"),
        (("reservation",), "capacity reservation: needs the id of the reservation"),
        (("capacity-block",), "capacity capacity-block: needs the id of the reservation"),
        (("reservation", RESERVATION, True), "only a capacity-block starts"),
    ],
)
def test_capacities_that_contradict_themselves_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        NodeCapacity(*arguments)


def test_the_nodes_and_the_pods_agree_on_label_and_taint():
    """Said twice, since the construct library is installable without the manifests."""
    assert GPU_LABELS == GPU_NODE_LABELS
    assert GPU_TAINT_KEY == TOLERATED_TAINT_KEY
