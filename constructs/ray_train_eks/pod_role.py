"""An IAM role that pods get through EKS Pod Identity."""

from __future__ import annotations

from aws_cdk import aws_iam as iam

from constructs import Construct


class PodRole(iam.Role):
    """Role without permissions, assumable by the Pod Identity agent only."""

    def __init__(self, scope: Construct, id: str) -> None:
        super().__init__(scope, id, assumed_by=iam.SessionTagsPrincipal(_pod_identity()))


def _pod_identity() -> iam.ServicePrincipal:
    return iam.ServicePrincipal("pods.eks.amazonaws.com")
