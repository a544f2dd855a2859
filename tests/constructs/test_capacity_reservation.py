"""Capacity reservations and Capacity Blocks: every finding, from answers that botocore accepts as AWS's."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest

from tests.constructs.stubbed_aws import BLOCK, NOW, RESERVED, Stubs, block, instance, own, reservation


def test_a_reservation_needs_no_quota(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.has_reservations(reservation())
    assert stubs.check(RESERVED) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"State": "expired"}, "is expired, not active"),
        ({"State": "pending"}, "is pending, not active"),
        ({"InstanceType": "g6.24xlarge"}, "reserves g6.24xlarge, not g6.12xlarge"),
        (
            {"AvailabilityZone": "us-east-2b"},
            "lies in us-east-2b, not in us-east-2a: move the GPU nodes there",
        ),
        ({"InstancePlatform": "Windows"}, "is for Windows, but the nodes run Linux/UNIX"),
        ({"Tenancy": "dedicated"}, "is of dedicated tenancy"),
        ({"ReservationType": "capacity-block"}, "is a Capacity Block: set capacity to capacity-block"),
    ],
)
def test_an_unfit_reservation_says_what_is_wrong(stubs: Stubs, changes: dict[str, Any], message: str) -> None:
    stubs.offers("us-east-2a")
    stubs.has_reservations(reservation(**changes))
    (finding,) = stubs.check(RESERVED)
    assert finding.subject == "reservation"
    assert finding.message.startswith(f"{RESERVED.capacity_reservation_id} {message}")


def test_too_small_a_reservation_says_by_how_much_to_enlarge_it(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.has_reservations(reservation(AvailableInstanceCount=0))
    stubs.runs(instance(CapacityReservationId=RESERVED.capacity_reservation_id))
    (finding,) = stubs.check(RESERVED)
    assert "has 0 of its 2 instances free, but 2 more are needed: enlarge it by 2" in finding.message


def test_the_group_s_own_nodes_inside_the_reservation_need_no_more_of_it(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.has_reservations(reservation(AvailableInstanceCount=0))
    inside = own(CapacityReservationId=RESERVED.capacity_reservation_id)
    stubs.runs(inside, inside)
    assert stubs.check(RESERVED) == []


def test_a_missing_reservation_is_named(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.ec2.add_client_error(
        "describe_capacity_reservations", "InvalidCapacityReservationId.NotFound", "no"
    )
    (finding,) = stubs.check(RESERVED)
    assert finding.message.startswith("cr-0123456789abcdef0 does not exist in us-east-2")


def test_all_problems_of_a_reservation_and_the_offering_come_at_once(stubs: Stubs) -> None:
    stubs.offers("us-east-2c")
    stubs.has_reservations(
        reservation(InstanceType="g5.12xlarge", AvailabilityZone="us-east-2c", State="cancelled")
    )
    assert [finding.subject for finding in stubs.check(RESERVED)] == ["offering"] + ["reservation"] * 3


def test_a_running_capacity_block_is_fine(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", instance_type="p5.48xlarge")
    stubs.has_reservations(block())
    assert stubs.check(BLOCK) == []


def test_a_block_that_has_not_started_takes_no_nodes_yet(stubs: Stubs) -> None:
    scheduled = block(State="scheduled", StartDate=NOW + dt.timedelta(hours=3), AvailableInstanceCount=0)
    stubs.offers("us-east-2a", instance_type="p5.48xlarge")
    stubs.has_reservations(scheduled)
    (finding,) = stubs.check(BLOCK)
    assert "starts only at 2026-07-01 15:00 UTC: deploy with no nodes until then" in finding.message


def test_a_group_without_nodes_may_wait_for_its_block(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", instance_type="p5.48xlarge")
    stubs.has_reservations(block(State="scheduled", AvailableInstanceCount=0))
    assert stubs.check(replace(BLOCK, num_nodes=0)) == []


def test_a_block_about_to_end_is_refused(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", instance_type="p5.48xlarge")
    stubs.has_reservations(block(EndDate=NOW + dt.timedelta(minutes=59)))
    (finding,) = stubs.check(BLOCK)
    assert "ends at 2026-07-01 12:59 UTC" in finding.message


def test_an_odcr_is_no_capacity_block(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", instance_type="p5.48xlarge")
    stubs.has_reservations(reservation(InstanceType="p5.48xlarge"))
    (finding,) = stubs.check(BLOCK)
    assert "is an On-Demand Capacity Reservation, not a Capacity Block" in finding.message
