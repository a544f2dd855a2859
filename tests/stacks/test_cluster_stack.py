"""Control plane and system nodes: what cdk-nag does not see in aws_eks_v2, and what a deployment needs."""

import json

import pytest

ADD_ONS_BEFORE_NODES = ("eks-pod-identity-agent", "vpc-cni", "kube-proxy")
ADD_ONS_AFTER_NODES = ("coredns", "eks-node-monitoring-agent")


@pytest.fixture(scope="module")
def cluster(default):
    return default.only("Cluster", "AWS::EKS::Cluster")


def _add_ons(assembly):
    found = assembly.resources("Cluster", "AWS::EKS::Addon").items()
    return {add_on["Properties"]["AddonName"]: (name, add_on) for name, add_on in found}


def test_the_api_is_private_unless_the_settings_open_it(cluster, reserved):
    assert cluster["ResourcesVpcConfig"]["EndpointPrivateAccess"] is True
    assert cluster["ResourcesVpcConfig"]["EndpointPublicAccess"] is False
    opened = reserved.only("Cluster", "AWS::EKS::Cluster")["ResourcesVpcConfig"]
    assert (opened["EndpointPrivateAccess"], opened["EndpointPublicAccess"]) == (True, True)
    assert opened["PublicAccessCidrs"] == ["192.0.2.0/24"]


@pytest.mark.parametrize("variant", ["default", "reserved", "block"])
def test_the_api_never_answers_the_whole_internet_by_itself(request, variant):
    assert "0.0.0.0/0" not in str(
        request.getfixturevalue(variant).only("Cluster", "AWS::EKS::Cluster")["ResourcesVpcConfig"]
    )


def test_the_control_plane_and_its_nodes_sit_in_private_subnets(default, cluster):
    node_group = default.only("Cluster", "AWS::EKS::Nodegroup")
    for subnets in (cluster["ResourcesVpcConfig"]["SubnetIds"], node_group["Subnets"]):
        assert len(subnets) == 3
        assert all("PrivateSubnet" in subnet["Fn::ImportValue"] for subnet in subnets)


def test_all_five_kinds_of_log_are_on_and_expire_and_go_with_the_stack(default, cluster):
    types = {entry["Type"] for entry in cluster["Logging"]["ClusterLogging"]["EnabledTypes"]}
    assert types == {"api", "audit", "authenticator", "controllerManager", "scheduler"}
    groups = default.resources("Cluster", "AWS::Logs::LogGroup").items()
    ((name, group),) = [(name, each) for name, each in groups if "LogGroupName" in each["Properties"]]
    assert group["Properties"]["LogGroupName"] == f"/aws/eks/{cluster['Name']}/cluster"
    assert (group["Properties"]["RetentionInDays"], group["DeletionPolicy"]) == (90, "Delete")
    ((_, resource),) = default.resources("Cluster", "AWS::EKS::Cluster").items()
    assert name in resource["DependsOn"]  # EKS would create the group itself, for ever


def test_secrets_are_encrypted_with_a_rotating_key(default, cluster):
    ((key_name, key),) = default.resources("Cluster", "AWS::KMS::Key").items()
    (encryption,) = cluster["EncryptionConfig"]
    assert encryption["Resources"] == ["secrets"]
    assert encryption["Provider"]["KeyArn"] == {"Fn::GetAtt": [key_name, "Arn"]}
    assert key["Properties"]["EnableKeyRotation"] is True


def test_access_goes_through_access_entries_alone(default, reserved, cluster):
    assert cluster["AccessConfig"] == {
        "AuthenticationMode": "API",
        "BootstrapClusterCreatorAdminPermissions": False,
    }
    (kubectl,) = default.resources("Cluster", "AWS::EKS::AccessEntry").values()
    assert "KubectlProvider" in str(kubectl["Properties"]["PrincipalArn"])
    entries = reserved.resources("Cluster", "AWS::EKS::AccessEntry").values()
    principals = [entry["Properties"]["PrincipalArn"] for entry in entries]
    assert "arn:aws:iam::123456789012:role/Admin" in principals
    assert "arn:aws:iam::123456789012:role/team/Ops" in principals
    assert len(principals) == 3


