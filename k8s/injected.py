"""The pods as KubeRay 1.7 creates them: what the templates do not say but every pod has.

Source: ray-operator/controllers/ray/common/pod.go and rayjob_controller.go at v1.7.0, with the operator's
default configuration. Only what bears on resources, scheduling, credentials and labels is modelled; the
`ray start` command and the probes are not.
"""

from __future__ import annotations

import copy

from k8s.pods import RAY_CLUSTER_LABEL, RAY_NODE_TYPE_LABEL, Manifest, env, guaranteed

# The init container that waits for Ray's control store; its size is fixed in the operator.
_WAIT_RESOURCES = {"cpu": "200m", "memory": "256Mi"}
_SHARED_MEMORY = "shared-mem"
# The submitter of a RayJob that brings no template for it (common/job.go): Burstable, on any node.
_DEFAULT_SUBMITTER = {
    "restartPolicy": "Never",
    "containers": [
        {
            "name": "ray-job-submitter",
            "resources": {
                "requests": {"cpu": "500m", "memory": "200Mi"},
                "limits": {"cpu": "1", "memory": "1Gi"},
            },
        }
    ],
}


def head_pod(ray_cluster: Manifest) -> Manifest:
    """The spec of the head pod."""
    return _ray_pod(ray_cluster, ray_cluster["spec"]["headGroupSpec"]["template"])


def worker_pods(ray_cluster: Manifest) -> dict[str, Manifest]:
    """Worker group -> the spec of each of its pods."""
    return {group["groupName"]: _worker_pod(ray_cluster, group) for group in _groups(ray_cluster)}


def submitter_pod(ray_job: Manifest, ray_cluster: Manifest) -> Manifest:
    """The spec of the submitter's pod, with the token of the cluster it submits to."""
    template = ray_job["spec"].get("submitterPodTemplate", {"spec": _DEFAULT_SUBMITTER})
    spec = copy.deepcopy(template["spec"])
    spec["containers"][0].setdefault("env", []).extend(_token(ray_cluster))
    return spec


def pod_labels(ray_cluster: Manifest, node_type: str) -> dict[str, str]:
    """The labels by which policies and affinities find the cluster's pods.

    Args:
        node_type: "head" or "worker".
    """
    return {
        RAY_CLUSTER_LABEL: ray_cluster["metadata"]["name"],
        RAY_NODE_TYPE_LABEL: node_type,
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }


def _groups(ray_cluster: Manifest) -> list[Manifest]:
    return ray_cluster["spec"].get("workerGroupSpecs", [])


def _worker_pod(ray_cluster: Manifest, group: Manifest) -> Manifest:
    spec = _ray_pod(ray_cluster, group["template"])
    ray = spec["containers"][0]
    # The operator copies these of the Ray container (and its mounts, which are of no account here).
    waiting = {key: copy.deepcopy(ray[key]) for key in ("image", "env", "securityContext") if key in ray}
    waiting |= {"name": "wait-gcs-ready", "resources": guaranteed(_WAIT_RESOURCES)}
    spec.setdefault("initContainers", []).append(waiting)
    return spec


def _ray_pod(ray_cluster: Manifest, template: Manifest) -> Manifest:
    spec = copy.deepcopy(template["spec"])
    ray = spec["containers"][0]
    ray.setdefault("env", []).extend(_token(ray_cluster))
    if "/dev/shm" not in [mount["mountPath"] for mount in ray.get("volumeMounts", [])]:
        limits = ray.get("resources", {}).get("limits", {})
        memory = {"medium": "Memory"} | ({"sizeLimit": limits["memory"]} if "memory" in limits else {})
        ray.setdefault("volumeMounts", []).append({"name": _SHARED_MEMORY, "mountPath": "/dev/shm"})
        spec.setdefault("volumes", []).append({"name": _SHARED_MEMORY, "emptyDir": memory})
    return spec


def _token(ray_cluster: Manifest) -> list[Manifest]:
    if ray_cluster["spec"].get("authOptions", {}).get("mode") != "token":
        return []
    secret = {"name": ray_cluster["metadata"]["name"], "key": "auth_token"}
    token = {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    return [*env({"RAY_AUTH_MODE": "token"}), token]
