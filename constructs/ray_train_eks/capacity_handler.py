"""The capacity guard's Lambda: CloudFormation asks, `capacity.check` judges, and an answer always goes back.

A custom resource that never answers holds a stack for an hour, so whatever happens - a bug, a hanging API -
the handler reports it as the reason of a failure before its own time is up.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import boto3

from ray_train_eks.capacity import Finding, Wanted, check
from ray_train_eks.capacity_api import Aws

# Kept back from the Lambda's time for sending the answer.
_ANSWER_S = 10
# Before the second and third look when AWS did not answer a question: a policy made seconds ago may not be in
# force everywhere yet, and throttling passes.
_PAUSES_S = (5, 10)
# CloudFormation cuts the whole answer at 4096 bytes.
_MAX_REASON = 2000


def handler(event: Mapping[str, Any], context: Any) -> None:
    """Entry point of the Lambda.

    Args:
        event: a CloudFormation custom resource request; its ResourceProperties are those of CapacityGuard.
        context: the Lambda context; only its remaining time is used.
    """
    deadline_s = context.get_remaining_time_in_millis() / 1000 - _ANSWER_S
    _answer(event, _reason_within(event, max(deadline_s, 1)))


def _reason_within(event: Mapping[str, Any], deadline_s: float) -> str:
    """Why the request fails, empty if it does not; after `deadline_s` seconds the wait is the reason."""
    if event["RequestType"] == "Delete":
        return ""
    answers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: answers.put(_reason(event)), daemon=True).start()
    try:
        return answers.get(timeout=deadline_s)
    except queue.Empty:
        return (
            f"AWS did not answer the questions about capacity within {deadline_s:.0f} s, which says nothing "
            "about capacity: retry, or switch the capacity guard off."
        )


def _reason(event: Mapping[str, Any]) -> str:
    try:
        wanted = _wanted(event["ResourceProperties"])
        if event["RequestType"] == "Update" and _adds_nothing(
            _wanted(event["OldResourceProperties"]), wanted
        ):
            return ""
        return " ".join(finding.message for finding in _look(Aws(boto3.session.Session()), wanted))
    except Exception as error:  # an exception that escapes would leave CloudFormation without an answer
        return (
            f"the capacity guard itself failed ({type(error).__name__}: {error}), which says nothing about "
            "capacity: report it, and switch the capacity guard off."
        )


def _look(aws: Aws, wanted: Wanted) -> list[Finding]:
    """The findings, after a second and a third look while AWS leaves questions unanswered."""
    findings = check(aws, wanted)
    for pause_s in _PAUSES_S:
        if not any(finding.subject == "api" for finding in findings):
            break
        time.sleep(pause_s)
        findings = check(aws, wanted)
    return findings


def _wanted(properties: Mapping[str, str]) -> Wanted:
    return Wanted(
        instance_type=properties["InstanceType"],
        az=properties["AvailabilityZone"],
        num_nodes=int(properties["NumNodes"]),
        capacity=properties["Capacity"],
        capacity_reservation_id=properties.get("CapacityReservationId", ""),
        cluster_name=properties.get("ClusterName", ""),
    )


def _adds_nothing(old: Wanted, new: Wanted) -> bool:
    """Whether the nodes of the new request are among those of the old one."""
    return new.num_nodes <= old.num_nodes and replace(old, num_nodes=new.num_nodes) == new


def _answer(event: Mapping[str, Any], reason: str) -> None:
    """Sends CloudFormation the outcome.

    Raises:
        OSError: if the address cannot be reached; Lambda then runs the whole request again.
    """
    body = {
        "Status": "FAILED" if reason else "SUCCESS",
        "Reason": reason[:_MAX_REASON],
        # Never changes, so that an update never makes CloudFormation delete "the old one".
        "PhysicalResourceId": event.get("PhysicalResourceId") or event["LogicalResourceId"],
        "StackId": event["StackId"],
        "RequestId": event["RequestId"],
        "LogicalResourceId": event["LogicalResourceId"],
    }
    print(json.dumps({"request": event["RequestType"], "status": body["Status"], "reason": reason}))
    request = urllib.request.Request(
        event["ResponseURL"], json.dumps(body).encode(), {"Content-Type": ""}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S / 2):
        pass
