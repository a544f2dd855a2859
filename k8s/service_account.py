"""The identity of head and workers towards AWS."""

from __future__ import annotations

from k8s.pods import Manifest, labels
from settings import Settings

SERVICE_ACCOUNT_NAME = "ray-train"


def service_account(settings: Settings) -> Manifest:
    """The service account that stacks/training.py associates with an IAM role (EKS Pod Identity).

    Pod Identity mounts a token of its own, so the Kubernetes token is never mounted: nothing in these pods
    calls the Kubernetes API.
    """
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": SERVICE_ACCOUNT_NAME,
            "namespace": settings.ray.namespace,
            "labels": labels(settings),
        },
        "automountServiceAccountToken": False,
    }
