"""A copy of a public ECR image in the account's own registry."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy, Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam

from constructs import Construct

_UPSTREAM = "public.ecr.aws"
_PREFIX_SUFFIX = "-cache"
_MAX_PREFIX_LENGTH = 30  # of ecrRepositoryPrefix, ECR API reference


class ImageCache(Construct):
    """ECR pull-through cache: the first node pulls through NAT, the others from S3 inside the Region.

    The repository is made here rather than by ECR at the first pull: then nodes need no permission to create
    one, and destroying the stack leaves no 20 GB behind.

    Attributes:
        image: the image's name in the account's registry, with the tag or digest it was given.
    """

    def __init__(self, scope: Construct, id: str, *, image: str, prefix: str) -> None:
        """Creates rule and repository.

        Args:
            image: a name in public.ecr.aws with tag or digest.
            prefix: first part of the repository's name; must be free in account and Region.

        Raises:
            ValueError: the image is not in public.ecr.aws.
        """
        super().__init__(scope, id)
        registry, _, path = image.partition("/")
        if registry != _UPSTREAM or not path:
            raise ValueError(f"image {image}: only images of {_UPSTREAM} can be cached")
        name = path.partition("@")[0].partition(":")[0]
        prefix = _repository_prefix(prefix)
        rule = ecr.CfnPullThroughCacheRule(
            self, "Rule", ecr_repository_prefix=prefix, upstream_registry_url=_UPSTREAM
        )
        self._repository = ecr.Repository(
            self,
            "Repository",
            repository_name=f"{prefix}/{name}",
            image_scan_on_push=True,
            empty_on_delete=True,
            removal_policy=RemovalPolicy.DESTROY,
            # A moving tag leaves its old image behind, untagged.
            lifecycle_rules=[
                ecr.LifecycleRule(tag_status=ecr.TagStatus.UNTAGGED, max_image_age=Duration.days(30))
            ],
        )
        self._repository.node.add_dependency(rule)
        stack = Stack.of(self)
        registry = f"{stack.account}.dkr.ecr.{stack.region}.{stack.url_suffix}"
        self.image = f"{registry}/{prefix}/{path}"

    def grant_pull(self, grantee: iam.IGrantable) -> None:
        """Lets nodes have ECR fetch what is not in the cache yet."""
        self._repository.grant(grantee, "ecr:BatchImportUpstreamImage")


def _repository_prefix(prefix: str) -> str:
    """A prefix that ECR takes: lower case, single hyphens, at most 30 characters."""
    words = "-".join(word for word in prefix.lower().split("-") if word)
    return words[: _MAX_PREFIX_LENGTH - len(_PREFIX_SUFFIX)].rstrip("-") + _PREFIX_SUFFIX
