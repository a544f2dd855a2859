"""Settings that the stacks could not build anything sensible from."""

import json
from pathlib import Path

import pytest

import settings

CONTEXT = json.loads((Path(__file__).parents[2] / "cdk.json").read_text())["context"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"capacity": "capacity-block", "capacity_reservation_id": "cr-0123456789abcdef0"},
            "capacity = capacity-block: EC2 offers Capacity Blocks for P types only, not for g6.12xlarge",
        ),
        ({"azs": "us-east-2a,us-east-2a,us-east-2b"}, "azs = us-east-2a,us-east-2a,us-east-2b: names a zone"),
        ({"kuberay_operator_version": "1.x"}, "kuberay_operator_version = 1.x: use one exact version"),
        ({"num_nat_gateways": 4}, "num_nat_gateways = 4: more than azs, of which there are 3"),
        (
            {"image_pull_through_cache": True, "image": "registry.example.com/ray:v1.0.0"},
            "image_pull_through_cache = True: only images of public.ecr.aws can be cached",
        ),
    ],
)
def test_what_no_stack_can_be_built_from_is_refused_with_the_remedy(overrides, expected):
    with pytest.raises(settings.SettingsError) as caught:
        settings.load(CONTEXT | overrides)
    assert [problem for problem in caught.value.problems if problem.startswith(expected)]


def test_a_cluster_that_nobody_can_use_is_pointed_out():
    assert "no role can use kubectl" in "".join(settings.warnings(settings.load(CONTEXT)))
    admin = {"admin_role_arns": "arn:aws:iam::123456789012:role/Admin"}
    assert "no role can use kubectl" not in "".join(settings.warnings(settings.load(CONTEXT | admin)))
