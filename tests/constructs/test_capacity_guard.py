"""The guard as CloudFormation meets it: template, permissions, and the Lambda's answers over real HTTP."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import boto3
import pytest
from aws_cdk.assertions import Template
from moto.core.exceptions import JsonRESTError
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer
from moto.servicequotas.models import ServiceQuotasBackend
from ray_train_eks import capacity_handler
from ray_train_eks.capacity_guard import ACTIONS, CapacityGuard

ON_DEMAND = {
    "instance_type": "g6.12xlarge",
    "az": "us-east-2a",
    "num_nodes": 2,
    "capacity": "on-demand",
    "capacity_reservation_id": "",
}
PROPERTIES = {
    "ServiceToken": "arn:aws:lambda:us-east-2:123456789012:function:guard",
    "InstanceType": "g6.12xlarge",
    "AvailabilityZone": "us-east-2a",
    "NumNodes": "2",
    "Capacity": "on-demand",
    "CapacityReservationId": "",
    "ClusterName": "llm",
}


# --- the construct ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synthesized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Template, Path]:
    """A stack of nothing but the guard, and the cloud assembly."""
    out = tmp_path_factory.mktemp("guard")
    app = cdk.App(outdir=str(out))
    stack = cdk.Stack(app, "Guard")
    CapacityGuard(stack, "Capacity", **ON_DEMAND, cluster_name="llm")
    template = Template.from_stack(stack)
    app.synth()
    return template, out


def test_the_custom_resource_carries_the_nodes_and_a_bound_on_its_time(
    synthesized: tuple[Template, Path],
) -> None:
    expected = {key: value for key, value in PROPERTIES.items() if key != "ServiceToken"}
    template, _ = synthesized
    template.has_resource_properties("Custom::CapacityGuard", expected | {"ServiceTimeout": "180"})


def test_the_lambda_may_only_look(synthesized: tuple[Template, Path]) -> None:
    (role,) = synthesized[0].find_resources("AWS::IAM::Role").values()
    look, log = role["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    assert (look["Action"], look["Resource"]) == (list(ACTIONS), "*")
    assert all(action.split(":")[1].startswith(("Describe", "Get")) for action in look["Action"])
    assert log["Resource"] != "*"
    assert "ManagedPolicyArns" not in role["Properties"]


def test_the_lambda_has_time_to_answer_before_cloudformation_stops_waiting(
    synthesized: tuple[Template, Path],
) -> None:
    synthesized[0].has_resource_properties("AWS::Lambda::Function", {"Timeout": 60, "Runtime": "python3.14"})
    assert capacity_handler._ANSWER_S < 60 < 180


def test_the_asset_holds_the_modules_it_imports_and_runs_without_the_cdk(
    synthesized: tuple[Template, Path],
) -> None:
    (asset,) = synthesized[1].glob("asset.*")
    files = {str(path.relative_to(asset)) for path in asset.rglob("*") if path.is_file()}
    names = ("__init__", "capacity", "capacity_api", "capacity_handler", "instance_types")
    assert files == {f"ray_train_eks/{name}.py" for name in names}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ray_train_eks.capacity_handler as handler;"
        "assert handler.__file__.startswith(sys.argv[1]), handler.__file__;"
        "assert not {'aws_cdk', 'constructs', 'pydantic', 'settings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(asset)], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": "spot"}, "capacity spot: use one of on-demand, reservation, capacity-block"),
        ({"capacity": "reservation"}, r"capacity reservation with capacity_reservation_id \(empty\)"),
        ({"capacity_reservation_id": "cr-0123456789abcdef0"}, "on-demand goes without a reservation"),
        ({"instance_type": "g6.12large"}, "g6.12large is not in the table"),
    ],
)
def test_what_cannot_be_checked_is_refused_at_synthesis(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CapacityGuard(cdk.Stack(), "Capacity", **(ON_DEMAND | changes))


# --- the Lambda, against AWS's interfaces on loopback -----------------------------------------------------


class CloudFormation(http.server.BaseHTTPRequestHandler):
    """The end of ResponseURL: keeps what is PUT there."""

    answers: list[dict[str, Any]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert not self.headers["Content-Type"]  # S3's presigned address would refuse any
        self.answers.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


class Context:
    """The Lambda context, as far as the handler uses it."""

    def __init__(self, remaining_s: float = 60) -> None:
        self._end = time.monotonic() + remaining_s

    def get_remaining_time_in_millis(self) -> int:
        return int((self._end - time.monotonic()) * 1000)


@pytest.fixture(scope="module")
def aws() -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def account(aws: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """An empty account; what its quotas allow can be changed through the dictionary."""
    vcpus = {"L-DB2E81BA": 96.0}
    host, port = aws.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    # What moto lacks: EC2's quotas and capacity reservations.
    monkeypatch.setattr(
        ServiceQuotasBackend,
        "get_service_quota",
        lambda self, service_code, quota_code: {"QuotaCode": quota_code, "Value": vcpus[quota_code]},
    )
    monkeypatch.setattr(EC2Response, "describe_capacity_reservations", _no_reservations, raising=False)
    monkeypatch.setattr(capacity_handler, "_PAUSES_S", ())
    yield vcpus
    ec2 = boto3.client("ec2")
    ids = [
        row["InstanceId"] for group in ec2.describe_instances()["Reservations"] for row in group["Instances"]
    ]
    if ids:
        ec2.terminate_instances(InstanceIds=ids)


def _no_reservations(self: EC2Response) -> str:
    name = "DescribeCapacityReservationsResponse"
    return f'<{name} xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><capacityReservationSet/></{name}>'


@pytest.fixture
def cloudformation() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A ResponseURL and the answers that arrive there."""
    answers: list[dict[str, Any]] = []
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Receiver", (CloudFormation,), {"answers": answers})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/answer", answers
    server.shutdown()
    server.server_close()


