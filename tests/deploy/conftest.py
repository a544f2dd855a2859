"""The real CDK CLI, a copy of the app it may change, and a stand-in for AWS on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
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

    def entries(self, since: int = 0) -> list[dict[str, Any]]:
        """The journal's entries, from number `since` on."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()][since:]


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    """The stand-in in a process of its own, with boto3 and the CDK CLI of this one pointing at it."""
    folder = tmp_path_factory.mktemp("aws")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # `localhost`, not 127.0.0.1: moto takes the first label of a host name it does not know for a bucket.
    standin = Standin(f"http://localhost:{port}", folder / "journal.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", standin.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "standin")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "standin")
        patch.setenv("AWS_REGION", REGION)
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "standin", str(port), str(standin.journal)],
                cwd=Path(__file__).parent,
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


class Cdk:
    """The CDK CLI in a copy of the app.

    Args:
        folder: the copy; tests may change it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            env=os.environ | {"PATH": path, "CDK_DISABLE_CLI_TELEMETRY": "1"},
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
def cdk(tmp_path_factory: pytest.TempPathFactory) -> Cdk:
    """The CLI in a copy of the app. The construct library is the installed one."""
    assert _CLI.exists(), "the CDK CLI is missing: run `make deploy-local`, or `npm ci`"
    folder = tmp_path_factory.mktemp("app")
    for name in _APP:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return Cdk(folder)
