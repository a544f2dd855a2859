"""Offering, quota, and errors of the API: every finding, from answers that botocore accepts as AWS's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ConnectTimeoutError
from botocore.stub import Stubber
from ray_train_eks.capacity_api import Aws
from ray_train_eks.capacity_guard import ACTIONS

from tests.constructs.stubbed_aws import (
    ACCOUNT,
    ON_DEMAND,
    RESERVED,
    Stubs,
    block,
    instance,
    own,
    reservation,
)


def test_an_offered_type_with_enough_quota_has_no_findings(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", "us-east-2b")
    stubs.runs()
    stubs.has_reservations()
    stubs.allows(96.0)
    assert stubs.check(ON_DEMAND) == []


def test_a_type_not_offered_in_the_az_names_the_azs_that_offer_it(stubs: Stubs) -> None:
    stubs.offers("us-east-2c", "us-east-2b")
    stubs.runs()
    stubs.has_reservations()
    stubs.allows(96.0)
    (finding,) = stubs.check(ON_DEMAND)
    assert finding.subject == "offering"
    assert finding.message == (
        "g6.12xlarge is not offered in us-east-2a: "
        "us-east-2b and us-east-2c offer it, so move the GPU nodes there."
    )


def test_a_type_the_region_lacks_says_so(stubs: Stubs) -> None:
    stubs.offers()
    stubs.runs()
    stubs.has_reservations()
    stubs.allows(96.0)
    (finding,) = stubs.check(ON_DEMAND)
    assert "no Availability Zone of the Region offers it" in finding.message


def test_too_small_a_quota_names_the_code_and_the_number_to_ask_for(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(instance("g6.xlarge"))
    stubs.has_reservations()
    stubs.allows(96.0)
    (finding,) = stubs.check(ON_DEMAND)
    assert finding.subject == "quota"
    assert (
        '"Running On-Demand G and VT instances" (L-DB2E81BA) allows 96 vCPUs in us-east-2' in finding.message
    )
    assert "4 are in use, but 2 x g6.12xlarge need 96 more: ask for 100" in finding.message
    assert "--quota-code L-DB2E81BA --desired-value 100`" in finding.message


@pytest.mark.parametrize(
    "row",
    [
        instance(InstanceLifecycle="spot"),
        instance("p5.48xlarge", InstanceLifecycle="capacity-block"),
        instance(Tenancy="host"),
        instance("m7i.xlarge"),
        instance("p4d.24xlarge"),
    ],
    ids=["spot", "capacity block", "dedicated host", "another quota", "P beside G"],
)
def test_instances_of_other_limits_do_not_count(stubs: Stubs, row: dict[str, Any]) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(row)
    stubs.has_reservations()
    stubs.allows(96.0)
    assert stubs.check(ON_DEMAND) == []


def test_instances_on_every_page_count(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    first = {"Reservations": [{"Instances": [instance("g6.xlarge")]}], "NextToken": "more"}
    stubs.ec2.add_response("describe_instances", first)
    stubs.runs(instance("g6.xlarge"))
    stubs.has_reservations()
    stubs.allows(96.0)
    (finding,) = stubs.check(ON_DEMAND)
    assert "8 are in use" in finding.message


def test_unused_reservations_of_the_account_count_against_the_quota(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs.offers("us-east-2a")
    stubs.runs()
    stubs.has_reservations(
        reservation(InstanceType="g6.xlarge", AvailableInstanceCount=3),
        reservation(OwnerId="999999999999"),  # shared with us: counts for its owner
        reservation(InstanceType="m7i.xlarge"),
        reservation(AvailableInstanceCount=0),
        block(InstanceType="g6.12xlarge"),
    )
    stubs.describes_types("g6.xlarge")
    stubs.allows(96.0)
    _is_account(stubs, monkeypatch, ACCOUNT)
    (finding,) = stubs.check(ON_DEMAND)
    assert "12 are in use" in finding.message


def _is_account(stubs: Stubs, monkeypatch: pytest.MonkeyPatch, account: str) -> None:
    """Lets the session's STS client answer; it is made anew at each call."""
    make_client = stubs.aws._session.client

    def client(service: str, **kwargs: Any) -> Any:
        made = make_client(service, **kwargs)
        stub = Stubber(made)
        stub.add_response("get_caller_identity", {"Account": account})
        stub.activate()
        return made

    monkeypatch.setattr(stubs.aws._session, "client", client)


@pytest.mark.parametrize("running", [2, 3])
def test_an_update_that_adds_no_nodes_passes_whatever_the_quota(stubs: Stubs, running: int) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(*[own()] * running)
    assert stubs.check(ON_DEMAND) == []


