"""Kubernetes objects that CloudFormation creates and deletes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import aws_eks_v2 as eks

from constructs import Construct

# CloudFormation waits an hour for a custom resource that never answers. The Lambda function behind ours ends
# after 15 minutes, so one minute more is enough.
SERVICE_TIMEOUT_S = 16 * 60


class Manifest(eks.KubernetesManifest):
    """Applies objects, and deletes them with the stack.

    Changing the id of a manifest while an object in it keeps its name deletes the live object: whatever
    changes one must change the other.
    """

    def __init__(
        self, scope: Construct, id: str, *, cluster: eks.ICluster, objects: Sequence[Mapping[str, Any]]
    ) -> None:
        """Applies `objects` in order.

        Args:
            cluster: where.
            objects: complete Kubernetes objects.
        """
        super().__init__(
            scope,
            id,
            cluster=cluster,
            manifest=[dict(each) for each in objects],
            prune=False,  # would put CDK's labels on every object
            overwrite=True,  # `kubectl apply`; `create` fails where an earlier attempt left the object
        )
        bound_waiting(self)


def bound_waiting(resource: eks.KubernetesManifest | eks.HelmChart) -> None:
    """Gives the custom resource of a chart or manifest a timeout."""
    custom_resource = resource.node.find_child("Resource").node.default_child
    custom_resource.add_property_override("ServiceTimeout", SERVICE_TIMEOUT_S)
