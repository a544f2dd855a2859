"""The IAM role of a node: join the cluster, pull images, and nothing else."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from constructs import Construct
from ray_train_eks.accepted_findings import accept, managed_policy

# The VPC CNI's permissions are missing on purpose: its own Pod Identity role has them (add_ons.py), so that
# no other pod of the node can use them.
_MANAGED_POLICIES = {
    "AmazonEKSWorkerNodePolicy": "What EKS requires of every node's role; EKS extends it with its needs.",
    "AmazonEC2ContainerRegistryPullOnly": "Pulls images, lists none; EKS's add-ons come from AWS's accounts.",
}


class NodeRole(iam.Role):
    """Role of the instances of one node group."""

    def __init__(self, scope: Construct, id: str) -> None:
        super().__init__(scope, id, assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        for name in _MANAGED_POLICIES:
            self.add_managed_policy(iam.ManagedPolicy.from_aws_managed_policy_name(name))
        accept(self, {managed_policy(name): reason for name, reason in _MANAGED_POLICIES.items()})
