"""Will the GPU nodes launch? Plain boto3, no CDK: the guard's Lambda and an operator's command share it.

`check` asks AWS whether an instance type is offered in an Availability Zone, whether the On-Demand quota
leaves room, and whether a reservation can take the nodes. It cannot see free physical capacity: no API of AWS
shows it, so "no findings" means "nothing known stands in the way", not "the nodes will launch".
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import BotoCoreError, ClientError

from ray_train_eks.capacity_api import Aws, Instance, counts_against
from ray_train_eks.instance_types import InstanceType, find

Subject = Literal["offering", "quota", "reservation", "api"]

# EC2 begins to terminate the instances of a Capacity Block 30 minutes before its end
# (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html); nodes need time for work.
_MIN_BLOCK_LEFT = dt.timedelta(minutes=60)


@dataclass(frozen=True)
class Wanted:
    """The nodes somebody is about to launch.

    Attributes:
        instance_type: a name in the table of instance types.
        az: Availability Zone of all nodes.
        num_nodes: how many nodes the group shall have, those it already has included.
        capacity: "on-demand", "reservation" (On-Demand Capacity Reservation) or "capacity-block".
        capacity_reservation_id: of the latter two.
        cluster_name: EKS cluster whose running instances in that AZ are the group's own, so that they do not
            count twice; empty if there are none.
    """

    instance_type: str
    az: str
    num_nodes: int
    capacity: str = "on-demand"
    capacity_reservation_id: str = ""
    cluster_name: str = ""

    @property
    def instance(self) -> InstanceType:
        return find(self.instance_type)


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way, with its remedy, in one sentence.

    Attributes:
        subject: what it is about; "api" means that AWS did not answer the question, which says nothing about
            capacity.
        message: the sentence.
    """

    subject: Subject
    message: str


def check(aws: Aws, wanted: Wanted, now: dt.datetime | None = None) -> list[Finding]:
    """Everything that stands in the way of launching the nodes; empty if nothing does.

    Args:
        aws: the account and Region.
        wanted: the nodes.
        now: the time to judge a Capacity Block by; the present if None.
    """
    now = now or dt.datetime.now(dt.UTC)
    findings: list[Finding] = []
    for one in _CHECKS[wanted.capacity]:
        try:
            findings += one(aws, wanted, now)
        except (ClientError, BotoCoreError) as error:
            findings.append(Finding("api", _api_message(error)))
    return findings


def _check_offering(aws: Aws, wanted: Wanted, now: dt.datetime) -> list[Finding]:
    azs = aws.offered_azs(wanted.instance_type)
    if wanted.az in azs:
        return []
    if not azs:
        remedy = "no Availability Zone of the Region offers it, so choose another type or Region"
    else:
        verb = "offers" if len(azs) == 1 else "offer"
        *others, last = azs
        named = f"{', '.join(others)} and {last}" if others else last
        remedy = f"{named} {verb} it, so move the GPU nodes there"
    return [Finding("offering", f"{wanted.instance_type} is not offered in {wanted.az}: {remedy}.")]


def _check_quota(aws: Aws, wanted: Wanted, now: dt.datetime) -> list[Finding]:
    instance = wanted.instance
    code = instance.quota_code
    counted = [row for row in aws.instances() if row.on_demand and counts_against(row.instance_type, code)]
    # MINIMAL, the node group's update strategy, ends an old node before it starts a new one: what the group
    # runs is room for what it will run, also when the type changes.
    needed = wanted.num_nodes * instance.vcpus - sum(row.vcpus for row in counted if _is_own(row, wanted))
    if needed <= 0:
        return []
    in_use = sum(row.vcpus for row in counted) + aws.unused_reserved_vcpus(code)
    allowed = aws.quota_vcpus(code)
    if in_use + needed <= allowed:
        return []
    enough = in_use + needed
    message = (
        f'The quota "{instance.quota_name}" ({code}) allows {allowed} vCPUs in {aws.region} and {in_use} are '
        f"in use, but {wanted.num_nodes} x {wanted.instance_type} need {needed} more: ask for {enough} with "
        f"`aws service-quotas request-service-quota-increase --region {aws.region} --service-code ec2 "
        f"--quota-code {code} --desired-value {enough}`, or use fewer nodes or another Region."
    )
    return [Finding("quota", message)]


