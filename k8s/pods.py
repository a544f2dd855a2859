"""What the pods of this app have in common: where they run, what they may do, how resources are written."""

from __future__ import annotations

from typing import Any

from settings import Settings

Manifest = dict[str, Any]

# The system node group carries this label (stacks/cluster.py); head and submitter run there and nowhere else.
SYSTEM_NODE_LABELS = {"ray-train/role": "system"}

# Every GPU node carries this label and this taint (stacks/nodes.py). Without the toleration no worker
# schedules; without the taint any pod of the cluster could take a GPU node's CPUs.
GPU_NODE_LABELS = {"nvidia.com/gpu.present": "true"}
GPU_TAINT_KEY = "nvidia.com/gpu"
GPU_TOLERATION = {"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}

# KubeRay labels every pod of a RayCluster with these (common/pod.go, labelPod). Ours cannot override them.
RAY_CLUSTER_LABEL = "ray.io/cluster"
RAY_NODE_TYPE_LABEL = "ray.io/node-type"

# On the CUDA image without a GPU, the NVIDIA runtime would otherwise look for devices to mount.
NO_GPU = {"NVIDIA_VISIBLE_DEVICES": "void"}


def labels(settings: Settings) -> dict[str, str]:
    """Labels of every object of the app."""
    return {
        "app.kubernetes.io/name": "ray-train",
        "app.kubernetes.io/instance": settings.ray.ray_cluster_name,
        "app.kubernetes.io/managed-by": "aws-cdk",
    }


def env(variables: dict[str, str]) -> list[dict[str, str]]:
    """Environment variables as a container lists them, in the order given."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def guaranteed(amounts: dict[str, str]) -> Manifest:
    """Requests equal to limits, on which the QoS class Guaranteed depends.

    Args:
        amounts: resource name -> quantity; cpu and memory must be among them.
    """
    return {"requests": dict(amounts), "limits": dict(amounts)}


def container_security(*capabilities: str) -> Manifest:
    """No privilege except the capabilities named.

    The image decides the user: the Deep Learning Container's is root, and torch, Ray and NCCL of other
    images are not known to run as another one, so `runAsNonRoot` is not claimed here.
    """
    allowed = {"drop": ["ALL"]} | ({"add": list(capabilities)} if capabilities else {})
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": allowed,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
