"""VPC, subnets, NAT, endpoints, flow logs."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_logs as logs
from ray_train_eks.accepted_findings import accept
from ray_train_eks.function_logs import FunctionLogs
from ray_train_eks.image_cache import ImageCache

from constructs import Construct
from settings import NetworkSettings
from stacks.app_stack import AppStack


class NetworkStack(AppStack):
    """Public subnets for NAT only, private ones for everything else.

    Attributes:
        vpc: the network.
        image_cache: the image's copy in this account, or None.
    """

    def __init__(
        self, scope: Construct, id: str, network: NetworkSettings, *, prefix: str, cached_image: str | None
    ) -> None:
        """Creates the network.

        Args:
            network: Region, zones, address range, number of NAT gateways.
            prefix: of the cache's repositories.
            cached_image: public image to keep a copy of, or None.
        """
        super().__init__(scope, id, network, "Network: VPC, private subnets, NAT, endpoints, flow logs")
        self.vpc = self._vpc(network)
        reason = "Zones are settings: EFA needs all GPU nodes in one, and synth must not need credentials."
        accept(self.vpc, {"CloudFormation-Validate::W3010": reason})
        self.vpc.add_gateway_endpoint(
            "S3",
            service=ec2.GatewayVpcEndpointAwsService.S3,
            subnets=[ec2.SubnetSelection(subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS)],
        )
        self._record_flows()
        self.image_cache = (
            ImageCache(self, "ImageCache", image=cached_image, prefix=prefix) if cached_image else None
        )
        FunctionLogs(self, "FunctionLogs")

    def _vpc(self, network: NetworkSettings) -> ec2.Vpc:
        # The first NAT gateway stands where the GPU nodes are: their downloads do not cross zones.
        nat_azs = sorted(network.azs, key=lambda az: az != network.gpu_az)[: network.num_nat_gateways]
        return ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(network.vpc_cidr),
            availability_zones=list(network.azs),
            nat_gateways=network.num_nat_gateways,
            nat_gateway_subnets=ec2.SubnetSelection(
                subnet_type=ec2.SubnetType.PUBLIC, availability_zones=nat_azs
            ),
            restrict_default_security_group=True,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="Public", subnet_type=ec2.SubnetType.PUBLIC, map_public_ip_on_launch=False
                ),
                ec2.SubnetConfiguration(name="Private", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS),
            ],
        )

    def _record_flows(self) -> None:
        log_group = logs.LogGroup(
            self,
            "FlowLogs",
            retention=logs.RetentionDays.THREE_MONTHS,
            removal_policy=RemovalPolicy.DESTROY,
        )
        self.vpc.add_flow_log("FlowLog", destination=ec2.FlowLogDestination.to_cloud_watch_logs(log_group))
