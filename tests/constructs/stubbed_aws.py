"""AWS's answers about capacity: an `Aws` whose clients are botocore stubs, and rows to answer with."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from botocore.stub import Stubber
from ray_train_eks.capacity import Finding, Wanted, check
from ray_train_eks.capacity_api import Aws
from ray_train_eks.instance_types import INSTANCE_TYPES

ACCOUNT = "123456789012"
NOW = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
ON_DEMAND = Wanted("g6.12xlarge", "us-east-2a", 2, cluster_name="llm")
RESERVED = replace(ON_DEMAND, capacity="reservation", capacity_reservation_id="cr-0123456789abcdef0")
BLOCK = replace(RESERVED, instance_type="p5.48xlarge", capacity="capacity-block")


class Stubs:
    """An `Aws` whose clients answer what a test lined up, in order, and refuse any other call."""

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        self.ec2 = Stubber(self.aws._ec2)
        self.quotas = Stubber(self.aws._quotas)

    def offers(self, *azs: str, instance_type: str = "g6.12xlarge") -> None:
        rows = [{"InstanceType": instance_type, "Location": az} for az in azs]
        self.ec2.add_response("describe_instance_type_offerings", {"InstanceTypeOfferings": rows})

    def runs(self, *instances: dict[str, Any]) -> None:
        self.ec2.add_response("describe_instances", {"Reservations": [{"Instances": list(instances)}]})
        if instances:
            self.describes_types(*(row["InstanceType"] for row in instances))

    def describes_types(self, *names: str) -> None:
        vcpus = {name: row.vcpus for name, row in INSTANCE_TYPES.items()} | {"g6.xlarge": 4}
        rows = [
            {"InstanceType": name, "VCpuInfo": {"DefaultVCpus": vcpus[name]}} for name in sorted(set(names))
        ]
        self.ec2.add_response("describe_instance_types", {"InstanceTypes": rows})

    def has_reservations(self, *rows: dict[str, Any]) -> None:
        self.ec2.add_response("describe_capacity_reservations", {"CapacityReservations": list(rows)})

    def allows(self, vcpus: float) -> None:
        self.quotas.add_response("get_service_quota", {"Quota": {"Value": vcpus}})

    @contextmanager
    def active(self) -> Iterator[Aws]:
        with self.ec2, self.quotas:
            yield self.aws
            self.ec2.assert_no_pending_responses()
            self.quotas.assert_no_pending_responses()

    def check(self, wanted: Wanted) -> list[Finding]:
        with self.active() as aws:
            return check(aws, wanted, NOW)


def instance(
    instance_type: str = "g6.12xlarge",
    az: str = "us-east-2a",
    tags: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    pairs = [{"Key": key, "Value": value} for key, value in (tags or {}).items()]
    placement = {"AvailabilityZone": az, "Tenancy": more.pop("Tenancy", "default")}
    return {"InstanceType": instance_type, "Placement": placement, "Tags": pairs, **more}


def own(instance_type: str = "g6.12xlarge", az: str = "us-east-2a", **more: Any) -> dict[str, Any]:
    return instance(instance_type, az, {"eks:cluster-name": "llm", "eks:nodegroup-name": "gpu"}, **more)


def reservation(**changes: Any) -> dict[str, Any]:
    row = {
        "CapacityReservationId": RESERVED.capacity_reservation_id,
        "OwnerId": ACCOUNT,
        "InstanceType": "g6.12xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": "us-east-2a",
        "Tenancy": "default",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        "State": "active",
        "StartDate": NOW - dt.timedelta(days=1),
        "ReservationType": "default",
    }
    return row | changes


def block(**changes: Any) -> dict[str, Any]:
    defaults = {
        "ReservationType": "capacity-block",
        "InstanceType": "p5.48xlarge",
        "EndDate": NOW + dt.timedelta(days=1),
    }
    return reservation(**(defaults | changes))
