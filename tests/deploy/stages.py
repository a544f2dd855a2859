"""The stages of a deployment's life, as tests see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STACKS = tuple(f"ray-train-{name}" for name in ("Network", "Cluster", "Nodes", "Platform", "Training"))
NODES = "ray-train-Nodes"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """What one command did.

    Attributes:
        output: what the CDK CLI printed.
        entries: what CloudFormation did, in order.
    """

    output: str
    entries: list[Entry]

    def ids(self, op: str, type_part: str = "") -> list[str]:
        """Logical ids of one kind of operation, in order."""
        return [row["id"] for row in self.entries if row["op"] == op and type_part in row["type"]]

    def applied(self) -> list[str]:
        """What charts and manifests brought, in order: the chart's name or the kinds of the objects."""
        return [
            _content(row) for row in self.entries if row["op"] == "Create" and "AWSCDK-EKS" in row["type"]
        ]


def _content(entry: Entry) -> str:
    properties = entry["properties"]
    if "Chart" in properties:
        return properties["Chart"]
    return "+".join(sorted({each["kind"] for each in json.loads(properties["Manifest"])}))


def stage(aws: Any, command: Callable[[], str]) -> Stage:
    """Runs a command of the CLI and keeps what CloudFormation did."""
    before = len(aws.entries())
    output = command()
    return Stage(output, aws.entries(before))


def buckets(client: Callable[[str], Any]) -> list[str]:
    """Names of all buckets there are."""
    return [row["Name"] for row in client("s3").list_buckets()["Buckets"]]
