"""Templates of the five stacks, synthesized once for each set of settings."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from settings import load
from stacks.build import build

ROOT = Path(__file__).parents[2]
CONTEXT = json.loads((ROOT / "cdk.json").read_text())["context"]
RESERVATION = "cr-0123456789abcdef0"

Resource = dict[str, Any]


@dataclass(frozen=True)
class Assembly:
    """What `cdk synth` writes.

    Attributes:
        folder: the cloud assembly.
        templates: "Network", "Cluster", "Nodes", "Platform", "Training" -> template.
    """

    folder: Path
    templates: dict[str, dict[str, Any]]

    def resources(self, stack: str, type_: str) -> dict[str, Resource]:
        """Logical id -> resource, of one type of one stack."""
        found = self.templates[stack]["Resources"].items()
        return {name: resource for name, resource in found if resource["Type"] == type_}

    def only(self, stack: str, type_: str) -> dict[str, Any]:
        """Properties of the one resource of a type."""
        (resource,) = self.resources(stack, type_).values()
        return resource["Properties"]

    def all(self, type_: str) -> Iterator[Resource]:
        """Resources of a type in any stack."""
        for stack in self.templates:
            yield from self.resources(stack, type_).values()

    def manifests(self) -> dict[str, list[dict[str, Any]]]:
        """Logical id -> the Kubernetes objects that this resource of the Training stack applies."""
        found = self.resources("Training", "Custom::AWSCDK-EKS-KubernetesResource").items()
        return {name: decode(manifest["Properties"]["Manifest"]) for name, manifest in found}

    def objects(self) -> list[dict[str, Any]]:
        """Every Kubernetes object of the Training stack."""
        return [each for objects in self.manifests().values() for each in objects]

    def object(self, kind: str) -> dict[str, Any]:
        """The one Kubernetes object of a kind."""
        (found,) = [each for each in self.objects() if each["kind"] == kind]
        return found


def decode(text: Any) -> Any:
    """JSON that CloudFormation assembles: intrinsic functions inside it become `<...>` text."""
    if isinstance(text, dict):
        text = "".join(part if isinstance(part, str) else _placeholder(part) for part in text["Fn::Join"][1])
    return json.loads(text)


def _placeholder(intrinsic: dict[str, Any]) -> str:
    (value,) = intrinsic.values()
    return f"<{value if isinstance(value, str) else '.'.join(value)}>"


@pytest.fixture(scope="session")
def synthesize(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Assembly]:
    """Synthesizes the settings of cdk.json with some of them changed: `synthesize(train=False)`."""

    @functools.cache
    def cached(changes: tuple[tuple[str, Any], ...]) -> Assembly:
        context = CONTEXT | dict(changes)
        folder = tmp_path_factory.mktemp("cdk.out")
        app = cdk.App(context=context, outdir=str(folder), analytics_reporting=False)
        build(app, load(context))
        stacks = app.synth().stacks
        return Assembly(folder, {stack.stack_name.rpartition("-")[2]: stack.template for stack in stacks})

    return lambda **changes: cached(tuple(sorted(changes.items())))


@pytest.fixture(scope="session")
def default(synthesize: Callable[..., Assembly]) -> Assembly:
    return synthesize()


@pytest.fixture(scope="session")
def reserved(synthesize: Callable[..., Assembly]) -> Assembly:
    """An On-Demand Capacity Reservation, and every optional part switched on."""
    return synthesize(
        capacity="reservation",
        capacity_reservation_id=RESERVATION,
        image_pull_through_cache=True,
        admin_role_arns="arn:aws:iam::123456789012:role/Admin,arn:aws:iam::123456789012:role/team/Ops",
        api_public_cidrs="192.0.2.0/24",
        num_nat_gateways=2,
        gpu_az="us-east-2b",
        keep_bucket=False,
    )


@pytest.fixture(scope="session")
def block(synthesize: Callable[..., Assembly]) -> Assembly:
    """A Capacity Block of p5 that has not started, and no job."""
    return synthesize(
        gpu_instance_type="p5.48xlarge",
        capacity="capacity-block",
        capacity_reservation_id=RESERVATION,
        train=False,
    )


@pytest.fixture(scope="session")
def readable() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A template as a reviewer reads it: manifests decoded, hashes of assets and of code masked."""

    def convert(template: dict[str, Any]) -> dict[str, Any]:
        for resource in template["Resources"].values():
            for name in ("Manifest", "Values", "ConfigurationValues"):
                if name in resource.get("Properties", {}):
                    resource["Properties"][name] = decode(resource["Properties"][name])
        return json.loads(_mask(json.dumps(template)))

    return lambda template: convert(json.loads(json.dumps(template)))


def _mask(text: str) -> str:
    text = re.sub(r"[0-9a-f]{64}", "<asset hash>", text)
    job = re.search(r'"(RayJob\w*)([0-9a-f]{10})[0-9A-F]{8}"', text)
    if job:  # the logical id ends with a hash of the construct's path, which holds the digest
        text = text.replace(job[0], f'"{job[1]}<code digest>"').replace(job[2], "<code digest>")
    return text