def test_a_larger_group_needs_quota_for_the_added_nodes_only(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(own(), own())
    stubs.has_reservations()
    stubs.allows(144.0)
    (finding,) = stubs.check(replace(ON_DEMAND, num_nodes=4))
    assert "96 are in use, but 4 x g6.12xlarge need 96 more: ask for 192" in finding.message


def test_another_type_of_the_same_quota_takes_the_room_of_the_nodes_it_replaces(stubs: Stubs) -> None:
    stubs.offers("us-east-2a", instance_type="g5.12xlarge")
    stubs.runs(own(), own())
    assert stubs.check(replace(ON_DEMAND, instance_type="g5.12xlarge")) == []


@pytest.mark.parametrize(
    "stranger",
    [
        instance(tags={"eks:cluster-name": "other", "eks:nodegroup-name": "gpu"}),
        instance(tags={"eks:cluster-name": "llm"}),
        own(az="us-east-2b"),
        instance(),
    ],
    ids=[
        "another cluster",
        "no node group",
        "another AZ: the group is made anew before the old one goes",
        "no tags",
    ],
)
def test_only_the_cluster_s_own_nodes_in_the_az_make_room(stubs: Stubs, stranger: dict[str, Any]) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(stranger)
    stubs.has_reservations()
    stubs.allows(96.0)
    (finding,) = stubs.check(ON_DEMAND)
    assert "48 are in use, but 2 x g6.12xlarge need 96 more" in finding.message


def test_without_a_cluster_name_no_instance_is_the_group_s_own(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.runs(instance(tags={"eks:cluster-name": "", "eks:nodegroup-name": "gpu"}))
    stubs.has_reservations()
    stubs.allows(96.0)
    assert len(stubs.check(replace(ON_DEMAND, cluster_name=""))) == 1


def test_a_quota_never_changed_is_aws_s_default(stubs: Stubs) -> None:
    stubs.offers("us-east-2a")
    stubs.runs()
    stubs.has_reservations()
    stubs.quotas.add_client_error("get_service_quota", "NoSuchResourceException", "not applied")
    stubs.quotas.add_response("get_aws_default_service_quota", {"Quota": {"Value": 0.0}})
    (finding,) = stubs.check(ON_DEMAND)
    assert "allows 0 vCPUs" in finding.message


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("UnauthorizedOperation", "allow this call"),
        ("AccessDeniedException", "allow this call"),
        ("RequestLimitExceeded", "retry in a few minutes"),
        ("ThrottlingException", "retry in a few minutes"),
        ("InternalError", "retry in a few minutes"),
        ("OptInRequired", "mend what it names"),
    ],
)
def test_an_error_of_the_api_is_reported_as_itself_and_the_other_checks_still_run(
    stubs: Stubs, code: str, remedy: str
) -> None:
    stubs.ec2.add_client_error("describe_instance_type_offerings", code, "said AWS")
    stubs.runs()
    stubs.has_reservations()
    stubs.allows(0)
    api, quota = stubs.check(ON_DEMAND)
    assert (api.subject, quota.subject) == ("api", "quota")
    assert api.message.startswith(
        f"DescribeInstanceTypeOfferings failed with {code} (said AWS), which says nothing"
    )
    assert remedy in api.message


def test_a_network_that_fails_is_no_missing_capacity(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(instance_type: str) -> Sequence[str]:
        raise ConnectTimeoutError(endpoint_url="https://ec2.us-east-2.amazonaws.com")

    monkeypatch.setattr(stubs.aws, "offered_azs", fail)
    stubs.has_reservations(reservation())
    (finding,) = stubs.check(RESERVED)
    assert finding.subject == "api"
    assert "says nothing about capacity" in finding.message


def test_the_guard_s_policy_allows_every_call_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: set[str] = set()

    def note(model: Any, **_: Any) -> None:
        service = model.service_model.service_id.lower().replace(" ", "")
        calls.add(f"{service}:{model.name}")

    session = boto3.session.Session("key", "secret", region_name="us-east-2")
    session.events.register("before-parameter-build", note)
    stubs = Stubs(Aws(session))
    stubs.offers("us-east-2a")
    stubs.runs(instance())
    stubs.has_reservations(reservation())
    stubs.describes_types("g6.12xlarge")
    stubs.quotas.add_client_error("get_service_quota", "NoSuchResourceException", "not applied")
    stubs.quotas.add_response("get_aws_default_service_quota", {"Quota": {"Value": 0.0}})
    _is_account(stubs, monkeypatch, ACCOUNT)
    stubs.check(ON_DEMAND)
    assert calls == {*ACTIONS, "sts:GetCallerIdentity"}