def _check_reservation(aws: Aws, wanted: Wanted, now: dt.datetime) -> list[Finding]:
    name = wanted.capacity_reservation_id
    row = aws.reservation(name)
    if row is None:
        message = f"{name} does not exist in {aws.region} for this account: check the id, or have it shared."
        return [Finding("reservation", message)]
    problems = [*_wrong_kind(row, wanted), *_wrong_place(row, wanted)]
    problems += _wrong_time(row, wanted, now) or _too_small(aws, row, wanted)
    return [Finding("reservation", f"{name} {problem}.") for problem in problems]


def _wrong_kind(row: Mapping[str, Any], wanted: Wanted) -> list[str]:
    is_block = row.get("ReservationType", "default") == "capacity-block"
    if is_block and wanted.capacity != "capacity-block":
        return ["is a Capacity Block: set capacity to capacity-block"]
    if not is_block and wanted.capacity == "capacity-block":
        return ["is an On-Demand Capacity Reservation, not a Capacity Block: set capacity to reservation"]
    return []


def _wrong_place(row: Mapping[str, Any], wanted: Wanted) -> list[str]:
    found = []
    if (has := row["InstanceType"]) != wanted.instance_type:
        found.append(f"reserves {has}, not {wanted.instance_type}: use that type, or another reservation")
    if (has := row["AvailabilityZone"]) != wanted.az:
        found.append(f"lies in {has}, not in {wanted.az}: move the GPU nodes there, or use another one")
    if (has := row.get("InstancePlatform", "Linux/UNIX")) != "Linux/UNIX":
        found.append(f"is for {has}, but the nodes run Linux/UNIX: use another reservation")
    if (has := row.get("Tenancy", "default")) != "default":
        found.append(f"is of {has} tenancy, but the nodes are of default tenancy: use another reservation")
    return found


def _wrong_time(row: Mapping[str, Any], wanted: Wanted, now: dt.datetime) -> list[str]:
    state, start, end = row["State"], row.get("StartDate"), row.get("EndDate")
    if wanted.capacity == "capacity-block" and state == "scheduled" and start:
        if not wanted.num_nodes:
            return []  # the group waits for the block with no nodes
        return [f"starts only at {start:%Y-%m-%d %H:%M} UTC: deploy with no nodes until then"]
    if state != "active":
        return [f"is {state}, not active: wait until it is, or use another reservation"]
    if wanted.capacity == "capacity-block" and end and end - now < _MIN_BLOCK_LEFT:
        when = f"{end:%Y-%m-%d %H:%M} UTC"
        return [f"ends at {when} and EC2 takes its instances 30 minutes earlier: extend it, or use another"]
    return []


def _too_small(aws: Aws, row: Mapping[str, Any], wanted: Wanted) -> list[str]:
    free, total = row["AvailableInstanceCount"], row["TotalInstanceCount"]
    if wanted.num_nodes <= free:
        return []
    inside = [it for it in aws.instances() if it.capacity_reservation_id == row["CapacityReservationId"]]
    needed = wanted.num_nodes - sum(_is_own(instance, wanted) for instance in inside)
    if needed <= free:
        return []
    return [
        f"has {free} of its {total} instances free, but {needed} more are needed: enlarge it by "
        f"{needed - free}, stop what uses it, or use fewer nodes"
    ]


_API_REMEDIES = {
    "Throttl|LimitExceeded|Unavailable|Internal": "retry in a few minutes",
    "AccessDenied|Unauthorized": "allow this call, then retry",
    "": "mend what it names, then retry",
}


def _api_message(error: ClientError | BotoCoreError) -> str:
    """What went wrong, as AWS or the network said it; never a statement about capacity."""
    if not isinstance(error, ClientError):
        return f"AWS could not be asked ({error}), which says nothing about capacity: retry."
    code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
    remedy = next(remedy for pattern, remedy in _API_REMEDIES.items() if re.search(pattern, code))
    return f"{error.operation_name} failed with {code} ({text}), which says nothing about capacity: {remedy}."


def _is_own(instance: Instance, wanted: Wanted) -> bool:
    """Whether a node group of the wanted cluster runs it in the wanted AZ."""
    is_ours = wanted.cluster_name != "" and instance.cluster_name == wanted.cluster_name
    return is_ours and instance.az == wanted.az


_Check = Callable[[Aws, Wanted, dt.datetime], list[Finding]]

# Launching into a reservation uses no quota: an On-Demand Capacity Reservation counts against it from the
# moment it is made, used or not, and a Capacity Block does not count at all
# (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservation-limits.html).
_CHECKS: dict[str, tuple[_Check, ...]] = {
    "on-demand": (_check_offering, _check_quota),
    "reservation": (_check_offering, _check_reservation),
    "capacity-block": (_check_offering, _check_reservation),
}
