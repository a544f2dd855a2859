"""A Helm chart of exactly one version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aws_cdk import Duration
from aws_cdk import aws_eks_v2 as eks

from constructs import Construct
from ray_train_eks.manifest import bound_waiting


@dataclass(frozen=True)
class Chart:
    """Which chart, and how it is configured.

    Attributes:
        name: the chart's name in its repository; the release is called the same.
        repository: https address of the repository.
        version: exact version. A range would install something else tomorrow.
        namespace: where the release goes; created when missing.
        values: overrides of the chart's defaults.

    Raises:
        ValueError: the version is not exact.
    """

    name: str
    repository: str
    version: str
    namespace: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"v?\d+\.\d+\.\d+([-+][0-9A-Za-z.-]+)?", self.version):
            raise ValueError(
                f"chart {self.name}, version {self.version!r}: name one exact version such as 1.2.3"
            )


class PinnedChart(eks.HelmChart):
    """Installs a chart and waits until Helm calls its resources ready."""

    def __init__(self, scope: Construct, id: str, *, cluster: eks.ICluster, chart: Chart) -> None:
        super().__init__(
            scope,
            id,
            cluster=cluster,
            chart=chart.name,
            release=chart.name,
            repository=chart.repository,
            version=chart.version,
            namespace=chart.namespace,
            create_namespace=True,
            values=dict(chart.values),
            wait=True,
            # Below the 15 minutes of the Lambda function that runs Helm, so that Helm's own reason is what
            # CloudFormation shows.
            timeout=Duration.minutes(10),
        )
        bound_waiting(self)
