"""An IAM role that pods get through EKS Pod Identity."""

from __future__ import annotations

from aws_cdk import Stack
from aws_cdk import aws_iam as iam

from constructs import Construct


class PodRole(iam.Role):
    """Role without permissions, assumable by the Pod Identity agent only."""

    def __init__(self, scope: Construct, id: str) -> None:
        super().__init__(scope, id, assumed_by=iam.SessionTagsPrincipal(_pod_identity()))

    def grant_read_object(self, url: str) -> None:
        """Lets pods read one S3 object of this or another bucket, and nothing beside it.

        Args:
            url: `s3://bucket/key`. A bucket of another account has to allow the role as well, and one that is
                encrypted with a KMS key of its own needs that key's permission.
        """
        resource = Stack.of(self).format_arn(
            service="s3", region="", account="", resource=url.removeprefix("s3://")
        )
        self.add_to_policy(iam.PolicyStatement(actions=["s3:GetObject"], resources=[resource]))


def _pod_identity() -> iam.ServicePrincipal:
    return iam.ServicePrincipal("pods.eks.amazonaws.com")
