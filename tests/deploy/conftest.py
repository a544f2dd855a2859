"""The real CDK CLI, a copy of the app it may change, and a stand-in for AWS on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import boto3
import pytest

from tests.deploy.stages import NODES, Stage, buckets, stage

ROOT = Path(__file__).parents[2]
Client: TypeAlias = Callable[[str], Any]  # service -> boto3 client
REGION = "us-east-2"
ACCOUNT = "123456789012"  # the only one moto's CloudFormation works in
_APP = ("app.py", "cdk.json", "settings", "stacks", "k8s", "training")
_CLI = ROOT / "node_modules" / ".bin" / "cdk"


@dataclass(frozen=True)
class Standin:
    """AWS as far as these tests need it.

    Attributes:
        url: of every service.
        journal: what CloudFormation did, see standin/cloudformation.py.
    """

    url: str
    journal: Path

    @property
    def environment(self) -> dict[str, str]:
        """What makes a program take the stand-in for AWS."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "standin",
            "AWS_SECRET_ACCESS_KEY": "standin",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    def client(self, service: str) -> Any:
        """boto3's client of a service."""
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="standin",
            aws_secret_access_key="standin",
        )

    def entries(self, since: int = 0) -> list[dict[str, Any]]:
        """The journal's entries, from number `since` on."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()][since:]


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """The stand-in, in a process of its own."""
    folder = tmp_path_factory.mktemp("aws")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # `localhost`, not 127.0.0.1: moto takes the first label of a host name it does not know for a bucket.
    standin = Standin(f"http://localhost:{port}", folder / "journal.jsonl")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "standin", str(port), str(standin.journal)],
            cwd=Path(__file__).parent,
            env=os.environ | standin.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", (folder / "log").read_text()
        yield standin
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="session")
def client(aws: Standin) -> Client:
    """boto3's clients by the name of the service."""
    return aws.client


class Cdk:
    """The CDK CLI in a copy of the app.

    Args:
        folder: the copy; tests may change it.
        environment: what makes the CLI take the stand-in for AWS.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self.assembly = folder / "cdk.out"

    def run(self, *words: str, check: bool = True) -> str:
        """Runs `cdk WORDS` and returns what it prints, with stderr.

        Raises:
            AssertionError: it fails, and `check` is true.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            [str(_CLI), *words, "--no-notices", "--ci"],
            cwd=self.folder,
            env=os.environ | self._environment | {"PATH": path, "CDK_DISABLE_CLI_TELEMETRY": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def deploy(self, *stacks: str, synthesize: bool = True, check: bool = True) -> str:
        """Deploys stacks (all if none is named), as synthesized now or the last time."""
        app: Sequence[str] = () if synthesize else ("--app", str(self.assembly))
        # A change set (the default method) is nothing moto can execute; direct calls end in the same state.
        flags = ("--method", "direct", "--require-approval", "never", "--no-version-reporting")
        return self.run("deploy", *(stacks or ("--all",)), *flags, *app, check=check)

    def destroy(self, *stacks: str) -> str:
        """Destroys stacks (all if none is named), with what depends on them."""
        return self.run("destroy", *(stacks or ("--all",)), "--force", "--app", str(self.assembly))

    def template(self, stack: str) -> dict[str, Any]:
        """A template of the last synthesis."""
        return json.loads((self.assembly / f"{stack}.template.json").read_text())


@pytest.fixture(scope="session")
def cdk(aws: Standin, tmp_path_factory: pytest.TempPathFactory) -> Cdk:
    """The CLI in a copy of the app. The construct library is the installed one."""
    assert _CLI.exists(), "the CDK CLI is missing: run `make deploy-local`, or `npm ci`"
    folder = tmp_path_factory.mktemp("app")
    for name in _APP:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return Cdk(folder, aws.environment)


# --- the stages of a deployment's life, each built on the one before it ------------------------------------


@pytest.fixture(scope="session")
def deployed(aws, cdk) -> Stage:
    cdk.run("bootstrap", f"aws://{ACCOUNT}/{REGION}")
    return stage(aws, cdk.deploy)


@pytest.fixture(scope="session")
def results_bucket(client, deployed) -> str:
    (name,) = [name for name in buckets(client) if not name.startswith("cdk-")]
    return name


@pytest.fixture(scope="session")
def again(aws, cdk, deployed) -> Stage:
    return stage(aws, cdk.deploy)


@pytest.fixture(scope="session")
def changed(aws, cdk, again) -> Stage:
    """A line of the training module is another one."""
    with (cdk.folder / "training" / "run.py").open("a") as module:
        module.write("\n# changed\n")
    return stage(aws, cdk.deploy)


@pytest.fixture(scope="session")
def without_nodes(aws, cdk, changed) -> Stage:
    return stage(aws, lambda: cdk.destroy(NODES))


@pytest.fixture(scope="session")
def refused(aws, client, cdk, without_nodes) -> Stage:
    """Somebody else uses a part of the quota when the GPU nodes are deployed again."""
    ec2 = client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    answer = ec2.run_instances(ImageId=image, InstanceType="g6.xlarge", MinCount=1, MaxCount=1)
    seen = stage(aws, lambda: cdk.deploy(NODES, synthesize=False, check=False))
    ec2.terminate_instances(InstanceIds=[answer["Instances"][0]["InstanceId"]])
    return seen


@pytest.fixture(scope="session")
def nodes_again(aws, cdk, refused) -> Stage:
    return stage(aws, lambda: cdk.deploy(NODES, synthesize=False))


@pytest.fixture(scope="session")
def destroyed(aws, cdk, nodes_again) -> Stage:
    return stage(aws, cdk.destroy)
