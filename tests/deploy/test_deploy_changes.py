"""A deployment's later life: deployed again, changed, without GPU nodes and with them again, destroyed.

The stages are fixtures (conftest.py), each built on the one before it; the tests follow in the same order.
"""

from __future__ import annotations

from tests.deploy.stages import NODES, STACKS, buckets

# --- deployed again, changed ------------------------------------------------------------------------------


def test_a_second_deployment_changes_nothing(again):
    assert again.entries == []
    assert again.output.count("(no changes)") == len(STACKS)


def test_a_changed_training_module_replaces_the_ray_job_and_nothing_else(changed):
    assert len(changed.ids("Create")) == len(changed.ids("Delete")) == 1
    (new,), (old,) = changed.ids("Create"), changed.ids("Delete")
    assert new.startswith("RayJob") and old.startswith("RayJob") and new != old
    # The job's role may read the new package instead of the old one.
    assert [id_ for id_ in changed.ids("Update") if not id_.startswith("JobRole")] == []
    assert changed.ids("Skip") == []
    assert changed.output.count("(no changes)") == len(STACKS) - 1


# --- the GPU nodes alone ----------------------------------------------------------------------------------


def test_the_gpu_nodes_can_be_destroyed_alone(without_nodes):
    assert {row["stack"] for row in without_nodes.entries} == {NODES}
    assert {row["op"] for row in without_nodes.entries} == {"Delete"}
    deleted = without_nodes.ids("Delete")
    assert deleted[0].startswith("GpuNodesNodeGroup")


def test_the_guard_refuses_nodes_that_exceed_the_quota_before_the_node_group_is_made(refused):
    assert "Running On-Demand G and VT instances" in refused.output
    assert "4 are in use, but 2 x g6.12xlarge need 96 more: ask for 100" in refused.output
    assert refused.ids("Create", "CapacityGuard") == refused.ids("Create", "AWS::EKS::Nodegroup") == []


def test_the_gpu_nodes_come_back_without_a_change_to_the_rest(nodes_again):
    assert {row["stack"] for row in nodes_again.entries if row["op"] == "Create"} == {NODES}
    assert len(nodes_again.ids("Create", "AWS::EKS::Nodegroup")) == 1
    assert nodes_again.output.count("(no changes)") == 2  # Network and Cluster, which Nodes needs


# --- destroyed --------------------------------------------------------------------------------------------


def test_job_then_ray_cluster_then_operator_then_access_are_deleted(destroyed):
    """A RayJob or RayCluster whose operator is gone never finishes deleting."""
    deleted = destroyed.ids("Delete")
    last = ["RayJob", "RayCluster", "KubeRayOperator", "ControlPlaneClusterClusterAdminRoleAccess"]
    positions = [next(index for index, id_ in enumerate(deleted) if id_.startswith(name)) for name in last]
    assert positions == sorted(positions)


def test_everything_created_was_deleted_but_the_results_bucket(aws, destroyed):
    alive: dict[tuple[str, str], str] = {}
    for row in aws.entries():
        if row["op"] == "Create":
            alive[row["stack"], row["id"]] = row["type"]
        elif row["op"] == "Delete":
            alive.pop((row["stack"], row["id"]), None)
    left = {key: type_ for key, type_ in alive.items() if key[0] in STACKS}
    assert list(left.values()) == ["AWS::S3::Bucket"]


def test_aws_shows_nothing_but_the_results_bucket(client, destroyed, results_bucket):
    ec2, eks = client("ec2"), client("eks")
    assert eks.list_clusters()["clusters"] == []
    assert [row for row in ec2.describe_vpcs()["Vpcs"] if not row["IsDefault"]] == []
    assert ec2.describe_addresses()["Addresses"] == []
    assert [row for row in ec2.describe_nat_gateways()["NatGateways"] if row["State"] != "deleted"] == []
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    assert client("lambda").list_functions()["Functions"] == []
    assert client("logs").describe_log_groups()["logGroups"] == []
    roles = client("iam").list_roles()["Roles"]
    assert [row["RoleName"] for row in roles if not row["RoleName"].startswith("cdk-")] == []
    assert [name for name in buckets(client) if not name.startswith("cdk-")] == [results_bucket]