class Guard:
    """Sends a request to the handler and returns the one answer CloudFormation got."""

    def __init__(self, url: str, answers: list[dict[str, Any]]) -> None:
        self._url, self._answers = url, answers

    def __call__(
        self, request_type: str, properties: dict[str, str] = PROPERTIES, remaining_s: float = 60, **more: Any
    ) -> dict[str, Any]:
        event = {
            "RequestType": request_type,
            "ResponseURL": self._url,
            "StackId": "arn:aws:cloudformation:us-east-2:123456789012:stack/Nodes/1",
            "RequestId": "request-1",
            "LogicalResourceId": "CapacityCheck",
            "ResourceProperties": properties,
            **more,
        }
        capacity_handler.handler(event, Context(remaining_s))
        (answer,) = self._answers
        assert {key: answer[key] for key in ("StackId", "RequestId", "LogicalResourceId")} == {
            key: event[key] for key in ("StackId", "RequestId", "LogicalResourceId")
        }
        return answer


@pytest.fixture
def guard(cloudformation: tuple[str, list[dict[str, Any]]]) -> Guard:
    return Guard(*cloudformation)


def _run(num: int, instance_type: str = "g6.12xlarge", cluster_name: str = "llm") -> None:
    tags = [
        {"Key": "eks:cluster-name", "Value": cluster_name},
        {"Key": "eks:nodegroup-name", "Value": "gpu"},
    ]
    ec2 = boto3.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    ec2.run_instances(
        ImageId=image,
        MinCount=num,
        MaxCount=num,
        InstanceType=instance_type,
        Placement={"AvailabilityZone": "us-east-2a"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )


def test_nodes_that_fit_succeed_and_the_physical_id_is_stable(
    account: dict[str, float], guard: Guard
) -> None:
    answer = guard("Create")
    assert (answer["Status"], answer["Reason"], answer["PhysicalResourceId"]) == (
        "SUCCESS",
        "",
        "CapacityCheck",
    )


def test_every_reason_reaches_cloudformation(account: dict[str, float], guard: Guard) -> None:
    account["L-DB2E81BA"] = 64.0
    answer = guard("Create", PROPERTIES | {"AvailabilityZone": "us-east-2z"})
    assert answer["Status"] == "FAILED"
    assert (
        "g6.12xlarge is not offered in us-east-2z: us-east-2a, us-east-2b and us-east-2c" in answer["Reason"]
    )
    assert "--quota-code L-DB2E81BA --desired-value 96" in answer["Reason"]


def test_instances_of_others_count_against_the_quota(account: dict[str, float], guard: Guard) -> None:
    _run(1, "g6.xlarge", cluster_name="other")
    answer = guard("Create")
    assert "4 are in use, but 2 x g6.12xlarge need 96 more: ask for 100" in answer["Reason"]


def test_the_guard_can_be_switched_on_beside_running_nodes(account: dict[str, float], guard: Guard) -> None:
    _run(2)
    assert guard("Create")["Status"] == "SUCCESS"


def test_an_update_that_adds_nodes_is_checked_for_the_added_ones(
    account: dict[str, float], guard: Guard
) -> None:
    _run(2)
    answer = guard("Update", PROPERTIES | {"NumNodes": "3"}, OldResourceProperties=PROPERTIES)
    assert "need 48 more: ask for 144" in answer["Reason"]


@pytest.mark.parametrize("num_nodes", ["2", "1"])
def test_an_update_that_adds_no_nodes_passes_without_asking_aws(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, num_nodes: str
) -> None:
    monkeypatch.setattr(capacity_handler, "check", lambda *_: pytest.fail("asked"))
    changed = PROPERTIES | {"NumNodes": num_nodes}
    answer = guard("Update", changed, OldResourceProperties=PROPERTIES, PhysicalResourceId="as-before")
    assert (answer["Status"], answer["PhysicalResourceId"]) == ("SUCCESS", "as-before")


def test_the_rollback_of_a_refused_move_passes_while_the_old_nodes_run(
    account: dict[str, float], guard: Guard
) -> None:
    _run(2)
    moved = PROPERTIES | {"AvailabilityZone": "us-east-2b"}
    assert guard("Update", PROPERTIES, OldResourceProperties=moved)["Status"] == "SUCCESS"


@pytest.mark.parametrize("properties", [PROPERTIES, {}], ids=["as created", "broken"])
def test_delete_always_succeeds_without_asking_aws(
    guard: Guard, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]
) -> None:
    monkeypatch.setattr(capacity_handler, "check", lambda *_: pytest.fail("asked"))
    assert guard("Delete", properties, PhysicalResourceId="CapacityCheck")["Status"] == "SUCCESS"