def test_an_admin_keeps_the_same_entry_when_another_one_goes(reserved, synthesize):
    def entry_of_ops(assembly):
        entries = assembly.resources("Cluster", "AWS::EKS::AccessEntry").items()
        (found,) = [name for name, entry in entries if "team/Ops" in str(entry["Properties"]["PrincipalArn"])]
        return found

    ops = "arn:aws:iam::123456789012:role/team/Ops"
    alone = synthesize(admin_role_arns=f"{ops},{ops}")
    assert entry_of_ops(alone) == entry_of_ops(reserved)


def test_auto_mode_and_self_managed_add_ons_are_off(cluster):
    assert cluster["BootstrapSelfManagedAddons"] is False
    assert cluster["ComputeConfig"] == {"Enabled": False}


def test_the_kubectl_layer_is_that_of_the_cluster_s_version(default, synthesize, cluster):
    assert cluster["Version"] == "1.36"
    older = synthesize(kubernetes_version="1.30")

    def layer(assembly):
        layers = assembly.resources("Cluster", "AWS::Lambda::LayerVersion").items()
        (found,) = [layer for name, layer in layers if name.startswith("KubectlLayer")]
        return found["Properties"]["Content"]["S3Key"]

    assert older.only("Cluster", "AWS::EKS::Cluster")["Version"] == "1.30"
    assert layer(older) != layer(default)


def test_every_add_on_overwrites_what_it_finds(default):
    add_ons = _add_ons(default)
    assert add_ons.keys() == {*ADD_ONS_BEFORE_NODES, *ADD_ONS_AFTER_NODES}
    assert all(add_on["Properties"]["ResolveConflicts"] == "OVERWRITE" for _, add_on in add_ons.values())


def test_networking_comes_before_the_first_node_and_dns_after_it(default):
    """Without a CNI no node becomes Ready; CoreDNS is not ACTIVE before there is one."""
    ((nodes_name, nodes),) = default.resources("Cluster", "AWS::EKS::Nodegroup").items()
    add_ons = _add_ons(default)
    for name in ADD_ONS_BEFORE_NODES:
        assert add_ons[name][0] in nodes["DependsOn"]
    for name in ADD_ONS_AFTER_NODES:
        assert nodes_name in add_ons[name][1]["DependsOn"]


def test_network_policies_are_enforced(default):
    _, cni = _add_ons(default)["vpc-cni"]
    assert json.loads(cni["Properties"]["ConfigurationValues"]) == {"enableNetworkPolicy": "true"}


def test_only_the_cni_has_the_cni_s_permissions(default):
    roles = default.resources("Cluster", "AWS::IAM::Role")
    holders = [name for name, role in roles.items() if "AmazonEKS_CNI_Policy" in str(role)]
    (holder,) = holders
    _, cni = _add_ons(default)["vpc-cni"]
    assert cni["Properties"]["PodIdentityAssociations"] == [
        {"ServiceAccount": "aws-node", "RoleArn": {"Fn::GetAtt": [holder, "Arn"]}}
    ]
    trust = roles[holder]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert [statement["Principal"] for statement in trust] == [{"Service": "pods.eks.amazonaws.com"}]


def test_system_nodes_hold_the_training_image_on_an_encrypted_disk(default):
    data = default.only("Cluster", "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    assert data["InstanceType"] == "m7i.xlarge"
    (disk,) = data["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/xvda"
    assert disk["Ebs"]["VolumeSize"] >= 100
    assert (disk["Ebs"]["VolumeType"], disk["Ebs"]["Encrypted"]) == ("gp3", True)


def test_pods_cannot_reach_the_system_nodes_credentials(default):
    data = default.only("Cluster", "AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    assert data["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 1,
    }


def test_disk_and_type_stand_in_the_template_alone(default):
    """EKS refuses a node group that says them as well."""
    group = default.only("Cluster", "AWS::EKS::Nodegroup")
    assert not {"DiskSize", "InstanceTypes", "RemoteAccess"} & group.keys()
