"""What AWS says about capacity in one Region: every call that `capacity` makes, behind one wall."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

# Instance families, as the letters before the generation, that each On-Demand vCPU quota counts
# (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html#ec2-on-demand-instances-limits).
_QUOTA_FAMILIES = {
    "L-DB2E81BA": {"g", "gr", "vt"},
    "L-417A185B": {"p"},
    "L-1216C47A": {"a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"},
}

_MAX_TYPES_PER_CALL = 100  # of DescribeInstanceTypes

# A call that hangs must not outlast the guard's minute.
_CLIENT_CONFIG = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 3})


@dataclass(frozen=True)
class Instance:
    """A running or pending EC2 instance.

    Attributes:
        instance_type: its type, in our table or not.
        vcpus: of the type; an instance launched with fewer CPU options may count less against a quota.
        az: where it runs.
        on_demand: whether it counts against the On-Demand quotas: neither Spot nor Capacity Block, and not on
            a Dedicated Host.
        cluster_name: EKS cluster of the managed node group it belongs to, or empty.
        capacity_reservation_id: the reservation it runs in, or empty.
    """

    instance_type: str
    vcpus: int
    az: str
    on_demand: bool
    cluster_name: str
    capacity_reservation_id: str


class Aws:
    """Every AWS call of this module, for one Region.

    Args:
        session: credentials and Region.

    Each method raises botocore's ClientError or BotoCoreError as it comes.
    """

    def __init__(self, session: boto3.session.Session) -> None:
        self.region = session.region_name
        self._session = session

    @cached_property
    def _ec2(self) -> Any:
        return self._session.client("ec2", config=_CLIENT_CONFIG)

    @cached_property
    def _quotas(self) -> Any:
        return self._session.client("service-quotas", config=_CLIENT_CONFIG)

    def offered_azs(self, instance_type: str) -> list[str]:
        """The AZs of the Region that offer the type, sorted."""
        pages = self._ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [instance_type]}]
        )
        return sorted(row["Location"] for page in pages for row in page["InstanceTypeOfferings"])

    def quota_vcpus(self, quota_code: str) -> int:
        """The vCPUs an On-Demand quota allows: the account's value, or AWS's default if none was applied."""
        try:
            answer = self._quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota_code)
        except self._quotas.exceptions.NoSuchResourceException:
            answer = self._quotas.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=quota_code)
        return int(answer["Quota"]["Value"])

    def instances(self) -> list[Instance]:
        """What runs or is pending in the Region."""
        pages = self._ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        )
        rows = [row for page in pages for group in page["Reservations"] for row in group["Instances"]]
        vcpus = self._vcpus(row["InstanceType"] for row in rows)
        return [_instance(row, vcpus) for row in rows]

    def unused_reserved_vcpus(self, quota_code: str) -> int:
        """vCPUs of the account's active reservations that no instance uses yet: they count like instances."""
        pages = self._ec2.get_paginator("describe_capacity_reservations").paginate(
            Filters=[{"Name": "state", "Values": ["active"]}]
        )
        unused = [
            row
            for page in pages
            for row in page["CapacityReservations"]
            if row["AvailableInstanceCount"] > 0
            and row.get("ReservationType", "default") == "default"
            and counts_against(row["InstanceType"], quota_code)
        ]
        if not unused:
            return 0
        account = self._session.client("sts", config=_CLIENT_CONFIG).get_caller_identity()["Account"]
        own = [row for row in unused if row["OwnerId"] == account]
        vcpus = self._vcpus(row["InstanceType"] for row in own)
        return sum(row["AvailableInstanceCount"] * vcpus[row["InstanceType"]] for row in own)

    def _vcpus(self, instance_types: Iterable[str]) -> dict[str, int]:
        names = sorted(set(instance_types))
        vcpus = {}
        for start in range(0, len(names), _MAX_TYPES_PER_CALL):
            part = names[start : start + _MAX_TYPES_PER_CALL]
            rows = self._ec2.describe_instance_types(InstanceTypes=part)["InstanceTypes"]
            vcpus |= {row["InstanceType"]: row["VCpuInfo"]["DefaultVCpus"] for row in rows}
        return vcpus

    def reservation(self, reservation_id: str) -> Mapping[str, Any] | None:
        """The reservation as EC2 describes it; None if this account cannot see one of that id."""
        try:
            answer = self._ec2.describe_capacity_reservations(CapacityReservationIds=[reservation_id])
        except ClientError as error:
            if error.response["Error"]["Code"].startswith("InvalidCapacityReservationId"):
                return None
            raise
        return next(iter(answer["CapacityReservations"]), None)


def _instance(row: Mapping[str, Any], vcpus: Mapping[str, int]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in row.get("Tags", [])}
    placement = row["Placement"]
    return Instance(
        instance_type=row["InstanceType"],
        vcpus=vcpus[row["InstanceType"]],
        az=placement["AvailabilityZone"],
        on_demand=not row.get("InstanceLifecycle") and placement.get("Tenancy") != "host",
        # EKS puts both tags on every instance of a managed node group.
        cluster_name=tags.get("eks:cluster-name", "") if "eks:nodegroup-name" in tags else "",
        capacity_reservation_id=row.get("CapacityReservationId", ""),
    )


def counts_against(instance_type: str, quota_code: str) -> bool:
    """Whether On-Demand instances of a type count against a quota of the table of instance types."""
    letters = re.match("[a-z]*", instance_type)[0]  # g6e.12xlarge -> g, gr6.8xlarge -> gr
    return letters in _QUOTA_FAMILIES[quota_code]