def test_a_call_that_moto_does_not_answer_is_an_api_error_and_no_missing_capacity(
    account: dict[str, float], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ServiceQuotasBackend, service_code: str, quota_code: str) -> dict[str, Any]:
        raise JsonRESTError(
            "AccessDeniedException", "not authorized to perform servicequotas:GetServiceQuota"
        )

    monkeypatch.setattr(ServiceQuotasBackend, "get_service_quota", refuse)
    answer = guard("Create")
    assert answer["Status"] == "FAILED"
    assert answer["Reason"].startswith("GetServiceQuota failed with AccessDeniedException (not authorized")
    assert "says nothing about capacity: allow this call" in answer["Reason"]


def test_an_unanswered_question_is_asked_again(
    account: dict[str, float], guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that was made seconds ago is not in force everywhere yet."""
    monkeypatch.setattr(capacity_handler, "_PAUSES_S", (0, 0))
    answers = iter([[capacity_handler.Finding("api", "AccessDenied")], []])
    monkeypatch.setattr(capacity_handler, "check", lambda *_: next(answers))
    assert guard("Create")["Status"] == "SUCCESS"


def test_missing_capacity_is_not_asked_for_again(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_handler, "_PAUSES_S", (60, 60))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    monkeypatch.setattr(
        capacity_handler, "check", lambda *_: [capacity_handler.Finding("quota", "too small")]
    )
    assert guard("Create")["Reason"] == "too small"


def test_an_api_that_hangs_is_answered_for_before_the_lambda_s_time_is_up(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(capacity_handler, "check", lambda *_: release.wait(30) and [])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    answer = guard("Create", remaining_s=capacity_handler._ANSWER_S + 1)
    release.set()
    assert answer["Status"] == "FAILED"
    assert "AWS did not answer the questions about capacity within 1 s" in answer["Reason"]


def test_a_bug_is_answered_for_and_named(guard: Guard) -> None:
    answer = guard("Create", {"InstanceType": "g6.12xlarge"})
    assert answer["Status"] == "FAILED"
    assert "the capacity guard itself failed (KeyError: 'AvailabilityZone')" in answer["Reason"]
