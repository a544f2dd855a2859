"""What `cdk deploy --all` creates, asked of AWS's own interfaces.

AWS is a stand-in on loopback (standin/), so this shows that the app and its templates hang together and in
which order things happen; it does not show that AWS accepts or runs them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deploy.stages import STACKS, Entry


@pytest.fixture(scope="module")
def vpc_id(client, deployed) -> str:
    (vpc,) = [row for row in client("ec2").describe_vpcs()["Vpcs"] if not row["IsDefault"]]
    return vpc["VpcId"]


def _in_vpc(vpc_id: str) -> list[dict[str, Any]]:
    return [{"Name": "vpc-id", "Values": [vpc_id]}]


@pytest.fixture(scope="module")
def private_subnets(client, vpc_id) -> dict[str, str]:
    """Availability Zone -> private subnet."""
    rows = client("ec2").describe_subnets(Filters=_in_vpc(vpc_id))["Subnets"]
    return {row["AvailabilityZone"]: row["SubnetId"] for row in rows if _is_private(row)}


def _is_private(subnet: dict[str, Any]) -> bool:
    return {"Key": "aws-cdk:subnet-type", "Value": "Private"} in subnet["Tags"]


@pytest.fixture(scope="module")
def gpu_group(client, deployed) -> dict[str, Any]:
    eks = client("eks")
    names = eks.list_nodegroups(clusterName="ray-train")["nodegroups"]
    groups = [
        eks.describe_nodegroup(clusterName="ray-train", nodegroupName=name)["nodegroup"] for name in names
    ]
    (group,) = [group for group in groups if group["amiType"] == "AL2023_x86_64_NVIDIA"]
    return group


@pytest.fixture(scope="module")
def gpu_template(client, gpu_group) -> dict[str, Any]:
    versions = client("ec2").describe_launch_template_versions(
        LaunchTemplateId=gpu_group["launchTemplate"]["id"], Versions=["$Latest"]
    )
    return versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]


def test_every_resource_of_every_template_was_created(cdk, deployed):
    """The stand-in would skip a type it does not know, and the CLI would call that a success."""
    created = {(row["stack"], row["id"], row["type"]) for row in deployed.entries if row["op"] == "Create"}
    wanted = {
        (stack, id_, resource["Type"])
        for stack in STACKS
        for id_, resource in cdk.template(stack)["Resources"].items()
    }
    assert wanted and wanted - created == set()
    assert deployed.ids("Skip") == []


def test_private_subnets_lie_in_the_three_zones_and_reach_out_through_nat_only(client, private_subnets):
    assert sorted(private_subnets) == ["us-east-2a", "us-east-2b", "us-east-2c"]
    ec2 = client("ec2")
    gateways = {row["NatGatewayId"] for row in ec2.describe_nat_gateways()["NatGateways"]}
    for subnet in private_subnets.values():
        filters = [{"Name": "association.subnet-id", "Values": [subnet]}]
        (table,) = ec2.describe_route_tables(Filters=filters)["RouteTables"]
        (way_out,) = [row for row in table["Routes"] if row.get("DestinationCidrBlock") == "0.0.0.0/0"]
        assert way_out.get("NatGatewayId") in gateways
        assert "GatewayId" not in way_out


def test_no_subnet_gives_out_public_addresses(client, vpc_id):
    rows = client("ec2").describe_subnets(Filters=_in_vpc(vpc_id))["Subnets"]
    assert rows and not any(row["MapPublicIpOnLaunch"] for row in rows)


def test_s3_is_reached_without_the_nat_gateway(client, vpc_id, private_subnets):
    ec2 = client("ec2")
    (endpoint,) = ec2.describe_vpc_endpoints(Filters=_in_vpc(vpc_id))["VpcEndpoints"]
    assert (endpoint["VpcEndpointType"], endpoint["ServiceName"]) == ("Gateway", "com.amazonaws.us-east-2.s3")
    assert len(endpoint["RouteTableIds"]) == len(private_subnets)


def test_the_control_plane_is_private_logs_everything_and_encrypts_secrets(client, deployed):
    cluster = client("eks").describe_cluster(name="ray-train")["cluster"]
    access = cluster["resourcesVpcConfig"]
    assert (access["endpointPrivateAccess"], access["endpointPublicAccess"]) == (True, False)
    (logging,) = cluster["logging"]["clusterLogging"]
    assert set(logging["types"]) == {"api", "audit", "authenticator", "controllerManager", "scheduler"}
    (encryption,) = cluster["encryptionConfig"]
    assert encryption["resources"] == ["secrets"]
    assert client("kms").get_key_rotation_status(KeyId=encryption["provider"]["keyArn"])["KeyRotationEnabled"]


def test_only_cdk_s_kubectl_role_may_use_the_cluster(client, deployed):
    eks = client("eks")
    (principal,) = eks.list_access_entries(clusterName="ray-train")["accessEntries"]
    assert "KubectlProviderHandler" in principal
    policies = eks.list_associated_access_policies(clusterName="ray-train", principalArn=principal)
    (policy,) = policies["associatedAccessPolicies"]
    assert policy["policyArn"].endswith("/AmazonEKSClusterAdminPolicy")


def test_add_ons_come_in_the_order_in_which_nodes_need_them(client, deployed):
    """No node is Ready without a CNI, and coredns is not active without a node."""
    names = {
        row["id"]: row["properties"].get("AddonName") for row in deployed.entries if "Addon" in row["type"]
    }
    order = [
        names.get(id_, "nodes")
        for id_ in deployed.ids("Create", "AWS::EKS::")
        if id_ in names or "SystemNodes" in id_
    ]
    before, after = order[: order.index("nodes")], order[order.index("nodes") + 1 :]
    assert set(before) == {"eks-pod-identity-agent", "vpc-cni", "kube-proxy"}
    assert set(after) == {"coredns", "eks-node-monitoring-agent"}
    assert sorted(client("eks").list_addons(clusterName="ray-train")["addons"]) == sorted(before + after)


def test_gpu_nodes_stand_in_one_private_subnet_of_the_gpu_zone(gpu_group, private_subnets):
    assert gpu_group["subnets"] == [private_subnets["us-east-2a"]]


def test_the_gpu_node_group_is_labelled_tainted_and_updated_without_surplus_nodes(gpu_group):
    assert gpu_group["labels"] == {"nvidia.com/gpu.present": "true"}
    assert gpu_group["taints"] == [{"key": "nvidia.com/gpu", "value": "true", "effect": "NO_SCHEDULE"}]
    assert gpu_group["updateConfig"]["updateStrategy"] == "MINIMAL"
    assert gpu_group["nodeRepairConfig"]["enabled"] is True
    assert gpu_group["scalingConfig"]["desiredSize"] == 2


def test_the_gpu_nodes_interface_is_efa_in_both_groups_and_has_no_public_address(client, gpu_template):
    (interface,) = gpu_template["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["DeviceIndex"], interface["NetworkCardIndex"]) == (
        "efa",
        0,
        0,
    )
    assert interface["AssociatePublicIpAddress"] is False
    names = [_group(client, id_)["GroupName"] for id_ in interface["Groups"]]
    assert names[0] == "eks-cluster-sg-ray-train"
    assert "GpuNodesSecurityGroup" in names[1]
    assert "SecurityGroupIds" not in gpu_template


def _group(client, group_id: str) -> dict[str, Any]:
    (group,) = client("ec2").describe_security_groups(GroupIds=[group_id])["SecurityGroups"]
    return group


def test_the_efa_group_allows_all_traffic_to_and_from_itself_and_lets_nobody_else_in(client, gpu_template):
    group = _group(client, gpu_template["NetworkInterfaces"][0]["Groups"][1])
    (ingress,) = group["IpPermissions"]
    # Beside it moto keeps EC2's default rule for all addresses, which does not cover EFA.
    (egress,) = [row for row in group["IpPermissionsEgress"] if row["UserIdGroupPairs"]]
    for rule in (ingress, egress):
        assert rule["IpProtocol"] == "-1"
        assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
    assert ingress["IpRanges"] == ingress["Ipv6Ranges"] == []


def test_gpu_nodes_are_of_the_setting_s_type_encrypted_close_together_and_deaf_to_imdsv1(
    client, gpu_template
):
    assert gpu_template["InstanceType"] == "g6.12xlarge"
    metadata = gpu_template["MetadataOptions"]
    assert (metadata["HttpTokens"], metadata["HttpPutResponseHopLimit"]) == ("required", 1)
    (disk,) = gpu_template["BlockDeviceMappings"]
    assert (disk["DeviceName"], disk["Ebs"]["Encrypted"], disk["Ebs"]["VolumeSize"]) == (
        "/dev/xvda",
        True,
        200,
    )
    (placement,) = client("ec2").describe_placement_groups()["PlacementGroups"]
    assert placement["Strategy"] == "cluster"
    assert gpu_template["Placement"]["GroupName"] == placement["GroupName"]


def test_the_guard_s_own_code_looked_before_the_node_group_was_made(deployed):
    created = deployed.ids("Create")
    guard = next(index for index, id_ in enumerate(created) if id_.startswith("CapacityGuardCheck"))
    group = next(index for index, id_ in enumerate(created) if id_.startswith("GpuNodesNodeGroup"))
    assert guard < group


def test_charts_then_identity_then_ray_cluster_then_job(deployed):
    applied = deployed.applied()
    assert set(applied[:3]) == {"nvidia-device-plugin", "aws-efa-k8s-device-plugin", "kuberay-operator"}
    kinds = list(dict.fromkeys(applied[3:]))
    assert kinds == ["Namespace", "ServiceAccount", "NetworkPolicy", "RayCluster", "RayJob"]
    created = deployed.ids("Create")
    cluster = next(index for index, id_ in enumerate(created) if id_.startswith("RayCluster"))
    assert created.index("JobIdentity") < cluster


def test_pods_of_the_job_get_a_role_that_reads_one_package_and_writes_one_prefix(client, deployed):
    (association,) = client("eks").list_pod_identity_associations(clusterName="ray-train")["associations"]
    assert (association["namespace"], association["serviceAccount"]) == ("ray", "ray-train")
    (row,) = [row for row in deployed.entries if row["id"] == "JobIdentity"]
    role = row["properties"]["RoleArn"].rpartition("/")[2]
    iam = client("iam")
    (name,) = iam.list_role_policies(RoleName=role)["PolicyNames"]
    statements = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]["Statement"]
    packages = [_list(each["Resource"]) for each in statements if _list(each["Action"]) == ["s3:GetObject"]]
    assert len(packages) == 1 and packages[0][0].endswith(".zip")
    for statement in statements:
        assert "*" not in _list(statement["Resource"])
        assert all(action.startswith("s3:") and action != "s3:*" for action in _list(statement["Action"]))


def _list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def test_the_results_bucket_is_encrypted_closed_and_refuses_plain_http(client, deployed, results_bucket):
    s3 = client("s3")
    assert s3.get_bucket_encryption(Bucket=results_bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    # moto's CloudFormation drops this property, so what it was given is looked at.
    (row,) = [row for row in deployed.entries if row["type"] == "AWS::S3::Bucket"]
    assert set(row["properties"]["PublicAccessBlockConfiguration"].values()) == {True}
    policy = json.loads(s3.get_bucket_policy(Bucket=results_bucket)["Policy"])
    refused = [row["Condition"] for row in policy["Statement"] if row["Effect"] == "Deny"]
    assert {"Bool": {"aws:SecureTransport": "false"}} in refused


def test_the_job_s_package_is_where_the_job_looks_for_it(client, deployed):
    (job,) = [row for row in deployed.entries if _is_job(row)]
    (manifest,) = json.loads(job["properties"]["Manifest"])
    url = manifest["spec"]["runtimeEnvYAML"].split("working_dir: ")[1].split()[0].strip("\"'")
    bucket, _, key = url.removeprefix("s3://").partition("/")
    assert client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"] > 0


def _is_job(entry: Entry) -> bool:
    return entry["op"] == "Create" and entry["id"].startswith("RayJob")
