"""The RayCluster: a head without GPU on a system node, one worker pod on each GPU node."""

from __future__ import annotations

from k8s.pods import (
    GPU_NODE_LABELS,
    GPU_TOLERATION,
    NO_GPU,
    RAY_CLUSTER_LABEL,
    RAY_NODE_TYPE_LABEL,
    SYSTEM_NODE_LABELS,
    Manifest,
    container_security,
    env,
    guaranteed,
    labels,
)
from k8s.service_account import SERVICE_ACCOUNT_NAME
from settings import Settings

WORKER_GROUP = "gpu"

# Folders that grow: on a volume of the pod they are counted and cleared with it, and slow overlay writes are
# avoided. Ray keeps sessions, logs and unpacked working directories under /tmp/ray; the model cache is one
# for all ranks of a node.
_VOLUMES = {"ray-sessions": "/tmp/ray", "model-cache": "/var/cache/huggingface"}


def ray_cluster(settings: Settings) -> Manifest:
    """The RayCluster (ray.io/v1, KubeRay 1.7).

    `upgradeStrategy: Recreate` makes a deployment mean what it says: with the default, changed settings
    (image, memory, environment) would change the object and leave the running pods as they were. The price:
    deploying such a change while a job runs ends that job.
    """
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": settings.ray.ray_cluster_name,
            "namespace": settings.ray.namespace,
            "labels": labels(settings),
        },
        "spec": {
            "rayVersion": settings.ray.ray_version,
            "authOptions": {"mode": "token"},
            "upgradeStrategy": {"type": "Recreate"},
            "headGroupSpec": _head_group(settings),
            "workerGroupSpecs": [_worker_group(settings)],
        },
    }


def _head_group(settings: Settings) -> Manifest:
    amounts = {"cpu": str(settings.ray.head_cpu), "memory": f"{settings.ray.head_memory_gib}Gi"}
    return {
        "serviceType": "ClusterIP",  # port 8265 stays inside the cluster
        # No CPU to offer, so Ray places no training worker and no data task on the head.
        "rayStartParams": {"num-cpus": "0"},
        "template": _template(
            settings,
            {
                "name": "ray-head",
                "env": env(_common_env(settings) | NO_GPU),
                "resources": guaranteed(amounts),
                "securityContext": container_security(),
            },
            {"nodeSelector": dict(SYSTEM_NODE_LABELS)},
        ),
    }


def _worker_group(settings: Settings) -> Manifest:
    # All three counts are said: maxReplicas would default to 2147483647.
    num_workers = settings.nodes.num_gpu_nodes
    instance = settings.nodes.gpu_instance
    amounts = {
        "cpu": str(instance.worker_pod_cpu),
        "memory": f"{instance.worker_pod_memory_gib}Gi",
        "nvidia.com/gpu": str(instance.num_gpus),
        "vpc.amazonaws.com/efa": str(instance.efa_cards),
    }
    return {
        "groupName": WORKER_GROUP,
        "replicas": num_workers,
        "minReplicas": num_workers,
        "maxReplicas": num_workers,
        "rayStartParams": {},  # KubeRay derives num-cpus, num-gpus and memory from the limits
        "template": _template(
            settings,
            {
                "name": "ray-worker",
                "env": env(_common_env(settings) | _network_env(settings)),
                "resources": guaranteed(amounts),
                # Registering memory with the EFA device pins it. The kernel counts pinned memory against
                # RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK. Kubernetes has no field for that limit,
                # and the EKS AMI's container spec sets none (awslabs/amazon-eks-ami,
                # base-runtime-spec.json). The capability reaches processes of root only.
                "securityContext": container_security("IPC_LOCK"),
            },
            {
                "nodeSelector": dict(GPU_NODE_LABELS),
                "tolerations": [dict(GPU_TOLERATION)],
                "affinity": _one_worker_per_node(settings),
            },
        ),
    }


def _template(settings: Settings, container: Manifest, placement: Manifest) -> Manifest:
    # No labels: KubeRay sets its own, by which the head Service finds the head.
    return {
        "spec": {
            "serviceAccountName": SERVICE_ACCOUNT_NAME,
            "automountServiceAccountToken": False,
            **placement,
            # No `command`: KubeRay writes `ray start` itself. No /dev/shm: KubeRay mounts one of the pod's
            # memory limit, for Ray's object store and NCCL's buffers inside the node.
            "containers": [
                {
                    "name": container["name"],
                    "image": settings.ray.image,
                    **container,
                    "volumeMounts": [{"name": name, "mountPath": path} for name, path in _VOLUMES.items()],
                }
            ],
            "volumes": [{"name": name, "emptyDir": {}} for name in _VOLUMES],
        },
    }


def _common_env(settings: Settings) -> dict[str, str]:
    return {
        "AWS_REGION": settings.network.region,
        # Pods cannot reach the instance metadata service; without this AWS SDKs wait for it to time out.
        # Credentials come from EKS Pod Identity, which this does not switch off.
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HOME": _VOLUMES["model-cache"],
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _network_env(settings: Settings) -> dict[str, str]:
    """NCCL -> aws-ofi-nccl -> libfabric -> EFA; the image may or may not set these, so the pod does."""
    variables = {
        "FI_PROVIDER": "efa",
        "NCCL_NET_PLUGIN": "ofi",
        "NCCL_SOCKET_IFNAME": "eth0",  # bootstrap only; data goes over EFA
        "NCCL_DEBUG": "INFO",  # the transport check reads what NCCL writes
    }
    if settings.nodes.gpu_instance.gpudirect:
        variables["FI_EFA_USE_DEVICE_RDMA"] = "1"  # meaningless where EFA cannot reach GPU memory (G types)
    return variables


def _one_worker_per_node(settings: Settings) -> Manifest:
    """GPU requests already fill a node; this says it, and still holds if a node ever has GPUs left over."""
    same_cluster = {RAY_CLUSTER_LABEL: settings.ray.ray_cluster_name, RAY_NODE_TYPE_LABEL: "worker"}
    term = {"labelSelector": {"matchLabels": same_cluster}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
