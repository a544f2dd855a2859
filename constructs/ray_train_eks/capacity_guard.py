"""Fails a deployment in seconds, with the remedy, where a node group would hang for half an hour."""

from __future__ import annotations

from pathlib import Path

from aws_cdk import CustomResource, Duration, IgnoreMode, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs

from constructs import Construct
from ray_train_eks.accepted_findings import accept
from ray_train_eks.instance_types import find

# Exactly what capacity_api.Aws calls, beside sts:GetCallerIdentity, which needs no permission. Said here and
# not there, because synthesis must not need boto3; a test compares the two.
ACTIONS = (
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "servicequotas:GetAWSDefaultServiceQuota",
    "servicequotas:GetServiceQuota",
)
# What the Lambda imports of this package; boto3 comes with its runtime.
_MODULES = ("__init__", "capacity", "capacity_api", "capacity_handler", "instance_types")
_CAPACITIES = ("on-demand", "reservation", "capacity-block")


class CapacityGuard(Construct):
    """A custom resource that asks AWS whether the nodes can launch; make the node group depend on it.

    It checks when it is created and when its properties change, and does nothing on delete. It cannot see
    free physical capacity: a deployment that passes can still wait for it.

    Args:
        instance_type: of the nodes; one of the table of instance types.
        az: Availability Zone of the nodes.
        num_nodes: how many there shall be.
        capacity: "on-demand", "reservation" or "capacity-block".
        capacity_reservation_id: of the latter two; empty for On-Demand.
        cluster_name: EKS cluster of the nodes. What it runs in the AZ already is not counted against the new
            nodes; without it, the guard is right only for the group's first nodes.

    Raises:
        ValueError: if the type is unknown, or capacity and reservation do not match.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        instance_type: str,
        az: str,
        num_nodes: int,
        capacity: str,
        capacity_reservation_id: str,
        cluster_name: str = "",
    ) -> None:
        super().__init__(scope, id)
        find(instance_type)
        _validate(capacity, capacity_reservation_id)
        function = self._function()
        self.resource = CustomResource(
            self,
            "Check",
            resource_type="Custom::CapacityGuard",
            service_token=function.function_arn,
            service_timeout=Duration.minutes(3),
            properties={
                "InstanceType": instance_type,
                "AvailabilityZone": az,
                "NumNodes": str(num_nodes),
                "Capacity": capacity,
                "CapacityReservationId": capacity_reservation_id,
                "ClusterName": cluster_name,
            },
        )

    def _function(self) -> lambda_.Function:
        log_group = logs.LogGroup(
            self, "Logs", retention=logs.RetentionDays.ONE_MONTH, removal_policy=RemovalPolicy.DESTROY
        )
        return lambda_.Function(
            self,
            "Function",
            description="Checks offering, quota and reservation before the GPU node group is created",
            runtime=lambda_.Runtime.PYTHON_3_14,
            handler="ray_train_eks.capacity_handler.handler",
            code=_code(),
            role=self._role(log_group),
            log_group=log_group,
            timeout=Duration.seconds(60),
            memory_size=256,
        )

    def _role(self, log_group: logs.LogGroup) -> iam.Role:
        # The policies are inline, so that they exist as soon as the role does.
        statements = [
            iam.PolicyStatement(actions=list(ACTIONS), resources=["*"]),
            iam.PolicyStatement(
                actions=["logs:CreateLogStream", "logs:PutLogEvents"], resources=[log_group.log_group_arn]
            ),
        ]
        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"),
            inline_policies={"Guard": iam.PolicyDocument(statements=statements)},
        )
        reason = (
            "The describe calls of EC2 and the get calls of Service Quotas know no resource-level "
            "permissions (AWS Service Authorization Reference); all of them only read."
        )
        accept(role, {"AwsSolutions-IAM5[Resource::*]": reason})
        return role


def _validate(capacity: str, capacity_reservation_id: str) -> None:
    if capacity not in _CAPACITIES:
        raise ValueError(f"capacity {capacity}: use one of {', '.join(_CAPACITIES)}")
    if (capacity == "on-demand") == bool(capacity_reservation_id):
        raise ValueError(
            f"capacity {capacity} with capacity_reservation_id {capacity_reservation_id or '(empty)'}: "
            "on-demand goes without a reservation, the other two need one"
        )


def _code() -> lambda_.Code:
    """The few modules the Lambda needs, in their package, from wherever this package is installed."""
    package = Path(__file__).parent
    wanted = [f"!{package.name}/{module}.py" for module in _MODULES]
    exclude = ["*", f"!{package.name}", f"{package.name}/*", *wanted]
    return lambda_.Code.from_asset(str(package.parent), exclude=exclude, ignore_mode=IgnoreMode.GIT)
