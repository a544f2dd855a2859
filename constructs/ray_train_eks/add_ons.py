"""EKS add-ons, in the order that lets the first node become Ready."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aws_cdk import aws_eks as eks_l1
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam

from constructs import Construct, IDependable
from ray_train_eks.accepted_findings import accept, managed_policy
from ray_train_eks.pod_role import PodRole


class AddOns(Construct):
    """Managed add-ons of a cluster that was created without self-managed ones.

    Without a CNI no node becomes Ready, and CoreDNS is not ACTIVE before there is a node: networking first,
    then the node group (`install_around`), then the rest.
    """

    def __init__(self, scope: Construct, id: str, *, cluster: eks.ICluster) -> None:
        """Creates the add-ons.

        Args:
            cluster: a cluster with `bootstrap_self_managed_addons=False`.
        """
        super().__init__(scope, id)
        self._cluster = cluster
        identity = self._add("eks-pod-identity-agent")
        cni = self._add(
            "vpc-cni",
            # Without this a NetworkPolicy is accepted and does nothing.
            configuration={"enableNetworkPolicy": "true"},
            service_account_roles={"aws-node": self._cni_role()},
        )
        cni.node.add_dependency(identity)
        self._before_nodes = [identity, cni, self._add("kube-proxy")]
        self._after_nodes = [self._add("coredns"), self._add("eks-node-monitoring-agent")]

    def install_around(self, nodes: IDependable) -> None:
        """Orders the add-ons around the first node group."""
        for add_on in self._before_nodes:
            nodes.node.add_dependency(add_on)
        for add_on in self._after_nodes:
            add_on.node.add_dependency(nodes)

    def _cni_role(self) -> iam.Role:
        role = PodRole(self, "CniRole")
        name = "AmazonEKS_CNI_Policy"
        role.add_managed_policy(iam.ManagedPolicy.from_aws_managed_policy_name(name))
        accept(role, {managed_policy(name): "AWS's policy for this add-on; it changes with the add-on."})
        return role

    def _add(
        self,
        name: str,
        configuration: Mapping[str, Any] | None = None,
        service_account_roles: Mapping[str, iam.IRole] | None = None,
    ) -> eks_l1.CfnAddon:
        roles = service_account_roles or {}
        return eks_l1.CfnAddon(
            self,
            name,
            addon_name=name,
            cluster_name=self._cluster.cluster_name,
            # The L2 Addon cannot say this, and a conflict would fail the deployment.
            resolve_conflicts="OVERWRITE",
            configuration_values=json.dumps(configuration) if configuration else None,
            pod_identity_associations=[
                eks_l1.CfnAddon.PodIdentityAssociationProperty(
                    service_account=account, role_arn=role.role_arn
                )
                for account, role in roles.items()
            ]
            or None,
        )
