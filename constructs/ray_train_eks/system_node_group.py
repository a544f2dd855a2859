"""The node group for everything that needs no GPU: operator, DNS, and the Ray head."""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks

from constructs import Construct
from ray_train_eks.launch_template import encrypted_root_volume, imds_v2_for_the_host_only
from ray_train_eks.node_role import NodeRole


class SystemNodeGroup(Construct):
    """Nodes without GPU in the private subnets of every zone.

    Attributes:
        role: the nodes' IAM role.
        node_group: the managed node group.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        cluster: eks.ICluster,
        instance_type: str,
        num_nodes: int,
        disk_gib: int,
        labels: Mapping[str, str],
    ) -> None:
        """Creates the group.

        Args:
            cluster: the cluster to join.
            instance_type: EC2 name of an x86 type.
            num_nodes: size of the group.
            disk_gib: root volume; the Ray head runs the same CUDA image as the workers, over 10 GB unpacked.
            labels: what the operator and the head select these nodes by.
        """
        super().__init__(scope, id)
        self.role = NodeRole(self, "Role")
        template = ec2.CfnLaunchTemplate(
            self,
            "LaunchTemplate",
            launch_template_data=ec2.CfnLaunchTemplate.LaunchTemplateDataProperty(
                instance_type=instance_type,
                block_device_mappings=[encrypted_root_volume(disk_gib)],
                metadata_options=imds_v2_for_the_host_only(),
            ),
        )
        self.node_group = eks.Nodegroup(
            self,
            "NodeGroup",
            cluster=cluster,
            node_role=self.role,
            subnets=ec2.SubnetSelection(subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS),
            ami_type=eks.NodegroupAmiType.AL2023_X86_64_STANDARD,
            launch_template_spec=eks.LaunchTemplateSpec(
                id=template.ref, version=template.attr_latest_version_number
            ),
            min_size=num_nodes,
            desired_size=num_nodes,
            max_size=num_nodes + 1,  # room for the extra node of a rolling update
            enable_node_auto_repair=True,
            labels=labels,
        )
