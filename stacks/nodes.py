"""The GPU node group. Nothing refers to this stack, so it can be destroyed alone, which stops the bill."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from ray_train_eks.capacity_guard import CapacityGuard
from ray_train_eks.efa_node_group import EfaNodeGroup
from ray_train_eks.image_cache import ImageCache
from ray_train_eks.node_capacity import NodeCapacity

from constructs import Construct
from settings import NetworkSettings, NodesSettings
from stacks.app_stack import AppStack


class NodesStack(AppStack):
    """GPU nodes in one Availability Zone."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        network: NetworkSettings,
        *,
        settings: NodesSettings,
        cluster: eks.ICluster,
        image_cache: ImageCache | None,
    ) -> None:
        """Creates the node group.

        Args:
            network: Region and zones; `gpu_az` is where the nodes go.
            settings: type, number, capacity.
            cluster: what they join.
            image_cache: where they pull the training image from, or None.
        """
        super().__init__(scope, id, network, "Nodes: GPU node group with EFA; destroy it to stop the bill")
        capacity = NodeCapacity(
            settings.capacity, settings.capacity_reservation_id, settings.capacity_block_started
        )
        nodes = EfaNodeGroup(
            self,
            "GpuNodes",
            cluster=cluster,
            subnet=_private_subnet(cluster.vpc, network.gpu_az),
            instance_type=settings.gpu_instance_type,
            num_nodes=settings.num_gpu_nodes,
            disk_gib=settings.gpu_disk_gib,
            capacity=capacity,
        )
        if image_cache:
            image_cache.grant_pull(nodes.role)
        if settings.capacity_guard and capacity.can_launch:
            guard = self._guard(settings, network.gpu_az, cluster)
            nodes.node_group.node.add_dependency(guard)

    def _guard(self, settings: NodesSettings, az: str, cluster: eks.ICluster) -> CapacityGuard:
        return CapacityGuard(
            self,
            "CapacityGuard",
            instance_type=settings.gpu_instance_type,
            az=az,
            num_nodes=settings.num_gpu_nodes,
            capacity=settings.capacity,
            capacity_reservation_id=settings.capacity_reservation_id,
            cluster_name=cluster.cluster_name,
        )


def _private_subnet(vpc: ec2.IVpc, az: str) -> ec2.ISubnet:
    """The one private subnet of a zone. `select_subnets` of an unknown zone would give none, silently."""
    return next(subnet for subnet in vpc.private_subnets if subnet.availability_zone == az)
