"""The namespace of everything that belongs to one Ray cluster, and the name of the operator's own."""

from __future__ import annotations

from k8s.pods import Manifest, labels
from settings import Settings

# Where stacks/platform.py installs the KubeRay operator; the network policies let it in from there.
OPERATOR_NAMESPACE = "kuberay-operator"


def namespace(settings: Settings) -> Manifest:
    """The job's namespace.

    Pod Security admission warns about what the `restricted` standard would refuse, but refuses nothing: the
    workers add IPC_LOCK (k8s/ray_cluster.py says why), a capability that even `baseline` forbids, and
    admission knows no exception for one pod.
    """
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": settings.ray.namespace,
            "labels": {
                **labels(settings),
                "pod-security.kubernetes.io/enforce": "privileged",
                "pod-security.kubernetes.io/warn": "restricted",
                "pod-security.kubernetes.io/audit": "restricted",
            },
        },
    }
