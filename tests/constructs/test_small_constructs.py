"""Constructs that refuse what would fail later, or differently tomorrow."""

import aws_cdk as cdk
import pytest
from ray_train_eks.image_cache import ImageCache
from ray_train_eks.pinned_chart import Chart

IMAGE = "public.ecr.aws/deep-learning-containers/ray"


@pytest.mark.parametrize("version", ["1.2.3", "v0.5.32", "1.7.0-rc.0", "1.2.3+build.5"])
def test_an_exact_chart_version_is_taken(version):
    assert Chart("name", "https://example.com", version, "default").version == version


@pytest.mark.parametrize("version", ["", "1", "1.2", "^1.2.3", ">=1.2.3", "1.x", "latest", "1.2.3 || 2.0.0"])
def test_a_range_of_chart_versions_is_refused(version):
    with pytest.raises(ValueError, match="name one exact version such as"):
        Chart("name", "https://example.com", version, "default")


@pytest.mark.parametrize("reference", [":train-v1.1", f"@sha256:{'0' * 64}"])
def test_a_cached_image_keeps_its_tag_or_digest(reference):
    stack = cdk.Stack(cdk.App(), "Stack", env=cdk.Environment(account="123456789012", region="us-east-2"))
    cache = ImageCache(stack, "Cache", image=IMAGE + reference, prefix="Ray-Train")
    image = stack.resolve(cache.image)["Fn::Join"][1]
    assert image[0] == "123456789012.dkr.ecr.us-east-2."
    assert image[-1] == f"/ray-train-cache/deep-learning-containers/ray{reference}"


@pytest.mark.parametrize(
    ("prefix", "taken"),
    [("A", "a-cache"), ("My--Team", "my-team-cache"), ("a" * 23 + "-bcdefgh", "a" * 23 + "-cache")],
)
def test_any_prefix_becomes_one_that_ecr_takes(prefix, taken):
    stack = cdk.Stack(cdk.App(), "Stack")
    ImageCache(stack, "Cache", image=f"{IMAGE}:v1", prefix=prefix)
    template = cdk.assertions.Template.from_stack(stack)
    template.has_resource_properties("AWS::ECR::PullThroughCacheRule", {"EcrRepositoryPrefix": taken})


def test_an_image_of_another_registry_is_refused():
    stack = cdk.Stack(cdk.App(), "Stack")
    with pytest.raises(ValueError, match=r"only images of public\.ecr\.aws can be cached"):
        ImageCache(stack, "Cache", image="docker.io/library/python:3.13", prefix="p")
