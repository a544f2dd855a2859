"""Control plane, add-ons, access, system node group."""

from __future__ import annotations

import importlib

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_lambda as lambda_
from ray_train_eks.add_ons import AddOns
from ray_train_eks.control_plane import Access, ControlPlane
from ray_train_eks.function_logs import FunctionLogs
from ray_train_eks.image_cache import ImageCache
from ray_train_eks.system_node_group import SystemNodeGroup

from constructs import Construct
from k8s.pods import SYSTEM_NODE_LABELS
from settings import ClusterSettings, NetworkSettings
from stacks.app_stack import AppStack


class ClusterStack(AppStack):
    """Everything of the cluster that costs little and stays when the GPU nodes go.

    Attributes:
        cluster: for the stacks above this one.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        network: NetworkSettings,
        *,
        name: str,
        settings: ClusterSettings,
        vpc: ec2.IVpc,
        image_cache: ImageCache | None,
    ) -> None:
        """Creates the cluster.

        Args:
            network: Region and zones.
            name: the cluster's name.
            settings: version, access, system nodes.
            vpc: where it runs.
            image_cache: where its nodes pull the training image from, or None.
        """
        super().__init__(scope, id, network, "Cluster: EKS control plane, add-ons, system nodes")
        access = Access(settings.api_public_cidrs, settings.admin_role_arns)
        self.cluster = ControlPlane(
            self,
            "ControlPlane",
            vpc=vpc,
            name=name,
            version=settings.kubernetes_version,
            kubectl_layer=self._kubectl_layer(settings.kubernetes_version),
            access=access,
        ).cluster
        system = SystemNodeGroup(
            self,
            "SystemNodes",
            cluster=self.cluster,
            instance_type=settings.system_instance_type,
            num_nodes=settings.num_system_nodes,
            disk_gib=settings.system_disk_gib,
            labels=SYSTEM_NODE_LABELS,
        )
        AddOns(self, "AddOns", cluster=self.cluster).install_around(system.node_group)
        if image_cache:
            image_cache.grant_pull(system.role)
        FunctionLogs(self, "FunctionLogs")
        cdk.CfnOutput(
            self,
            "Kubeconfig",
            value=f"aws eks update-kubeconfig --name {name} --region {network.region}",
            description="Run with one of admin_role_arns, from where the API endpoint can be reached",
        )

    def _kubectl_layer(self, kubernetes_version: str) -> lambda_.ILayerVersion:
        """kubectl and helm of the cluster's version; kubectl tolerates one minor version of skew.

        The settings have checked that the package is installed.
        """
        minor = kubernetes_version.partition(".")[2]
        module = importlib.import_module(f"aws_cdk.lambda_layer_kubectl_v{minor}")
        return getattr(module, f"KubectlV{minor}Layer")(self, "KubectlLayer")
