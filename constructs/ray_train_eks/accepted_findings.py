"""Findings of cdk-nag (AwsSolutions) and of CDK's own validation that we accept, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import Acknowledgment, Stack, Validations

from constructs import Construct, IConstruct


def accept(construct: IConstruct, findings: Mapping[str, str]) -> None:
    """Accepts findings on a construct and everything below it.

    Args:
        construct: what the findings are about.
        findings: id of the finding -> why it is right as it is.
    """
    acknowledgments = [Acknowledgment(id=id, reason=reason) for id, reason in findings.items()]
    Validations.of(construct).acknowledge(*acknowledgments)


def managed_policy(name: str) -> str:
    """Id of the finding "uses an AWS managed policy"."""
    return f"AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/{name}]"


def wildcard(resource: Construct, suffix: str) -> str:
    """Id of the finding "wildcard in a policy" for everything below a resource's ARN.

    Args:
        resource: an L1 resource, such as the default child of a bucket.
        suffix: what follows the ARN, such as "/runs/*".
    """
    return f"AwsSolutions-IAM5[Resource::<{Stack.of(resource).get_logical_id(resource)}.Arn>{suffix}]"
