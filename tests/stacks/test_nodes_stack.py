"""The GPU node group: what neither cfn-lint nor CDK's validation notices when it is wrong."""

import pytest

from k8s.pods import GPU_NODE_LABELS, GPU_TAINT_KEY

VARIANTS = ("default", "reserved", "block")
RESERVATION = "cr-0123456789abcdef0"


def _template(assembly):
    return assembly.only("Nodes", "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]


def _group(assembly):
    return assembly.only("Nodes", "AWS::EKS::Nodegroup")


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.getfixturevalue(request.param)


def test_the_sample_s_nodes_have_one_interface_that_is_efa(default):
    (interface,) = _template(default)["NetworkInterfaces"]
    place = (interface["NetworkCardIndex"], interface["DeviceIndex"], interface["InterfaceType"])
    assert place == (0, 0, "efa")
    assert interface["AssociatePublicIpAddress"] is False


def test_every_interface_has_the_cluster_s_security_group_and_efa_s(variant):
    """Naming groups stops EKS from adding the cluster's; naming them twice is refused."""
    (efa_group,) = variant.resources("Nodes", "AWS::EC2::SecurityGroup")
    template = _template(variant)
    for interface in template["NetworkInterfaces"]:
        cluster_group, own_group = interface["Groups"]
        assert "ClusterSecurityGroupId" in cluster_group["Fn::ImportValue"]
        assert own_group == {"Fn::GetAtt": [efa_group, "GroupId"]}
    assert not {"SecurityGroups", "SecurityGroupIds"} & template.keys()


def test_efa_traffic_may_leave_and_enter_the_group_and_nothing_else_may(variant):
    ((name, group),) = variant.resources("Nodes", "AWS::EC2::SecurityGroup").items()
    itself, everything = {"Fn::GetAtt": [name, "GroupId"]}, "-1"
    assert not {"SecurityGroupEgress", "SecurityGroupIngress"} & group["Properties"].keys()
    ingress = variant.only("Nodes", "AWS::EC2::SecurityGroupIngress")
    assert (ingress["GroupId"], ingress["SourceSecurityGroupId"]) == (itself, itself)
    egress = variant.only("Nodes", "AWS::EC2::SecurityGroupEgress")
    assert (egress["GroupId"], egress["DestinationSecurityGroupId"]) == (itself, itself)
    assert ingress["IpProtocol"] == egress["IpProtocol"] == everything


def test_the_rules_are_in_place_before_the_first_node(variant):
    ((_, group),) = variant.resources("Nodes", "AWS::EKS::Nodegroup").items()
    for type_ in ("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress"):
        (rule,) = variant.resources("Nodes", type_)
        assert rule in group["DependsOn"]


def test_the_nodes_are_in_exactly_one_private_subnet_of_the_gpu_zone(default, reserved):
    for assembly, number in ((default, 1), (reserved, 2)):  # gpu_az is us-east-2a, us-east-2b
        (subnet,) = _group(assembly)["Subnets"]
        assert f"PrivateSubnet{number}Subnet" in subnet["Fn::ImportValue"]


def test_the_template_holds_nothing_that_eks_forbids_there(variant):
    template = _template(variant)
    forbidden = {"IamInstanceProfile", "InstanceInitiatedShutdownBehavior", "HibernationOptions"}
    assert not forbidden & template.keys()
    assert not any("SubnetId" in interface for interface in template["NetworkInterfaces"])
    assert not {"DiskSize", "InstanceTypes", "RemoteAccess"} & _group(variant).keys()


def test_an_update_stops_old_nodes_first(variant):
    """The other way round asks for more GPUs than quota or reservation hold."""
    assert _group(variant)["UpdateConfig"] == {"MaxUnavailable": 1, "UpdateStrategy": "MINIMAL"}


def test_nodes_carry_the_label_and_the_taint_that_pods_and_charts_count_on(variant):
    group = _group(variant)
    assert group["Labels"] == GPU_NODE_LABELS == {"nvidia.com/gpu.present": "true"}
    (taint,) = group["Taints"]
    assert (taint["Key"], taint["Effect"]) == (GPU_TAINT_KEY, "NO_SCHEDULE")


def test_image_repair_disk_and_metadata_are_as_they_must_be(variant):
    group, template = _group(variant), _template(variant)
    assert group["AmiType"] == "AL2023_x86_64_NVIDIA"
    assert group["NodeRepairConfig"] == {"Enabled": True}
    (disk,) = template["BlockDeviceMappings"]
    assert (disk["DeviceName"], disk["Ebs"]["VolumeSize"]) == ("/dev/xvda", 200)
    assert (disk["Ebs"]["VolumeType"], disk["Ebs"]["Encrypted"]) == ("gp3", True)
    assert template["MetadataOptions"]["HttpTokens"] == "required"
    assert template["MetadataOptions"]["HttpPutResponseHopLimit"] == 1


def test_on_demand_nodes_stand_close_together(default):
    ((name, placement),) = default.resources("Nodes", "AWS::EC2::PlacementGroup").items()
    assert placement["Properties"] == {"Strategy": "cluster"}
    assert _template(default)["Placement"] == {"GroupName": {"Ref": name}}
    assert _group(default)["CapacityType"] == "ON_DEMAND"
    assert not {"CapacityReservationSpecification", "InstanceMarketOptions"} & _template(default).keys()
    assert _group(default)["ScalingConfig"] == {"MinSize": 0, "DesiredSize": 2, "MaxSize": 2}


def test_a_reservation_is_targeted_by_its_id_and_not_from_a_placement_group(reserved):
    template = _template(reserved)
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": RESERVATION}
    assert "InstanceMarketOptions" not in template
    assert "Placement" not in template
    assert _group(reserved)["CapacityType"] == "ON_DEMAND"


def test_a_capacity_block_has_its_market_and_no_node_before_it_starts(block, synthesize):
    template = _template(block)
    assert template["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = template["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": RESERVATION}
    assert _group(block)["CapacityType"] == "CAPACITY_BLOCK"
    assert _group(block)["ScalingConfig"] == {"MinSize": 0, "DesiredSize": 0, "MaxSize": 2}
    assert not block.resources("Nodes", "Custom::CapacityGuard")  # nothing launches yet
    started = synthesize(
        gpu_instance_type="p5.48xlarge",
        capacity="capacity-block",
        capacity_reservation_id=RESERVATION,
        capacity_block_started=True,
        train=False,
    )
    assert _group(started)["ScalingConfig"]["DesiredSize"] == 2
    assert started.resources("Nodes", "Custom::CapacityGuard")


def test_the_guard_speaks_before_the_node_group(default, synthesize):
    ((guard_name, guard),) = default.resources("Nodes", "Custom::CapacityGuard").items()
    assert guard["Properties"]["AvailabilityZone"] == "us-east-2a"
    assert guard["Properties"]["InstanceType"] == "g6.12xlarge"
    assert guard["Properties"]["NumNodes"] == "2"
    ((_, group),) = default.resources("Nodes", "AWS::EKS::Nodegroup").items()
    assert guard_name in group["DependsOn"]
    without = synthesize(capacity_guard=False)
    assert not without.resources("Nodes", "Custom::CapacityGuard")


def test_the_nodes_role_joins_and_pulls_and_can_do_no_more(default):
    roles = default.resources("Nodes", "AWS::IAM::Role")
    (role,) = [each["Properties"] for name, each in roles.items() if name.startswith("GpuNodes")]
    names = [arn["Fn::Join"][1][-1].rpartition("/")[2] for arn in role["ManagedPolicyArns"]]
    assert names == ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"]
    assert "Policies" not in role
    assert not default.resources("Nodes", "AWS::IAM::Policy")


def test_an_output_says_what_the_stacks_cost(default):
    text = default.templates["Nodes"]["Outputs"]["HourlyCost"]["Value"]
    assert "USD an hour (GPU nodes 9.20 USD, the rest 0.35 USD" in text
