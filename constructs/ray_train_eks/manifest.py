"""A Kubernetes object that CloudFormation creates and deletes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_cdk import aws_eks_v2 as eks

from constructs import Construct

# CloudFormation waits an hour for a custom resource that never answers. The Lambda function behind ours ends
# after 15 minutes, so one minute more is enough.
SERVICE_TIMEOUT_S = 16 * 60


class Manifest(eks.KubernetesManifest):
    """Applies one object, and deletes it with the stack or when it is no longer asked for.

    The construct's id is the object's kind, namespace and name. So a new name is a new resource, and
    CloudFormation deletes the old object; with an id of its own, `kubectl apply` would add the new object and
    leave the old one running. One object each for the same reason: dropped from a list, it would stay.
    """

    def __init__(self, scope: Construct, *, cluster: eks.ICluster, object: Mapping[str, Any]) -> None:
        """Applies the object.

        Args:
            cluster: where.
            object: a complete Kubernetes object; kind, namespace and name hold no CDK token.
        """
        names = [object["kind"], object["metadata"].get("namespace", ""), object["metadata"]["name"]]
        super().__init__(
            scope,
            "-".join(filter(None, names)),
            cluster=cluster,
            manifest=[dict(object)],
            prune=False,  # would put CDK's labels on every object
            overwrite=True,  # `kubectl apply`; `create` fails where an earlier attempt left the object
        )
        bound_waiting(self)


def bound_waiting(resource: eks.KubernetesManifest | eks.HelmChart) -> None:
    """Gives the custom resource of a chart or manifest a timeout."""
    custom_resource = resource.node.find_child("Resource").node.default_child
    custom_resource.add_property_override("ServiceTimeout", SERVICE_TIMEOUT_S)
