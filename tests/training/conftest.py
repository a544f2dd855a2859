"""What several tests of the training module use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.training.job import OWN_DATA


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 prefix of an endpoint that the environment names, as on a cluster with a private endpoint."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-2",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    where = {"LocationConstraint": "us-east-2"}
    bucket = f"results-{uuid.uuid4().hex}"  # all servers of one process share their buckets
    boto3.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
    yield f"s3://{bucket}/runs"
    server.stop()


@pytest.fixture
def own_data(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    return {"PYTHONPATH": str(tmp_path)}
