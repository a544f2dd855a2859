"""The bucket that runs write to: step records, summaries, checkpoints."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3

from constructs import Construct
from ray_train_eks.accepted_findings import accept, wildcard

RUNS_PREFIX = "runs"
CHECKPOINTS_PREFIX = "checkpoints"
_ABANDONED_UPLOAD_DAYS = 7
_OBJECT_ACTIONS = [
    "s3:GetObject",
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
]


class ResultsBucket(s3.Bucket):
    """Encrypted, TLS only, closed to the public; old checkpoints expire, results stay."""

    def __init__(self, scope: Construct, id: str, *, checkpoint_days: int, keep: bool) -> None:
        """Creates the bucket.

        Args:
            checkpoint_days: age at which objects under `checkpoints/` are deleted.
            keep: whether the bucket and its contents survive the stack.
        """
        super().__init__(
            scope,
            id,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            removal_policy=RemovalPolicy.RETAIN if keep else RemovalPolicy.DESTROY,
            auto_delete_objects=not keep,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="expire-checkpoints",
                    prefix=f"{CHECKPOINTS_PREFIX}/",
                    expiration=Duration.days(checkpoint_days),
                ),
                s3.LifecycleRule(
                    id="drop-abandoned-uploads",
                    abort_incomplete_multipart_upload_after=Duration.days(_ABANDONED_UPLOAD_DAYS),
                ),
            ],
        )
        reason = "Only the job's role has access; CloudTrail data events can record it."
        accept(self, {"AwsSolutions-S1": reason})

    @property
    def storage_path(self) -> str:
        """Where runs write, as an s3:// address."""
        return f"s3://{self.bucket_name}/{RUNS_PREFIX}"

    def grant_runs(self, role: iam.Role) -> None:
        """What a training job needs: the objects under its prefixes, and to list the bucket.

        Listing is not narrowed to the prefixes: pyarrow, which Ray Train stores through, asks first whether
        the bucket exists (HeadBucket), a call that carries no prefix to compare.
        """
        below = [f"{prefix}/*" for prefix in (RUNS_PREFIX, CHECKPOINTS_PREFIX)]
        objects = [self.arn_for_objects(pattern) for pattern in below]
        role.add_to_policy(iam.PolicyStatement(actions=["s3:ListBucket"], resources=[self.bucket_arn]))
        role.add_to_policy(iam.PolicyStatement(actions=_OBJECT_ACTIONS, resources=objects))
        reason = "The names of a run's files are not known beforehand; the prefix is the job's own."
        accept(role, {wildcard(self.node.default_child, f"/{pattern}"): reason for pattern in below})
