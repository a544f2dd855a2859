"""Fixtures of the capacity tests."""

from __future__ import annotations

import boto3
import pytest
from ray_train_eks.capacity_api import Aws

from tests.constructs.stubbed_aws import Stubs


@pytest.fixture(scope="session")
def stubbed() -> Aws:
    """One for all tests: making EC2's client takes longer than any of them."""
    return Aws(boto3.session.Session("key", "secret", region_name="us-east-2"))


@pytest.fixture
def stubs(stubbed: Aws) -> Stubs:
    """Nothing lined up yet."""
    return Stubs(stubbed)
