"""A managed node group of GPU instances that reach each other over EFA."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks

from constructs import Construct
from ray_train_eks.efa_interfaces import efa_interfaces
from ray_train_eks.instance_types import InstanceType, find
from ray_train_eks.launch_template import encrypted_root_volume, imds_v2_for_the_host_only
from ray_train_eks.node_capacity import NodeCapacity
from ray_train_eks.node_role import NodeRole

# What the NVIDIA device plugin selects its nodes by, and what keeps other pods off them.
GPU_LABELS = {"nvidia.com/gpu.present": "true"}
GPU_TAINT_KEY = "nvidia.com/gpu"


class EfaNodeGroup(Construct):
    """GPU nodes in one subnet, hence in one Availability Zone: EFA traffic does not leave a zone.

    Attributes:
        role: the nodes' IAM role, for permissions of the image registry.
        node_group: the managed node group.
        security_group: all traffic from and to itself, as EFA requires; nothing else.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        cluster: eks.ICluster,
        subnet: ec2.ISubnet,
        instance_type: str,
        num_nodes: int,
        disk_gib: int = 200,
        capacity: NodeCapacity | None = None,
    ) -> None:
        """Creates the group.

        Args:
            cluster: the cluster to join; its security group carries all traffic that is not EFA.
            subnet: a private subnet of the cluster's VPC.
            instance_type: a GPU type with EFA, by its EC2 name.
            num_nodes: size of the group; 0 nodes until a Capacity Block has started.
            disk_gib: root volume; the training image, Ray's sessions and the model cache live there.
            capacity: how the instances are had; None is On-Demand.

        Raises:
            UnknownInstanceType: the type is not in the table.
            ValueError: the arguments cannot make a working group; the message says what would.
        """
        super().__init__(scope, id)
        instance, capacity = find(instance_type), capacity or NodeCapacity()
        _check(instance, cluster, subnet, num_nodes, capacity)
        self.role = NodeRole(self, "Role")
        self.security_group = self._efa_security_group(cluster)
        template = self._launch_template(instance, cluster, disk_gib, capacity)
        self.node_group = self._node_group(cluster, subnet, template, num_nodes, capacity)

    def _efa_security_group(self, cluster: eks.ICluster) -> ec2.SecurityGroup:
        """All traffic to and from itself, both directions.

        `allow_all_outbound=True` would make CDK drop the self-referencing egress rule, and 0.0.0.0/0 does
        not cover EFA: the nodes would hang or report "Unresponsive receiver" (4126).
        """
        group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=cluster.vpc,
            description="EFA between GPU nodes: all traffic to and from this group",
            allow_all_outbound=False,
        )
        group.connections.allow_internally(ec2.Port.all_traffic(), "EFA")
        return group

    def _launch_template(
        self, instance: InstanceType, cluster: eks.ICluster, disk_gib: int, capacity: NodeCapacity
    ) -> ec2.CfnLaunchTemplate:
        # A template that names security groups stops EKS from adding the cluster's: name it as well.
        groups = [cluster.cluster_security_group_id, self.security_group.security_group_id]
        return ec2.CfnLaunchTemplate(
            self,
            "LaunchTemplate",
            launch_template_data=ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
                # Here and not on the node group: CDK's own list of GPU types is old.
                instance_type=instance.name,
                network_interfaces=efa_interfaces(instance, groups),
                block_device_mappings=[encrypted_root_volume(disk_gib)],
                metadata_options=imds_v2_for_the_host_only(),
                placement=self._placement(capacity),
                capacity_reservation_specification=capacity.reservation_specification,
                instance_market_options=capacity.market_options,
            ),
        )

    def _placement(self, capacity: NodeCapacity) -> ec2.CfnLaunchTemplate.PlacementProperty | None:
        if not capacity.wants_placement_group:
            return None
        group = ec2.CfnPlacementGroup(self, "PlacementGroup", strategy="cluster")
        return ec2.CfnLaunchTemplate.PlacementProperty(group_name=group.ref)

    def _node_group(
        self,
        cluster: eks.ICluster,
        subnet: ec2.ISubnet,
        template: ec2.CfnLaunchTemplate,
        num_nodes: int,
        capacity: NodeCapacity,
    ) -> eks.Nodegroup:
        group = eks.Nodegroup(
            self,
            "NodeGroup",
            cluster=cluster,
            node_role=self.role,
            subnets=ec2.SubnetSelection(subnets=[subnet]),
            ami_type=eks.NodegroupAmiType.AL2023_X86_64_NVIDIA,
            capacity_type=capacity.capacity_type,
            launch_template_spec=eks.LaunchTemplateSpec(
                id=template.ref, version=template.attr_latest_version_number
            ),
            min_size=0,  # lets an operator scale to 0, which stops the bill
            desired_size=num_nodes if capacity.can_launch else 0,
            max_size=num_nodes,
            enable_node_auto_repair=True,
            labels=GPU_LABELS,
            taints=[eks.TaintSpec(key=GPU_TAINT_KEY, value="true", effect=eks.TaintEffect.NO_SCHEDULE)],
        )
        # The rules are resources of their own; a node that starts before them fails its first EFA traffic.
        group.node.add_dependency(self.security_group)
        # Not in the L2 construct. The default strategy launches new nodes first: more GPUs than quota or
        # reservation hold.
        group.node.default_child.add_property_override(
            "UpdateConfig", {"MaxUnavailable": 1, "UpdateStrategy": "MINIMAL"}
        )
        return group


def _check(
    instance: InstanceType, cluster: eks.ICluster, subnet: ec2.ISubnet, num_nodes: int, capacity: NodeCapacity
) -> None:
    if not instance.num_gpus or not instance.efa_cards:
        raise ValueError(f"instance_type {instance.name}: needs GPUs and EFA, such as g6.12xlarge")
    if num_nodes < 1:
        raise ValueError(f"num_nodes {num_nodes}: at least 1")
    if any(subnet.node.path == public.node.path for public in cluster.vpc.public_subnets):
        raise ValueError(f"subnet {subnet.node.path}: is public; GPU nodes belong into a private subnet")
    capacity.check_instance_type(instance)
